"""Waiting for many descriptors from many threads.

Events are one-shot: a descriptor that was reported stays quiet until it is armed
again, so that never two threads are told of the same one.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
from collections import deque
from typing import NamedTuple, Protocol

from gradwire.transport._forks import keep_from_children

__all__ = ["Event", "Poller", "make_poller"]


class Event(NamedTuple):
    """A descriptor that can be read from (or ended), or written to."""

    fileno: int
    readable: bool
    writable: bool


class Poller(Protocol):
    """What the pool needs of a poller; all methods may be called by any thread."""

    def add(self, fileno: int) -> None:
        """Starts to know a descriptor, unarmed."""

    def arm(self, fileno: int, read: bool, write: bool) -> None:
        """Reports the descriptor once, when it is ready. Both False: keeps it quiet."""

    def remove(self, fileno: int) -> None:
        """Forgets a descriptor; must precede its closing."""

    def fileno(self) -> int | None:
        """A descriptor that is readable while `wait` would return; None: there is none."""

    def wait(self, timeout_s: float) -> Event | None:
        """The next event; None after the limit or when woken."""

    def wake(self) -> None:
        """Makes one waiting thread return."""

    def wake_all(self) -> None:
        """Makes all waiting threads return, and all who come later: it is the end."""

    def close(self) -> None:
        """Frees the poller's own descriptors."""


def make_poller() -> Poller:
    """The best poller that the platform has."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()


class EpollPoller:
    """Linux: the kernel itself hands each event to one of the waiting threads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered and never read: each ring wakes one thread.
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)
        keep_from_children(self)

    def add(self, fileno: int) -> None:
        self._epoll.register(fileno, select.EPOLLONESHOT)

    def arm(self, fileno: int, read: bool, write: bool) -> None:
        mask = select.EPOLLONESHOT
        if read:
            mask |= select.EPOLLIN | select.EPOLLRDHUP
        if write:
            mask |= select.EPOLLOUT
        # Even unasked, the kernel reports a hang-up; one-shot keeps it to a single time.
        self._epoll.modify(fileno, mask)

    def remove(self, fileno: int) -> None:
        self._epoll.unregister(fileno)

    def fileno(self) -> int | None:
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> Event | None:
        events = self._epoll.poll(timeout_s, 1)
        if not events:
            return None
        fileno, mask = events[0]
        if fileno == self._bell:
            return None
        writable = bool(mask & select.EPOLLOUT)
        return Event(fileno, bool(mask & ~select.EPOLLOUT), writable)

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def wake_all(self) -> None:
        os.eventfd_write(self._bell, 1)
        self._epoll.modify(self._bell, select.EPOLLIN)  # level-triggered: it stays on

    def close(self) -> None:
        self._epoll.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    def abandon(self) -> None:
        """See `keep_from_children`."""
        self.close()


class SelectorPoller:
    """Everywhere: one thread at a time waits in a selector, the others for their turn."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._turn = threading.Lock()  # held by the thread that waits in the selector
        # Guards all below, which any thread changes and the waiting one applies.
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._ready: deque[Event] = deque()
        self._reported: set[int] = set()  # descriptors whose event in `_ready` counts
        self._num_visitors = 0
        self._is_ending = False
        self._wakes = 0
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        keep_from_children(self._bell)
        keep_from_children(self._button)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def add(self, fileno: int) -> None:
        with self._lock:
            self._wanted[fileno] = 0

    def arm(self, fileno: int, read: bool, write: bool) -> None:
        mask = selectors.EVENT_READ if read else 0
        mask |= selectors.EVENT_WRITE if write else 0
        with self._lock:
            if fileno not in self._wanted:
                raise ValueError(f"descriptor {fileno} was not added")
            self._wanted[fileno] = mask
            self._dirty.add(fileno)
            self._reported.discard(fileno)
        self._ring()

    def remove(self, fileno: int) -> None:
        with self._lock:
            del self._wanted[fileno]
            self._dirty.add(fileno)
            self._reported.discard(fileno)
            self._num_visitors += 1
        try:
            while not self._turn.acquire(timeout=0.01):
                self._ring()  # whoever selects on it must come out first
        finally:
            with self._lock:
                self._num_visitors -= 1
        try:
            self._apply()
        finally:
            self._turn.release()

    def fileno(self) -> int | None:
        return None  # what is wanted is told to the selector only when somebody waits

    def wait(self, timeout_s: float) -> Event | None:
        if not self._turn.acquire(timeout=timeout_s):
            return None
        try:
            while not self._has_ready():
                with self._lock:
                    if self._num_visitors or self._is_ending:
                        return None
                    if self._wakes:
                        self._wakes -= 1
                        return None
                self._apply()
                events = self._selector.select(timeout_s)
                if not events:
                    return None
                for key, mask in events:
                    self._collect(key.fd, mask)
                if not self._has_ready() and not self._wakes:
                    return None  # let others in: somebody wanted to change something
            return self._next_ready()
        finally:
            self._turn.release()

    def _has_ready(self) -> bool:
        """Whether an event is left whose descriptor nobody removed or disarmed since."""
        with self._lock:
            while self._ready and self._ready[0].fileno not in self._reported:
                self._ready.popleft()
            return bool(self._ready)

    def _next_ready(self) -> Event:
        with self._lock:
            event = self._ready.popleft()
            self._reported.discard(event.fileno)
            return event

    def _collect(self, fileno: int, mask: int) -> None:
        if fileno == self._bell.fileno():
            try:
                self._bell.recv(4096)
            except BlockingIOError:
                pass
            return
        with self._lock:
            if not self._wanted.get(fileno):
                return
            self._wanted[fileno] = 0
            self._dirty.add(fileno)
            self._reported.add(fileno)
            readable = bool(mask & selectors.EVENT_READ)
            writable = bool(mask & selectors.EVENT_WRITE)
            self._ready.append(Event(fileno, readable, writable))

    def _apply(self) -> None:
        """Tells the selector what changed. The caller has the turn."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            wanted = {fileno: self._wanted.get(fileno, 0) for fileno in dirty}
        for fileno, mask in wanted.items():
            if fileno in self._selector.get_map():
                self._selector.unregister(fileno)
            if mask:
                self._selector.register(fileno, mask)

    def wake(self) -> None:
        with self._lock:
            self._wakes += 1
        self._ring()

    def wake_all(self) -> None:
        with self._lock:
            self._is_ending = True
        self._ring()

    def _ring(self) -> None:
        try:
            self._button.send(b"!")
        except BlockingIOError:
            pass  # it rings already

    def close(self) -> None:
        self._selector.close()
        self._bell.close()
        self._button.close()
