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

import threading
import time
from typing import TYPE_CHECKING

from gradwire.errors import GradwireError, ShutdownTimeout, UsageError
from gradwire.rpc._context import serving_agent
from gradwire.rpc._future import Future
from gradwire.rpc._signals import wait_in_slices
from gradwire.rpc.functions import async_execution

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._peer import Peer

__all__ = ["Departure"]

_RELEASE_S = 5.0


class Departure:
    """One worker's way out of the group."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Guards all below: threads that serve reports, and the one in `wait`.
        self._changed = threading.Condition()
        self._entered = False
        self._released = False
        self._reports: list[Future[int]] = []

    # ------------------------------------------------------------------ as a member

    def report(self) -> Future[int]:
        """A future that completes when this worker wants to leave and is quiet."""
        future: Future[int] = Future()
        with self._changed:
            self._reports.append(future)
        self.check()
        return future

    def release(self) -> None:
        """The coordinator says that all are done."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def check(self) -> None:
        """Answers the reports if the worker is quiet; called whenever work has ended."""
        if not self._reports:
            return
        with self._changed:
            if not self._is_quiet():
                return
            reports, self._reports = self._reports, []
        for future in reports:
            future.set_result(self._agent.num_started)

    def _is_quiet(self) -> bool:
        agent = self._agent
        return self._entered and agent.num_active == 0 and agent.num_pending == 0

    def peer_lost(self) -> None:
        """Somebody is gone, perhaps the coordinator."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------ waiting

    def wait(self, timeout_s: float) -> None:
        """Waits until all workers want to leave and nothing is in flight anywhere.

        Args:
            timeout_s: Limit, 0 for none but the liveness of the others.

        Raises:
            ShutdownTimeout: Says who was not ready, and what was in flight here.
        """
        start = time.monotonic()
        deadline = start + timeout_s if timeout_s else float("inf")
        with self._changed:
            self._entered = True
        self.check()
        while not self._released:
            coordinator = self._coordinator()
            if coordinator is None:
                self._coordinate(deadline, timeout_s)
                return
            self._ensure_connected(coordinator)

            def wait(timeout_s: float, coordinator: Peer = coordinator) -> bool:
                with self._changed:
                    return self._changed.wait_for(
                        lambda: self._released or not coordinator.is_usable, timeout_s
                    )

            if not wait_in_slices(wait, deadline):
                raise self._timeout([coordinator], timeout_s)

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

    def _ensure_connected(self, coordinator: Peer) -> None:
        # Only a connection tells us when the coordinator dies.
        try:
            self._agent.network.connect(coordinator)
        except GradwireError as error:
            self._agent.lose(coordinator, f"it cannot be reached: {error}")

    def _coordinate(self, deadline: float, timeout_s: float) -> None:
        numbers: dict[int, int] = {}
        while True:
            previous, numbers = numbers, self._round(deadline, timeout_s)
            if numbers == previous:
                break
        others = self._others()
        acknowledged = []
        for peer in others:
            try:
                acknowledged.append(
                    self._agent.call_async(peer.info, _release, timeout=_RELEASE_S)
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
                try:
                    numbers[peer.info.id] = future.wait(min(left, 3600.0))
                except GradwireError:
                    if not future.done():
                        continue  # only our own limit for one wait
                break  # answered, or lost
        left = deadline - time.monotonic()
        if left <= 0 or not own._outcome.wait(min(left, 3600.0)):
            raise self._timeout([], timeout_s)
        numbers[self._agent.info.id] = own.value()
        return numbers

    def _timeout(self, waiting: list[Peer], timeout_s: float) -> ShutdownTimeout:
        names = ", ".join(f"{p.info.name!r} (rank {p.info.id})" for p in waiting)
        pending = self._agent.pending_calls()
        parts = [f"for {names}"] if names else []
        if pending:
            more = f" and {len(pending) - 5} more" if len(pending) > 5 else ""
            parts.append(f"for its own calls: {', '.join(pending[:5])}{more}")
        if self._agent.num_active:
            parts.append(f"for {self._agent.num_active} requests that it still serves")
        return ShutdownTimeout(
            f"worker {self._agent.info.name!r} waited {timeout_s} s in a graceful shutdown "
            f"{' and '.join(parts) or 'for the others'}; it is shut down now"
        )


def _departure() -> Departure:
    agent = serving_agent.get()
    if agent is None:
        raise UsageError("this function is called by other agents only")
    return agent.departure


@async_execution
def _report() -> Future[int]:
    return _departure().report()


def _release() -> None:
    _departure().release()
