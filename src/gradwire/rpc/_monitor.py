"""The agent's clock: one thread that looks after deadlines and heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gradwire.rpc._log import log as _log

__all__ = ["Monitor"]

_SHORTEST_TICK_S = 0.002
_CLOSE_S = 5.0


class Monitor:
    """Calls ``tick(now)`` whenever it is due.

    Args:
        name: Name of the agent, for the thread's name.
        tick: Does what is due and returns when it wants to be called next.
    """

    def __init__(self, name: str, tick: Callable[[float], float]) -> None:
        self._tick = tick
        # Guards `due` and `_closed`: callers bring the next tick forward.
        self._changed = threading.Condition()
        self.due = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"gradwire-{name}-monitor", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call_by(self, when: float) -> None:
        """Makes sure that there is a tick at that time or before."""
        if when < self.due:
            with self._changed:
                if when < self.due:
                    self.due = when
                    self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    left = self.due - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if self._closed:
                    return
                # Whoever wants an earlier tick from now on finds this and rings.
                self.due = float("inf")
            now = time.monotonic()
            try:
                due = self._tick(now)
            except Exception:
                _log.exception("the monitor failed; it goes on")
                due = now + 1.0
            with self._changed:
                # At least a little pause: many deadlines close together are one tick.
                self.due = max(min(self.due, due), now + _SHORTEST_TICK_S)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if (
            self._thread.ident is not None
            and self._thread is not threading.current_thread()
        ):
            # A look never blocks; the limit is for the day on which one does.
            self._thread.join(_CLOSE_S)
