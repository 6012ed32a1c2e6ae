"""The contexts that a worker takes part in, and those that are over for ever."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gradwire.autograd._context import ContextName, Side
from gradwire.autograd._messages import (
    counter_of,
    is_implicit,
    key_of_context,
    opener_of,
)
from gradwire.errors import ContextReleased, UnknownContext
from gradwire.rpc.extension import rebuild

if TYPE_CHECKING:
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._nodes import Mark
    from gradwire.rpc.extension import Peer

__all__ = ["Ended", "Registry"]


class Ended:
    """Which explicit contexts of one opener are over: all that were, except for a few.

    A late message must not bring a context back to life. Every release tells how many
    contexts the opener has opened so far and which of them still live; these few numbers
    say all there is to know, however many contexts there were.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._issued = -1
        self._live: set[int] = set()

    def note(self, issued: int, live: set[int]) -> None:
        """Takes in what a release says; an old one may come late."""
        if issued > self._issued:
            self._live = {c for c in live if c > self._issued or c in self._live}
            self._issued = issued
        else:
            self._live = {c for c in self._live if c > issued or c in live}

    def includes(self, counter: int) -> bool:
        """Whether a context is over."""
        return counter <= self._issued and counter not in self._live


class _Naming(Protocol):
    @property
    def key(self) -> int | None: ...
    @property
    def incarnation(self) -> int: ...


class Broken(NamedTuple):
    """A context that was dropped because a member was lost."""

    cause: Any  # see `Exchange.describe`
    known: frozenset[int]  # who must still hear of its end


