"""The tensor table of a message that is sent: tensors in, metadata and memory out.

Theory of operation. While a value is encoded, ``TensorTable.add`` notes each tensor once
and hands out its index. ``TensorTable.pack`` then decides which memory travels:

1. A tensor that overlaps no other one travels alone: just the bytes from its first to its
   last element, with its strides. A view with big holes is made compact first.
2. Views of one storage whose bytes overlap form a cluster that travels as one storage, so
   that they overlap again on arrival. Views that do not overlap do not drag the gap along.
3. Storages of up to ``INLINE_BYTES`` are copied into the head; others are sent from where
   they are, as ``Buffer``.

Only exact ``torch.Tensor`` and ``torch.nn.Parameter`` objects belong here. A subclass has
its own idea of how it is pickled. Attributes that were set on a tensor do not travel.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

import torch

from gradwire.errors import EncodeError
from gradwire.wire._dtypes import CODE_OF_DTYPE, DTYPES, SPARSE_LAYOUTS
from gradwire.wire._messages import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["INLINE_BYTES", "Buffer", "TensorTable", "any_overlap", "memory_at"]

INLINE_BYTES: Final = 64 << 10
"""Storages of up to this size travel inside the head: copying them costs less than a
buffer of their own does, with its allocation and its reads."""

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
COALESCED: Final = 4
TRACKED: Final = 8
"""The tensor belongs to a graph that goes on at the sender: the layer above gives it a
history on arrival, so it arrives without one and shares its memory with no other."""

# A lone view that would carry along more holes than data is copied, if it is worth it.
_HOLES_MIN_BYTES: Final = 8 << 10
_HOLES_RATIO: Final = 2

# Item sizes are powers of two up to 16: a cluster that starts at a multiple of 16 from the
# start of its storage can be seen as any dtype.
_CLUSTER_ALIGNMENT: Final = 16

_STRIDED = torch.strided
_Parameter = torch.nn.Parameter
COMPLEX_CODES = frozenset(
    code for code, (dtype, _) in DTYPES.items() if dtype.is_complex
)
_CODE_OF_LAYOUT = {layout: code for code, layout in SPARSE_LAYOUTS.items()}


def _find_function(name: str, *arguments: Any) -> Any:
    # The interpreter's own ways; those of ``ctypes`` go through more layers.
    function = ctypes.pythonapi[name]
    function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, *arguments]
    function.restype = ctypes.py_object
    return function


_bytes_at: Callable[[int, int], bytes] = _find_function("PyBytes_FromStringAndSize")
_view_at: Callable[[int, int, int], memoryview] = _find_function(
    "PyMemoryView_FromMemory", ctypes.c_int
)
_TO_READ: Final = 0x100
_MOST_COPIED: Final = 4 << 10  # bytes: a copy costs less than a view


def memory_at(address: int, nbytes: int) -> bytes | memoryview:
    """Memory that is about to be copied, and lives until then."""
    if nbytes <= _MOST_COPIED:
        return _bytes_at(address, nbytes)
    return _view_at(address, nbytes, _TO_READ)


class Buffer(NamedTuple):
    """Memory to send: ``nbytes`` at ``address``, valid for as long as ``owner`` lives."""

    address: int
    nbytes: int
    owner: object


# Memory that one table entry needs, from its first to its last byte: address, size in
# bytes, index of the entry, tensor that owns it. (A NamedTuple takes longer to make than
# all the rest of a small message, so these two are plain tuples.)
_Region: TypeAlias = tuple[int, int, int, torch.Tensor]

Packed: TypeAlias = tuple[list[int], list[bytes], list[Buffer]]
"""Memory of a message: sizes of all storages, the small ones, the big ones."""


class TensorTable:
    """Tensors of one outgoing message, each once, with what is needed to rebuild them.

    Attributes:
        tensors: The tensors in the order of their indexes, as they were given.
        metas: Their metadata; complete after ``pack``.
        of_modules: Ids of parameters that are part of a module in the message.
    """

    __slots__ = ("_index_of", "_regions", "metas", "of_modules", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.metas: list[TensorMeta] = []
        # Identity is enough: ``tensors`` keeps the objects alive, so ids are not reused.
        self._index_of: dict[int, int] = {}
        self._regions: list[_Region] = []
        self.of_modules: set[int] = set()

    def add(self, tensor: torch.Tensor) -> int:
        """Notes a tensor and returns its index; the same object has the same index.

        Raises:
            EncodeError: If tensors of this device, dtype or layout cannot be sent.
        """
        index = self._index_of.get(id(tensor))
        if index is not None:
            return index
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        if type(tensor) is _Parameter:
            flags |= PARAMETER
        try:
            code = CODE_OF_DTYPE.get(tensor.dtype)
            if (
                code is None
                or not tensor.is_cpu
                or tensor.layout is not _STRIDED
                or tensor.is_neg()
                or (code in COMPLEX_CODES and tensor.is_conj())
            ):
                return self._add_unusual(tensor, flags)
            shape = tensor.shape
            if tensor.is_contiguous() and 0 not in shape and 1 not in shape:
                strides = None
                nbytes = tensor.nbytes
            else:
                strides, nbytes = _strides_and_span(tensor)
            address = tensor.data_ptr()
        except RuntimeError as error:
            _refuse(tensor, error)
        if not address and nbytes:
            # Torch has tensors of zeros without memory; a copy is an ordinary one.
            return self._add_resolved(tensor, tensor.detach().clone(), flags)
        # As ``_append``, written out: this is the path of nearly every tensor.
        tensors = self.tensors
        index = len(tensors)
        tensors.append(tensor)
        self.metas.append(TensorMeta(code, shape, strides, 0, -1, flags))
        self._index_of[id(tensor)] = index
        self._regions.append((address, nbytes, index, tensor))
        return index

    def pack(self) -> Packed:
        """Assigns storages to all entries and collects the memory that travels."""
        packed: Packed = ([], [], [])
        alone = self._regions
        if len(alone) > 1 and any_overlap(alone):
            alone = self._pack_clusters(packed)
        for address, nbytes, entry, tensor in alone:
            meta = self.metas[entry]
            if (
                meta.strides is not None
                and nbytes > _HOLES_MIN_BYTES
                and nbytes > _HOLES_RATIO * tensor.nbytes
            ):
                compact = tensor.detach().contiguous()
                meta.strides = None
                meta.storage = _take(
                    packed, compact.data_ptr(), compact.nbytes, compact
                )
            else:
                meta.storage = _take(packed, address, nbytes, tensor)
        return packed

    def _pack_clusters(self, packed: Packed) -> list[_Region]:
        """Packs the tensors that overlap others; returns the regions of all the rest."""
        metas = self.metas
        alone = [r for r in self._regions if metas[r[2]].flags & TRACKED]
        rest = [r for r in self._regions if not metas[r[2]].flags & TRACKED]
        for cluster in _clusters(rest):
            if len(cluster) == 1:
                alone += cluster
            else:
                self._pack_cluster(cluster, packed)
        return alone

    def _append(self, tensor: torch.Tensor, meta: TensorMeta) -> int:
        index = len(self.tensors)
        self.tensors.append(tensor)
        self.metas.append(meta)
        self._index_of[id(tensor)] = index
        return index

    def _add_unusual(self, tensor: torch.Tensor, flags: int) -> int:
        if tensor.dtype not in CODE_OF_DTYPE or not tensor.is_cpu:
            _refuse(tensor)
        if tensor.layout is not _STRIDED:
            return self._add_sparse(tensor, flags)
        plain = tensor.detach().resolve_conj().resolve_neg()
        return self._add_resolved(tensor, plain, flags)

    def _add_resolved(
        self, tensor: torch.Tensor, source: torch.Tensor, flags: int
    ) -> int:
        """Adds ``tensor``, taking its memory from ``source``, a plain copy of it."""
        strides, nbytes = _strides_and_span(source)
        meta = TensorMeta(
            CODE_OF_DTYPE[source.dtype], source.shape, strides, 0, -1, flags
        )
        index = self._append(tensor, meta)
        self._regions.append((source.data_ptr(), nbytes, index, source))
        return index

    def _add_sparse(self, tensor: torch.Tensor, flags: int) -> int:
        layout = _CODE_OF_LAYOUT.get(tensor.layout)
        if layout is None:
            _refuse(tensor)
        if tensor.layout is torch.sparse_coo and tensor.is_coalesced():
            flags |= COALESCED
        # Components come first, so that they exist when this entry is rebuilt.
        *indices, values = _components(tensor.detach())
        parts = (*(self.add(_unrepeated(part)) for part in indices), self.add(values))
        return self._append(
            tensor,
            TensorMeta(
                CODE_OF_DTYPE[tensor.dtype],
                tensor.shape,
                flags=flags,
                layout=layout,
                parts=parts,
            ),
        )

    def _pack_cluster(self, cluster: list[_Region], packed: Packed) -> None:
        owner = cluster[0][3]
        base = owner.untyped_storage().data_ptr()
        low = min(address for address, _, _, _ in cluster) - base
        low = base + low // _CLUSTER_ALIGNMENT * _CLUSTER_ALIGNMENT
        high = max(address + nbytes for address, nbytes, _, _ in cluster)
        storage = _take(packed, low, high - low, owner)
        for address, _, entry, tensor in cluster:
            meta = self.metas[entry]
            meta.storage = storage
            meta.offset = (address - low) // tensor.itemsize


def _take(packed: Packed, address: int, nbytes: int, owner: torch.Tensor) -> int:
    """Adds a storage to the message and returns its number."""
    storages, inline, buffers = packed
    number = len(storages)
    storages.append(nbytes)
    if nbytes <= INLINE_BYTES:
        inline.append(_bytes_at(address, nbytes))
    else:
        buffers.append(Buffer(address, nbytes, owner))
    return number


def _strides_and_span(tensor: torch.Tensor) -> tuple[tuple[int, ...] | None, int]:
    """Strides (None if they are the contiguous ones) and bytes from first to last element."""
    shape = tensor.shape
    strides = tensor.stride()
    last = 0
    expected = 1
    contiguous = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        contiguous = contiguous and stride == expected
        expected *= size or 1
        last += (size - 1) * stride
    span = 0 if 0 in shape else (last + 1) * tensor.itemsize
    return (None if contiguous else strides), span


def any_overlap(regions: Iterable[tuple[Any, ...]]) -> bool:
    """Whether some memory is in two regions, which begin with address and size."""
    end = 0
    for address, nbytes in sorted([(r[0], r[1]) for r in regions if r[1]]):
        if address < end:
            return True
        end = address + nbytes
    return False


def _clusters(regions: list[_Region]) -> list[list[_Region]]:
    """Groups regions that share bytes of one storage, directly or through others."""
    clusters: list[list[_Region]] = []
    by_storage: dict[int, list[_Region]] = {}
    for region in regions:
        _, nbytes, _, tensor = region
        if nbytes:
            base = tensor.untyped_storage().data_ptr()
            by_storage.setdefault(base, []).append(region)
        else:
            clusters.append([region])
    for group in by_storage.values():
        end = 0
        for region in sorted(group, key=lambda r: r[0]):
            address, nbytes, _, _ = region
            if address < end:
                clusters[-1].append(region)
            else:
                clusters.append([region])
            end = max(end, address + nbytes)
    return clusters


def _components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a sparse one is made of, its values last."""
    if tensor.layout is torch.sparse_coo:
        # The public accessors refuse tensors that are not coalesced.
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _unrepeated(indices: torch.Tensor) -> torch.Tensor:
    """Indices with memory for each of them: receivers insist on it."""
    is_repeated = indices.nbytes > _strides_and_span(indices)[1]
    return indices.contiguous() if is_repeated else indices


