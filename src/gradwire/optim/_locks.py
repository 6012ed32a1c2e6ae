"""Who may change which parameters now.

Several trainers may have optimizers over the same parameters of one owner. Each group of
parameters has a lock, made by the first optimizer that comes with it; optimizers that
come later with some of these parameters take the locks that there are. So two that have a
parameter in common have a lock in common, and a step takes as many locks as it has
groups, not one for each parameter.

A step in two phases keeps its locks from one request of its trainer to the next, so two
of them could wait for each other, on two owners. Each has a number, the lower the older,
and a younger one never waits for an older one: it is told to come again (`try_hold`). So
waits lead from older to younger ones and never round. Steps in one phase have no numbers,
and hold nothing while they wait for another worker.

Invariant: an optimizer that holds a parameter holds its lock, so the id of a parameter
that has a lock is not used again for another while the lock is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

__all__ = [
    "GroupLock",
    "Held",
    "find_locks",
    "hold",
    "hold_or_borrow",
    "lend",
    "try_hold",
]

_LOOK_S = 0.005
_PATIENCE_S = 1.0


class GroupLock:
    """A lock with a place in the order in which locks are taken."""

    __slots__ = ("__weakref__", "holder", "is_lent", "lock", "num_uses", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        # The transaction that has it, and for how many of its parts: a trainer that has
        # added groups later has several optimizers on one owner.
        self.holder: int | None = None
        self.num_uses = 0
        # The step that has it waits for the closure of its trainer.
        self.is_lent = False


class Held:
    """Locks that a transaction has; they are free at the latest when this object dies.

    So they do not outlast the optimizer of a trainer that was lost. The end may come on
    any thread: it only releases.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: list[GroupLock] = []

    def try_add(self, lock: GroupLock, number: int, timeout_s: float) -> bool:
        """Takes a lock for a transaction, unless another has it until the limit."""
        with _registry_lock:
            if lock.holder == number:
                lock.num_uses += 1
                self._locks.append(lock)
                return True
        if not lock.lock.acquire(timeout=timeout_s):
            return False
        with _registry_lock:
            lock.holder, lock.num_uses = number, 1
            self._locks.append(lock)
        return True

    def release(self) -> None:
        """Gives all of them back."""
        while self._locks:
            lock = self._locks.pop()
            with _registry_lock:
                lock.num_uses -= 1
                if lock.num_uses:
                    continue
                lock.holder = None
            lock.lock.release()

    def __del__(self) -> None:
        self.release()


_numbers = itertools.count()
# Guards the dictionary, and who has a lock: handlers. Finalisers too, which may run on a
# thread that is in here already.
_registry_lock = threading.RLock()
_locks: weakref.WeakValueDictionary[int, GroupLock] = weakref.WeakValueDictionary()


def find_locks(groups: Sequence[Sequence[Tensor]]) -> list[GroupLock]:
    """The locks of some groups of parameters, in the order to take them."""
    found: dict[int, GroupLock] = {}
    with _registry_lock:
        for group in groups:
            fresh = GroupLock(next(_numbers))
            for parameter in group:
                lock = _locks.setdefault(id(parameter), fresh)
                found[lock.number] = lock
    return [found[number] for number in sorted(found)]


def hold(locks: Sequence[GroupLock]) -> AbstractContextManager[object]:
    """Takes locks, in their order, and gives them back.

    What is returned can be entered any number of times, on any threads.
    """
    return locks[0].lock if len(locks) == 1 else _Holding(locks)


class _Holding(AbstractContextManager[None]):
    """See `hold`."""

    __slots__ = ("_locks",)

    def __init__(self, locks: Sequence[GroupLock]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        taken: list[GroupLock] = []
        try:
            for lock in self._locks:
                lock.lock.acquire()
                taken.append(lock)
        except BaseException:
            for lock in taken:
                lock.lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        for lock in self._locks:
            lock.lock.release()


@contextlib.contextmanager
def lend(locks: Sequence[GroupLock]) -> Iterator[None]:
    """Around the evaluation of a closure, by the step that has the locks."""
    for lock in locks:
        lock.is_lent = True
    try:
        yield
    finally:
        for lock in locks:
            lock.is_lent = False


@contextlib.contextmanager
def hold_or_borrow(locks: Sequence[GroupLock]) -> Iterator[None]:
    """As `hold`, but does not wait for those that are lent: a closure may call this."""
    with contextlib.ExitStack() as taken:
        for lock in locks:
            while not lock.is_lent:
                if lock.lock.acquire(timeout=_LOOK_S):
                    taken.callback(lock.lock.release)
                    break
        yield


def try_hold(
    locks: Sequence[GroupLock], number: int, patience_s: float = _PATIENCE_S
) -> Held | None:
    """Takes locks for a transaction; None: it has to give way.

    Args:
        locks: In their order.
        number: Of the transaction; a lower one comes first.
        patience_s: For how long to wait for younger ones, and for steps in one phase.
            (These may in turn wait for older transactions, so there must be a limit.)
    """
    held = Held()
    deadline = time.monotonic() + patience_s
    for lock in locks:
        is_taken = held.try_add(lock, number, 0)
        while not is_taken:
            holder = lock.holder
            comes_first = holder is not None and holder < number
            if comes_first or time.monotonic() > deadline:
                held.release()
                return None
            is_taken = held.try_add(lock, number, _LOOK_S)
    return held
