"""Which thread of the pool waits for events and serves them: one leads at a time.

Two threads that serve short requests of two connections at once only fight for the
interpreter lock, and each fight costs more than a request. So the one that leads goes on
with whatever comes next, and the others are in reserve. It resigns before it waits or
computes for long, and is deposed by a look (see `_watch`) if it takes long unexpectedly.
Then nobody leads until the next event comes, for which one of the reserve is woken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Lead"]


class Lead:
    """The lead of a pool.

    Args:
        watch: Called with whether the reserve is to be woken by the next event; None if
            the poller cannot do that: then all lead at any time.
    """

    __slots__ = ("_is_watched", "_lock", "_watch", "holder", "is_shared")

    def __init__(self, watch: Callable[[bool], None] | None) -> None:
        self.is_shared = watch is None
        self._watch = watch or (lambda _: None)
        self._lock = threading.Lock()  # guards both: threads of the pool, and looks
        self._is_watched = False
        self.holder = 0

    def claim(self) -> bool:
        """Whether the current thread leads, from now on if nobody else does."""
        me = threading.get_ident()
        if self.is_shared or self.holder == me:
            return True
        with self._lock:
            if self.holder:
                return False
            self.holder = me
            if self._is_watched:
                self._is_watched = False
                self._watch(False)
            return True

    @property
    def is_mine(self) -> bool:
        """Whether the current thread leads."""
        return self.is_shared or self.holder == threading.get_ident()

    def depose(self, thread: int) -> bool:
        """Takes the lead from a thread; False if it did not have it."""
        if not thread or self.holder != thread:
            return False
        with self._lock:
            if self.holder != thread:
                return False
            self.holder = 0
            self._is_watched = True
            self._watch(True)
            return True

    def was_called(self) -> None:
        """The reserve was woken, once: it will not be again unless it is to be."""
        self._is_watched = False
