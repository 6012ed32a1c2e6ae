"""What finalisers leave to do.

A finaliser runs anywhere, also on a thread that holds a lock: it must neither send nor
lock. It makes an entry here, and a thread of its own does the work soon after.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from gradwire.rpc._log import log as _log
from gradwire.rpc._signals import shielded

__all__ = ["End", "Leftovers"]

_GATHER_S = 0.01  # entries are gathered for so long, to be worked off together
_CLOSE_S = 5.0


class End(weakref.ref[Any]):
    """The end of an object, to be told to `Leftovers`."""

    __slots__ = ("bell", "entry")

    entry: Any
    bell: weakref.ref[Any]


class Leftovers:
    """A queue that any code may add to, and a thread that empties it.

    Args:
        worker: Name of the worker, for the thread's name.
        work_off: Gets the entries, several at a time, on any thread.
    """

    def __init__(self, worker: str, work_off: Callable[[list[Any]], None]) -> None:
        self._worker = worker
        self._work_off = work_off
        self._queue: SimpleQueue[Any] = SimpleQueue()
        # Wakes the thread; False ends it. It takes nothing else out by itself: an entry in
        # its hands would be missed by who looks for it in the queue.
        self._bell: SimpleQueue[object] = SimpleQueue()
        # Held while entries are worked off: who finds the queue empty knows it is done.
        self._at_work = threading.RLock()
        # Guards the start and the end of the thread.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, entry: Any) -> None:
        """Adds an entry; safe in finalisers."""
        self._queue.put(entry)
        self._bell.put(True)

    def watch(self, mortal: object, entry: Any) -> End:
        """Adds an entry when an object dies.

        In C alone, unlike a finaliser: there a signal handler may raise before anything
        is done, and Python goes on as if nothing were.

        Args:
            mortal: The object.
            entry: What is added.

        Returns:
            What has to live for as long as the object does.
        """
        bell = weakref.ref(mortal, self._bell.put)
        end = End(mortal, self._queue.put)  # the later one is called first
        end.entry, end.bell = entry, bell
        return end

    def ensure_thread(self) -> None:
        """To be called, outside finalisers, by whoever makes objects that will `put`."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_closed:
                    self._thread = threading.Thread(
                        target=self._run,
                        name=f"gradwire-{self._worker}-leftovers",
                        daemon=True,
                    )
                    self._thread.start()

    def _run(self) -> None:
        while self._bell.get():
            time.sleep(_GATHER_S)
            goes_on: object = True
            with contextlib.suppress(Empty):
                while goes_on:
                    goes_on = self._bell.get_nowait()
            if not goes_on:
                return
            self.work_off()

    def work_off(self) -> None:
        """Works off what there is, now, on this thread."""
        with shielded(), self._at_work:  # what was taken out must not be lost
            entries = []
            with contextlib.suppress(Empty):
                while True:
                    entry = self._queue.get_nowait()
                    entries.append(entry.entry if type(entry) is End else entry)
            try:
                if entries:
                    self._work_off(entries)
            except Exception:
                _log.exception("%s: an internal task failed", self._worker)
            finally:
                entries.clear()  # one may be all that keeps a graph alive

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._bell.put(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
