"""Graceful shutdown: nobody leaves while somebody still works.

The member with the lowest rank that is still there coordinates. It asks each worker to
report when it has called `shutdown` and has nothing in flight; the answer is the number
of calls that the worker has started so far. A worker that reported may be asked to work
again by one that did not, so one round proves nothing. Two rounds with the same numbers
do: nothing was started in between. Then the coordinator releases everybody.

A worker that is lost does not count any more; if it was the coordinator, the next one
takes over. So this ends with the work of those who are alive, or at the limit.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING

from gradwire.errors import GradwireError, ShutdownTimeout, UsageError
from gradwire.rpc._context import serving_agent
from gradwire.rpc._exports import for_agents
from gradwire.rpc._future import Future, Outcome
from gradwire.rpc._log import log as _log
from gradwire.rpc._signals import wait_in_slices
from gradwire.rpc.functions import async_execution

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._peer import Peer

__all__ = ["Departure"]

_RELEASE_S = 5.0
_LEAST_RELEASE_S = 0.2
_ASK_S = 0.5  # for the reason why a worker is not ready; mostly after the limit
_FIRST_WORD_S = 60.0  # after which a long wait is logged, and then ever less often
_MOST_NAMED = 5


class Departure:
    """One worker's way out of the group."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Guards all below: threads that serve reports, and the one in `wait`.
        self._changed = threading.Condition()
        self._entered = False
        self._released = False
        # What `check` answers; empty until somebody wants to leave.
        self.reports: list[Future[int]] = []
        self._next_word = float("inf")
        self._pause_s = _FIRST_WORD_S

    # ------------------------------------------------------------------ as a member

    def report(self) -> Future[int]:
        """A future that completes when this worker wants to leave and is quiet."""
        future: Future[int] = Future()
        with self._changed:
            self.reports.append(future)
        self.check()
        return future

    def release(self) -> None:
        """The coordinator says that all are done."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def check(self) -> None:
        """Answers the reports if the worker is quiet; called whenever work has ended."""
        if not self.reports:
            return
        with self._changed:
            if not self._is_quiet():
                return
            reports, self.reports = self.reports, []
        for future in reports:
            future.set_result(self._agent.num_started)

    def _is_quiet(self) -> bool:
        agent = self._agent
        return self._entered and agent.num_active == 0 and agent.num_pending == 0

    def state(self) -> str:
        """Why this worker is not ready to leave; empty if it is."""
        parts = [] if self._entered else ["has not called shutdown"]
        requests, calls = self._agent.active_requests(), self._agent.pending_calls()
        if requests:
            parts.append(f"runs {_shortened(requests)}")
        if calls:
            parts.append(f"waits for {_shortened(calls)}")
        return " and ".join(parts)

    def peer_lost(self) -> None:
        """Somebody is gone, perhaps the coordinator."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------ waiting

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Waits until all workers want to leave and nothing is in flight anywhere.

        Args:
            deadline: On the monotonic clock; infinite: as long as the others live.
            timeout_s: What the program gave as the limit; 0 for none.

        Raises:
            ShutdownTimeout: Says who was not ready, and what was in flight here.
        """
        self._enter()
        while not self._released:
            coordinator = self._coordinator()
            if coordinator is None:
                self._coordinate(deadline, timeout_s)
                return
            self._connect_to([coordinator], deadline, timeout_s)

            def wait(timeout_s: float, coordinator: Peer = coordinator) -> bool:
                self._log_long_wait()
                with self._changed:
                    return self._changed.wait_for(
                        lambda: self._released or not coordinator.is_usable, timeout_s
                    )

            if not wait_in_slices(wait, deadline):
                raise self._timeout([coordinator], timeout_s)

    def wait_alone(self, deadline: float, timeout_s: float) -> None:
        """Waits until nothing of this worker is in flight; the others stay.

        Args:
            deadline: As in `wait`.
            timeout_s: Likewise.

        Raises:
            ShutdownTimeout: Says what was in flight here.
        """
        self._enter()
        quiet = self.report()

        def wait(slice_s: float) -> bool:
            self._log_long_wait()
            return quiet._outcome.wait(slice_s)

        if not wait_in_slices(wait, deadline):
            raise self._timeout([], timeout_s)

    def _enter(self) -> None:
        """This worker wants to leave."""
        self._next_word = time.monotonic() + self._pause_s
        with self._changed:
            self._entered = True
        self.check()

    def _log_long_wait(self) -> None:
        now = time.monotonic()
        if now < self._next_word:
            return
        self._pause_s *= 2
        self._next_word = now + self._pause_s
        _log.warning(
            "worker %s still waits in a graceful shutdown for %s",
            self._agent.info.name,
            "; ".join(self._reasons([])) or "the others",
        )

    def _coordinator(self) -> Peer | None:
        """The worker that coordinates; None if it is this one."""
        for peer in self._agent.network.peers():
            if peer.info.id >= self._agent.info.id:
                break
            if peer.is_usable:
                return peer
        return None

    def _others(self) -> list[Peer]:
        me = self._agent.info
        return [p for p in self._agent.network.peers() if p.is_usable and p.info != me]

    def _connect_to(self, peers: list[Peer], deadline: float, timeout_s: float) -> None:
        """Connects to workers, all at once; who cannot be reached is lost.

        Only a connection tells us when one of them dies.
        """
        attempts = [(peer, Outcome()) for peer in peers if peer.link is None]
        for peer, attempt in attempts:
            work = functools.partial(self._connect, peer, deadline, attempt)
            self._agent.run_soon(work)
        for _, attempt in attempts:
            left = deadline - time.monotonic()
            attempt.wait(max(0.0, left) if timeout_s else None)
        late = [peer for peer, _ in attempts if peer.link is None and peer.is_usable]
        if late:
            raise self._timeout(late, timeout_s)

    def _connect(self, peer: Peer, deadline: float, attempt: Outcome) -> None:
        try:
            self._agent.network.connect(peer, dial_until=deadline)
        except Exception as error:
            if time.monotonic() < deadline:  # else it is we who do not wait any more
                self._agent.lose(peer, f"it cannot be reached: {error}")
        finally:
            attempt.finish(None, None)

    def _coordinate(self, deadline: float, timeout_s: float) -> None:
        numbers: dict[int, int] = {}
        while True:
            previous, numbers = numbers, self._round(deadline, timeout_s)
            if numbers == previous:
                break
        left = max(_LEAST_RELEASE_S, min(deadline - time.monotonic(), _RELEASE_S))
        acknowledged = []
        for peer in self._others():
            try:
                acknowledged.append(
                    self._agent.call_async(peer.info, _release, timeout=left)
                )
            except GradwireError:
                continue  # lost meanwhile: it need not be told
        for future in acknowledged:
            try:
                future.wait()
            except GradwireError:
                continue

    def _round(self, deadline: float, timeout_s: float) -> dict[int, int]:
        """The numbers of all workers, each asked for when that worker is quiet."""
        asked: list[tuple[Peer, Future[int]]] = []
        self._connect_to(self._others(), deadline, timeout_s)
        for peer in self._others():
            try:
                asked.append(
                    (peer, self._agent.call_async(peer.info, _report, timeout=0))
                )
            except GradwireError as error:
                self._agent.lose(peer, f"it cannot be reached: {error}")
        own = self.report()
        numbers: dict[int, int] = {}
        for peer, future in asked:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    waiting = [p for p, f in asked if not f.done() and p.is_usable]
                    raise self._timeout(waiting, timeout_s)
                self._log_long_wait()
                try:
                    numbers[peer.info.id] = future.wait(min(left, _FIRST_WORD_S))
                except GradwireError:
                    if not future.done():
                        continue  # only our own limit for one wait
                break  # answered, or lost
        while not own.done():
            self._log_long_wait()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._timeout([], timeout_s)
            own._outcome.wait(min(left, _FIRST_WORD_S))
        numbers[self._agent.info.id] = own.value()
        return numbers

    def _timeout(self, waiting: list[Peer], timeout_s: float) -> ShutdownTimeout:
        reasons = "; for ".join(self._reasons(waiting)) or "the others"
        return ShutdownTimeout(
            f"worker {self._agent.info.name!r} waited {timeout_s} s in a graceful shutdown "
            f"for {reasons}; it is shut down now"
        )

    def _reasons(self, waiting: list[Peer]) -> list[str]:
        """Who is not ready and why; those in ``waiting`` also if they do not say it."""
        asked: list[tuple[Peer, Future[str] | None]] = []
        for peer in self._others():
            try:
                # Only those whose connection is open: who was never called runs nothing
                # for us, and a new connection may take longer than the limit.
                call = None
                if peer.link is not None:
                    call = self._agent.call_async(peer.info, _state, timeout=_ASK_S)
                asked.append((peer, call))
            except GradwireError:
                asked.append((peer, None))
        reasons = []
        for peer, answer in asked:
            state = ""
            if answer is not None:
                try:
                    state = answer.wait()
                except GradwireError:
                    state = "does not answer"
            if state or peer in waiting:
                who = f"{peer.info.name!r} (rank {peer.info.id})"
                reasons.append(f"{who}, which {state}" if state else who)
        if pending := self._agent.pending_calls():
            reasons.append(f"its own calls: {_shortened(pending)}")
        if active := self._agent.active_requests():
            reasons.append(f"requests that it still serves: {_shortened(active)}")
        return reasons


def _shortened(things: list[str]) -> str:
    more = len(things) - _MOST_NAMED
    text = ", ".join(things[:_MOST_NAMED])
    return f"{text} and {more} more" if more > 0 else text


def _departure() -> Departure:
    agent = serving_agent.get()
    if agent is None:
        raise UsageError("this function is called by other agents only")
    return agent.departure


@for_agents
@async_execution
def _report() -> Future[int]:
    return _departure().report()


@for_agents
def _state() -> str:
    return _departure().state()


@for_agents
def _release() -> None:
    _departure().release()
