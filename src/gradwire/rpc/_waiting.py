"""Waiting for what other workers send, by reading it where nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gradwire.errors import UsageError
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._future import Outcome
from gradwire.rpc._link import Link
from gradwire.rpc._network import Network
from gradwire.rpc._peer import Peer
from gradwire.rpc._signals import shielded
from gradwire.rpc._turn import about_to_block, call_for_help, this_thread
from gradwire.wire import thread_state_is_clean

__all__ = ["Waiting"]

_SLICE_S = 0.05


class Waiting:
    """The waits of one agent.

    Args:
        network: The workers.
        expire: Ends a call whose deadline has come.
    """

    def __init__(
        self, network: Network, expire: Callable[[Peer, PendingCall], None]
    ) -> None:
        self._network = network
        self._expire = expire

    def wait_for_call(self, call: PendingCall, timeout_s: float | None) -> bool:
        """Waits for a call; reads the connection itself if nobody else does.

        Returns:
            False if ``timeout_s`` came first. The call's own deadline finishes it.
        """
        with shielded():
            return self.wait_for_call_shielded(call, timeout_s)

    def wait_for_call_shielded(
        self, call: PendingCall, timeout_s: float | None, looks_first: bool = False
    ) -> bool:
        """As `wait_for_call`; the main thread is inside `shielded` already.

        Args:
            call: The call.
            timeout_s: Likewise.
            looks_first: The answer is likely to be here.
        """
        link = call.link
        peer = self._network.peer_of(link)
        limit = call.deadline
        if timeout_s is not None:
            own_limit = time.monotonic() + timeout_s
            limit = min(limit, own_limit) if limit else own_limit
        if peer is not None and not call.done:
            self._read_until(
                link, peer, call, limit, call.target, looks_first=looks_first
            )
        if not call.done:
            link.waits_elsewhere(+1)
            try:
                self._wait_for_others(call, peer, limit)
            finally:
                link.waits_elsewhere(-1)
        return call.done

    def wait_for(
        self, outcome: Outcome, peer: Peer, what: str, limit: float = 0.0
    ) -> bool:
        """Waits for something that a message of ``peer`` brings.

        Args:
            outcome: What is waited for. Whoever loses the peer must finish it too.
            peer: Whose connection is read meanwhile, if nobody else reads it.
            what: See `Link.read_as_caller`.
            limit: On the monotonic clock, 0 for none but the peer's life.

        Returns:
            False at the limit.
        """
        if outcome.done:
            return True
        link = peer.link
        with shielded():
            if link is not None:
                self._read_until(
                    link, peer, outcome, limit, what, unless_under_way=True
                )
            if not outcome.done:
                if link is not None:
                    link.waits_elsewhere(+1)
                try:
                    left = limit - time.monotonic() if limit else None
                    outcome.block(None if left is None else max(0.0, left))
                finally:
                    if link is not None:
                        link.waits_elsewhere(-1)
        return outcome.done

    def _read_until(
        self,
        link: Link,
        peer: Peer,
        outcome: Outcome,
        limit: float,
        what: str,
        unless_under_way: bool = False,
        looks_first: bool = False,
    ) -> None:
        """Reads on this thread, before it blocks, if it may; see `Link.read_as_caller`."""
        if link.holds:
            link.flush()
        writer = link.connection.writer
        if writer and writer == threading.get_ident():
            raise UsageError(
                f"a finaliser (__del__, or a callback of weakref) waits for worker "
                f"{peer.info.name!r} in the middle of a message to it, which can never "
                "be finished then. Finalisers run anywhere: use rpc_async there, and do "
                "not wait",
                worker=peer.info.name,
            )
        turn = this_thread.turn
        if not thread_state_is_clean():
            return
        if (
            turn is not None
            and turn.link is link
            and not turn.is_over
            and not turn.siblings  # it would leave them unread
        ):
            call_for_help()
            link.read_in_turn(turn, outcome, limit, what, unless_under_way)
        else:
            about_to_block()
            link.read_as_caller(
                outcome,
                limit,
                peer.calls,
                what,
                before=turn,
                unless_under_way=unless_under_way,
                looks_first=looks_first,
            )

    def _wait_for_others(
        self, call: PendingCall, peer: Peer | None, limit: float
    ) -> None:
        """Waits until ``limit`` while other threads read."""
        left = limit - time.monotonic() if limit else None
        while not call.block(None if left is None else max(0.0, left)):
            if peer is None or limit != call.deadline:
                return
            self._expire(peer, call)
            left = _SLICE_S  # else its answer is here, and somebody reads it
