"""Values as plain data: what travels where nothing may be unpickled.

A value is a tree. Its leaves are None, bool, int, float, str and bytes, which msgpack has
of its own; everything else is a msgpack array that begins with a tag::

    [LIST, items...]  [TUPLE, items...]  [SET, items...]  [FROZENSET, items...]
    [DICT, key, value, key, value...]    [TENSOR, index in the tensor table]
    [SIZE, sizes...]  [DTYPE, code]      [DEVICE, text]    [COMPLEX, real, imaginary]
    [INT, bytes]      beyond 64 bits     [TEXT, bytes]     not valid Unicode
    [WORKER, name, rank]                 a `WorkerInfo`
    [PACKED, layer, content]             an object of a layer above, such as an RRef

Types are exact: a subclass would arrive as something else than it is, so it is refused.
A tensor that is there twice arrives as one tensor; a list that is there twice as two lists.

What arrives may come from a hostile peer. Invariants:

1. Only the types above are ever made, and no code runs but theirs and that of
   ``unpack``, which belongs to a layer of ours.
2. The depth of a tree is bounded, on both sides.
3. So is the number of keys of dictionaries and members of sets whose hashes a peer could
   choose to be equal: thousands of them would keep the interpreter busy for minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from gradwire._ids import WorkerInfo, check_rank, check_worker_name
from gradwire.errors import DecodeError, EncodeError, GradwireError, InvalidWorkerName
from gradwire.wire._dtypes import CODE_OF_DTYPE, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gradwire.wire._pickle import Packer
    from gradwire.wire._tensors import TensorTable

__all__ = ["MAX_DEPTH", "dumps", "loads"]

MAX_DEPTH = 100
"""How many containers may be inside one another."""

(
    LIST,
    TUPLE,
    DICT,
    SET,
    FROZENSET,
    TENSOR,
    SIZE,
    DTYPE,
    DEVICE,
    COMPLEX,
    INT,
    TEXT,
    PACKED,
    WORKER,
) = range(14)

_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, "
    "torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, RRef and WorkerInfo"
)

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_LEAVES = frozenset((bool, float, type(None), bytes))
_LEAVES_READ = frozenset((bool, float, type(None), bytes, int, str))
_SEQUENCES: dict[Any, int] = {
    list: LIST,
    tuple: TUPLE,
    set: SET,
    frozenset: FROZENSET,
    torch.Size: SIZE,
}
_LEAST, _MOST = -(2**63), 2**64 - 1
MAX_ODD_KEYS = 1000
"""How many keys and members of a value may be neither texts, bytes nor small numbers."""
# Hashes of texts and bytes are keyed, those of floats and 64-bit ints seldom collide.
_COMMON_KEYS = frozenset((str, bytes, float, bool, type(None)))
# Longer than any number that a program means, and short enough to be read at once.
_MAX_INT_BYTES = 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def dumps(value: object, table: TensorTable, packer: Packer | None = None) -> bytes:
    """Encodes a value; its tensors go to the table, some objects to the packer.

    Raises:
        EncodeError: Something in it is not plain data.
    """
    return _encode(_Writer(value, table, packer).write(value, 0))


def loads(
    data: bytes, tensors: list[torch.Tensor], unpack: Callable[[Any], Any] | None = None
) -> Any:
    """Rebuilds what ``dumps`` made, with these tensors in their places.

    Raises:
        DecodeError: This is no such value.
    """
    try:
        return _Reader(tensors, unpack).read(_decode(data), 0)
    except InvalidWorkerName as error:
        raise DecodeError(f"a value that arrived is no plain data: {error}") from error
    except GradwireError:
        raise
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
        raise DecodeError(
            f"a value that arrived is no plain data ({type(error).__name__}: {error})"
        ) from error


class _Writer:
    """Makes a tree of one value."""

    __slots__ = ("_keys", "_packed_types", "_packer", "_table", "_whole")

    def __init__(
        self, whole: object, table: TensorTable, packer: Packer | None
    ) -> None:
        self._whole = whole
        self._table = table
        self._packer = packer
        self._packed_types = () if packer is None else packer.types
        self._keys = _Keys()

    def write(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            return (TENSOR, self._table.add(value))
        if kind in _LEAVES:
            return value
        if kind is str:
            return value if value.isascii() else _write_text(value)
        if kind is int:
            return value if _LEAST <= value <= _MOST else self._write_int(value)
        if depth == MAX_DEPTH:
            raise EncodeError(
                f"cannot send a value of type {_type_name(self._whole)}: more than "
                f"{MAX_DEPTH} containers are inside one another, or one is inside itself"
            )
        write = self.write
        depth += 1
        if kind is dict:
            tree: list[Any] = [DICT]
            self._count_keys(value)
            for key, item in value.items():
                tree.append(write(key, depth))
                tree.append(write(item, depth))
            return tree
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            if tag in (SET, FROZENSET):
                self._count_keys(value)
            return [tag, *[write(item, depth) for item in value]]
        return self._write_other(value, kind)

    def _count_keys(self, keys: Iterable[object]) -> None:
        if self._keys.are_too_many(keys):
            raise EncodeError(
                f"cannot send a value of type {_type_name(self._whole)}: more than "
                f"{MAX_ODD_KEYS} keys of its dictionaries and members of its sets are "
                "tuples or the like; send lists of pairs instead"
            )

    def _write_other(self, value: Any, kind: type) -> Any:
        if kind in self._packed_types and self._packer is not None:
            layer, content = self._packer.pack(value)
            return (PACKED, layer, content)
        if kind is torch.dtype and value in CODE_OF_DTYPE:
            return (DTYPE, CODE_OF_DTYPE[value])
        if kind is torch.device:
            return (DEVICE, str(value))
        if kind is complex:
            return (COMPLEX, value.real, value.imag)
        if kind is WorkerInfo:
            return (WORKER, *value)
        self._refuse(value)

    def _write_int(self, value: int) -> Any:
        num_bytes = value.bit_length() // 8 + 1
        if num_bytes > _MAX_INT_BYTES:
            raise EncodeError(
                f"cannot send an int of {num_bytes} bytes; at most {_MAX_INT_BYTES} are "
                "allowed"
            )
        return (INT, value.to_bytes(num_bytes, "big", signed=True))

    def _refuse(self, culprit: object) -> NoReturn:
        where = _find(self._whole, culprit, MAX_DEPTH) or ""
        if isinstance(culprit, torch.futures.Future):
            remedy = "wait for it and send the result"
        elif isinstance(culprit, _Tensor):
            remedy = "send a plain tensor instead of one of a subclass"
        elif isinstance(culprit, tuple):
            remedy = "send tuple(value)"
        elif isinstance(culprit, dict):
            remedy = "send dict(value)"
        else:
            remedy = "send its content, or keep it here and send an RRef to it"
        raise EncodeError(
            f"cannot send an object of type {_type_name(culprit)}"
            f"{f' (found at {where} of the value)' if where else ''}: this worker has the "
            "option serializer='safe', which sends tensors and plain data only, of exactly "
            f"these types: {_ALLOWED}; {remedy}"
        )


class _Reader:
    """Makes a value of one tree."""

    __slots__ = ("_keys", "_tensors", "_unpack")

    def __init__(
        self, tensors: list[torch.Tensor], unpack: Callable[[Any], Any] | None
    ) -> None:
        self._tensors = tensors
        self._unpack = unpack
        self._keys = _Keys()

    def read(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind is not list:
            if kind in _LEAVES_READ:
                return node
            _fail(f"a {kind.__name__} has no place in it")
        if not node:
            _fail("an array without a tag")
        tag = node[0]
        if tag == TENSOR:
            _, index = node
            if type(index) is not int or not 0 <= index < len(self._tensors):
                _fail(f"it has {len(self._tensors)} tensors, and no tensor {index!r}")
            return self._tensors[index]
        if depth == MAX_DEPTH:
            _fail(f"more than {MAX_DEPTH} containers are inside one another")
        read = self.read
        depth += 1
        if tag == TUPLE:
            return tuple([read(item, depth) for item in node[1:]])
        if tag == LIST:
            return [read(item, depth) for item in node[1:]]
        if tag == DICT:
            if not len(node) & 1:
                _fail("a dict with a key that has no value")
            keys = [read(key, depth) for key in node[1::2]]
            self._count_keys(keys)
            return dict(
                zip(keys, [read(item, depth) for item in node[2::2]], strict=True)
            )
        return self._read_other(tag, node, depth)

    def _count_keys(self, keys: list[Any]) -> None:
        if self._keys.are_too_many(keys):
            _fail(
                f"more than {MAX_ODD_KEYS} keys and members are tuples or the like, whose "
                "hashes could all be equal"
            )

    def _read_other(self, tag: Any, node: list[Any], depth: int) -> Any:
        if tag in (SET, FROZENSET):
            members = [self.read(item, depth) for item in node[1:]]
            self._count_keys(members)
            return set(members) if tag == SET else frozenset(members)
        if tag == PACKED:
            _, layer, content = node
            if self._unpack is None or type(layer) is not str:
                _fail("an object of another layer has no place in it")
            return self._unpack((layer, content))
        return _read_single(tag, node)


def _read_single(tag: Any, node: list[Any]) -> Any:
    """Reads what has a size of its own, and nothing inside."""
    if tag == WORKER:
        _, name, rank = node
        return WorkerInfo(check_worker_name(name), check_rank(rank))
    if tag == SIZE:
        if any(type(size) is not int or not 0 <= size < 2**63 for size in node[1:]):
            _fail("a torch.Size must have sizes")
        return torch.Size(node[1:])
    if tag == COMPLEX:
        _, real, imaginary = node
        if type(real) is not float or type(imaginary) is not float:
            _fail("a complex must have two floats")
        return complex(real, imaginary)
    _, content = node
    if tag == DTYPE and type(content) is int and content in DTYPES:
        return DTYPES[content][0]
    if tag == DEVICE and type(content) is str:
        return _read_device(content)
    if tag == INT and type(content) is bytes and len(content) <= _MAX_INT_BYTES:
        return int.from_bytes(content, "big", signed=True)
    if tag == TEXT and type(content) is bytes:
        return content.decode("utf-8", "surrogatepass")
    _fail(f"tag {tag!r} with {type(content).__name__} means nothing here")


class _Keys:
    """Counts keys of one value whose hashes whoever sends them can choose."""

    __slots__ = ("_num_odd",)

    def __init__(self) -> None:
        self._num_odd = 0

    def are_too_many(self, keys: Iterable[Any]) -> bool:
        for key in keys:
            kind = type(key)
            if kind in _COMMON_KEYS or (kind is int and _LEAST <= key <= _MOST):
                continue
            self._num_odd += 1
        return self._num_odd > MAX_ODD_KEYS


def _write_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in names of files
        return (TEXT, value.encode("utf-8", "surrogatepass"))
    return value


def _read_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:  # its text quotes the device as it is, line breaks and all
        raise DecodeError(f"{text[:40]!r} is no device of this torch") from None


def _find(value: object, culprit: object, depth: int) -> str | None:
    """Where an object is inside a value, as one would write it; None if it is not."""
    if value is culprit:
        return ""
    if not depth:
        return None
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items()]
        if any(key is culprit for key in value):
            return "a key"
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(enumerate(value))
    for key, item in items:
        found = _find(item, culprit, depth - 1)
        if found is not None:
            return f"[{key!r:.40}]{found}"
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _fail(why: str) -> NoReturn:
    raise DecodeError(f"a value that arrived is no plain data: {why}")