class Registry:
    """Sides by context.

    Args:
        exchange: The worker.
        incarnation: Its own.

    Attributes:
        is_closed: The worker was shut down.
    """

    def __init__(self, exchange: Exchange, incarnation: int) -> None:
        self._exchange = exchange
        self._incarnation = incarnation
        # Guards all below; any thread that calls, serves or reads.
        self._lock = threading.Lock()
        self._sides: dict[int, Side] = {}
        # Explicit contexts of other workers among them, by opener.
        self._joined: dict[int, set[ContextName]] = {}
        self._ended: dict[int, Ended] = {}
        self._brought: dict[int, int] = {}
        self._issued = -1
        self._live: set[int] = set()
        # Of contexts that are over, while nodes hold them. As a `WeakSet`, without its
        # Python code: nobody iterates over it.
        self._kept: set[weakref.ref[Mark]] = set()
        # Contexts of others that were dropped here because a worker was lost: others may
        # still start passes over them. Until their openers' releases come.
        self._broken: dict[ContextName, Broken] = {}
        self.is_closed = False

    def open(self, into_grad: bool, outer: ContextName | None = None) -> Side:
        """A new explicit context of this worker, opened inside another one or not."""
        me = self._exchange.me
        with self._lock:
            self._issued += 1
            self._live.add(self._issued)
            key = key_of_context(me, self._issued)
            side = self._make(ContextName(key, self._incarnation), "", into_grad)
        if outer is not None:
            enclosing = self.find(outer)
            side.around = outer, *(enclosing.around if enclosing is not None else ())
        return side

    def innermost(self, names: Iterable[ContextName]) -> ContextName | None:
        """The first of some contexts that is not over."""
        for name in names:
            if self.find(name) is not None or name in self._broken:
                return name
        return None

    def find(self, name: _Naming) -> Side | None:
        """Our side of a context, if there is one; a message names one, too."""
        side = self._sides.get(name.key)  # type: ignore[arg-type]
        if side is None or side.name.incarnation != name.incarnation:
            return None
        return side

    def get(self, key: int) -> Side:
        """Our side of the explicit context with this id.

        Raises:
            UnknownContext: There is none.
            ContextReleased: There was one.
            PeerLostError: There was one, which was dropped because a member was lost.
        """
        side = self._sides.get(key)
        if side is not None:
            return side
        # Gradients that were here are gone. Whoever takes that for "there were none"
        # would make its step without them.
        with self._lock:
            causes = [b.cause for name, b in self._broken.items() if name.key == key]
        for cause in causes:
            raise rebuild(cause)
        ended = self._ended.get(opener_of(key))
        counter = counter_of(key)
        is_mine = opener_of(key) == self._exchange.me and counter <= self._issued
        is_over = is_mine or (ended is not None and ended.includes(counter))
        if is_over and not is_implicit(key):
            raise ContextReleased(
                f"Could not find autograd context with id: {key}: it was released when "
                "its `with` block was left; call backward and read its gradients inside the block",
                worker=self._exchange.agent.info.name,
            )
        raise UnknownContext(
            f"Could not find autograd context with id: {key}: worker "
            f"{self._exchange.agent.info.name!r} has not taken part in such a context. "
            "Pass the id that context() gave, and use it on workers that were called in it; "
            "or use no context at all: plain loss.backward() runs through calls",
            worker=self._exchange.agent.info.name,
        )

    def join(
        self, name: ContextName, label: str, into_grad: bool, peer: Peer
    ) -> Side | None:
        """Our side of a context, made if there is none; None if the context is over.

        Raises:
            LimitExceeded: The peer that brings it has brought too many.
        """
        side = self.find(name)
        if side is not None:
            return side
        with self._lock:
            side = self._sides.get(name.key)
            if side is not None and side.name.incarnation == name.incarnation:
                return side
            if side is not None or self.is_closed or self._is_over(name):
                return None
            if name in self._broken:
                return None
            self._check_limit(peer)
            side = self._charge(self._make(name, label, into_grad), peer)
            opener = opener_of(name.key)
            if opener != self._exchange.me:
                joined = self._joined.get(opener)
                if joined is None:
                    joined = self._joined[opener] = set()
                joined.add(name)
            return side

    def add_call(
        self,
        name: ContextName,
        label: str,
        *,
        is_caller: bool,
        peer: Peer | None = None,
    ) -> Side:
        """Our side of the context that a call is by itself; a call to oneself has one.

        Args:
            name: The context.
            label: What to call it in messages.
            is_caller: Whether the call is ours.
            peer: If it is not: whose.

        Raises:
            LimitExceeded: The peer that calls has too many.
        """
        with self._lock:
            side = self._sides.get(name.key)
            if side is None or side.name != name:
                if peer is not None:
                    self._check_limit(peer)
                if side is not None and side.brought_by is not None:
                    self._discharge(side.brought_by)
                side = Side(self._exchange, name, label, holds_weakly=is_caller)
                self._sides[name.key] = side
                if peer is not None:
                    self._charge(side, peer)
            return side

    # Contexts are charged to the peer that brought them here, whoever opened them.

    def _check_limit(self, peer: Peer) -> None:
        agent, rank = self._exchange.agent, peer.info.id
        if self._brought.get(rank, 0) >= agent.limits.contexts and (
            rank != self._exchange.me
        ):
            raise agent.limits.over_contexts(peer.info.name)

    def _charge(self, side: Side, peer: Peer) -> Side:
        side.brought_by = peer.info.id
        self._brought[peer.info.id] = self._brought.get(peer.info.id, 0) + 1
        return side

    def _discharge(self, rank: int) -> None:
        self._brought[rank] -= 1
        if not self._brought[rank]:
            del self._brought[rank]

    def _make(self, name: ContextName, label: str, into_grad: bool) -> Side:
        label = label or f"the context {name.key}"
        side = Side(self._exchange, name, label, into_grad=into_grad)
        self._sides[name.key] = side
        return side

    def _is_over(self, name: ContextName) -> bool:
        opener, counter = opener_of(name.key), counter_of(name.key)
        if opener == self._exchange.me:
            # Our own contexts are here for as long as they live.
            return name.incarnation != self._incarnation or counter not in self._live
        ended = self._ended.get(opener)
        return (
            ended is not None
            and ended.incarnation == name.incarnation
            and ended.includes(counter)
        )

    # --------------------------------------------------------------------------- end

    def drop(self, name: ContextName) -> Side | None:
        """Takes a side out; whoever gets it has to end it."""
        with self._lock:
            side = self._sides.get(name.key)
            if side is None or side.name.incarnation != name.incarnation:
                return None
            del self._sides[name.key]
            if side.brought_by is not None:
                self._discharge(side.brought_by)
            side.is_released = True
            opener = opener_of(name.key)
            if opener != self._exchange.me:
                if joined := self._joined.get(opener):
                    joined.discard(name)
            elif not side.is_implicit:
                self._live.discard(counter_of(name.key))
            if not side.is_implicit:
                self._kept.add(weakref.ref(side.mark, self._kept.discard))
            return side

    def mark_broken(
        self, name: ContextName, cause: Any, known: Iterable[int] = ()
    ) -> None:
        """A context of another worker is dropped because a member was lost."""
        with self._lock:
            self._broken.setdefault(name, Broken(cause, frozenset(known)))

    def why_broken(self, name: ContextName) -> Any:
        """Why a context was dropped; None if it was not, or is over."""
        broken = self._broken.get(name)
        return None if broken is None else broken.cause

    def take_broken(self, name: ContextName) -> frozenset[int]:
        """A broken context is over; returns who must still hear of it."""
        if name not in self._broken:
            return frozenset()
        with self._lock:
            broken = self._broken.pop(name, None)
        return frozenset() if broken is None else broken.known

    def forget_broken(self, opener: int, incarnation: int) -> None:
        """An opener lives again, or has died again: its earlier lives are forgotten."""
        with self._lock:
            self._forget_broken(opener, incarnation)

    def _forget_broken(self, opener: int, incarnation: int) -> None:
        for name in list(self._broken):
            if opener_of(name.key) == opener and name.incarnation != incarnation:
                del self._broken[name]

    def ended_so_far(self) -> tuple[int, tuple[int, ...]]:
        """What our own releases say: see `Ended`."""
        with self._lock:
            return self._issued, tuple(sorted(self._live)) if self._live else ()

    def note_ended(
        self, opener: int, incarnation: int, issued: int, live: tuple[int, ...]
    ) -> list[ContextName]:
        """Takes in what the release of another worker says.

        Returns:
            The contexts that are over by it: broken ones, and those whose own release
            has not come this way.
        """
        with self._lock:
            if self._broken:
                self._forget_broken(opener, incarnation)
            ended = self._ended.get(opener)
            if ended is None or ended.incarnation != incarnation:
                ended = self._ended[opener] = Ended(incarnation)
            ended.note(issued, set(live))
            found = [n for n in self._broken if opener_of(n.key) == opener]
            found += self._joined.get(opener, ())
            return [name for name in found if self._is_over(name)]

    def sides(self) -> list[Side]:
        """All sides."""
        with self._lock:
            return list(self._sides.values())

    def close(self) -> list[Side]:
        """No context is joined any more; returns the sides that there were."""
        with self._lock:
            self.is_closed = True
            sides = list(self._sides.values())
            self._sides.clear()
            self._joined.clear()
            self._brought.clear()
            self._live.clear()
            return sides

    def counts(self) -> dict[str, Any]:
        """What there is."""
        sides = self.sides()
        return {
            "contexts": len(sides),
            "sends": sum(side.num_sends for side in sides),
            "recvs": sum(len(side.live_recvs()) for side in sides),
            "passes": sum(side.run is not None for side in sides),
            "released_contexts_kept_alive": len(self._kept),
        }
