"""Looking for data a little longer before going to sleep."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from gradwire.rpc._host import num_cores

__all__ = ["Ready", "SpinGauge", "readiness"]

Ready: TypeAlias = list[tuple[int, int]]
"""Descriptors that are ready, each with what it is ready for."""
_Found = TypeVar("_Found")

_LONGEST_SPIN_S = 2e-3
_LOOK_ROUND_S = 100e-6
_CROWDED = 1.2  # cores that the process uses, this thread among them
_PREEMPTED_S = 2e-3
_FEWEST_SKIPPED, _MOST_SKIPPED = 16, 512


def readiness(*filenos: int, write: bool = False) -> Callable[[float], Ready]:
    """A function that waits up to so many milliseconds for any descriptor to be readable.

    It returns those that are, as `select.poll` does. One thread at a time may call it.

    Args:
        filenos: The descriptors.
        write: Also wait for any of them to be writable.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        events = select.POLLIN | (select.POLLOUT if write else 0)
        for fileno in filenos:
            poll.register(fileno, events)
        return poll.poll
    writers = filenos if write else ()

    def select_from(ms: float) -> Ready:
        readable, writable, _ = select.select(filenos, writers, [], ms / 1e3)
        return [(fileno, 0) for fileno in {*readable, *writable}]

    return select_from


# The peer itself may have been put on this very core: then it must run now, or both lose.
_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class SpinGauge:
    """Decides how long to look before going to sleep.

    Waking a sleeping process costs more than a whole call, so a short wait is best
    spent looking; but only if waits are short, and only where the peer runs at the same
    time on another core. The gauge keeps the typical wait. A long gap between two looks
    means that somebody else computes on this core (other workers, to whom it is left at
    each look, are back sooner): then there is no spinning for a while, and if that goes
    on, for longer and longer. And whoever spins keeps the interpreter, or a
    core, from other threads of the process: if these are busy, it does so only briefly.
    """

    # One spinning thread per process is enough. Not a lock: a signal could come between
    # taking it and the try that gives it back, and if two spin for once, nothing happens.
    _is_taken = False

    __slots__ = ("_penalty", "_skip", "_typical_s")

    def __init__(self) -> None:
        self._typical_s = 0.0
        self._penalty = _FEWEST_SKIPPED
        self._skip = 0 if num_cores() > 1 else 1 << 62

    def note(self, waited_s: float) -> None:
        """Data came after so long, and not while `spin` looked for it."""
        # One long wait (the program did something else) must not end the spinning.
        waited_s = min(waited_s, 4 * _LONGEST_SPIN_S)
        self._typical_s += (waited_s - self._typical_s) / 8

    def spin(self, look: Callable[[int], _Found]) -> _Found | None:
        """Calls ``look(0)`` until it finds something, and notes how long that took.

        Returns:
            What it found; None when it is time to sleep.
        """
        if self._skip > 0:
            self._skip -= 1
            return None
        if self._typical_s > _LONGEST_SPIN_S or SpinGauge._is_taken:
            return None
        limit = min(4 * self._typical_s + 100e-6, _LONGEST_SPIN_S)
        # Other threads are looked for in a spin that lasts, when it has lasted a little
        # and from then on: the clock of a process is a system call.
        look_at, looked = _LOOK_ROUND_S, 0.0
        used: float | None = None
        SpinGauge._is_taken = True
        try:
            start = last = time.perf_counter()
            while not (found := look(0)):
                _yield_core()
                now = time.perf_counter()
                if now - last > _PREEMPTED_S:
                    self._skip = self._penalty
                    self._penalty = min(2 * self._penalty, _MOST_SKIPPED)
                    return None
                if now - start > limit:
                    return None
                if now - start > look_at:
                    before, used = used, time.process_time()
                    if before is not None and used - before > _CROWDED * (now - looked):
                        return None
                    looked = now
                    look_at += _LOOK_ROUND_S
                last = now
            self._penalty = _FEWEST_SKIPPED
            self._typical_s += (last - start - self._typical_s) / 8
            return found
        finally:
            SpinGauge._is_taken = False
