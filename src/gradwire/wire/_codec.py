"""Messages to bytes and back.

A message is a *head* and a list of *buffers*, the raw memory of its larger tensors::

    head = fixed part: kind u8, flags u8 (0), reserved u16 (0),
                       length of control u32, length of payload u32 (big-endian)
           control:    the message as a msgpack array
           payload:    pickle of the value, if it is not a simple one; or, where nothing
                       may be unpickled, msgpack
           inline:     the small storages, one after the other

Reading has two steps, so that a receiver can look at what came in before any code of the
user runs: ``decode_control`` never unpickles, ``decode_value`` does with a serializer that
may.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import torch

from gradwire.errors import DecodeError, EncodeError, GradwireError
from gradwire.wire._dtypes import CODE_OF_DTYPE
from gradwire.wire._messages import (
    DECODERS,
    FLAT_TUPLE,
    KINDS,
    SINGLE,
    Body,
    Message,
    Reply,
    TensorMeta,
)
from gradwire.wire._pickle import Packer
from gradwire.wire._rebuild import rebuild_one, rebuild_tensors
from gradwire.wire._serializers import PICKLE, Serializer
from gradwire.wire._tensors import (
    COALESCED,
    COMPLEX_CODES,
    INLINE_BYTES,
    PARAMETER,
    REQUIRES_GRAD,
    TRACKED,
    Buffer,
    TensorTable,
    any_overlap,
    memory_at,
)
from gradwire.wire._torch_private import clean_thread_state, thread_state_is_clean

if TYPE_CHECKING:
    from collections.abc import Callable

    OnTensors = Callable[[list[torch.Tensor], set[int]], dict[int, int] | None]
    """Given the tensors of a value, and the ids of those that are parameters of a module
    in it; returns, by index, what to make of tensors whose flags are to change."""

Small: TypeAlias = tuple[int, int, TensorMeta]
"""A small, ordinary tensor: where its memory is, how much, and its metadata."""

__all__ = [
    "NO_VALUE",
    "PLAIN_TYPES",
    "Outgoing",
    "decode_control",
    "decode_small",
    "decode_value",
    "describe_small",
    "encode",
    "encode_small",
    "encode_tensors",
    "is_bare",
    "peek_kind",
    "plain_body",
    "tracked_tensors",
]

_FIXED: Final = struct.Struct(">BBHII")
_FIXED_BYTES: Final = _FIXED.size
_MAX_PART_BYTES: Final = 2**32 - 1
_MOST_SMALL: Final = 4  # tensors that `_encode_small` takes
PLAIN_TYPES: Final = frozenset((int, float, bool, type(None), str, bytes))
"""Types of values that need no serializer, unless they are too large."""
_PLAIN: Final = PLAIN_TYPES
_REAL_CODE_OF_DTYPE: Final = {
    dtype: code for dtype, code in CODE_OF_DTYPE.items() if code not in COMPLEX_CODES
}
_SAFE: Final = frozenset((float, bool, type(None)))  # msgpack can hold each of them
# What msgspec raises for a value that msgpack cannot hold.
_MSGPACK_ERRORS: Final = (OverflowError, ValueError, TypeError)

_pack_fixed = _FIXED.pack
_unpack_fixed = _FIXED.unpack_from
_encode_control = msgspec.msgpack.Encoder().encode
_STRIDED = torch.strided
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_REPLY_KIND = KINDS[Reply]


class _NoValue(Enum):
    NO_VALUE = "NO_VALUE"

    def __repr__(self) -> str:
        return self.value


NO_VALUE: Final = _NoValue.NO_VALUE
"""Stands for "this message carries no value", which is not the same as None."""


class Outgoing(msgspec.Struct, eq=False, gc=False):
    """An encoded message.

    Attributes:
        head: Everything but the large storages.
        buffers: The large storages. Their memory is read when the message is sent.
        tensors: The tensors of the message, as they were given, in table order.
    """

    head: bytes
    buffers: list[Buffer] = []
    tensors: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of the head and the buffers together."""
        if not self.buffers:
            return len(self.head)
        return len(self.head) + sum([buffer.nbytes for buffer in self.buffers])


