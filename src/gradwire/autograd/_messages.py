"""What this layer puts on the wire: headers of calls and replies, and its own messages.

A context is named by two numbers, `key` and `incarnation`. The key of an explicit
context is the id that users see, rank of the opener << 48 | counter; that of a call
without a context is derived from the caller's rank and the number of the call, and is
negative. The incarnation is the opener's: it tells one life of a worker from the next.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from gradwire.errors import RemoteProtocolError
from gradwire.wire import Body, Message, register_message

__all__ = [
    "AS_LEAVES",
    "CONTEXT_KEEPS_GRAD",
    "CUT",
    "MESSAGE_HAS_HISTORY",
    "NOT_RECORDED",
    "CallHeader",
    "Dead",
    "Gradient",
    "GradientAndStart",
    "Gradients",
    "PassAbort",
    "PassDone",
    "PassStart",
    "Release",
    "ReplyHeader",
    "Stale",
    "counter_of",
    "decode_header",
    "encode_header",
    "is_implicit",
    "key_of_call",
    "key_of_context",
    "opener_of",
]

_COUNTER_BITS = 48
MAX_COUNTER = (1 << _COUNTER_BITS) - 1


def key_of_context(rank: int, counter: int) -> int:
    """The key of an explicit context."""
    return rank << _COUNTER_BITS | counter


def key_of_call(rank: int, call_id: int) -> int:
    """The key of the context that a call outside any context is by itself."""
    return ~(rank << _COUNTER_BITS | call_id)


def is_implicit(key: int) -> bool:
    """Whether a key is that of a call."""
    return key < 0


def opener_of(key: int) -> int:
    """The rank of the worker that opened a context."""
    return (~key if key < 0 else key) >> _COUNTER_BITS


def counter_of(key: int) -> int:
    """The counter or the number of the call in a key."""
    return (~key if key < 0 else key) & MAX_COUNTER


MESSAGE_HAS_HISTORY = 1
"""The message has tensors whose history goes on at the sender: it waits for gradients."""
NOT_RECORDED = 2
"""The caller does not record: the reply must not either."""
AS_LEAVES = 8
"""Not recorded, and tensors that require grad arrive as leaves, as in torch."""
CONTEXT_KEEPS_GRAD = 4
"""Gradients of this context go to ``.grad``, not to a dictionary."""


class CallHeader(msgspec.Struct, array_like=True, gc=False):
    """Header of a call. A call without one is recorded, in a context of its own.

    Attributes:
        flags: Sum of the flags above.
        key: The context, None if the call is one by itself.
        incarnation: Of the context's opener.
        message: Number of the message at the sender.
        after: Starter and number of the last pass that had begun at the sender.
        autocast: See `gradwire.autograd._autocast`.
        consumed: Number of the last pass that consumed the graph there.
    """

    flags: int
    key: int | None = None
    incarnation: int = 0
    message: int = 0
    after: tuple[int, int] | None = None
    autocast: list[tuple[str, str]] | None = None
    consumed: int = -1


CUT = -1


class ReplyHeader(msgspec.Struct, array_like=True, gc=False):
    """Header of a reply whose tensors have a history at the sender.

    With `CUT` as its number the message was not recorded: the history ends there.

    Attributes:
        message: Number of the message at the sender.
        after: As in `CallHeader`; likewise the next two.
        key: Likewise.
        incarnation: Likewise.
        is_of_leaves: There is no history but leaves: nothing is computed from gradients
            there, so they may come late.
    """

    message: int
    after: tuple[int, int] | None = None
    key: int | None = None
    incarnation: int = 0
    is_of_leaves: bool = False


encode_header = msgspec.msgpack.Encoder().encode
_decoders: dict[type, Any] = {
    cls: msgspec.msgpack.Decoder(cls).decode for cls in (CallHeader, ReplyHeader)
}


def decode_header(cls: type, data: bytes) -> Any:
    """The header that a message carried.

    Raises:
        RemoteProtocolError: It is malformed.
    """
    try:
        return _decoders[cls](data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the header of a recorded message is malformed: {error}"
        ) from error


Start: TypeAlias = tuple[int, bool, bool, list[tuple[str, str]] | None]
"""What a pass is: destination, retain, create_graph, autocast."""


class PassStart(Message, array_like=True, gc=False):
    """A pass begins: run your part, and tell those whom you know."""

    key: int
    incarnation: int
    starter: int
    number: int
    destination: int
    retain: bool
    create_graph: bool
    autocast: list[tuple[str, str]] | None = None


class Gradient(Message, array_like=True, gc=False):
    """The answer to one message in one pass: the gradients of its tensors.

    Attributes:
        message: Number that the receiver gave to the message that is answered.
        present: For each tensor whether a gradient follows; empty: none at all.
        is_last: There will be no answer to the message in later passes.
        history: With ``create_graph``: number of this message itself, whose tensors have
            a history at the sender. Else -1.
        after: As in `CallHeader`.
        body: The gradients.
    """

    key: int
    incarnation: int
    starter: int
    number: int
    message: int
    present: tuple[bool, ...] = ()
    is_last: bool = False
    history: int = -1
    after: tuple[int, int] | None = None
    body: Body | None = None


class GradientAndStart(Message, array_like=True, gc=False):
    """A `Gradient` and the `PassStart` of its pass, in one message."""

    key: int
    incarnation: int
    starter: int
    number: int
    message: int
    present: tuple[bool, ...]
    is_last: bool
    history: int
    after: tuple[int, int] | None
    destination: int
    retain: bool
    create_graph: bool
    autocast: list[tuple[str, str]] | None = None
    body: Body | None = None


class Gradients(Message, array_like=True, gc=False):
    """The answers to several messages in one pass; none of them has a history.

    Attributes:
        answers: For each the number of the message, and ``present`` as in `Gradient`.
        is_last: As in `Gradient`.
        start: If it is the `PassStart` as well: its fields behind the number.
        body: The gradients of all messages, in one tuple.
    """

    key: int
    incarnation: int
    starter: int
    number: int
    answers: list[tuple[int, tuple[bool, ...]]]
    is_last: bool = False
    start: Start | None = None
    body: Body | None = None


class PassDone(Message, array_like=True, gc=False):
    """The sender, and all whom it told of the pass, are done."""

    key: int
    incarnation: int
    starter: int
    number: int


class PassAbort(Message, array_like=True, gc=False):
    """The pass failed; the value describes the error."""

    key: int
    incarnation: int
    starter: int
    number: int
    body: Body | None = None


class Dead(Message, array_like=True, gc=False):
    """A message was dropped on its way: it will be answered in no pass."""

    key: int
    incarnation: int
    message: int


class Stale(Message, array_like=True, gc=False):
    """Messages that the receiver got are gone at the sender: a pass that failed used them."""

    key: int
    incarnation: int
    messages: list[int]


class Release(Message, array_like=True, gc=False):
    """Contexts are over.

    Attributes:
        incarnation: Of the opener.
        keys: Which ones to drop now.
        issued: All explicit contexts of this opener with a counter up to this one are
            over, except for those in ``live``. -1 for calls, which need no such mark.
        live: Counters.
        lost: Name of a member that is lost. Then the contexts are not over but broken,
            and this comes from members that may never have been connected to that one.
        by: Name of the worker that has lost it.
    """

    incarnation: int
    keys: list[int]
    issued: int = -1
    live: tuple[int, ...] = ()
    lost: str = ""
    by: str = ""


register_message(16, PassStart)
register_message(17, Gradient)
register_message(18, PassDone)
register_message(19, PassAbort)
register_message(20, Dead)
register_message(21, Release)
register_message(22, GradientAndStart)
register_message(23, Stale)
register_message(24, Gradients)
