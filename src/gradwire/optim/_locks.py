"""Who may change which parameters now.

Several trainers may have optimizers over the same parameters of one owner. Each group of
parameters has a lock, made by the first optimizer that comes with it; optimizers that
come later with some of these parameters take the locks that there are. So two that have a
parameter in common have a lock in common, and a step takes as many locks as it has
groups, not one for each parameter.

Invariant: an optimizer that holds a parameter holds its lock, so the id of a parameter
that has a lock is not used again for another while the lock is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor

__all__ = ["GroupLock", "find_locks", "hold"]


class GroupLock:
    """A lock with a place in the order in which locks are taken."""

    __slots__ = ("__weakref__", "lock", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


_numbers = itertools.count()
# Guards the dictionary: handlers that make optimizers.
_registry_lock = threading.Lock()
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


@contextlib.contextmanager
def hold(locks: Sequence[GroupLock]) -> Iterator[None]:
    """Takes locks, and gives them back."""
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock.lock)
        yield