def encode(
    message: Message,
    value: Any = NO_VALUE,
    on_tensors: OnTensors | None = None,
    packer: Packer | None = None,
    serializer: Serializer = PICKLE,
) -> Outgoing:
    """Encodes a message, with a value if its class can carry one.

    Sets ``message.body``. Plain values, tensors, and tuples of them need no serializer.
    What a dispatch or function mode of the calling thread does to tensors does not
    matter.

    Args:
        message: The message.
        value: What it carries.
        on_tensors: Called once, with the tensors of the value, before the message itself
            is encoded, so that it may still set fields such as headers, and change flags
            of tensors; see `OnTensors`.
        packer: See `Packer`.
        serializer: For all other values.

    Raises:
        EncodeError: If something in the value cannot be sent.
    """
    kind = KINDS[type(message)]
    try:
        if value is NO_VALUE:
            control = _encode_control(message)
            if len(control) > _MAX_PART_BYTES:
                raise _too_large(control, b"")
            return Outgoing(_pack_fixed(kind, 0, 0, len(control), 0) + control)
        if thread_state_is_clean():
            return _encode_small(
                kind, message, value, on_tensors
            ) or _encode_with_value(
                kind, message, value, on_tensors, packer, serializer
            )
        with clean_thread_state():
            return _encode_with_value(
                kind, message, value, on_tensors, packer, serializer
            )
    except _MSGPACK_ERRORS as error:
        raise EncodeError(
            f"a field of a message of class {type(message).__name__} cannot be sent: {error}"
        ) from error


def peek_kind(head: bytes) -> int:
    """The kind of a message, from the first byte of its head."""
    if not head:
        raise DecodeError("the head of a message is empty")
    return head[0]


def decode_control(head: bytes) -> tuple[Message, int]:
    """Decodes all of a message but its value; returns it and its kind.

    Raises:
        RemoteProtocolError: If messages of this kind are unknown here.
        DecodeError: If the head is malformed.
    """
    try:
        kind, flags, reserved, control_bytes, payload_bytes = _unpack_fixed(head)
    except struct.error:
        raise DecodeError(
            f"the head of a message must have at least {_FIXED_BYTES} bytes, found "
            f"{len(head)}"
        ) from None
    decode = DECODERS[kind]
    end = _FIXED_BYTES + control_bytes
    if flags or reserved or end + payload_bytes > len(head):
        raise DecodeError(
            f"the head of a message of kind {kind} is malformed: flags {flags} and reserved "
            f"{reserved} should be 0, and {control_bytes} bytes of control and "
            f"{payload_bytes} of payload should fit in {len(head) - _FIXED_BYTES} bytes"
        )
    try:
        return decode(head[_FIXED_BYTES:end]), kind
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DecodeError(
            f"the control part of a message of kind {kind} is malformed: {error}"
        ) from error


def is_bare(head: bytes) -> bool:
    """Whether there is nothing behind the control part of a message."""
    _, _, _, control_bytes, payload_bytes = _unpack_fixed(head)
    return not payload_bytes and _FIXED_BYTES + control_bytes == len(head)


