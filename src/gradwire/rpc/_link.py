"""One connection and who reads it.

At most one thread reads a connection at a time. It is either a thread of the pool that
was told of an event and has its *turn* (see `_turn`), or a caller that waits for an
answer and reads for itself, which saves waking another thread. Meanwhile the poller
keeps quiet about the connection.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Container, Sequence, Sized
from typing import Any, Protocol, TypeVar

from gradwire.errors import ProtocolError
from gradwire.rpc._future import Outcome
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._round import take_turns
from gradwire.rpc._signals import interruptible
from gradwire.rpc._spin import Ready, SpinGauge, readiness
from gradwire.rpc._turn import (
    LONGEST_TURN_S,
    LOOK_S,
    Turn,
    leave_unread,
    let_others_read,
    this_thread,
)
from gradwire.transport import Connection, Frame, RawBuffer, Ticket

__all__ = ["Link", "LinkOwner"]

T = TypeVar("T")

_MOST_HELD = 64
_MOST_GAUGES = 64
_NOT_LEFT = 64  # waits of handlers, after one that did not come back soon
_MOST_PASSED_ON = 3
"""Requests after which a caller leaves the reading to those who serve them: a call or two
back belong to most conversations."""
_SLICE_S = 0.05
"""How long a caller reads before it looks whether it still has to."""


class Settled(Protocol):
    """Tells when a look has to be put off again."""

    settled_until: float
    """Until then `LinkOwner.turn_begins` need not be called, on the monotonic clock."""


class LinkOwner(Protocol):
    """What a link needs of the agent."""

    @property
    def watch(self) -> Settled:
        """What looks at turns."""

    @property
    def request_kinds(self) -> Container[int]:
        """How frames begin that ask this worker to do something; others tell it something."""

    def accept(self, link: Link, frame: Frame) -> Any:
        """Handles a frame, which may run callbacks; returns a request to serve, or None."""

    def serve(self, link: Link, request: Any) -> None:
        """Serves a request; may block.

        Args:
            link: Where it came from.
            request: From `accept`, and not needed by who calls. It should be emptied, so
                that its memory dies with its user.
        """

    def turn_begins(self, now: float) -> None:
        """A turn begins to serve; `Link.check_turn` must be called before long.

        Args:
            now: On the monotonic clock.
        """

    def link_ended(self, link: Link, reason: str) -> None:
        """Nothing more will come; told once."""


class Link:
    """A connection, its place in the poller, and its reader.

    Args:
        connection: The connection, which `close` closes.
        pool: Its threads read.
        owner: Gets what is read.
    """

    def __init__(
        self, connection: Connection, pool: WorkerPool, owner: LinkOwner
    ) -> None:
        self.connection = connection
        self.worker = ""  # the name of whoever is at the other end
        self.shares_clock = True  # processes of one host do
        self.clock_offset = 0.0  # the peer's monotonic clock minus ours
        self.last_received = self.last_sent = time.monotonic()
        self._bytes_noticed = 0  # when the monitor looked last
        # Frames were held back, and wait for `flush`. Set after they were queued, and
        # cleared before the queue is written, by any thread.
        self.holds = False
        self._pool = pool
        self._owner = owner
        self.fileno = connection.fileno()
        self.gauge = SpinGauge()  # for what comes unasked
        self._gauges: dict[str, SpinGauge] = {}  # for what is waited for
        self._quiet_since = self._last_called = time.perf_counter()
        self.has_woken = False  # only who reads changes this
        # An item for each frame that was read and not handled, and for a read that goes
        # on. A list, since that takes and gives items in one step, without a lock.
        self._under_way: list[None] = []
        self.is_ready = self.is_any_ready = readiness(self.fileno)
        self._poller_fileno = pool.poller.fileno()
        if self._poller_fileno is not None:  # for who leads: others need it, too
            self.is_any_ready = readiness(self.fileno, self._poller_fileno)
        # Guards all below: readers, senders, those who handle what was read, or look.
        self._lock = threading.Lock()
        self._reader: object | None = None
        self._turn: Turn | None = None
        self._last_turn: Turn | None = None  # of a caller: over, and known to nobody
        self._reading_wanted = self._writing_wanted = False
        self._num_not_left = 0  # waits after which a handler is not to leave it unread
        self.num_waiting = 0
        self._ended = False
        self._open = True
        pool.watch(self.fileno, self._on_event)

    def start(self) -> None:
        """Begins to read."""
        with self._lock:
            self._arm(read=True)
        if not self.connection.is_drained:
            # What came with the end of the handshake is read already: the poller will
            # not tell of it.
            self._pool.submit(self._read_what_came)

    def _read_what_came(self) -> None:
        if self._open:
            self._on_event(readable=True, writable=False)

    def _arm(self, *, read: bool | None = None, write: bool | None = None) -> None:
        """Tells the poller what to report. The caller holds the lock."""
        if read is None:
            read = self._reading_wanted
        if write is None:
            write = self._writing_wanted
        if self._open and self.connection.end is None:  # else there is always an event
            self._pool.poller.arm(self.fileno, read, write)
        # After that: should a signal handler raise before, it is asked for once more.
        self._reading_wanted, self._writing_wanted = read, write

    # --------------------------------------------------------------------- sending

    def send(
        self, head: bytes, buffers: Sequence[RawBuffer] = (), *, hold: bool = False
    ) -> Ticket | None:
        """Sends a frame; what cannot be written now is written later.

        Args:
            head: See `Connection.send`.
            buffers: Likewise.
            hold: More frames follow, or `flush` will be called: do not write yet.
        """
        self.last_sent = time.monotonic()
        connection = self.connection
        ticket = connection.send(head, buffers, hold=hold)
        num_queued = connection.num_queued
        if hold and num_queued <= _MOST_HELD:
            self.holds = True
        elif num_queued:
            self.flush()
        return ticket

    def flush(self) -> None:
        """Writes what was held back or could not be written."""
        self.holds = False
        if self.connection.num_queued and not self.connection.flush():
            with self._lock:
                self._arm(write=True)

    def shed(self) -> None:
        """See `Connection.shed`."""
        self.connection.shed()

    def keep_house(self, now: float) -> None:
        """See `Connection.housekeeping`."""
        self.connection.housekeeping(now)
        self.flush()

    # ------------------------------------------------------- reading, on pool threads

    def _on_event(self, readable: bool, writable: bool) -> None:
        """The poller is quiet about this link until it is armed again."""
        turn = self.take_pools_turn(readable, writable)
        if turn is not None:  # else a caller reads; it arms the link when it is done
            event = take_turns(turn, self._pool)
            if event is not None:
                self._pool.handle(event)

    def take_pools_turn(self, readable: bool, writable: bool) -> Turn | None:
        """The turn for a thread of the pool that was told of an event.

        None if there is nothing to read, or another thread does.
        """
        turn = None
        with self._lock:
            # One-shot: what was not reported has to be asked for again.
            if readable:
                self._reading_wanted = False
            if writable:
                self._writing_wanted = False
            if self._reading_wanted or self._writing_wanted:
                self._arm()
            if readable and self._reader is None:
                self._reader = self._turn = turn = Turn(self)
        if writable:
            self.flush()
        if turn is not None:
            self.gauge.note(time.perf_counter() - self._quiet_since)
        return turn

    def serve_in_turn(self, turn: Turn) -> bool:
        """Reads and serves what there is; returns whether the turn goes on.

        ``has_woken`` tells afterwards whether some thread waited for what was read.
        """
        frames = self._receive()
        if frames:
            num_woken = Outcome.num_woken
            now = self.last_received
            for sibling in turn.siblings:  # none of them is read meanwhile
                sibling.serving_since = now
            if len(frames) == 1 and not turn.rest:
                # As mostly; `_work_off` does the same.
                turn.serving_since = now
                if now > self._owner.watch.settled_until:
                    self._owner.turn_begins(now)
                if not self._pool.num_idle:
                    self._pool.ensure_follower()
                self._handle(frames, turn)
            else:
                self._work_off(frames, turn)
            turn.serving_since = 0.0  # as `reads_again`, written out
            goes_on = not turn.is_over
            if goes_on and turn.put_off:
                goes_on = self._work_off_meanwhile(turn)
            self.has_woken = Outcome.num_woken != num_woken
            if not goes_on:
                return False
        else:
            self.has_woken = False
            self.end_if_over()
        if self.connection.end is not None:
            return False
        if self.holds:
            self.flush()
        self._quiet_since = time.perf_counter()
        return True

    def put_off(self, turn: Turn, work: Callable[[], None]) -> None:
        """Does something soon, but not before the turn has looked for more requests.

        Args:
            turn: Of the current thread, at this link.
            work: Sends what nobody waits for. Is run on this thread or one of the pool.
        """
        turn.put_off.append(work)
        if turn.is_over:  # whoever has ended it may not have seen this
            self._pool.submit(*_take_all(turn.put_off))

    def _work_off_meanwhile(self, turn: Turn) -> bool:
        """Serves what has come by now, and then does what was put off; as `reads_again`."""
        frames = self._receive()
        if frames:
            self._work_off(frames, turn)
            if not self.reads_again(turn):
                return False
        while turn.put_off:  # one by one: whoever sends looks whether there is more
            try:
                work = turn.put_off.pop(0)
            except IndexError:  # whoever ended the turn was faster
                break
            work()
        return True

    def end_turn(self, turn: Turn, *, if_since: float | None = None) -> bool:
        """Lets other threads read, and serve what the turn has not begun. Idempotent.

        Args:
            turn: The turn.
            if_since: Only if it still serves what it began to serve then.

        Returns:
            Whether that has ended it.
        """
        with self._lock:
            if turn.is_over or if_since not in (None, turn.serving_since):
                return False
            turn.is_over = True
            # Once more: see `reads_again`.
            if if_since not in (None, turn.serving_since):
                turn.is_over = False
                return False
            self._reader = self._turn = None
            self._arm(read=True)
        self._after_turn(turn)
        return True

    def _after_turn(self, turn: Turn) -> None:
        """Leaves to others what a turn that is over has not done."""
        if turn.rest:
            self._submit(_take_all(turn.rest))
        if turn.put_off:
            self._pool.submit(*_take_all(turn.put_off))
        if self.holds:
            self.flush()
        if self.connection.end is not None:
            # No event will tell of it; and it may run foreign code.
            self._pool.submit(self.end_if_over)

    def read_by_others(self) -> None:
        """Whoever left the link unread does not come back to it soon."""
        with self._lock:
            if self._reader is None and not self._reading_wanted:
                self._arm(read=True)

    def check_turn(self, now: float) -> bool:
        """Ends a turn that serves for too long; returns whether to look again soon."""
        self.flush()
        with self._lock:
            if self._reader is None and not self._reading_wanted:
                # The caller that left it so is likely to come back, the more so while it
                # sends; but answers must not wait for it for long.
                away_s = time.perf_counter() - self._last_called
                is_sending = now - self.last_sent < LOOK_S
                if away_s < (LONGEST_TURN_S if is_sending else LOOK_S):
                    return True
                self._num_not_left = _NOT_LEFT
                self._arm(read=True)
            turn = self._turn
        if turn is None:
            return False
        since = turn.serving_since
        if since and now - since > LONGEST_TURN_S:
            if self.end_turn(turn, if_since=since):
                self._pool.depose(turn.thread)
            return False
        return True

    # ------------------------------------------------------------ reading, as a caller

    def read_as_caller(
        self,
        outcome: Outcome,
        deadline: float,
        calls: Sized,
        what: str,
        before: Turn | None = None,
        unless_under_way: bool = False,
        looks_first: bool = False,
    ) -> None:
        """Reads on the calling thread, which waits for an answer.

        It handles all answers that come, but runs no handler: requests go to the pool. If
        there are several of them, the threads that serve these had better read as well.
        The main thread must be inside `shielded`.
        Returns when the caller need not wait any more, at the deadline, or when another
        thread reads or should; the caller then has to wait in some other way.

        Args:
            outcome: What the caller waits for.
            deadline: When to stop in any case, 0 for never.
            calls: The calls that are in flight on this link.
            what: What kind of thing the caller waits for: how long it took so far tells
                whether to spin.
            before: The turn that the thread has, at another connection.
            unless_under_way: What is waited for may be here already. If it has been
                read, and is on its way through the pool, do not read.
            looks_first: It is likely to be here, and was not read.
        """
        turn = self.take_callers_turn(unless_under_way)
        if turn is None:
            return
        is_nested = before is not None and before.is_callers
        wait = self._wait_inside_a_wait if is_nested else self._wait
        this_thread.turn = turn
        try:
            gauge = self._gauges.get(what) or self.gauge_of(what)
            waits_first = not looks_first and self._waits_first(unless_under_way)
            self._read_until(
                turn, outcome, deadline, gauge, waits_first, wait, _MOST_PASSED_ON
            )
        finally:
            this_thread.turn = before
            self.leave_callers_turn(turn, calls)

    def take_callers_turn(self, unless_under_way: bool = False) -> Turn | None:
        """The turn for a thread that waits; None if another one has it.

        Args:
            unless_under_way: See `read_as_caller`.
        """
        with self._lock:
            if self._reader is not None or (unless_under_way and self._under_way):
                return None
            turn, self._last_turn = self._last_turn, None
            if turn is None:
                turn = Turn(self, is_callers=True)
            else:
                turn.thread = threading.get_ident()
                turn.serving_since = 0.0
                turn.is_over = False
            self._reader = self._turn = turn
            if self._reading_wanted:
                self._arm(read=False)
        return turn

    def leave_callers_turn(self, turn: Turn, calls: Sized) -> None:
        """Ends the turn of a thread that has waited.

        Args:
            turn: From `take_callers_turn`.
            calls: See `read_as_caller`.
        """
        # A caller that calls again and again waits for its next answer in a moment:
        # arming the link in between would only cost, or wake a thread to fight with.
        # A handler lets others read when it is over, for the next request comes then. But
        # another one may be what it waits for meanwhile, in some way of its own.
        now = time.perf_counter()
        is_rapid = now - self._last_called < LOOK_S / 2
        self._last_called = now
        later = (is_rapid or len(calls) > 0) and not self.num_waiting
        if self._num_not_left and later and self._pool.is_pool_thread:
            self._num_not_left -= 1
            later = False
        with self._lock:  # as in `end_turn`; if later, `check_turn` arms
            if turn.is_over:
                return
            turn.is_over = True
            self._reader = self._turn = None
            if not later:
                self._arm(read=True)
        if turn.rest or turn.put_off or self.holds or self.connection.end is not None:
            self._after_turn(turn)
        if later:
            unread = this_thread.unread
            if unread is None or self not in unread:
                leave_unread(self)
            if not turn.serving_since:  # else a look is due: it was put off since then
                self._owner.turn_begins(time.monotonic())
        self._last_turn = turn

    def reads_again(self, turn: Turn) -> bool:
        """A turn's thread has handled what there was; False if the turn is over.

        Without the lock: `end_turn` sets the one before it looks at the other a last time,
        and this does so the other way round. So never do both go on. If both give way, the
        turn is not over yet: whoever stops reading ends it in any case.
        """
        turn.serving_since = 0.0
        return not turn.is_over

    def read_in_turn(
        self,
        turn: Turn,
        outcome: Outcome,
        deadline: float,
        what: str,
        unless_under_way: bool = False,
    ) -> None:
        """As `read_as_caller`, for a thread whose turn at this link it is.

        It keeps its turn: another thread that were woken to read would only fight with it
        for the interpreter lock.
        """
        was_callers, turn.is_callers = turn.is_callers, True
        was_serving = turn.serving_since > 0  # else a signal handler calls, in a wait
        wait = self._wait_inside_a_wait if was_callers else self._wait_in_turn
        try:
            self._handle_rest(turn)
            with self._lock:
                if turn.is_over or (unless_under_way and self._under_way):
                    return
                turn.serving_since = 0.0
            try:
                gauge = self.gauge_of(what)
                waits_first = self._waits_first(unless_under_way)
                self._read_until(turn, outcome, deadline, gauge, waits_first, wait)
            finally:
                turn.serving_since = time.monotonic() if was_serving else 0.0
        finally:
            turn.is_callers = was_callers

    def gauge_of(self, what: str) -> SpinGauge:
        """Of the waits for one kind of thing; of all the others, if there are too many."""
        gauge = self._gauges.get(what)
        if gauge is None:
            if len(self._gauges) >= _MOST_GAUGES:
                what = ""
            gauge = self._gauges.setdefault(what, SpinGauge())
        return gauge

    def _waits_first(self, may_be_here: bool) -> bool:
        """Whether a caller waits before it reads.

        The answer to a call cannot be here yet, and to look for it would cost a read. Nor
        is there need of one for the rest, if all that came so far was read: the wait ends
        at once if there is more.
        """
        connection = self.connection
        return not may_be_here or (connection.is_drained and connection.end is None)

    def _read_until(
        self,
        turn: Turn,
        outcome: Outcome,
        deadline: float,
        gauge: SpinGauge,
        waits_first: bool,
        wait: Callable[[float, SpinGauge], object],
        most_passed_on: float = math.inf,
    ) -> None:
        if outcome.done:  # whoever has read before us has seen to it
            return
        if waits_first:
            interruptible(wait, deadline, gauge)
        while not turn.is_over:  # as when a signal handler has called another worker
            frames = self._receive()
            has_served = bool(frames)
            if frames:
                most_passed_on -= self._handle_as_caller(frames, turn)
            if outcome.done or most_passed_on <= 0 or self.connection.end is not None:
                return
            if has_served:
                with self._lock:
                    if turn.is_over:
                        return
                    turn.serving_since = 0.0
            if deadline and time.monotonic() >= deadline:
                return
            interruptible(wait, deadline, gauge)

    def _handle_rest(self, turn: Turn) -> None:
        """Handles what the turn has read, before its thread waits; requests go to the pool.

        It may be just what the thread is about to wait for.
        """
        while turn.rest:
            try:  # one by one: a look may end the turn meanwhile, and take the others
                holder = [turn.rest.pop()]
            except IndexError:
                return
            if self._is_request(holder[0]):
                self._submit(holder)
            else:
                self._handle(holder, turn)

    def waits_elsewhere(self, number: int) -> None:
        """Counts the callers that wait for somebody else to read their answer."""
        with self._lock:
            self.num_waiting += number
            if self._reader is None and not self._reading_wanted:
                self._arm(read=True)

    def _wait(
        self,
        deadline: float,
        gauge: SpinGauge,
        is_ready: Callable[[float], Ready] | None = None,
    ) -> Ready:
        """Waits until there is something to read, or the deadline; returns what is ready.

        Args:
            deadline: As in `read_as_caller`.
            gauge: Of what is waited for.
            is_ready: To wait for something else, too.
        """
        is_ready = is_ready or self.is_ready
        start = time.perf_counter()
        ready = None if self.num_waiting else gauge.spin(is_ready)
        if not ready:
            let_others_read()
            left = deadline - time.monotonic() if deadline else _SLICE_S
            # In slices: something else than this connection may end the wait.
            ready = is_ready(max(0.0, min(left, _SLICE_S)) * 1e3)
            gauge.note(time.perf_counter() - start)
        return ready

    def _wait_in_turn(self, deadline: float, gauge: SpinGauge) -> None:
        """As `_wait`, for a thread that may lead: then others may need it meanwhile.

        A caller's own turn begins when it has resigned (`about_to_block`).
        """
        if not self._pool.leads:
            self._wait(deadline, gauge)
        elif self._others_call(self._wait(deadline, gauge, self.is_any_ready)):
            self._pool.resign()

    def _wait_inside_a_wait(self, deadline: float, _gauge: SpinGauge) -> None:
        """As `_wait`, for a thread that is in there already, in the middle of it.

        That is a signal handler that calls. What its thread waits with cannot be used by
        two at a time.
        """
        filenos = [self.fileno]
        if self._pool.leads and self._poller_fileno is not None:
            filenos.append(self._poller_fileno)
        left = deadline - time.monotonic() if deadline else _SLICE_S
        ready = readiness(*filenos)(max(0.0, min(left, _SLICE_S)) * 1e3)
        if self._others_call(ready):
            self._pool.resign()

    def _others_call(self, ready: Ready) -> bool:
        """Whether the poller is among what is ready: who leads is needed elsewhere."""
        if len(ready) == 1:  # as nearly always
            return ready[0][0] == self._poller_fileno
        return any(fileno == self._poller_fileno for fileno, _ in ready)

    # ----------------------------------------------------------------------- handling

    def _receive(self) -> list[Frame]:
        # The end may be noticed in here, before what came with it is counted: the one
        # frame that comes mostly is counted before.
        self._under_way.append(None)
        frames: list[Frame] = []
        try:
            frames = self.connection.receive()
            if frames:
                self.last_received = time.monotonic()
        except ProtocolError as error:
            self.connection.end = f"it broke the protocol: {error}"
        finally:
            if len(frames) != 1:
                self._under_way.extend([None] * len(frames))
                self._under_way.pop()
        return frames

    def silence(self, now: float) -> float:
        """For how long nothing was heard of the peer; a part of a frame counts.

        A large frame takes its time on a slow link, and heartbeats wait behind it.
        """
        received = self.connection.bytes_received
        if received != self._bytes_noticed:
            self._bytes_noticed = received
            self.last_received = now
        return now - self.last_received

    # Frames that were read may still be under way to their handling when the end of the
    # stream is seen. The end must come last, or calls would fail whose answer is here.

    def _handle_as_caller(self, frames: list[Frame], turn: Turn) -> int:
        """Handles what a caller has read; requests go to the pool. Empties the list.

        Returns:
            How many requests there were.
        """
        if len(frames) == 1 and not turn.rest:
            head = frames[0].head
            if head and head[0] not in self._owner.request_kinds:
                # As mostly; `_work_off` does the same.
                turn.serving_since = now = self.last_received
                if now > self._owner.watch.settled_until:
                    self._owner.turn_begins(now)
                if not self._pool.num_idle:
                    self._pool.ensure_follower()
                self._handle(frames, turn)
                return 0
        num_requests = self._pass_on_requests(frames)
        self._work_off(frames, turn)
        return num_requests

    def _pass_on_requests(self, frames: list[Frame]) -> int:
        """Takes the requests out, which go to the pool; returns how many there were."""
        is_request = self._is_request
        requests = [frame for frame in frames if is_request(frame)]
        if requests:
            frames[:] = [frame for frame in frames if not is_request(frame)]
            self._submit(requests)
        return len(requests)

    def _is_request(self, frame: Frame) -> bool:
        return bool(frame.head) and frame.head[0] in self._owner.request_kinds

    def _submit(self, frames: list[Frame]) -> None:
        self._pool.submit(*[functools.partial(self._handle, [f], None) for f in frames])

    def _work_off(self, frames: list[Frame], turn: Turn) -> None:
        """Handles what the turn has read, or has not come to before."""
        rest = turn.rest
        self._owner.turn_begins(self.last_received)
        frames.reverse()
        rest[:0] = frames
        frames.clear()
        while rest:
            turn.serving_since = time.monotonic()
            try:
                holder = [rest.pop()]
            except IndexError:  # whoever ended the turn was faster
                return
            self._pool.ensure_follower()
            self._handle(holder, turn)

    def _handle(self, holder: list[Frame], turn: Turn | None) -> None:
        """Handles one frame, and serves the request that it may be.

        The frame is taken out of ``holder``, so that its memory dies with its user.
        """
        try:
            request = self._owner.accept(self, holder.pop())
        finally:
            self._under_way.pop()
            if self.connection.end is not None:
                self.end_if_over()
        if request is None:
            return
        if turn is not None and turn.is_callers:
            # Its thread waits in the middle of something else.
            self._pool.submit(functools.partial(self._owner.serve, self, request))
            return
        self._owner.serve(self, request)

    def end_with(self, reason: str) -> None:
        """The peer has said that nothing more will come, and why."""
        self.connection.end = self.connection.end or reason

    def end_if_over(self) -> None:
        """Reports the end of the connection, once, when everything before it is handled."""
        with self._lock:
            if self.connection.end is None or self._ended:
                return
            if self._under_way:
                return  # who handles the last of it comes here
            self._ended = True
        self._owner.link_ended(self, self.connection.end)

    # ---------------------------------------------------------------------------- end

    def close(self) -> None:
        """Closes the connection. Whoever reads or waits notices at once."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            turn = self._turn
            self._pool.unwatch(self.fileno)
        self.connection.close()
        if turn is not None:
            # What ends with the connection may run foreign code, and looks do not see
            # this turn any more.
            self._pool.depose(turn.thread)


def _take_all(items: list[T]) -> list[T]:
    """Empties a list of a turn, from which others may take at the same time."""
    taken = []
    while items:
        try:
            taken.append(items.pop())
        except IndexError:  # another thread was faster
            break
    return taken
