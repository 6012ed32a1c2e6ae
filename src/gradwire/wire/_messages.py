"""Message classes, the layout of a value inside a message, and the table of kinds.

A message is a small typed record. On the wire it is a msgpack array, so fields are told
apart by their position: a new field goes to the end and has a default, then old and new
workers understand each other. Every class has a number, its *kind*. The kinds of calls
and of connection upkeep are defined here; other layers register their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from gradwire.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FLAT_TUPLE",
    "PICKLED",
    "PLAIN",
    "SINGLE",
    "Body",
    "Call",
    "Failure",
    "Goodbye",
    "Heartbeat",
    "Introduction",
    "Message",
    "Reply",
    "TensorMeta",
    "kind_of",
    "register_message",
]

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

SINGLE = 0
"""Form of a body: one plain value or one tensor."""
FLAT_TUPLE = 1
"""Form of a body: a tuple of plain values and tensors."""
PICKLED = 2
"""Form of a body: anything else; the payload is a pickle that refers to the tensors."""
PLAIN = 3
"""Form of a body: other plain data; the payload is msgpack that refers to the tensors."""


class TensorMeta(msgspec.Struct, array_like=True, gc=False):
    """How to rebuild one tensor from the storages of its message.

    Attributes:
        dtype: Code of the dtype, see ``_dtypes``.
        shape: Sizes.
        strides: Strides in elements; None if the tensor is contiguous.
        offset: Where its first element is inside the storage, in elements.
        storage: Index into ``Body.storages``; -1 for sparse tensors, which have parts.
        flags: Sum of ``REQUIRES_GRAD``, ``PARAMETER`` and ``COALESCED``.
        layout: Code of the layout; 0 is strided.
        parts: Indexes of the component tensors, which are earlier entries of the table.
    """

    dtype: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None
    offset: Size = 0
    storage: int = -1
    flags: int = 0
    layout: int = 0
    parts: tuple[Size, ...] = ()


class Body(msgspec.Struct, array_like=True, gc=False):
    """A value without its bulk: how to put it together from plain values and tensors.

    Attributes:
        form: ``SINGLE``, ``FLAT_TUPLE``, ``PICKLED`` or ``PLAIN``.
        plain: The elements that are not tensors; None where a tensor stands.
        refs: For each element its index in ``tensors``; -1 for a plain one.
        tensors: The tensor table.
        storages: Size in bytes of each storage. Small ones are inside the head, in order;
            the others are the buffers, in order.
    """

    form: int
    plain: list[Any] = []
    refs: list[int] = []
    tensors: list[TensorMeta] = []
    storages: list[Size] = []


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages; a subclass with a field ``body`` can carry a value."""


class Call(Message, array_like=True, gc=False):
    """Asks a worker to run a function.

    Attributes:
        id: Number that the answer repeats.
        deadline: On the sender's monotonic clock, 0 for none.
        target: Name of the function, see ``name_of``; None if it is part of the value.
        style: What the value is: 0 the tuple of positional arguments, 1 ``(args,
            kwargs)``, 2 ``(function, args, kwargs)``.
        headers: What the layers above added to the call, by their names.
        body: The value.
    """

    id: int
    deadline: float = 0.0
    target: str | None = None
    style: int = 0
    headers: dict[str, bytes] | None = None
    body: Body | None = None


class Reply(Message, array_like=True, gc=False):
    """Answers a call with its result, which is None if there is no body."""

    id: int
    headers: dict[str, bytes] | None = None
    body: Body | None = None


class Failure(Message, array_like=True, gc=False):
    """Answers a call with a description of what went wrong."""

    id: int
    body: Body | None = None


class Heartbeat(Message, array_like=True, gc=False):
    """Shows that the sender is alive; ``sent_at`` is on its monotonic clock."""

    sent_at: float


class Goodbye(Message, array_like=True, gc=False):
    """Announces that the sender is about to close the connection, and why.

    Attributes:
        reason: Why.
        declared_lost: It takes the receiver for dead, not itself.
    """

    reason: str = ""
    declared_lost: bool = False


class Introduction(Message, array_like=True, gc=False):
    """Says where the worker that has opened a connection can be reached itself.

    Attributes:
        record: As it would be in the rendezvous store.
    """

    record: str = ""


_MAX_KIND = 255
_classes: dict[int, type[Message]] = {}


class _Kinds(dict[type[Message], int]):
    def __missing__(self, cls: type[Message]) -> int:
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is not registered; call "
            "register_message(kind, cls) where it is defined"
        )


class _Decoders(dict[int, "Callable[[bytes], Any]"]):
    def __missing__(self, kind: int) -> Callable[[bytes], Any]:
        known = ", ".join(f"{k} ({c.__name__})" for k, c in sorted(_classes.items()))
        raise RemoteProtocolError(
            f"a message of kind {kind} arrived, which is unknown here; known kinds: {known}. "
            "Run the same version of gradwire on all workers"
        )


KINDS = _Kinds()
"""The numbers of the message classes; asked for another class, it says what is wrong."""
DECODERS = _Decoders()
"""By kind, the functions that decode the control part of messages; likewise."""


def register_message(kind: int, cls: type[Message]) -> None:
    """Gives a message class its number on the wire.

    Args:
        kind: 1 to 255, used by no other class.
        cls: Subclass of ``Message``, declared with ``array_like=True``.

    Raises:
        ValueError: If the number or the class is taken, or cannot be used.
    """
    if not 1 <= kind <= _MAX_KIND:
        raise ValueError(
            f"the kind of a message must be 1 to {_MAX_KIND}, found {kind} for {cls.__name__}"
        )
    if not cls.__struct_config__.array_like:
        raise ValueError(f"{cls.__name__} must be declared with array_like=True")
    holder = _classes.get(kind)
    if holder is not None:
        raise ValueError(
            f"kind {kind} belongs to {holder.__module__}.{holder.__qualname__}; choose "
            f"another one for {cls.__module__}.{cls.__qualname__}"
        )
    if cls in KINDS:
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} is registered already, as kind "
            f"{KINDS[cls]}"
        )
    decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(cls)
    DECODERS[kind] = decoder.decode
    _classes[kind] = cls
    KINDS[cls] = kind


def kind_of(cls: type[Message]) -> int:
    """The number of a registered message class."""
    return KINDS[cls]


register_message(1, Call)
register_message(2, Reply)
register_message(3, Failure)
register_message(4, Heartbeat)
register_message(5, Goodbye)
register_message(6, Introduction)