def decode_value(
    message: Message,
    head: bytes,
    buffers: list[torch.UntypedStorage],
    unpack: Callable[[Any], Any] | None = None,
    serializer: Serializer | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """Rebuilds the value of a message; returns it and its tensors in table order.

    Args:
        message: What ``decode_control`` made of ``head``.
        head: The head.
        buffers: The storages that came with it. The tensors take them over.
        unpack: Makes an object of what a `Packer` made of it.
        serializer: For values that are not simple; without one they are refused, as are
            those that another serializer made.

    Returns:
        The value, ``NO_VALUE`` if there is none, and the tensor table.

    Raises:
        DecodeError: If the message is malformed, or the value cannot be rebuilt here.
    """
    body: Body | None = getattr(message, "body", None)
    if not buffers and body is not None and not body.tensors and is_bare(head):
        # Plain values alone, as mostly; what is wrong is told by the long way.
        values, refs = body.plain, body.refs
        if (
            body.form == FLAT_TUPLE
            and not body.storages
            and len(values) == len(refs) == refs.count(-1)
            and _PLAIN.issuperset(map(type, values))
        ):
            return tuple(values), []
    if (
        body is None
        # There is nothing that torch or a serializer would make.
        or (body.form <= FLAT_TUPLE and not (body.tensors or buffers))
        or thread_state_is_clean()
    ):
        return _decode_value(message, body, head, buffers, unpack, serializer)
    with clean_thread_state():
        return _decode_value(message, body, head, buffers, unpack, serializer)


def decode_small(
    body: Body, head: bytes
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Rebuilds the value of a message if it is one tensor, small and ordinary; else None.

    Nothing but speed, for what `encode_small` makes and whatever is like that: the same as
    `decode_value` and `tracked_tensors` come to, which also say what is wrong with a
    message that is not.

    Args:
        body: That of a message without buffers, which `decode_control` has made.
        head: Its head.

    Returns:
        The tensor, and a list with it if its history is at the sender, else without. The
        state of the thread is clean then.
    """
    if body.form or body.refs != _ONE_TENSOR or len(body.plain) != 1:
        return None
    _, _, _, control_bytes, payload_bytes = _unpack_fixed(head)
    if payload_bytes or not thread_state_is_clean():
        return None
    try:
        tensor = rebuild_one(body, head, _FIXED_BYTES + control_bytes)
    except Exception:
        return None
    if tensor is None:
        return None
    return tensor, [tensor] if body.tensors[0].flags & TRACKED else []


_ONE_TENSOR: Final = [0]


def _encode_with_value(
    kind: int,
    message: Message,
    value: Any,
    on_tensors: OnTensors | None,
    packer: Packer | None,
    serializer: Serializer,
) -> Outgoing:
    table = TensorTable()
    body = _flatten(value, table)
    if body is not None and _fits_msgpack(body):
        payload = b""
    else:
        body, table = Body(serializer.form), TensorTable()
        payload = serializer.dumps(value, table, packer)
    if on_tensors is not None:
        _set_flags(table.metas, on_tensors(table.tensors, table.of_modules))
    return _finish(kind, message, body, payload, table)


def _fits_msgpack(body: Body) -> bool:
    """Whether the plain values can be held: no int beyond 64 bits, no lone surrogate."""
    try:
        _encode_control(body.plain)
    except _MSGPACK_ERRORS:
        return False
    return True


def _set_flags(metas: list[TensorMeta], changes: dict[int, int] | None) -> None:
    if changes:
        for index, flags in changes.items():
            metas[index].flags = metas[index].flags & COALESCED | flags


def tracked_tensors(
    message: Message, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Those tensors of a message that arrived whose history is at the sender."""
    body: Body | None = getattr(message, "body", None)
    if body is None:
        return []
    if len(tensors) == 1 == len(body.tensors):  # as mostly
        return tensors if body.tensors[0].flags & TRACKED else []
    pairs = zip(tensors, body.tensors, strict=True)
    return [tensor for tensor, meta in pairs if meta.flags & TRACKED]


def _encode_small(  # noqa: PLR0912, PLR0915 - written out on purpose
    kind: int, message: Message, value: Any, on_tensors: OnTensors | None
) -> Outgoing | None:
    """Encodes plain values and a few small, ordinary tensors.

    Nothing but speed: the same bytes as the long way makes, in one function instead of
    ten, for the calls whose cost is mostly ours. None if the value is not so simple.
    """
    if type(value) is tuple:
        form, items = FLAT_TUPLE, value
    else:
        form, items = SINGLE, (value,)
    if _PLAIN.issuperset(map(type, items)):
        return _encode_plain(kind, message, form, items, on_tensors)
    plain = list(items)
    refs = [-1] * len(plain)
    tensors: list[torch.Tensor] = []
    metas: list[TensorMeta] = []
    sizes: list[int] = []
    number_at: dict[int, int] = {}  # by where their memory starts
    parts: list[bytes | memoryview] = [b"", b""]
    try:
        for position, item in enumerate(items):
            cls = type(item)
            if cls is _Tensor or cls is _Parameter:
                plain[position] = None
                shape = item.shape
                code = _REAL_CODE_OF_DTYPE.get(item.dtype)
                nbytes = item.nbytes
                strides = None
                if not item.is_contiguous():
                    strides = item.stride()
                    if any(strides):
                        return None
                    nbytes = item.itemsize  # one number, as in the gradient of a sum
                if (
                    nbytes > INLINE_BYTES
                    or code is None
                    or not item.is_cpu
                    or item.layout is not _STRIDED
                    or item.is_neg()
                    or 0 in shape
                    or 1 in shape
                ):
                    return None
                start = item.data_ptr()
                if not start:
                    return None
                refs[position] = number = number_at.setdefault(start, len(tensors))
                if number < len(tensors):
                    if tensors[number] is item:
                        continue
                    return None  # they share memory, and have to share it there
                if number == _MOST_SMALL:
                    return None
                flags = REQUIRES_GRAD if item.requires_grad else 0
                if cls is _Parameter:
                    flags |= PARAMETER
                metas.append(TensorMeta(code, shape, strides, 0, number, flags))
                parts.append(memory_at(start, nbytes))
                sizes.append(nbytes)
                tensors.append(item)
            elif cls not in _PLAIN:
                return None
    except RuntimeError:
        return None  # torch has tensors without memory; the long way explains
    end = 0
    for start in sorted(number_at):
        if start < end:
            return None  # likewise: they share memory
        end = start + sizes[number_at[start]]
    body = Body(form, plain, refs, metas, sizes)
    if on_tensors is not None:
        # It is told once per message, so nothing may go wrong afterwards.
        if not (_SAFE.issuperset(map(type, plain)) or _fits_msgpack(body)):
            return None
        _set_flags(metas, on_tensors(tensors, set()))
    try:
        message.body = body  # type: ignore[attr-defined]
        control = _encode_control(message)
    except (AttributeError, *_MSGPACK_ERRORS):
        if on_tensors is not None:
            raise  # the long way would tell it once more
        return None
    parts[0] = _pack_fixed(kind, 0, 0, len(control), 0)
    parts[1] = control
    return Outgoing(b"".join(parts), [], tensors)


def describe_small(tensor: torch.Tensor, storage: int = 0) -> Small | None:
    """What there is to know of a tensor that is small and ordinary; else None.

    For `encode_small` and `encode_tensors`. The state of the thread must be clean.

    Args:
        tensor: The tensor.
        storage: The place of its memory in the message.
    """
    code = _REAL_CODE_OF_DTYPE.get(tensor.dtype)
    shape = tensor.shape
    try:
        if (
            code is None
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or not 0 < (nbytes := tensor.nbytes) <= INLINE_BYTES
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or 1 in shape
            or not (address := tensor.data_ptr())
        ):
            return None
    except RuntimeError:
        return None  # as in `_encode_small`
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is _Parameter:
        flags |= PARAMETER
    return address, nbytes, TensorMeta(code, shape, None, 0, storage, flags)


def encode_small(message: Reply, small: Small) -> bytes:
    """The head of a reply whose value is one tensor, and that needs no buffers.

    Args:
        message: Its ``body`` is set.
        small: Of the tensor, which lives; flags may have been changed.
    """
    address, nbytes, meta = small
    message.body = Body(SINGLE, [None], [0], [meta], [nbytes])
    control = _encode_control(message)
    fixed = _pack_fixed(_REPLY_KIND, 0, 0, len(control), 0)
    return b"".join((fixed, control, memory_at(address, nbytes)))


def encode_tensors(message: Message, tensors: tuple[Any, ...]) -> Outgoing | None:
    """As `encode`, for a tuple of small, ordinary tensors that share no memory.

    Nothing but speed: the same bytes, without what is there for all other values.

    Returns:
        None if it is not that simple: nothing was done.
    """
    if not thread_state_is_clean():
        return None
    smalls: list[Small] = []
    for tensor in tensors:
        small = None
        if type(tensor) is _Tensor:
            small = describe_small(tensor, len(smalls))
        if small is None:
            return None
        smalls.append(small)
    if any_overlap(smalls):
        return None
    addresses, sizes, metas = zip(*smalls, strict=True)
    num = len(metas)
    body = Body(FLAT_TUPLE, [None] * num, [*range(num)], [*metas], [*sizes])
    try:
        message.body = body  # type: ignore[attr-defined]
        control = _encode_control(message)
    except (AttributeError, *_MSGPACK_ERRORS):
        return None  # the long way explains
    fixed = _pack_fixed(KINDS[type(message)], 0, 0, len(control), 0)
    memory = map(memory_at, addresses, sizes)
    return Outgoing(b"".join((fixed, control, *memory)), [], [*tensors])


def plain_body(items: tuple[Any, ...]) -> Body | None:
    """A value that is a tuple of nothing but plain values; None if it is not, or too big."""
    if not _PLAIN.issuperset(map(type, items)):
        return None
    body = Body(FLAT_TUPLE, [*items], [-1] * len(items))
    is_fit = _SAFE.issuperset(map(type, items)) or _fits_msgpack(body)
    return body if is_fit else None


def _encode_plain(
    kind: int,
    message: Message,
    form: int,
    items: tuple[Any, ...],
    on_tensors: OnTensors | None,
) -> Outgoing | None:
    """As `_encode_small`, for plain values alone."""
    body = Body(form, list(items), [-1] * len(items))
    if on_tensors is not None:
        # As there: nothing may go wrong afterwards.
        if not (_SAFE.issuperset(map(type, items)) or _fits_msgpack(body)):
            return None
        on_tensors([], set())
    try:
        message.body = body  # type: ignore[attr-defined]
        control = _encode_control(message)
    except (AttributeError, *_MSGPACK_ERRORS):
        if on_tensors is not None:
            raise  # the long way would tell it once more
        return None
    return Outgoing(_pack_fixed(kind, 0, 0, len(control), 0) + control)


def _flatten(value: Any, table: TensorTable) -> Body | None:
    """Describes a plain value, a tensor, or a tuple of them; None if it is neither."""
    kind = type(value)
    if kind is tuple:
        form = FLAT_TUPLE
        items = value
    else:
        form = SINGLE
        items = (value,)
    plain: list[Any] = []
    refs = []
    for item in items:
        kind = type(item)
        if kind is _Tensor or kind is _Parameter:
            plain.append(None)
            refs.append(table.add(item))
        elif kind in _PLAIN:
            plain.append(item)
            refs.append(-1)
        else:
            return None
    return Body(form, plain, refs)


def _finish(
    kind: int, message: Message, body: Body, payload: bytes, table: TensorTable
) -> Outgoing:
    inline: list[bytes] = []
    buffers: list[Buffer] = []
    if table.tensors:
        body.tensors = table.metas
        body.storages, inline, buffers = table.pack()
    try:
        message.body = body  # type: ignore[attr-defined]
    except AttributeError:
        raise EncodeError(
            f"a message of class {type(message).__name__} cannot carry a value: the class "
            "has no field 'body'"
        ) from None
    return _join(kind, message, payload, inline, buffers, table.tensors)


def _join(
    kind: int,
    message: Message,
    payload: bytes,
    inline: list[bytes],
    buffers: list[Buffer],
    tensors: list[torch.Tensor],
) -> Outgoing:
    control = _encode_control(message)
    if len(control) > _MAX_PART_BYTES or len(payload) > _MAX_PART_BYTES:
        raise _too_large(control, payload)
    fixed = _pack_fixed(kind, 0, 0, len(control), len(payload))
    return Outgoing(b"".join([fixed, control, payload, *inline]), buffers, tensors)


def _too_large(control: bytes, payload: bytes) -> EncodeError:
    return EncodeError(
        f"a value without its tensors must stay below {_MAX_PART_BYTES} bytes, found "
        f"{len(control)} and {len(payload)}; send bulk data as tensors"
    )


def _decode_value(
    message: Message,
    body: Body | None,
    head: bytes,
    buffers: list[torch.UntypedStorage],
    unpack: Callable[[Any], Any] | None,
    serializer: Serializer | None,
) -> tuple[Any, list[torch.Tensor]]:
    _, _, _, control_bytes, payload_bytes = _unpack_fixed(head)
    start = _FIXED_BYTES + control_bytes
    end = start + payload_bytes
    if body is None:
        if end != len(head) or payload_bytes or buffers:
            raise DecodeError(
                f"a message of class {type(message).__name__} without a body should have no "
                f"payload and no buffers; found {len(head) - start} bytes and "
                f"{len(buffers)} buffers"
            )
        return NO_VALUE, []
    try:
        has_memory = body.tensors or body.storages or buffers or end != len(head)
        tensors = rebuild_tensors(body, head, end, buffers) if has_memory else []
    except GradwireError:
        raise
    except Exception as error:
        # Torch refuses some combinations by itself, such as an int that requires grad.
        raise DecodeError(
            f"the tensors of a message cannot be rebuilt ({type(error).__name__}: {error})"
        ) from error
    form = body.form
    if form > FLAT_TUPLE:
        if serializer is None or form != serializer.form:
            raise DecodeError(
                f"a value of form {form} is not accepted here: "
                + (
                    "this message carries tensors and simple values only"
                    if serializer is None
                    else f"this worker has the option serializer={serializer.name!r}, "
                    f"which reads values of form {serializer.form}"
                )
            )
        return serializer.loads(head[start:end], tensors, unpack), tensors
    if payload_bytes:
        raise DecodeError(f"a body of form {form} should have no payload")
    values = _merge(body, tensors)
    if form == FLAT_TUPLE:
        return tuple(values), tensors
    if form == SINGLE and len(values) == 1:
        return values[0], tensors
    raise DecodeError(
        f"the form of a body must be {SINGLE} with one element, or {FLAT_TUPLE}; found "
        f"{form} with {len(values)} elements"
    )


def _merge(body: Body, tensors: list[torch.Tensor]) -> list[Any]:
    """The elements of a value: plain ones, and tensors where they are referred to."""
    num_tensors = len(tensors)
    if len(body.plain) == num_tensors and body.refs == [*range(num_tensors)]:
        return tensors.copy()  # as many values are
    # A copy, so that a message that is kept does not keep the tensors alive.
    values = body.plain.copy()
    if len(values) != len(body.refs):
        raise DecodeError(
            f"found {len(values)} values but {len(body.refs)} references to tensors"
        )
    is_plain = not num_tensors and body.refs.count(-1) == len(values)
    if is_plain and _PLAIN.issuperset(map(type, values)):
        return values  # without a look at each
    for position, ref in enumerate(body.refs):
        if 0 <= ref < num_tensors:
            values[position] = tensors[ref]
        elif ref != -1 or type(values[position]) not in _PLAIN:
            raise DecodeError(
                "each element of a value should be a plain value or one of "
                f"{num_tensors} tensors; found a {type(values[position]).__name__} and "
                f"tensor {ref}"
            )
    return values
