"""A worker as seen from another: identity, connection, calls in flight, fate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gradwire._ids import WorkerInfo
from gradwire.errors import ClosedError, PeerLostError
from gradwire.rpc._calls import CallTable
from gradwire.rpc._limits import Held
from gradwire.rpc._link import Link
from gradwire.rpc._records import WorkerRecord

__all__ = ["Peer"]


class Peer:
    """One incarnation of another worker (or of this one: calls to oneself).

    If two workers lose each other and both live, they may meet again, with nothing left
    of what was between them: then another of these takes the place of this one.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        max_inflight_bytes: int,
        record: WorkerRecord | None = None,
    ) -> None:
        self.info = info
        self.incarnation = incarnation
        self.record = record
        self.calls = CallTable(max_inflight_bytes)
        self.held = Held()  # guarded by the lock of `Server`
        # One of these at a time, on the side of the lower rank at least; so two workers
        # that dial each other at once end up with one connection, the same for both.
        self.is_dialing = False
        self.is_accepting = False
        self.is_newcomer = False  # nobody was told of it yet
        self.unpack: Callable[[Any], Any] | None = None  # see `Packing`
        # Guards `link`, `fate`, `is_dialing` and `is_accepting`; callers that connect,
        # threads that accept, and whoever notices the end.
        self.changed = threading.Condition()
        self.link: Link | None = None
        self.fate: str | None = None
        self.says_goodbye = False  # it leaves, and was not lost
        self.is_mourned = False  # all that depended on it has been ended
        self._has_left = False

    @property
    def is_usable(self) -> bool:
        """Whether it is neither lost nor gone."""
        return self.fate is None

    @property
    def is_connected(self) -> bool:
        """Whether it is usable, and there is a connection to it."""
        return self.link is not None and self.is_usable

    @property
    def may_be_met_again(self) -> bool:
        """Whether it is lost for good as it was, but may have been cut off only."""
        return self.is_mourned and not self._has_left

    def attach(self, link: Link) -> bool:
        """Makes ``link`` the connection to this peer; False if it came too late."""
        with self.changed:
            if self.fate is not None or self.link is not None:
                return False
            self.link = link
            self.changed.notify_all()
            return True

    def end(self, reason: str, *, left: bool = False) -> bool:
        """Notes why this peer is over; False if that was known already."""
        with self.changed:
            if self.fate is not None:
                return False
            self.fate = reason
            self._has_left = left
            self.changed.notify_all()
            return True

    def claim_dialing(self) -> bool:
        """Whether the caller is to open the connection; then `end_dialing` must follow."""
        with self.changed:
            if self._is_being_connected or self._is_settled:
                return False
            self.is_dialing = True
            return True

    def claim_second_dialing(self) -> bool:
        """As `claim_dialing`, for one that is lost."""
        with self.changed:
            if self._is_being_connected or self.record is None:
                return False
            if not self.may_be_met_again:
                return False
            self.is_dialing = True
            return True

    def claim_accepting(self, *, overtakes: bool) -> bool:
        """Whether a connection that the peer opens may be the one to it.

        Then `end_accepting` must follow, unless another takes the place of this one.

        Args:
            overtakes: Even if we are dialing: that attempt will be refused.
        """
        with self.changed:
            if self.is_usable and self.link is not None:
                return False
            if self.is_accepting or (self.is_dialing and not overtakes):
                return False
            self.is_accepting = True
            return True

    def end_accepting(self) -> None:
        """The connection is attached, or will not come."""
        with self.changed:
            self.is_accepting = False
            self.changed.notify_all()

    def end_dialing(self) -> None:
        """The attempt is over, whatever came of it."""
        with self.changed:
            self.is_dialing = False
            self.changed.notify_all()

    def wait_while_dialing(self, timeout_s: float) -> bool:
        """Waits while another thread opens the connection; False at the limit."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not self._is_being_connected or self._is_settled, timeout_s
            )

    def wait_for_link(self, timeout_s: float) -> bool:
        """Waits for a connection that the peer opens itself; False at the limit."""
        with self.changed:
            return self.changed.wait_for(lambda: self._is_settled, timeout_s)

    @property
    def _is_being_connected(self) -> bool:
        return self.is_dialing or self.is_accepting

    @property
    def _is_settled(self) -> bool:
        return self.link is not None or self.fate is not None

    def error(self) -> PeerLostError | ClosedError:
        """Why nothing can be asked of this peer any more."""
        name = self.info.name
        if self._has_left:
            return PeerLostError(
                f"worker {name!r} (rank {self.info.id}) has left the group: {self.fate}",
                worker=name,
            )
        return PeerLostError(
            f"worker {name!r} (rank {self.info.id}) is lost: {self.fate}", worker=name
        )
