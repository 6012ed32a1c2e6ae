"""Rebuilds the tensors of a message that arrived, from their metadata and memory.

The metadata may come from a faulty or hostile peer. Invariants:

1. No tensor is made before its shape, strides and offset are known to lie inside its
   storage: torch would otherwise grow the storage to whatever size is asked for.
2. Memory is only allocated for bytes that have arrived.
3. A tensor owns its storage, except for those that shared one at the sender. None is a
   view of something bigger, so in-place operations work under autograd.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NoReturn

import torch

from gradwire.errors import DecodeError
from gradwire.wire._dtypes import DTYPES, SPARSE_LAYOUTS
from gradwire.wire._tensors import (
    COALESCED,
    INLINE_BYTES,
    PARAMETER,
    REQUIRES_GRAD,
    TRACKED,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradwire.wire._messages import Body, TensorMeta

__all__ = ["rebuild_one", "rebuild_tensors"]

_KNOWN_FLAGS = REQUIRES_GRAD | PARAMETER | COALESCED | TRACKED
_MAX_NBYTES = 2**63 - 1
_MOST_REPEATED = 1 << 32  # more is left to the long way
_MOST_SIZES = 16  # likewise: the product of a million of them takes minutes
_NO_DTYPE = (None, 0)
_MOST_SLICED = 4 << 10  # bytes: a copy costs less than to ask for an address
_NUM_PARTS_COO = 2
_NUM_PARTS_COMPRESSED = 3
_BLOCK_LAYOUTS = (4, 5)
_INDICES_COO = (torch.int64,)
_INDICES_COMPRESSED = (torch.int32, torch.int64)

_prod = math.prod
_empty = torch.empty
_empty_strided = torch.empty_strided


def _find_memmove() -> Callable[[int, bytes | int, int], object]:
    # Through PyDLL the interpreter lock is kept: giving it up for a copy of a few KiB
    # would cost more than the copy.
    try:
        function = ctypes.PyDLL(None).memmove
    except (OSError, TypeError, AttributeError):
        return ctypes.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


def _find_address_of() -> Callable[[bytes], int]:
    function = ctypes.pythonapi["PyBytes_AsString"]
    function.argtypes, function.restype = [ctypes.py_object], ctypes.c_void_p
    return function


_memmove, _address_of = _find_memmove(), _find_address_of()


def _fill(target: int, head: bytes, start: int, nbytes: int) -> None:
    """Copies a part of a message to an address."""
    if nbytes <= _MOST_SLICED:
        _memmove(target, head[start : start + nbytes], nbytes)
    else:
        _memmove(target, _address_of(head) + start, nbytes)


def rebuild_tensors(
    body: Body, head: bytes, start: int, buffers: list[torch.UntypedStorage]
) -> list[torch.Tensor]:
    """Makes all tensors of a message, in the order of its table.

    Args:
        body: The metadata.
        head: The head of the message, which ends with the inline storages.
        start: Where the inline storages begin in ``head``.
        buffers: The other storages. The tensors take them over.

    Raises:
        DecodeError: If the metadata does not agree with the memory that arrived.
    """
    tensors = None if buffers else _rebuild_small(body, head, start)
    if tensors is not None:
        return tensors
    tensors = []
    sources = _locate(body.storages, head, start, buffers)
    for meta in body.tensors:
        if meta.layout:
            tensor = _make_sparse(meta, tensors)
        else:
            tensor = _make_strided(meta, body.storages, sources, head)
        if meta.flags:
            tensor = _apply_flags(tensor, meta)
        tensors.append(tensor)
    return tensors


def rebuild_one(body: Body, head: bytes, start: int) -> torch.Tensor | None:
    """Makes the only tensor of a message, if it is contiguous and inline.

    Nothing but speed, as `_rebuild_small`.
    """
    if len(body.tensors) != 1:
        return None
    meta = body.tensors[0]
    shape, flags = meta.shape, meta.flags
    if (
        meta.strides is not None
        or meta.offset
        or meta.layout
        or meta.storage
        or len(shape) > _MOST_SIZES
    ):
        return None
    dtype, nbytes = DTYPES.get(meta.dtype, _NO_DTYPE)
    nbytes *= _prod(shape)
    if (
        not 0 < nbytes <= INLINE_BYTES
        or body.storages != [nbytes]
        or start + nbytes != len(head)
    ):
        return None
    tensor = _empty(shape, dtype=dtype)
    _fill(tensor.data_ptr(), head, start, nbytes)
    return _apply_flags(tensor, meta) if flags and flags != TRACKED else tensor


def _rebuild_small(body: Body, head: bytes, start: int) -> list[torch.Tensor] | None:
    """Makes tensors that each fill an inline storage of their own.

    They are contiguous, or one number that is repeated, as in the gradient of a sum.
    Nothing but speed, for most messages are such. None if there is anything else, or
    something is wrong: the long way explains.
    """
    metas, storages = body.tensors, body.storages
    if len(metas) != len(storages) or start + sum(storages) != len(head):
        return None
    tensors = []
    position = start
    for index, meta in enumerate(metas):
        dtype, expected = DTYPES.get(meta.dtype, _NO_DTYPE)
        shape, strides = meta.shape, meta.strides
        if strides is None:
            if len(shape) > _MOST_SIZES:
                return None
            expected *= _prod(shape)
        elif any(strides) or not _may_repeat(shape, strides):
            return None
        if (
            not 0 < expected <= INLINE_BYTES
            or meta.storage != index
            or storages[index] != expected
            or meta.offset
            or meta.layout
        ):
            return None
        end = position + expected
        if strides is None:
            tensor = _empty(shape, dtype=dtype)
        else:
            tensor = _empty_strided(shape, strides, dtype=dtype)
        _fill(tensor.data_ptr(), head, position, expected)
        if meta.flags:
            tensor = _apply_flags(tensor, meta)
        tensors.append(tensor)
        position = end
    return tensors


def _may_repeat(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    total = 1
    for size in shape:
        total *= size
        if not 0 < total <= _MOST_REPEATED:
            return False
    return len(shape) == len(strides)


def _apply_flags(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    flags = meta.flags
    if flags & ~_KNOWN_FLAGS:
        _fail(meta, f"the flags {flags} are unknown")
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, bool(flags & REQUIRES_GRAD))
    if flags & REQUIRES_GRAD:
        tensor.requires_grad = True
    return tensor


_Source = torch.UntypedStorage | int
"""Where a storage is: itself, or its position in the head."""


def _locate(
    storages: list[int], head: bytes, start: int, buffers: list[torch.UntypedStorage]
) -> list[_Source]:
    sources: list[_Source] = []
    position = start
    taken = 0
    for nbytes in storages:
        if nbytes <= INLINE_BYTES:
            sources.append(position)
            position += nbytes
        else:
            if taken == len(buffers) or buffers[taken].nbytes() != nbytes:
                raise DecodeError(
                    f"buffer {taken} of a message should have {nbytes} bytes; found "
                    f"buffers of {[b.nbytes() for b in buffers]} bytes"
                )
            sources.append(buffers[taken])
            taken += 1
    if position != len(head) or taken != len(buffers):
        raise DecodeError(
            f"a message should have {position - start} bytes of inline tensors and {taken} "
            f"buffers; found {len(head) - start} bytes and {len(buffers)} buffers"
        )
    return sources


def _make_strided(
    meta: TensorMeta, storages: list[int], sources: list[_Source], head: bytes
) -> torch.Tensor:
    if meta.dtype not in DTYPES:
        _fail(meta, "its dtype is unknown; do all workers run the same version?")
    if not 0 <= meta.storage < len(storages):
        _fail(meta, f"there are {len(storages)} storages")
    dtype, itemsize = DTYPES[meta.dtype]
    nbytes = storages[meta.storage]
    strides = _check_extent(meta, itemsize, nbytes)
    source = sources[meta.storage]
    if isinstance(source, int):
        storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        _fill(storage.data_ptr(), head, source, nbytes)
        # The next tensor of this storage is to share it.
        sources[meta.storage] = source = storage
    return _empty(0, dtype=dtype).set_(source, meta.offset, meta.shape, strides)


def _check_extent(meta: TensorMeta, itemsize: int, nbytes: int) -> tuple[int, ...]:
    """Raises unless the tensor lies inside its storage; returns its strides."""
    shape = meta.shape
    _check_numel(meta, itemsize)
    strides = _contiguous_strides(shape) if meta.strides is None else meta.strides
    if len(strides) != len(shape):
        _fail(meta, f"it has {len(shape)} sizes and {len(strides)} strides")
    end = meta.offset
    if 0 not in shape:
        end += 1
        for size, stride in zip(shape, strides, strict=True):
            end += (size - 1) * stride
    if end * itemsize > nbytes:
        _fail(meta, f"it ends at byte {end * itemsize}, its storage at byte {nbytes}")
    return strides


def _check_numel(meta: TensorMeta, itemsize: int) -> None:
    # Torch multiplies sizes in 64 bits, also those beside a zero and those of stride 0.
    total = itemsize
    for size in meta.shape:
        total *= size or 1
        if total > _MAX_NBYTES:
            _fail(meta, "its sizes are beyond 64 bits")


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


def _make_sparse(meta: TensorMeta, earlier: list[torch.Tensor]) -> torch.Tensor:
    layout = SPARSE_LAYOUTS.get(meta.layout)
    if layout is None or meta.dtype not in DTYPES:
        _fail(
            meta, "its layout or dtype is unknown; do all workers run the same version?"
        )
    _check_numel(meta, DTYPES[meta.dtype][1])
    is_coo = layout is torch.sparse_coo
    num_parts = _NUM_PARTS_COO if is_coo else _NUM_PARTS_COMPRESSED
    if len(meta.parts) != num_parts or any(p >= len(earlier) for p in meta.parts):
        _fail(meta, f"it needs {num_parts} parts, each an earlier tensor")
    parts = [earlier[part] for part in meta.parts]
    if parts[-1].dtype != DTYPES[meta.dtype][0]:
        _fail(meta, f"its values have the dtype {parts[-1].dtype}")
    for part in parts[:-1]:
        _check_indices(meta, part, _INDICES_COO if is_coo else _INDICES_COMPRESSED)
    # Invariants are checked because wrong indices would reach outside of the values.
    if is_coo:
        return torch.sparse_coo_tensor(
            parts[0],
            parts[1],
            meta.shape,
            is_coalesced=bool(meta.flags & COALESCED),
            check_invariants=True,
        )
    if meta.layout in _BLOCK_LAYOUTS:
        # Torch lets blocks of no elements pass, and divides by their sizes later.
        num_batch_dims = parts[0].dim() - 1
        if 0 in parts[2].shape[num_batch_dims + 1 : num_batch_dims + 3]:
            _fail(meta, f"its blocks are empty, of shape {tuple(parts[2].shape)}")
    return torch.sparse_compressed_tensor(
        parts[0],
        parts[1],
        parts[2],
        meta.shape,
        layout=layout,
        check_invariants=True,
    )


def _check_indices(
    meta: TensorMeta, indices: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    # Torch looks at every element, and copies indices of other dtypes: a few bytes that
    # are repeated without end would take all the time and memory there is.
    if indices.dtype not in dtypes:
        _fail(meta, f"its indices have the dtype {indices.dtype}")
    if indices.nbytes > indices.untyped_storage().nbytes():
        _fail(meta, "its indices have more elements than there is memory for them")


def _fail(meta: TensorMeta, why: str) -> NoReturn:
    raise DecodeError(f"a tensor that arrived cannot be rebuilt: {why}; found {meta}")
