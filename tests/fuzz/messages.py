"""Heads and buffers of messages: the control part, and the rebuilding of tensors.

Pickles are left out: whoever may send them may run code anyway.
"""

from __future__ import annotations

import random
import struct
import warnings
from typing import Any, NamedTuple

import msgspec
import torch

import mutations
from fuzz.corpus import make_messages
from fuzz.running import Finding, Target
from gradwire.errors import DecodeError, RemoteProtocolError
from gradwire.wire import PickleSerializer, _codec, decode_control, decode_value

_FIXED = struct.Struct(">BBHII")
_DEEP = msgspec.Raw(b"\x91" * 3000 + b"\xc0")
_MOST_TOUCHED = 10_000


class Arrived(NamedTuple):
    """An input: a head, and the sizes of the buffers beside it."""

    head: bytes
    buffers: tuple[int, ...]


class Messages(Target):
    name = "messages"
    errors = (DecodeError, RemoteProtocolError)

    def __init__(self) -> None:
        self._corpus = [
            Arrived(m.head, tuple(b.nbytes for b in m.buffers)) for m in make_messages()
        ]
        self._heads = [arrived.head for arrived in self._corpus]
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")  # torch calls some layouts experimental

    def close(self) -> None:
        self._warnings.__exit__(None, None, None)

    def make(self, choice: random.Random) -> Arrived:
        head, buffers = choice.choice(self._corpus)
        kind = choice.random()
        if kind < 0.3:
            head = mutations.mutate(head, choice, self._heads)
        elif kind < 0.9:
            head = change_control(head, choice)
        else:
            fields = list(_FIXED.unpack_from(head))
            at = choice.randrange(len(fields))
            fields[at] = choice.choice(mutations.EDGES) % 256
            head = _FIXED.pack(*fields) + head[_FIXED.size :]
        if choice.random() < 0.05:
            sizes = (0, 1, 100, 9999, 10_000, 10_001)
            buffers = tuple(choice.choice(sizes) for _ in range(choice.randrange(4)))
        return Arrived(head, buffers)

    def sound_inputs(self) -> list[Arrived]:
        return self._corpus

    def feed(self, given: Arrived) -> str:
        message, _ = decode_control(given.head)
        buffers = [torch.UntypedStorage(size) for size in given.buffers]
        value, tensors = decode_value(
            message, given.head, buffers, serializer=_NO_LOADS
        )
        if tensors:
            check_tensors(tensors, message.body.storages)  # type: ignore[attr-defined]
        if value is _codec.NO_VALUE:
            return "message"
        return f"value with {min(len(tensors), 3)} tensors"


class _NoLoads(PickleSerializer):
    def loads(self, data: bytes, tensors: object, unpack: object) -> None:
        return None


_NO_LOADS = _NoLoads()


def change_control(head: bytes, choice: random.Random) -> bytes:
    """Changes values inside the control part; lengths are made to fit again."""
    kind, flags, reserved, control_bytes, payload_bytes = _FIXED.unpack_from(head)
    end = _FIXED.size + control_bytes
    tree = msgspec.msgpack.decode(head[_FIXED.size : end])
    control = msgspec.msgpack.encode(mutations.mutate_value(tree, choice, _DEEP))
    fixed = _FIXED.pack(kind, flags, reserved, len(control), payload_bytes)
    return fixed + control + head[end:]


def check_tensors(tensors: list[torch.Tensor], announced: list[int]) -> None:
    """Each lies inside one of the storages that came, and no storage has grown."""
    sizes = {}
    for tensor in tensors:
        for part in _parts_of(tensor):
            storage = part.untyped_storage()
            nbytes = sizes[storage.data_ptr()] = storage.nbytes()
            if part.numel() and _end(part) > nbytes:
                raise Finding(f"a tensor that ends at {_end(part)} of {nbytes}")
            if nbytes and nbytes not in announced:
                raise Finding(f"a storage of {nbytes} bytes, of those of {announced}")
        if tensor.numel() <= _MOST_TOUCHED:
            _touch(tensor)
    # A copy for a tensor that fills its own storage, and one that all others share: who
    # mixes the two gets both.
    if sum(sizes.values()) > 2 * sum(announced):
        raise Finding(f"storages of {sizes} bytes, of those of {announced}")


def _parts_of(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _end(tensor: torch.Tensor) -> int:
    last = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


def _touch(tensor: torch.Tensor) -> None:
    """Reads all of a tensor: one that reaches outside of its memory crashes here."""
    try:
        if tensor.layout is torch.strided:
            tensor.detach().clone()
        else:
            tensor.detach().to_dense()
    except (RuntimeError, NotImplementedError):
        pass  # torch cannot do this with every dtype
