"""The turns of one pool thread at several connections.

Workers that ask short things, one after the other, would have the thread that leads go from
connection to connection by way of the poller: arm the one, ask the kernel for the next
event, take its turn at the other. Instead it keeps its turn where it has been, and looks at
all of these connections at once, and at the poller for news of others. As soon as it does
anything but serve what is short, it has its turn at one connection at most: see
`about_to_block` and `about_to_compute`; and while it serves one, a look (see `_watch`) may
take any of the others away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradwire.rpc._spin import Ready, readiness
from gradwire.rpc._turn import Turn, set_turn

if TYPE_CHECKING:
    from gradwire.rpc._poller import Event
    from gradwire.rpc._pool import WorkerPool

__all__ = ["take_turns"]

_MOST_TURNS = 8


def take_turns(first: Turn, pool: WorkerPool) -> Event | None:
    """Reads and serves, as long as there is more very soon, here or elsewhere.

    Args:
        first: The turn of the calling thread, at a connection with something to read.
        pool: Whose thread it is.

    Returns:
        An event of something else than a connection, which is for the caller to handle.
    """
    set_turn(first)
    try:
        others = _serve_alone(first, pool)
        return _Round(first, pool).serve_all(others) if others else None
    finally:
        set_turn(None)
        first.link.end_turn(first)


def _serve_alone(turn: Turn, pool: WorkerPool) -> Ready:
    """Serves one connection; returns what is ready when others have something, too."""
    link = turn.link
    while link.serve_in_turn(turn) and not link.has_woken and not pool.has_work:
        if not pool.leads:
            if not link.gauge.spin(link.is_ready):
                break
        elif not (found := link.gauge.spin(link.is_any_ready)):
            break
        elif len(found) > 1 or found[0][0] != link.fileno:
            return found
    return []


class _Round:
    """The turns that a thread has at the moment; all of them are siblings."""

    __slots__ = ("_are_ready", "_event", "_has_woken", "_pool", "turns")

    def __init__(self, first: Turn, pool: WorkerPool) -> None:
        self._pool = pool
        self.turns = [first]
        self._event: Event | None = None
        # Whoever waits for what this thread has read needs the interpreter now.
        self._has_woken = False
        # Waits for all connections and the poller; made anew when there are others.
        self._are_ready: Callable[[float], Ready] | None = None

    def serve_all(self, found: Ready | None) -> Event | None:
        """Serves what is ready, and goes on; see `take_turns`."""
        pool = self._pool
        try:
            while found and (ready := self._take_ready(found)):
                for turn in ready:
                    self._serve(turn)
                if not self.turns or self._has_woken or pool.has_work or not pool.leads:
                    break
                # The connection that was served last knows how long to look.
                are_ready = self._are_ready or self._watch_all()
                found = ready[-1].link.gauge.spin(are_ready)
        finally:
            for turn in self.turns:
                turn.siblings = ()
                turn.link.end_turn(turn)
        return self._event

    def _serve(self, turn: Turn) -> None:
        """Serves what has come to a connection; any turn may end by that."""
        turns, link = self.turns, turn.link
        if turn not in turns:
            return  # it has ended while another one was served
        set_turn(turn)
        if not link.serve_in_turn(turn):
            self._drop(turn)
        elif link.has_woken:
            self._has_woken = True
        for sibling in turns[:]:  # all are read again, as in `Link.reads_again`
            sibling.serving_since = 0.0
            if sibling.is_over:
                self._drop(sibling)

    def _drop(self, turn: Turn) -> None:
        self.turns.remove(turn)
        self._are_ready = None
        turn.siblings = ()
        if len(self.turns) == 1:
            self.turns[0].siblings = ()
        turn.link.end_turn(turn)

    def _watch_all(self) -> Callable[[float], Ready]:
        """Makes what waits for all connections and the poller."""
        filenos = [turn.link.fileno for turn in self.turns]
        if self._pool.poller_fileno is not None:
            filenos.append(self._pool.poller_fileno)
        self._are_ready = readiness(*filenos)
        return self._are_ready

    def _take_ready(self, found: Ready) -> list[Turn]:
        """The turns of what was found, and perhaps one more."""
        if len(found) == 1:  # as mostly
            fileno = found[0][0]
            for turn in self.turns:
                if turn.link.fileno == fileno:
                    return [turn]
        filenos = [fileno for fileno, _ in found]
        ready = [turn for turn in self.turns if turn.link.fileno in filenos]
        if self._pool.poller_fileno in filenos:
            event = self._pool.poller.wait(0)
            if event is not None:
                self._take(event, ready)
        return ready

    def _take(self, event: Event, ready: list[Turn]) -> None:
        """An event of something where there is no turn yet."""
        link = self._pool.link_at(event.fileno)
        if link is None:
            self._event = event
            ready.clear()
            return
        if len(self.turns) == _MOST_TURNS:
            self._drop(self.turns[0])  # the poller tells if there is something
        turn = link.take_pools_turn(event.readable, event.writable)
        if turn is not None:
            self.turns.append(turn)
            ready.append(turn)
            self._are_ready = None
            for sibling in self.turns:
                sibling.siblings = self.turns
