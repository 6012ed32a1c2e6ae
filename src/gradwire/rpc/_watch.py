"""Looking whether threads get stuck, without holding up those that do not.

While calls come and go, threads begin turn after turn, and nothing is wrong. A look costs
the interpreter lock, which they need: a hundred of them per second made every call some
percent slower. So each turn that begins puts the next look off, and it comes when no turn
has begun for a while; or now and then, for one may be stuck while others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gradwire.rpc._alarm import Alarm
from gradwire.rpc._link import Link
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._turn import LOOK_S

__all__ = ["TurnWatch"]

_LONGEST_S = 0.05
_NEVER = float("inf")


class TurnWatch:
    """Looks at turns, at the queue of the pool, and at what was held back.

    Args:
        pool: Its threads look.
        links: All connections.
        call_by: Makes the monitor look by some time, where there is no alarm.
        alarm: Rings.
    """

    def __init__(
        self,
        pool: WorkerPool,
        links: Callable[[], Iterable[Link]],
        call_by: Callable[[float], None],
        alarm: Alarm | None,
    ) -> None:
        self._pool = pool
        self._links = links
        self._call_by = call_by
        self._alarm = alarm
        self.has_alarm = alarm is not None
        if alarm is not None:
            pool.watch(alarm.fileno(), self._on_alarm, in_reserve=True)
        # Guards all below, and the alarm: whoever calls, serves or looks.
        self._lock = threading.Lock()
        self._look_by = _NEVER
        self.settled_until = 0.0
        """Until then a turn that begins need not call `put_off`. Read without the lock."""

    def start(self) -> None:
        """Begins to listen to the alarm."""
        with self._lock:
            self._listen()

    def _listen(self) -> None:
        if self._alarm is not None:
            self._pool.reserve.arm(self._alarm.fileno(), read=True, write=False)

    def look_soon(self) -> None:
        """Calls were held back: looks in a moment."""
        when = time.monotonic() + LOOK_S
        if when < self._look_by:
            with self._lock:
                self._look_by = min(self._look_by, when)
                self._set(self._look_by)

    def put_off(self, now: float) -> None:
        """A turn begins, or work was queued: looks if nothing of this happens for a while."""
        with self._lock:
            self._look_by = min(self._look_by, now + _LONGEST_S)
            self._set(min(now + 2 * LOOK_S, self._look_by))

    def _set(self, when: float) -> None:
        if self._alarm is None:
            self._call_by(when)
            self.settled_until = _NEVER  # it looks in any case
        else:
            self._alarm.set(when)
            can_wait = when < self._look_by
            self.settled_until = when - LOOK_S if can_wait else _NEVER

    def _on_alarm(self, readable: bool, writable: bool) -> None:
        """On a thread of the pool."""
        with self._lock:
            if self._alarm is not None:
                self._alarm.stop()
                self._listen()
        now = time.monotonic()
        if self.look(now):
            with self._lock:
                self._look_by = min(self._look_by, now + _LONGEST_S)
                self._set(min(now + LOOK_S, self._look_by))

    def look(self, now: float) -> bool:
        """Helps where somebody is stuck; returns whether to look again in a moment."""
        with self._lock:
            self._look_by, self.settled_until = _NEVER, 0.0
        is_busy = self._pool.check_stall()
        for link in self._links():
            is_busy = link.check_turn(now) or is_busy
        return is_busy

    def close(self) -> None:
        """Ends the alarm."""
        with self._lock:
            alarm, self._alarm = self._alarm, None
        if alarm is not None:
            self._pool.unwatch(alarm.fileno())
            alarm.close()
