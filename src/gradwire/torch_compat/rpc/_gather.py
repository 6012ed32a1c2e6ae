"""Collecting one object from each worker, by calls only.

The worker with the smallest name leads: the others call it with their objects, and it
calls each of them with all. Rounds of the same workers are told apart by a number.

Who waits looks now and then whether those are there whom it waits for: the leader for
those whose objects are missing, the others for the leader.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from gradwire.errors import DeadlineExceeded
from gradwire.rpc import Future

__all__ = ["Round", "Rounds"]

_LOOK_S = 0.25


class Round:
    """One round on one worker: what has come so far."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        # One of ours: a handler that waits for it is known to wait.
        self._complete: Future[None] = Future()

    def is_complete(self) -> bool:
        """Whether all objects are there."""
        return self._complete.done()

    def complete(self) -> None:
        """All objects are there."""
        self._complete.set_result(None)

    def fail(self, error: Exception) -> None:
        """They will never be."""
        self._complete.set_exception(error)

    def wait(self, timeout_s: float | None, look: Callable[[], None]) -> None:
        """Waits until all objects are there, or until the limit.

        Args:
            timeout_s: The limit; None: none.
            look: Called now and then while something is missing; may end the round, or
                raise.
        """
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            try:
                self._complete.wait(max(0.0, min(left, _LOOK_S)))
            except DeadlineExceeded:
                if left <= 0:
                    return  # what is missing shows later, in the calls that follow
                look()
            else:
                return


class Rounds:
    """The rounds that a worker takes part in."""

    def __init__(self) -> None:
        # Guards all: threads that gather, and those that serve the calls of others.
        self._lock = threading.Lock()
        self._rounds: dict[str, Round] = collections.defaultdict(Round)
        self._next: dict[str, int] = {}
        self._arrival: Future[None] = Future()

    def begin(self, names: set[str]) -> str:
        """Names a new round of these workers; each of them gives the same name."""
        key = "".join(sorted(names))
        with self._lock:
            number = self._next.get(key, 0)
            self._next[key] = number + 1
        return f"{key}{number}"

    def get(self, sequence_id: str) -> Round:
        """A round, which may have begun elsewhere first."""
        with self._lock:
            return self._rounds[sequence_id]

    def end(self, sequence_id: str) -> None:
        """A round is over here."""
        with self._lock:
            self._rounds.pop(sequence_id, None)

    def add(
        self, sequence_id: str, worker_name: str, obj: Any, names: set[str]
    ) -> None:
        """An object came to the leader."""
        with self._lock:
            one = self._rounds[sequence_id]
            if worker_name not in names:
                raise AssertionError(f"{worker_name} is not expected by leader.")
            if worker_name in one.gathered_objects:
                raise AssertionError(
                    f"{worker_name} reported intent sequence id {sequence_id} twice."
                )
            one.gathered_objects[worker_name] = obj
            if names == set(one.gathered_objects):
                one.complete()

    def leave_out(self, sequence_id: str, names: set[str]) -> None:
        """The leader waits for these only, as others are lost."""
        with self._lock:
            one = self._rounds[sequence_id]
            if names <= one.gathered_objects.keys() and not one.is_complete():
                one.complete()

    def arrive(self) -> None:
        """This worker has come to the end, where all wait for each other."""
        with self._lock:
            arrival = self._arrival
        if not arrival.done():
            arrival.set_result(None)

    def arrival(self) -> Future[None]:
        """Completes when it has."""
        with self._lock:
            return self._arrival

    def clear(self) -> None:
        """The group is over; the next begins from the first number."""
        with self._lock:
            self._rounds.clear()
            self._next.clear()
            self._arrival = Future()
