"""What is due by time: deadlines, heartbeats, losses."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING

from gradwire.errors import GradwireError, TransportError
from gradwire.rpc._alarm import make_alarm
from gradwire.rpc._link import Link
from gradwire.rpc._monitor import Monitor
from gradwire.rpc._peer import Peer
from gradwire.rpc._turn import LOOK_S
from gradwire.rpc._watch import TurnWatch
from gradwire.wire import Goodbye, Heartbeat, encode

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = ["Rounds"]


class Rounds:
    """Makes the rounds of an agent, on a thread of its own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._monitor = Monitor(agent.info.name, self._tick)
        self.watch = TurnWatch(
            agent.pool, self._links, self._monitor.call_by, make_alarm()
        )
        self._last = time.monotonic()
        self._lock = threading.Lock()  # guards `_next`: callers, and the monitor
        self._next = 0.0

    def start(self) -> None:
        """Begins."""
        self.watch.start()
        self._monitor.start()

    def _links(self) -> list[Link]:
        return [link for link, _ in self._agent.network.links()]

    def note_deadline(self, deadline: float) -> None:
        """Calls are looked at by then; to be told after the call was entered."""
        if deadline < self._next:
            with self._lock:
                self._next = min(self._next, deadline)
            self._monitor.call_by(deadline)

    def _tick(self, now: float) -> float:
        """Looks at what is due, and at turns if nobody else does.

        Returns:
            When to come again.
        """
        is_busy = not self.watch.has_alarm and self.watch.look(now)
        if now >= self._next:
            with self._lock:
                self._next = float("inf")
            due = self._round(now)
            with self._lock:  # a call may have brought it forward meanwhile
                self._next = min(self._next, due)
        return min(self._next, now + LOOK_S if is_busy else float("inf"))

    def _round(self, now: float) -> float:
        """Deadlines, heartbeats, losses, housekeeping; says when to come again."""
        agent = self._agent
        interval = agent.options.lost_after / 4
        # If we ourselves slept (a stopped process, a laptop lid), nobody else is late.
        slept = now - self._last > agent.options.lost_after / 2
        self._last = now
        due = now + min(interval, 1.0)
        for peer in agent.network.peers():
            for call in peer.calls.overdue(now):
                agent.pool.submit(functools.partial(agent.expire, peer, call))
            due = min(due, max(peer.calls.next_deadline(), now))
        for link, peer in agent.network.links():
            if slept:
                link.last_received = now
            self._look_at(link, peer, now, interval)
        agent.network.keep_house(now)
        agent.pool.ensure_follower()  # perhaps none could be started when it was needed
        return due

    def _look_at(self, link: Link, peer: Peer, now: float, interval: float) -> None:
        """Loses a peer that is silent, and shows it that we are not."""
        silence = link.silence(now)
        if silence > self._agent.options.lost_after:
            reason = f"nothing was heard of it for {silence:.1f} s"
            with contextlib.suppress(GradwireError):
                # If it still lives, it reads this when it wakes up.
                link.send(encode(Goodbye(reason, declared_lost=True)).head)
            self._agent.lose(peer, reason)
            return
        try:
            link.keep_house(now)
            if now - link.last_sent >= interval * 0.9:
                link.send(encode(Heartbeat(now)).head)
        except TransportError:
            pass  # its reader notices too, and knows why

    def close(self) -> None:
        """Ends the thread, and the looks."""
        self._monitor.close()
        self.watch.close()
