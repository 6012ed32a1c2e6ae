"""One connection and who reads it.

At most one thread reads a connection at a time: the one that holds its *role*. It is
either a thread of the pool that was told of an event, or a caller that waits for a
reply and reads for itself, which saves waking another thread. While the role is taken,
the poller keeps quiet about the connection.
"""

from __future__ import annotations

import functools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from gradwire.errors import ProtocolError
from gradwire.rpc._pool import WorkerPool
from gradwire.transport import Connection, Frame, RawBuffer, Ticket
from gradwire.wire import answered_call

__all__ = ["Link", "readiness"]

_LONGEST_SPIN_S = 500e-6
_PREEMPTED_S = 500e-6
_MOST_SKIPPED = 1024


class _SpinGauge:
    """Decides how long to look for data before going to sleep.

    Waking a sleeping process costs more than a whole call, so a short wait is best
    spent looking; but only if waits are short, and only where the peer runs at the same
    time on another core. The gauge keeps the typical wait. A gap between two looks
    means that somebody else needed the core: then there is no spinning for a while.
    """

    _spinning = threading.Lock()  # one spinning thread per process is enough

    __slots__ = ("_penalty", "_skip", "_typical_s")

    def __init__(self) -> None:
        self._typical_s = 0.0
        self._penalty = 16
        self._skip = 0 if (os.cpu_count() or 1) > 1 else 1 << 62

    def note(self, waited_s: float) -> None:
        """Data came after so long, asleep or not."""
        # One long wait (the program did something else) must not end the spinning.
        waited_s = min(waited_s, 4 * _LONGEST_SPIN_S)
        self._typical_s += (waited_s - self._typical_s) / 8

    def spin(self, is_ready: Callable[[int], object]) -> bool:
        """Calls ``is_ready(0)`` until it is true; False when it is time to sleep."""
        limit = min(2 * self._typical_s + 50e-6, _LONGEST_SPIN_S)
        if self._skip > 0:
            self._skip -= 1
            return False
        if self._typical_s > _LONGEST_SPIN_S or not self._spinning.acquire(False):
            return False
        try:
            start = last = time.perf_counter()
            while not is_ready(0):
                now = time.perf_counter()
                if now - last > _PREEMPTED_S:
                    self._skip = self._penalty = min(2 * self._penalty, _MOST_SKIPPED)
                    return False
                if now - start > limit:
                    return False
                last = now
            self._penalty = max(16, self._penalty - 1)
            return True
        finally:
            self._spinning.release()


