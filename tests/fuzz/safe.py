"""Values of peers that are not trusted: the decoder that unpickles nothing."""

from __future__ import annotations

import random
import struct
import warnings
from typing import Any

import msgspec
import torch

import mutations
from fuzz.messages import Arrived, check_tensors
from fuzz.running import Finding, Target
from gradwire.errors import DecodeError, RemoteProtocolError
from gradwire.rpc import _remote_exceptions, _rref_parts
from gradwire.rpc._rref_table import RefId
from gradwire.wire import (
    Call,
    Failure,
    Outgoing,
    Reply,
    SafeSerializer,
    decode_control,
    decode_value,
    encode,
)

EXPORTED = "tests.integration.test_fuzz:exported_add"
_FIXED = struct.Struct(">BBHII")
_DEEP = msgspec.Raw(b"\x92\x00" * 1500 + b"\xc0")
_MAX_DEPTH = 101
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_TORCH = (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device)
_SAFE = SafeSerializer()


class Packer:
    def goes_without_history(self, tensor: torch.Tensor) -> None:
        raise AssertionError("tensors of subclasses cannot be sent in safe mode")

    """Stands for the layers above: packs references as they do."""

    types = (_rref_parts.Packed,)

    def pack(self, value: Any) -> tuple[str, Any]:
        return "rref", value


def unpack(packed: tuple[str, Any]) -> Any:
    name, content = packed
    if name != "rref":
        raise DecodeError(f"an object of an unknown layer, {name!r:.40}, arrived")
    return _rref_parts.read_packed(content)


class Safe(Target):
    name = "safe"
    errors = (DecodeError, RemoteProtocolError)

    def __init__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")  # torch calls some layouts experimental
        self._corpus = [
            Arrived(m.head, tuple(b.nbytes for b in m.buffers))
            for m in make_safe_messages()
        ]
        self._heads = [arrived.head for arrived in self._corpus]

    def close(self) -> None:
        self._warnings.__exit__(None, None, None)

    def sound_inputs(self) -> list[Arrived]:
        return self._corpus

    def make(self, choice: random.Random) -> Arrived:
        head, buffers = choice.choice(self._corpus)
        kind = choice.random()
        if kind < 0.25:
            return Arrived(mutations.mutate(head, choice, self._heads), buffers)
        fixed = list(_FIXED.unpack_from(head))
        middle = _FIXED.size + fixed[3]
        end = middle + fixed[4]
        control, payload = head[_FIXED.size : middle], head[middle:end]
        if kind < 0.4 or not payload:
            control = _change(control, choice)
        elif kind < 0.9:
            payload = _change(payload, choice)
        else:
            payload = mutations.mutate(payload, choice, self._heads)
        fixed[3:] = [len(control), len(payload)]
        return Arrived(_FIXED.pack(*fixed) + control + payload + head[end:], buffers)

    def feed(self, given: Arrived) -> str:
        message, _ = decode_control(given.head)
        buffers = [torch.UntypedStorage(size) for size in given.buffers]
        value, tensors = decode_value(
            message, given.head, buffers, unpack, serializer=_SAFE
        )
        if tensors:
            check_tensors(tensors, message.body.storages)  # type: ignore[attr-defined]
        _check_value(value, 0)
        if isinstance(message, Failure):
            error = _remote_exceptions.rebuild(value, is_safe=True)
            if not isinstance(error, Exception):
                raise Finding(f"not for a caller to catch: {error!r}")
            return "failure"
        return f"{type(value).__name__}"


def _check_value(value: Any, depth: int) -> None:
    """Only what was promised, and no deeper."""
    if depth > _MAX_DEPTH:
        raise Finding("too deep")
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            _check_value(key, depth + 1)
            _check_value(item, depth + 1)
    elif kind in (list, tuple, set, frozenset):
        for item in value:
            _check_value(item, depth + 1)
    elif kind is RefId or kind is _rref_parts.Packed:
        pass
    elif kind not in _LEAVES and kind not in _TORCH and repr(value) != "NO_VALUE":
        raise Finding(f"a {kind} came of plain data")


def _change(data: bytes, choice: random.Random) -> bytes:
    tree = msgspec.msgpack.decode(data)
    return msgspec.msgpack.encode(mutations.mutate_value(tree, choice, _DEEP))


def make_safe_messages() -> list[Outgoing]:
    """Sound messages, as workers in safe mode send them."""
    small, large = torch.ones(2, 3), torch.arange(2500.0)
    packed = _rref_parts.Packed(0, RefId(1, 77, 2), RefId(3, 88, 4), 5, 66)
    values: list[Any] = [
        [1, -5, 2.5, None, True, "text", b"bytes", 2**70, "\udc80", 1 + 2j],
        {"key": [small, (large, small)], 3: {4, 5}, (1, 2): frozenset({"a"})},
        {"size": torch.Size([2, 3]), "dtype": torch.float16, "to": torch.device("cpu")},
        ((torch.eye(3).to_sparse(), {"x": torch.nn.Parameter(small)}), {"b": [[[1]]]}),
        [packed, {"ref": packed}],
        (small, 1, "flat"),
    ]
    messages = []
    for value in values:
        messages.append(_encode(Call(1, 0.0, EXPORTED, 1), (value, {"k": value})))
        messages.append(_encode(Reply(2, {"rref": b"\x90"}), value))
    error = _remote_exceptions.describe(ValueError("bad"), "w1", is_safe=True)
    messages.append(_encode(Failure(3), error))
    messages.append(_encode(Failure(4), ("w1", "x.Unknown", "text", "", b"pickle")))
    return messages


def _encode(message: Any, value: Any) -> Outgoing:
    return encode(message, value, packer=Packer(), serializer=_SAFE)
