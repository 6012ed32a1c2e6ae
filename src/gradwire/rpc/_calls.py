"""Calls in flight, as this worker's own agent sees them: no sockets, no threads.

Who finishes a call (reply, deadline, loss of the peer) is decided by whoever takes it
out of its peer's table; taking out is atomic.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradwire.rpc._future import Future, Outcome
from gradwire.rpc._signals import interruptible

if TYPE_CHECKING:
    from gradwire.rpc._interceptors import Note
    from gradwire.rpc._link import Link

__all__ = ["CallTable", "Credits", "PendingCall"]

_NO_NOTES: Mapping[str, Note] = {}
_LITTLE_PART, _SMALL_CALL_PART = 16, 256  # of the bound


class PendingCall(Outcome, kw_only=True, eq=False):
    """One call that was sent and not answered yet.

    Attributes:
        id: Its number.
        target: What is called, for people.
        deadline: When nobody waits any more, on the monotonic clock; 0: never.
        cost: The bytes that it makes the peer hold.
        link: Where it went.
        await_answer: Waits for it.
        notes: Of the interceptors, by their names.
        future: Of whoever has one.
        is_given_up: Nobody waits any more.
        is_sent: It is on its way.
        notice: To be called by the thread that waits.
        keeps: What must live until the answer is there.
    """

    id: int
    target: str
    deadline: float
    cost: int
    link: Link
    await_answer: Callable[[PendingCall, float | None], bool]
    notes: Mapping[str, Note] = _NO_NOTES
    future: Future[Any] | None = None
    is_given_up: bool = False
    is_sent: bool = False
    notice: Callable[[], None] | None = None
    keeps: object = None

    def what(self) -> tuple[str, str | None]:
        """See `Outcome`."""
        worker = self.link.worker
        return f"the call of {self.target} on worker {worker!r}", worker

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the answer; see `Outcome.wait`."""
        return self.await_answer(self, timeout_s)

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Finishes the call. Callbacks of its future may run here."""
        if not self.finish(value, error):
            return
        if error is not None:
            self.fail_notes(error)
        elif notes := self.notes:
            self.notes = _NO_NOTES
            for note in notes.values():
                note.call = None
        if self.keeps is not None:
            self.keeps = None
        if (future := self.future) is not None:
            # Taken out: a finished call and its future must not keep each other alive.
            self.future = None
            future._settle()

    def fail_notes(self, error: BaseException | None = None) -> None:
        """Ends the notes, and tells them that no value will be taken."""
        if self.notes:
            notes, self.notes = self.notes, _NO_NOTES
            for note in notes.values():
                note.call = None
                note.failed(was_sent=True, error=error)


class CallTable:
    """The unanswered calls to one peer, and the bytes that they make it hold.

    A call that nobody waits for any more stays until the peer answers after all: it
    still holds the request.
    """

    def __init__(self, max_bytes: int) -> None:
        self.credits = Credits(max_bytes)
        self._unanswered: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._unanswered)

    def add(self, call: PendingCall) -> None:
        """Enters a call, before it is sent."""
        self._unanswered[call.id] = call

    def take(self, call_id: int) -> PendingCall | None:
        """The call that an answer belongs to; None if nobody waits for it any more."""
        call = self._unanswered.pop(call_id, None)
        if call is None:
            return None
        self.credits.give(call.cost)
        return None if call.is_given_up else call

    def give_up(self, call: PendingCall) -> bool:
        """Stops waiting for a call; False if it was answered meanwhile."""
        if call.id not in self._unanswered:
            return False
        # An answer may come right now. Both sides then finish the call, which counts
        # once, and the answer alone returns the bytes.
        call.is_given_up = True
        return True

    def take_all(self) -> list[PendingCall]:
        """Empties the table: the peer is lost. Returns the calls that are waited for."""
        calls = []
        while self._unanswered:
            try:
                _, call = self._unanswered.popitem()
            except KeyError:
                break
            calls.append(call)
        calls.reverse()  # as they were made
        self.credits.close()
        return [c for c in calls if not c.is_given_up]

    def pending(self) -> list[PendingCall]:
        """The calls that somebody waits for."""
        return [c for c in list(self._unanswered.values()) if not c.is_given_up]

    def overdue(self, now: float) -> list[PendingCall]:
        """Those of them whose deadline has passed."""
        return [c for c in self.pending() if 0 < c.deadline <= now]

    def next_deadline(self) -> float:
        """The earliest deadline, infinity if there is none."""
        return min(
            (c.deadline for c in self.pending() if c.deadline), default=float("inf")
        )


class Credits:
    """A bound on the bytes that unanswered calls make a peer hold.

    Who has to wait is served in the order of coming. But small calls pass those who wait
    if there is room for them: what a large one waits for may wait for a small one itself.
    And a little that is taken by others keeps nobody waiting: it may last.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._little = max_bytes // _LITTLE_PART
        self._small_call = max_bytes // _SMALL_CALL_PART
        # Guards all below; any calling thread, and those that read answers.
        self._lock = threading.Lock()
        self._used = 0
        self._waiters: deque[_Waiter] = deque()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def take(self, cost: int, deadline: float) -> bool:
        """Takes ``cost`` bytes, waiting for them if need be; False at the deadline.

        A cost above the whole bound is granted when hardly anything else is taken.
        """
        with self._lock:
            used = self._used
            if used <= self._little and not self._waiters:  # as mostly
                self._used = used + cost
                return True
            may_pass = not self._waiters or cost <= self._small_call
            if may_pass and self._fits(cost):
                self._used += cost
                return True
            waiter = _Waiter(cost)
            self._waiters.append(waiter)
        try:
            while not waiter.is_granted:
                left = deadline - time.monotonic() if deadline else 3600.0
                if left <= 0:
                    break
                interruptible(waiter.lock.acquire, True, left)
        except BaseException:  # a signal handler raised
            self._withdraw(waiter)
            if waiter.is_granted:
                self.give(cost)
            raise
        self._withdraw(waiter)
        return waiter.is_granted

    def _fits(self, cost: int) -> bool:
        """The caller holds the lock."""
        is_free = self._used <= self._little or self._used + cost <= self._max
        return is_free or self._closed

    def _grant(self) -> None:
        """Serves those who wait, in their order; the caller holds the lock."""
        while self._waiters and self._fits(self._waiters[0].cost):
            waiter = self._waiters.popleft()
            self._used += waiter.cost
            waiter.is_granted = True
            waiter.lock.release()

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if not waiter.is_granted:
                self._waiters.remove(waiter)
                self._grant()  # others may have waited for this one only

    def force(self, cost: int) -> None:
        """Takes ``cost`` bytes without waiting: nested calls must not wait."""
        with self._lock:
            self._used += cost

    def give(self, cost: int) -> None:
        """Gives bytes back."""
        with self._lock:
            if not self._closed:
                self._used -= cost
            if self._waiters:
                self._grant()

    def close(self) -> None:
        """Nobody waits any more: the peer is gone, and all bytes are free."""
        with self._lock:
            self._closed = True
            self._used = 0
            self._grant()


class _Waiter:
    """A call that waits for `Credits`; their lock guards it."""

    __slots__ = ("cost", "is_granted", "lock")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.is_granted = False
        # Released when it is granted. Not a condition: see `Outcome.block`.
        self.lock = threading.Lock()
        self.lock.acquire()
