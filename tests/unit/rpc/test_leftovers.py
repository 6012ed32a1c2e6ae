"""What finalisers leave to do is done once, and nobody misses it."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

from gradwire.rpc._leftovers import Leftovers

LIMIT_S = 10.0


class Done:
    """Takes down what was worked off."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.changed = threading.Condition()

    def __call__(self, entries: list[Any]) -> None:
        with self.changed:
            self.entries += entries
            self.changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.entries) >= count, LIMIT_S)


class SlowThread:
    """A queue that the thread gets nothing back into, should it take something out."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.taken = threading.Event()

    def put(self, entry: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(LIMIT_S)
        self._queue.put(entry)

    def get(self) -> Any:
        entry = self._queue.get()
        self.taken.set()
        return entry

    def get_nowait(self) -> Any:
        return self._queue.get_nowait()


def test_who_works_off_what_is_there_does_not_miss_what_wakes_the_thread(monkeypatch):
    done = Done()
    leftovers = Leftovers("test", done)
    queue = SlowThread()
    monkeypatch.setattr(leftovers, "_queue", queue)
    leftovers.ensure_thread()

    leftovers.put("entry")
    queue.taken.wait(0.1)
    leftovers.work_off()

    assert done.entries == ["entry"]
    leftovers.close()


def test_entries_are_worked_off_by_the_thread():
    done = Done()
    leftovers = Leftovers("test", done)
    leftovers.put("before it was started")
    leftovers.ensure_thread()
    try:
        assert done.wait_for(1)
        leftovers.put("later")
        assert done.wait_for(2)
    finally:
        leftovers.close()

    assert done.entries == ["before it was started", "later"]


def test_work_that_fails_does_not_end_the_thread(caplog):
    done = Done()

    def work_off(entries: list[Any]) -> None:
        done(entries)
        if entries == ["bad"]:
            raise ValueError("no good")

    leftovers = Leftovers("test", work_off)
    leftovers.ensure_thread()
    try:
        leftovers.put("bad")
        assert done.wait_for(1)
        leftovers.put("good")
        assert done.wait_for(2)
    finally:
        leftovers.close()

    assert "no good" in caplog.text


def test_thread_ends_with_the_worker():
    leftovers = Leftovers("ending", Done())
    leftovers.ensure_thread()
    leftovers.put("something")

    leftovers.close()

    assert "gradwire-ending-leftovers" not in {t.name for t in threading.enumerate()}
