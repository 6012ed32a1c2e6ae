"""What references are made of: values, forks, handles, and what travels of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gradwire._ids import WorkerInfo
from gradwire.errors import DecodeError, RemoteProtocolError
from gradwire.rpc._future import Outcome
from gradwire.rpc._rref_table import RefId
from gradwire.wire import Message, register_message

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradwire.rpc._leftovers import End
    from gradwire.rpc._rref_service import RefService

__all__ = [
    "Arrived",
    "Creation",
    "Deleted",
    "ForkRequest",
    "Forked",
    "Handle",
    "Owned",
    "Packed",
    "References",
    "User",
    "decode_header",
    "encode_header",
    "read_packed",
]


class ForkRequest(Message, array_like=True, gc=False):
    """Asks the owner to enter a fork that the sender was given.

    Attributes:
        rref: The value.
        fork: The fork.
        life: The incarnation of the owner that has the value, or had it.
    """

    rref: RefId
    fork: RefId
    life: int


class Forked(Message, array_like=True, gc=False):
    """Answers a `ForkRequest`.

    Attributes:
        fork: The fork.
        is_known: Whether it is entered.
        limit: If it is not because the sender has too many: how many it may have.
    """

    fork: RefId
    is_known: bool
    limit: int = 0


class Arrived(Message, array_like=True, gc=False):
    """Tells a parent that its children have arrived."""

    forks: list[RefId]


class Deleted(Message, array_like=True, gc=False):
    """Tells the owner that forks are gone.

    Attributes:
        forks: The value and the fork, and whether the call that makes the value failed.
    """

    forks: list[tuple[RefId, RefId, bool]]


register_message(32, ForkRequest)
register_message(33, Forked)
register_message(34, Arrived)
register_message(35, Deleted)


class Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What travels of a reference, in the value and in the header of its message.

    Attributes:
        owner: Who has the value.
        rref: The value.
        fork: This reference to it.
        parent: Who has sent it.
        life: The incarnation of the owner: one that was restarted has other values.
    """

    owner: int
    rref: RefId
    fork: RefId
    parent: int
    life: int

    def __reduce__(self) -> Any:
        return Packed, (self.owner, self.rref, self.fork, self.parent, self.life)


class References(msgspec.Struct, array_like=True, gc=False):
    """Header of a call or a reply.

    Attributes:
        packed: The references in it, so that a message that is dropped unread can be
            accounted for.
        made: Of a call whose result stays there: the ids of the value and its first fork.
    """

    packed: list[Packed]
    made: tuple[RefId, RefId] | None = None


encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(References).decode


def decode_header(header: bytes) -> References:
    """The references that a message carried.

    Raises:
        RemoteProtocolError: It is malformed.
    """
    try:
        return _decode_header(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the header of a message with references is malformed: {error}"
        ) from error


def read_packed(content: list[Any]) -> Packed:
    """A reference, as plain data has it.

    Raises:
        DecodeError: It is none.
    """
    try:
        return msgspec.convert(content, Packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"a reference that arrived is malformed: {error}") from error


class Owned:
    """A value of this worker that may be referred to from others."""

    __slots__ = ("id", "is_begun", "outcome")

    def __init__(self, rref: RefId, *, is_begun: bool = True) -> None:
        self.id = rref
        self.is_begun = is_begun  # the call that makes it has come
        self.outcome = Outcome()

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Sets the value, or why there is none."""
        if self.outcome.finish(value, error):
            for callback in self.outcome.take_callbacks():
                callback()


class User:
    """A fork that this worker holds."""

    __slots__ = ("confirmation", "end", "fork", "id", "life", "owner")

    def __init__(self, rref: RefId, fork: RefId, owner: WorkerInfo, life: int) -> None:
        self.id = rref
        self.fork = fork
        self.owner = owner
        self.life = life  # the incarnation of the owner
        self.confirmation = Outcome()
        self.end: End | None = None  # of the handle

    def check(self) -> None:
        """Raises if there is nothing to refer to."""
        error = self.confirmation.error
        if error is not None:
            raise error.with_traceback(None)


class Handle:
    """What a program holds of a reference; its death is that of the reference.

    Finalisers must not lock, so the end only makes an entry in a queue.
    """

    __slots__ = ("__weakref__", "_ref", "_service")

    _service: RefService
    _ref: Owned | User

    @classmethod
    def _bind(cls, service: RefService, ref: Owned | User) -> Self:
        handle = cls.__new__(cls)
        handle._service = service
        handle._ref = ref
        if type(ref) is User:
            ref.end = service.leftovers.watch(handle, ref.fork)
        return handle

    def __del__(self) -> None:
        # An exception above leaves a handle without an end, or without fields.
        ref = getattr(self, "_ref", None)
        if type(ref) is User and ref.end is None:
            self._service.leftovers.put(ref.fork)


class Creation:
    """A call that makes a value: the ids of the value and its first fork."""

    __slots__ = ("fork", "rref")

    def __init__(self, rref: RefId, fork: RefId) -> None:
        self.rref, self.fork = rref, fork
