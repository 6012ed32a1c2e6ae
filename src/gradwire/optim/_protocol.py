"""Steps in two phases, and what is known after a crash: decisions only, pure.

One worker, the driver, has the optimizer; its owners have the parameters. A step is a
*transaction*: all owners *prepare* it, which nobody sees, and if all have, the driver
decides for it, and all *commit*. Else all undo.

A state of all owners together has a `Mark`: how many steps were committed, and by which
transaction the last. A *snapshot* is one owner's share of such a state, kept where it
survives the owner. It is made while the owner prepares, so that it is there before the
driver decides:

    the owner dies               the driver's decision   its state when it is back
    before it has prepared       no                      the last committed one
    prepared, no decision yet    no: nobody answers      the last committed one
    prepared, others failed      no                      the last committed one
    prepared, decided, not told  yes                     this step, from the snapshot
    after its commit             yes                     this step, from the snapshot

1. An owner that has prepared can commit: nothing that may fail is left to do.
2. The driver decides for a transaction only if all owners have prepared it, so a decision
   is never taken back. From then on the step counts, whoever dies.
3. Two snapshots are kept: of the last committed state that has one, and of the
   transaction that is being prepared. One of them is that of the last decision. Whoever
   undoes a step, or is restored, drops the others: so the last state of which all owners
   have snapshots is one that was decided for or may still be.
4. Transactions have numbers of their own. A state that was prepared and dropped can so
   never be taken for that of a later attempt at the same step.
5. If snapshots are made at every n-th step only, one owner's loss takes all of them back
   to the last one; steps since then are undone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = [
    "Decision",
    "Ledger",
    "Mark",
    "OwnerRecord",
    "Recovery",
    "Vote",
    "find_common",
]

K = TypeVar("K")


class Mark(NamedTuple):
    """A state of all owners together."""

    step: int
    transaction: int


BEGINNING = Mark(0, 0)


class Vote(enum.Enum):
    """An owner's answer to the request to prepare."""

    PREPARED = enum.auto()
    BUSY = enum.auto()
    """Another transaction has the parameters, and comes first."""
    FAILED = enum.auto()


class Decision(enum.Enum):
    """What becomes of a transaction."""

    COMMIT = enum.auto()
    ABORT = enum.auto()
    TRY_AGAIN = enum.auto()
    """Undo it, and begin another for the same step."""


@dataclass(frozen=True)  # Python 3.10 has no named tuples that are generic
class Recovery(Generic[K]):
    """How owners come to one state again."""

    mark: Mark
    """The state."""
    restored: list[K]
    """Who has to be given it, from snapshots."""
    num_undone: int
    """How many committed steps are lost by it."""


class Ledger:
    """What the driver has decided.

    Args:
        every: Snapshots are made at steps that are multiples of this; None: never.
    """

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.committed = BEGINNING
        self.kept: Mark | None = None
        """The last committed state of which there are snapshots."""

    def propose(self, transaction: int) -> Mark:
        """The state to which a new transaction leads."""
        return Mark(self.committed.step + 1, transaction)

    def is_kept(self, mark: Mark) -> bool:
        """Whether owners make snapshots when they prepare this."""
        return self.every is not None and mark.step % self.every == 0

    @staticmethod
    def decide(votes: Iterable[Vote]) -> Decision:
        """What becomes of a transaction that all owners have answered."""
        found = set(votes)
        if Vote.FAILED in found:
            return Decision.ABORT
        return Decision.TRY_AGAIN if Vote.BUSY in found else Decision.COMMIT

    def commit(self, mark: Mark) -> None:
        """Notes a decision for a transaction."""
        self.committed = mark
        if self.is_kept(mark):
            self.kept = mark

    def keep(self, mark: Mark) -> None:
        """Snapshots of the present state were made apart from a step."""
        self.committed = self.kept = mark

    def plan(self, states: Mapping[K, Mark | None]) -> Recovery[K] | None:
        """How to go on after losses; None: it cannot be done.

        Args:
            states: Which state each owner is in; None: it is lost, and its state with it.
        """
        behind = [owner for owner, mark in states.items() if mark != self.committed]
        if not behind:
            return Recovery(self.committed, [], 0)
        if self.kept is None:
            return None
        if self.kept == self.committed:
            return Recovery(self.kept, behind, 0)
        undone = self.committed.step - self.kept.step
        return Recovery(self.kept, list(states), undone)

    def recovered(self, recovery: Recovery[K]) -> None:
        """All owners are in that state now."""
        self.committed = recovery.mark


class OwnerRecord:
    """Which transactions one owner has seen."""

    def __init__(self, mark: Mark = BEGINNING) -> None:
        self.mark = mark
        """The state that all can see."""
        self.prepared: Mark | None = None
        self._over = 0  # the last transaction that was aborted

    def may_prepare(self, mark: Mark) -> bool:
        """Whether a transaction is not over yet; its end may overtake its beginning."""
        return self.prepared is None and mark.transaction > self._over

    def prepare(self, mark: Mark) -> None:
        """A transaction is ready to be committed."""
        self.prepared = mark

    def commit(self, mark: Mark) -> bool:
        """Whether there is anything to show; not if that was done before."""
        if self.prepared != mark:
            if self.mark != mark:
                raise AssertionError(f"{mark} was committed but never prepared")
            return False
        self.mark, self.prepared = mark, None
        return True

    def abort(self, mark: Mark) -> bool:
        """Whether there is anything to undo."""
        self._over = max(self._over, mark.transaction)
        if self.prepared != mark:
            return False
        self.prepared = None
        return True


def find_common(found: Iterable[Iterable[Mark]]) -> Mark | None:
    """The last state of which all owners have a snapshot, by what each of them has."""
    sets = [set(marks) for marks in found]
    common = set.intersection(*sets) if sets else set()
    return max(common, default=None)