def readiness(fileno: int) -> Callable[[float], object]:
    """A function that waits up to so many milliseconds for the descriptor to be readable.

    Signals interrupt it.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fileno, select.POLLIN)
        return poll.poll
    return lambda ms: select.select([fileno], [], [], ms / 1e3)[0]


class Link:
    """A connection, its place in the poller, and the role of its reader."""

    def __init__(
        self,
        connection: Connection,
        pool: WorkerPool,
        on_frames: Callable[[Link, list[Frame]], Callable[[], None] | None],
        on_end: Callable[[Link, str], None],
    ) -> None:
        """Takes over a connection; see `start`.

        Args:
            connection: The connection, which `close` closes.
            pool: Its threads read.
            on_frames: Handles answers and control messages and returns the rest of the
                work, which may block.
            on_end: Told once why nothing will come any more.
        """
        self.connection = connection
        self.clock_offset = 0.0  # the peer's monotonic clock minus ours
        self.last_received = self.last_sent = time.monotonic()
        self._pool = pool
        self._on_frames = on_frames
        self._on_end = on_end
        self._role = threading.Lock()
        # Guards all below: the reader, senders, and those who handle what was read.
        self._interest = threading.Lock()
        self._undelivered = 0
        self._ended = False
        self._want_read = self._want_write = False
        self._open = True
        self._gauge = _SpinGauge()
        self._quiet_since = time.perf_counter()
        self._is_ready = readiness(connection.fileno())
        pool.watch(connection.fileno(), self._on_event)

    def start(self) -> None:
        """Begins to read."""
        self._wish(read=True)

    # --------------------------------------------------------------------- sending

    def send(self, head: bytes, buffers: Sequence[RawBuffer]) -> Ticket | None:
        """See `Connection.send`; also arranges that a backlog is written later."""
        self.last_sent = time.monotonic()
        ticket = self.connection.send(head, buffers)
        if self.connection.has_backlog:
            self._wish(write=True)
        return ticket

    def keep_house(self, now: float) -> None:
        """See `Connection.housekeeping`; also writes a backlog that got stuck."""
        self.connection.housekeeping(now)
        if self.connection.has_backlog and not self.connection.flush():
            self._wish(write=True)

    def _wish(self, *, read: bool | None = None, write: bool | None = None) -> None:
        with self._interest:
            if read is not None:
                self._want_read = read
            if write is not None:
                self._want_write = write
            if self._open:
                self._pool.poller.arm(
                    self.connection.fileno(), self._want_read, self._want_write
                )

    # --------------------------------------------------------------------- reading

    def _on_event(self, readable: bool, writable: bool) -> None:
        """On a pool thread; the poller is quiet about this link until it is armed."""
        with self._interest:
            # One-shot: what was not reported has to be asked for again.
            if readable:
                self._want_read = False
            if writable:
                self._want_write = False
            if self._open and (self._want_read or self._want_write):
                self._pool.poller.arm(
                    self.connection.fileno(), self._want_read, self._want_write
                )
        if writable and not self.connection.flush():
            self._wish(write=True)
        if readable and self._role.acquire(False):
            self._gauge.note(time.perf_counter() - self._quiet_since)
            self._read_as_server()
        # else: a caller reads; it arms the link when it is done.

    def _read_as_server(self) -> None:
        """Reads and serves, as long as there is more very soon. Takes over the role."""
        frames = self._receive()
        while True:
            self._count(frames)
            self._give_role_back()
            if frames:
                self.deliver(frames)
            else:
                self.end_if_over()
            if self.connection.end is not None or self._pool.has_work:
                return
            if not self._role.acquire(False):
                return
            self._wish(read=False)
            self._quiet_since = time.perf_counter()
            if not self._gauge.spin(self._is_ready):
                self._give_role_back()
                return
            self._gauge.note(time.perf_counter() - self._quiet_since)
            frames = self._receive()

    def read_for(
        self, call_id: int, is_done: Callable[[], bool], deadline: float
    ) -> list[Frame]:
        """Reads on the calling thread, which waits for the answer to a call.

        It runs no handler: what is not the answer goes to the pool.

        Args:
            call_id: The call.
            is_done: Whether the caller need not wait any more.
            deadline: When to stop in any case, 0 for never.

        Returns:
            The frame with the answer, for `deliver`; empty if another thread reads, or
            if there was none.
        """
        if not self._role.acquire(False):
            return []
        found: list[Frame] = []
        try:
            self._wish(read=False)
            while not found and not is_done():
                self._wait(deadline)
                frames = self._receive()
                if frames:
                    found = self._sort(frames, call_id)
                elif self.connection.end is not None or (
                    deadline and time.monotonic() >= deadline
                ):
                    break
        finally:
            self._give_role_back()
        return found

    def _sort(self, frames: list[Frame], call_id: int) -> list[Frame]:
        """Takes out the answer to a call, and gives the rest to the pool."""
        found = [f for f in frames if answered_call(f.head) == call_id]
        self._count(found)
        if len(found) < len(frames):
            others = [f for f in frames if f not in found]
            self._count(others)
            self._pool.submit(functools.partial(self.deliver, others))
        return found

    # Frames that were read may still be under way to their handling when the end of the
    # stream is seen. The end must come last, or calls would fail whose answer is here.

    def _count(self, frames: list[Frame]) -> None:
        if frames:
            with self._interest:
                self._undelivered += 1

    def deliver(self, frames: list[Frame]) -> None:
        """Handles frames that were read. Empties the list, and may run foreign code."""
        try:
            work = self._on_frames(self, frames)
        finally:
            with self._interest:
                self._undelivered -= 1
            if self.connection.end is not None:
                self.end_if_over()
        if work is not None:
            work()

    def end_if_over(self) -> None:
        """Reports the end of the connection, once, when everything before it is handled."""
        with self._interest:
            if self.connection.end is None or self._undelivered or self._ended:
                return
            self._ended = True
        self._on_end(self, self.connection.end)

    def _wait(self, deadline: float) -> None:
        """Waits until there is something to read, or the deadline."""
        start = time.perf_counter()
        if not self._gauge.spin(self._is_ready):
            left = deadline - time.monotonic() if deadline else 3600.0
            self._is_ready(max(0.0, left) * 1e3)
        self._gauge.note(time.perf_counter() - start)

    def _receive(self) -> list[Frame]:
        try:
            frames = self.connection.receive()
        except ProtocolError as error:
            self.connection.end = f"it broke the protocol: {error}"
            return []
        if frames:
            self.last_received = time.monotonic()
        return frames

    def _give_role_back(self) -> None:
        self._role.release()
        self._wish(read=True)

    # ------------------------------------------------------------------------- end

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._open

    def close(self) -> None:
        """Closes the connection. Whoever reads or waits notices at once."""
        with self._interest:
            if not self._open:
                return
            self._open = False
            self._pool.unwatch(self.connection.fileno())
        self.connection.close()
