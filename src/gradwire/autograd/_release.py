"""The end of contexts: explicit ones are left, those of calls die with their graph.

An explicit release floods: everybody who took part tells those whom it knows in the
context. The context of a call has two members, and only the caller can end it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gradwire.autograd._context import ContextName, Lease, Side
from gradwire.autograd._messages import Release, is_implicit, opener_of
from gradwire.errors import ContextReleased, PeerLostError
from gradwire.rpc.extension import Leftovers, Peer
from gradwire.transport import Frame
from gradwire.wire import encode

if TYPE_CHECKING:
    from gradwire.autograd._exchange import Exchange

__all__ = ["Releases"]


class Releases:
    """How contexts end on one worker."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._registry = exchange.registry
        self.leftovers = Leftovers(exchange.agent.info.name, self._work_off)

    # ---------------------------------------------------------------------- explicit

    def release(self, side: Side) -> None:
        """An explicit context is left, mostly by its opener: it is over everywhere."""
        if self._registry.drop(side.name) is not None:
            key, incarnation = side.name
            message = Release(incarnation, [key])
            if opener_of(key) == self._exchange.me:
                message.issued, message.live = self._registry.ended_so_far()
            self._spread(side, message, None)

    def on_release(self, peer: Peer, message: Release, frame: Frame) -> None:
        """Contexts are over, or broken; we tell those whom we know in them."""
        for key in message.keys:
            name = ContextName(key, message.incarnation)
            if message.lost:
                self._on_broken(name, peer, message)
                continue
            side = self._registry.drop(name)
            if not is_implicit(key):
                self._end_broken(name, message, peer.info.id)
            if side is not None and side.is_implicit:
                self.end(side)
            elif side is not None:
                self._spread(side, message, peer.info.id)

    # A context that has lost a member is broken. Only its opener keeps it, to say so,
    # until it is left. All others drop it and tell each other: between two of them the
    # lost one may have been the only way, and the opener's release would not come.

    def member_lost(self, side: Side, peer: Peer, error: BaseException) -> None:
        """A member of a context is lost, the opener itself maybe."""
        if not side.is_implicit:
            key, incarnation = side.name
            by = self._exchange.agent.info.name
            told = Release(incarnation, [key], lost=peer.info.name, by=by)
            self._drop_broken(side.name, peer, told, error)
        self.end(side, error)

    def _on_broken(self, name: ContextName, peer: Peer, message: Release) -> None:
        """Another member says that one is lost."""
        if opener_of(name.key) == self._exchange.me:
            return  # it is kept, and whoever uses it finds out
        error = self._loss(name, message)
        self._drop_broken(name, peer, message, error)
        if (side := self._registry.find(name)) is not None:
            self.end(side, error)

    def _drop_broken(
        self, name: ContextName, peer: Peer, told: Release, error: BaseException
    ) -> None:
        side = self._registry.find(name)
        known: set[int] = set()
        if side is not None:
            with side.lock:
                known = side.state.known - {peer.info.id}
        # Handlers that still run in it must not bring it back to life.
        self._registry.mark_broken(name, self._exchange.describe(error), known)
        self._send(known - {opener_of(name.key)}, told)

    def _loss(self, name: ContextName, message: Release) -> PeerLostError:
        """Why a context is broken."""
        opener = opener_of(name.key)
        for peer in self._exchange.agent.network.peers():
            if (
                peer.info == (message.lost, opener)
                and peer.incarnation == name.incarnation
                and peer.link is not None
                and peer.is_usable
            ):
                # The opener lives, and may ask. It is that pair that has come apart, and
                # the lost one is, for the opener, the other.
                return PeerLostError(
                    f"worker {message.by!r} has lost worker {message.lost!r}, which "
                    "opened the context",
                    worker=message.by,
                )
        return PeerLostError(
            f"worker {message.lost!r} is lost: worker {message.by!r} has said so, which "
            "took part in the same context",
            worker=message.lost,
        )

    def _end_broken(self, name: ContextName, message: Release, sender: int) -> None:
        """Contexts that were dropped here before are over; others may not know."""
        over = {name: self._registry.take_broken(name)}
        if message.issued >= 0:
            for other in self._registry.note_ended(
                opener_of(name.key), message.incarnation, message.issued, message.live
            ):
                over[other] = self._registry.take_broken(other)
                if (side := self._registry.drop(other)) is not None:
                    with side.lock:
                        over[other] |= side.state.known
                    self.end(side)
        for ended, known in over.items():
            if known - {sender}:
                told = Release(
                    message.incarnation, [ended.key], message.issued, message.live
                )
                self._send(known - {sender}, told)

    def _spread(self, side: Side, message: Release, sender: int | None) -> None:
        """Ends a side that was dropped, and tells those whom we know there."""
        with side.lock:
            known = side.state.known - {sender}
        self._send(known, message)
        self._end_dropped(side)

    def _send(self, known: Collection[int], message: Release) -> None:
        if not known:
            return
        outgoing = encode(message)
        for rank in known:
            self._exchange.telling.send(rank, outgoing)

    # ------------------------------------------------------------------------- calls

    def lease(self, name: ContextName) -> Lease:
        """A lease on the context of a call; see `Lease`."""
        self.leftovers.ensure_thread()
        return Lease(self.leftovers, name)

    def tell_callee(self, peer: int, name: ContextName) -> None:
        """The caller of a call does not need it any more: the callee may drop it."""
        self._exchange.telling.send(peer, encode(Release(name.incarnation, [name.key])))

    def _work_off(self, entries: list[Any]) -> None:
        """Ends what `Lease`s and failed backwards left."""
        by_peer: dict[int, list[int]] = {}
        for entry in entries:
            if not isinstance(entry, ContextName):
                entry()
            elif (side := self._registry.drop(entry)) is not None:
                for rank in side.state.known:
                    by_peer.setdefault(rank, []).append(entry.key)
                self.end(side)
        incarnation = self._exchange.agent.network.incarnation
        for rank, keys in by_peer.items():
            self._exchange.telling.send(rank, encode(Release(incarnation, keys)))

    # -------------------------------------------------------------------------- here

    def end(self, side: Side, error: BaseException | None = None) -> None:
        """A context is over on this worker: its pass fails, its graph is dropped."""
        self._registry.drop(side.name)
        self._end_dropped(side, error)

    def _end_dropped(self, side: Side, error: BaseException | None = None) -> None:
        if (run := side.run) is not None:
            why = ContextReleased(f"{side.label} was released while a backward ran")
            self._exchange.abort(side, run, error or why)
        side.forget_graph()
