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

import time
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
    tour = _Round(first, pool)
    ready = [first]
    try:
        while ready:
            for turn in ready:
                tour.serve(turn)
            if not tour.turns or tour.has_woken or pool.has_work:
                break
            ready = tour.look(ready[-1])
    finally:
        set_turn(None)
        tour.leave()
    return tour.event


class _Round:
    """The turns that a thread has at the moment; all of them are siblings."""

    __slots__ = ("_look", "_pool", "event", "has_woken", "turns")

    def __init__(self, first: Turn, pool: WorkerPool) -> None:
        self._pool = pool
        self.turns = [first]
        self.event: Event | None = None
        # Whoever waits for what this thread has read needs the interpreter now.
        self.has_woken = False
        # Waits for all connections and the poller; made anew when there are others.
        self._look: Callable[[float], Ready] | None = None

    def serve(self, turn: Turn) -> None:
        """Serves what has come to a connection; any turn may end by that."""
        turns = self.turns
        if turn not in turns:
            return  # it has ended while another one was served
        set_turn(turn)
        if len(turns) == 1:
            self._serve(turn)
            return
        now = time.monotonic()
        for sibling in turns:  # none of them is read meanwhile
            sibling.serving_since = now
        self._serve(turn)
        for sibling in turns[:]:
            if sibling is not turn and not sibling.link.reads_again(sibling):
                self._drop(sibling)

    def _serve(self, turn: Turn) -> None:
        link = turn.link
        if not link.serve_in_turn(turn):
            self._drop(turn)
        elif link.has_woken:
            self.has_woken = True

    def _drop(self, turn: Turn) -> None:
        self.turns.remove(turn)
        self._look = None
        turn.siblings = ()
        if len(self.turns) == 1:
            self.turns[0].siblings = ()
        turn.link.end_turn(turn)

    def look(self, latest: Turn) -> list[Turn]:
        """The turns with something to read; empty if it is time to sleep.

        Args:
            latest: The one that was served last: its connection knows how long to look.
        """
        pool, turns = self._pool, self.turns
        leads = pool.leads
        if len(turns) == 1:
            link = turns[0].link
            look = link.is_any_ready if leads else link.is_ready
        elif not leads:
            return []
        else:
            if self._look is None:
                filenos = [turn.link.fileno for turn in turns]
                if pool.poller_fileno is not None:
                    filenos.append(pool.poller_fileno)
                self._look = readiness(*filenos)
            look = self._look
        found = latest.link.gauge.spin(look)
        if not found:
            return []
        if len(found) == 1 and found[0][0] == turns[0].link.fileno:
            return [turns[0]]
        filenos = [fileno for fileno, _ in found]
        ready = [turn for turn in turns if turn.link.fileno in filenos]
        if pool.poller_fileno in filenos:
            event = pool.poller.wait(0)
            if event is not None:
                self._take(event, ready)
        return ready

    def _take(self, event: Event, ready: list[Turn]) -> None:
        """An event of something where there is no turn yet."""
        link = self._pool.link_at(event.fileno)
        if link is None:
            self.event = event
            ready.clear()
            return
        if len(self.turns) == _MOST_TURNS:
            self._drop(self.turns[0])  # the poller tells if there is something
        turn = link.take_pools_turn(event.readable, event.writable)
        if turn is not None:
            self.turns.append(turn)
            ready.append(turn)
            self._look = None
            for sibling in self.turns:
                sibling.siblings = self.turns

    def leave(self) -> None:
        """Ends all turns."""
        for turn in self.turns:
            turn.siblings = ()
            turn.link.end_turn(turn)
