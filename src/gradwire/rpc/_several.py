"""Reading several connections at once, for a caller that waits for answers of all.

The thread has one turn at each of them, its *siblings*: whatever makes it wait elsewhere
ends all of them (see `about_to_block`), and while it handles what one connection has
brought, a look (see `_watch`) may take any of them away, since none is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Sized

from gradwire.rpc._calls import PendingCall
from gradwire.rpc._link import MOST_PASSED_ON, SLICE_S, Link
from gradwire.rpc._signals import interruptible
from gradwire.rpc._spin import Ready, SpinGauge, readiness
from gradwire.rpc._turn import Turn, let_others_read, this_thread

__all__ = ["Reading", "read_several"]

_MOST_KEPT = 64
# What waits for several connections, by their descriptors, of which it knows nothing but
# the numbers. Who waits takes it out: a signal handler may call the same workers meanwhile,
# and give the turns to a thread that does.
_kept: dict[tuple[int, ...], Callable[[float], Ready]] = {}


class Reading:
    """What a caller waits for at one connection, and its turn there.

    Args:
        link: The connection.
        call: The first call that it waits for.
        calls_there: All calls that are in flight to that worker.
    """

    __slots__ = ("calls", "calls_there", "link", "turn")

    def __init__(self, link: Link, call: PendingCall, calls_there: Sized) -> None:
        self.link = link
        self.calls = [call]
        self.calls_there = calls_there
        self.turn: Turn

    def goes_on(self) -> bool:
        """Whether there is something to wait for, and it is this thread that reads."""
        calls, turn, link = self.calls, self.turn, self.link
        while calls[-1].done:
            calls.pop()
            if not calls:
                return False
        if turn.is_over or link.connection.end is not None:
            return False
        return not turn.serving_since or link.reads_again(turn)


def read_several(readings: Sequence[Reading], limit: float) -> None:
    """Reads connections on the calling thread until nothing is awaited there any more.

    As `Link.read_as_caller`, for a thread without a turn. Connections that others read are
    left to them; and it may return early for all of the reasons of that one. So the
    caller has to wait for each call in some other way if it is not done.

    Args:
        readings: For each connection, what the caller waits for.
        limit: When to stop in any case, on the monotonic clock; 0 for never.
    """
    siblings: list[Turn] = []
    own = []
    for reading in readings:
        turn = reading.link.take_callers_turn()
        if turn is not None:
            reading.turn = turn
            turn.siblings = siblings
            siblings.append(turn)
            own.append(reading)
    if not own:
        return
    this_thread.turn = siblings[0]
    try:
        _read_until_done(own, siblings, limit)
    finally:
        for reading in own:
            _leave(reading, siblings)


def _leave(reading: Reading, siblings: list[Turn]) -> None:
    """Ends a turn, of which nobody knows then: so the next caller may get it again."""
    turn = reading.turn
    siblings.remove(turn)
    turn.siblings = ()
    this_thread.turn = siblings[0] if siblings else None
    reading.link.leave_callers_turn(turn, reading.calls_there)


def _read_until_done(
    readings: list[Reading], siblings: list[Turn], limit: float
) -> None:
    """Those that are over are left, and taken out of the list."""
    num_left = MOST_PASSED_ON
    while True:
        first = readings[0]
        gauge = first.link.gauge_of(first.calls[-1].target)
        ready = dict(interruptible(_wait, readings, gauge, limit))
        for reading in readings:
            # If nothing is ready, all: some of it may have been read with a handshake.
            if not ready or reading.link.fileno in ready:
                num_left -= reading.link.read_as_sibling(reading.turn)
        for reading in readings[:]:
            if not reading.goes_on():
                readings.remove(reading)
                _leave(reading, siblings)
        if not readings or num_left <= 0 or (limit and time.monotonic() >= limit):
            return


def _wait(readings: list[Reading], gauge: SpinGauge, limit: float) -> Ready:
    """Waits until there is something to read anywhere, for a while; see `Link`."""
    start = time.perf_counter()
    may_spin = True
    filenos: tuple[int, ...] = ()
    for reading in readings:
        if reading.calls[-1].done:  # whoever has read before us has seen to it
            return []
        link = reading.link
        if link.num_waiting:
            may_spin = False
        filenos += (link.fileno,)
    is_ready = _kept.pop(filenos, None) or readiness(*filenos)
    ready = gauge.spin(is_ready) if may_spin else None
    if not ready:
        let_others_read()
        left = limit - time.monotonic() if limit else SLICE_S
        ready = is_ready(max(0.0, min(left, SLICE_S)) * 1e3)
        gauge.note(time.perf_counter() - start)
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[filenos] = is_ready
    return ready