def _refuse(tensor: torch.Tensor, cause: RuntimeError | None = None) -> NoReturn:
    """Raises the error that says why a tensor cannot be sent and what to do instead."""
    if tensor.device.type == "meta":
        why = (
            "it is on the device 'meta' and so has no data; materialise it on the CPU "
            "first, for example with torch.empty_like(tensor, device='cpu')"
        )
    elif not tensor.is_cpu:
        why = (
            f"it is on the device '{tensor.device}' and only CPU tensors travel; send "
            "tensor.cpu()"
        )
    elif tensor.is_quantized:
        why = f"its dtype {tensor.dtype} is a quantised one; send tensor.dequantize()"
    elif tensor.dtype not in CODE_OF_DTYPE:
        why = f"its dtype {tensor.dtype} is not supported; convert it with tensor.to(dtype)"
    elif tensor.is_nested:
        why = "it is a nested tensor; send the list that tensor.unbind() returns"
    elif tensor.layout is not _STRIDED:
        why = f"its layout {tensor.layout} is not supported; send tensor.to_dense()"
    else:
        why = (
            f"its memory cannot be reached ({cause}); inside a torch.func transform such "
            "as vmap or grad, make the call outside of the transform"
        )
    raise EncodeError(f"cannot send a tensor: {why}") from cause
