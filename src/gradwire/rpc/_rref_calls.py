"""References that travel with calls: what is remembered of one until it ends."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire._ids import WorkerInfo
from gradwire.errors import PeerLostError, RemoteError, UsageError
from gradwire.rpc._interceptors import NOTHING, Addition, Note, Scope
from gradwire.rpc._rref_parts import (
    Creation,
    Owned,
    Packed,
    References,
    User,
    encode_header,
)

if TYPE_CHECKING:
    from gradwire.rpc._peer import Peer
    from gradwire.rpc._rref_service import RefService

__all__ = ["CallNote", "CallScope", "CreationScope", "Reaching", "Transfer"]


class Transfer(threading.local):
    """What a thread has packed or unpacked of the message that it is at."""

    def __init__(self) -> None:
        self.packed: list[Packed] = []
        self.unconfirmed: list[User] = []

    def take_unpacked(self) -> list[User]:
        unconfirmed, self.unconfirmed = self.unconfirmed, []
        return unconfirmed

    def take_packed(self) -> list[Packed]:
        packed, self.packed = self.packed, []
        return packed


class CallNote(Note):
    """References that leave with a call, and the value that it makes."""

    __slots__ = ("_packed", "_service", "creation")

    def __init__(
        self, service: RefService, packed: list[Packed], creation: Creation | None
    ) -> None:
        made = None if creation is None else (creation.rref, creation.fork)
        super().__init__(Addition(encode_header(References(packed, made))))
        self._service = service
        self._packed = packed
        self.creation = creation

    def failed(self, *, was_sent: bool, error: BaseException | None = None) -> None:
        """See `Note`."""
        if not was_sent:
            self._service.cancel(self._packed)
        if self.creation is not None:
            if error is None:
                error = UsageError("the call that should make the value was not sent")
            self._service.created(self.creation, error, was_sent=was_sent)


class CallScope(Scope):
    """References that came with a call or leave with its reply."""

    __slots__ = ("_packed", "_peer", "_service", "_unconfirmed")

    def __init__(
        self, service: RefService, peer: Peer, unconfirmed: list[User]
    ) -> None:
        self._service = service
        self._peer = peer
        self._unconfirmed = unconfirmed
        self._packed: list[Packed] = []

    def enter_handler(self) -> AbstractContextManager[None] | None:
        """Waits until the owners know the references that came as arguments."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        agent = self._service.agent
        for user in unconfirmed:
            owner = agent.network.find(user.owner.id)
            agent.wait_for(user.confirmation, owner, "confirmation")
            user.check()
        return None

    def sending_reply(self, tensors: list[Tensor], of_modules: set[int]) -> Addition:
        """See `Scope`."""
        packed = self._packed = self._service.transfer.take_packed()
        if not packed:
            return NOTHING
        self._service.check_sent(self._peer)
        return Addition(encode_header(References(packed)))

    def failed(self, error: BaseException | None = None) -> None:
        """See `Scope`."""
        packed, self._packed = self._packed, []
        if packed:
            self._service.cancel(packed)


class CreationScope(CallScope):
    """A call whose result stays here, as a value that is referred to."""

    __slots__ = ("owned",)

    keeps_result = True

    def __init__(
        self, service: RefService, peer: Peer, unconfirmed: list[User], owned: Owned
    ) -> None:
        super().__init__(service, peer, unconfirmed)
        self.owned = owned

    def keep(self, value: Any, error: BaseException | None) -> None:
        """See `Scope`. An error is the value's, not the call's."""
        self._service.keep(self.owned, value, error)


class Reaching:
    """See `RefService.reaching`."""

    __slots__ = ("_owner", "_service")

    def __init__(self, service: RefService, owner: WorkerInfo) -> None:
        self._service = service
        self._owner = owner

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if isinstance(error, PeerLostError) and not isinstance(error, RemoteError):
            peer = self._service.agent.network.find(self._owner.id)
            raise self._service.owner_lost(peer, error) from error
