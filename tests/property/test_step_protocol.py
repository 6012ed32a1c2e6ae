"""Steps in two phases under crashes at every point, with snapshots: one state for all.

A simulation of one driver and some owners. What an owner has is the list of transactions
that it was told to commit; its disk outlives it. Whatever happens, owners that are all
there have the same list, and it is that of the steps that the driver was told to be made.
"""

from __future__ import annotations

import enum
import itertools
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.optim._protocol import (
    BEGINNING,
    Decision,
    Ledger,
    Mark,
    OwnerRecord,
    Vote,
    find_common,
)

History = tuple[int, ...]


class Fate(enum.Enum):
    """What happens to one owner in one transaction."""

    LIVES = enum.auto()
    BUSY = enum.auto()
    FAILS = enum.auto()
    DIES_FIRST = enum.auto()
    DIES_WITH_SNAPSHOT = enum.auto()  # made, but nobody has heard of it
    DIES_PREPARED = enum.auto()  # its answer is on its way
    DIES_COMMITTED = enum.auto()


class Owner:
    """One life of an owner has a record and a state; all share the disk."""

    def __init__(self) -> None:
        self.disk: dict[Mark, History] = {}
        self.is_alive = True
        self.record = OwnerRecord()
        self.shown: History = ()
        self.hidden: History = ()

    def save(self, mark: Mark, history: History, kept: Mark | None) -> None:
        self.disk[mark] = history
        for old in set(self.disk) - {mark, kept}:
            del self.disk[old]

    def restore(self, mark: Mark) -> None:
        self.is_alive = True
        self.record = OwnerRecord(mark)
        self.shown = self.disk[mark]
        self.disk = {mark: self.shown}

    def die(self) -> None:
        self.is_alive = False

    def prepare(
        self, mark: Mark, kept: Mark | None, is_kept: bool, fate: Fate
    ) -> Vote | None:
        """Its vote; None if it dies before anybody hears of it."""
        if not self.is_alive or fate is Fate.DIES_FIRST:
            self.die()
            return None
        if fate is Fate.BUSY:
            return Vote.BUSY
        if fate is Fate.FAILS:
            return Vote.FAILED
        assert self.record.may_prepare(mark)
        self.hidden = (*self.shown, mark.transaction)
        if is_kept:
            self.save(mark, self.hidden, kept)
        if fate is Fate.DIES_WITH_SNAPSHOT:
            self.die()
            return None
        self.record.prepare(mark)
        if fate is Fate.DIES_PREPARED:
            self.die()
        return Vote.PREPARED

    def commit(self, mark: Mark, fate: Fate) -> None:
        if self.is_alive:
            if self.record.commit(mark):
                self.shown = self.hidden
            assert not self.record.commit(mark)  # told twice
        if fate is Fate.DIES_COMMITTED:
            self.die()

    def abort(self, mark: Mark) -> None:
        if self.is_alive:
            self.record.abort(mark)
            self.disk.pop(mark, None)
            assert not self.record.may_prepare(mark)  # its beginning may come later


class Group:
    def __init__(self, num_owners: int, every: int | None) -> None:
        self.owners = [Owner() for _ in range(num_owners)]
        self.ledger = Ledger(every)
        self.numbers = itertools.count(1)
        self.made: History = ()
        """What the program believes: the transactions of steps that have returned."""
        if every is not None:
            for owner in self.owners:
                owner.save(BEGINNING, (), None)
            self.ledger.keep(BEGINNING)

    def step(self, fates: list[Fate]) -> bool:
        """One transaction; whether it was made."""
        mark = self.ledger.propose(next(self.numbers))
        votes = []
        for owner, fate in zip(self.owners, fates, strict=True):
            vote = owner.prepare(
                mark, self.ledger.kept, self.ledger.is_kept(mark), fate
            )
            votes.append(vote or Vote.FAILED)
            self.check_restart(mark)
        decision = self.ledger.decide(votes)
        if decision is not Decision.COMMIT:
            for owner in self.owners:
                owner.abort(mark)
            return False
        self.ledger.commit(mark)
        self.made = (*self.made, mark.transaction)
        for owner, fate in zip(self.owners, fates, strict=True):
            owner.commit(mark, fate)
            self.check_restart(mark)
        return True

    def recover(self) -> bool:
        """Whether the owners have one state again."""
        states = {
            number: owner.record.mark if owner.is_alive else None
            for number, owner in enumerate(self.owners)
        }
        plan = self.ledger.plan(states)
        if plan is None:
            assert self.ledger.every is None
            return False
        for number in plan.restored:
            self.owners[number].restore(plan.mark)
        self.ledger.recovered(plan)
        if plan.num_undone:
            assert self.ledger.every != 1
            assert plan.num_undone < (self.ledger.every or 0)
            self.made = self.made[: -plan.num_undone]
        return True

    def check(self) -> None:
        for owner in self.owners:
            assert owner.is_alive
            assert owner.record.prepared is None
            assert owner.shown == self.made
            assert owner.record.mark == self.ledger.committed
        assert self.ledger.committed.step == len(self.made)

    def check_restart(self, under_way: Mark) -> None:
        """Were the driver to die now, snapshots would lead to one state of all."""
        if self.ledger.every is None:
            return
        common = find_common(owner.disk for owner in self.owners)
        assert common in (self.ledger.kept, under_way)
        assert common is not None
        assert len({owner.disk[common] for owner in self.owners}) == 1
        assert all(len(owner.disk) <= 2 for owner in self.owners)


class Run(NamedTuple):
    every: int | None
    fates: list[list[Fate]]


def runs() -> st.SearchStrategy[Run]:
    fates = st.one_of(st.just(Fate.LIVES), st.sampled_from(Fate))
    return st.integers(1, 3).flatmap(
        lambda num: st.builds(
            Run,
            st.sampled_from([None, 1, 2, 3]),
            st.lists(
                st.lists(fates, min_size=num, max_size=num), min_size=1, max_size=12
            ),
        )
    )


@settings(max_examples=300, deadline=None)
@given(runs())
def test_owners_have_the_steps_that_were_made(run):
    group = Group(len(run.fates[0]), run.every)
    for fates in run.fates:
        was_made = group.step(fates)
        all_willing = not {Fate.BUSY, Fate.FAILS} & set(fates)
        all_prepared = not {Fate.DIES_FIRST, Fate.DIES_WITH_SNAPSHOT} & set(fates)
        assert was_made == (all_willing and all_prepared)
        if not group.recover():
            assert not all(owner.is_alive for owner in group.owners)
            return
        group.check()


def test_every_single_crash_leads_to_the_state_of_the_table():
    """The table in `gradwire.optim._protocol`, line by line."""
    expected = {
        Fate.DIES_FIRST: (False, 1),
        Fate.DIES_WITH_SNAPSHOT: (False, 1),
        Fate.DIES_PREPARED: (True, 2),
        Fate.DIES_COMMITTED: (True, 2),
    }
    for fate, (is_made, num_steps) in expected.items():
        group = Group(2, every=1)
        assert group.step([Fate.LIVES, Fate.LIVES])
        assert group.step([Fate.LIVES, fate]) == is_made
        assert group.recover()
        group.check()
        assert len(group.made) == num_steps


def test_crash_while_another_owner_fails_undoes_the_step():
    group = Group(2, every=1)
    assert group.step([Fate.LIVES, Fate.LIVES])

    assert not group.step([Fate.FAILS, Fate.DIES_PREPARED])
    assert group.recover()

    group.check()
    assert len(group.made) == 1


def test_sparse_snapshots_take_all_owners_back():
    group = Group(2, every=3)
    for _ in range(5):
        assert group.step([Fate.LIVES, Fate.LIVES])

    assert group.step([Fate.LIVES, Fate.DIES_COMMITTED])  # the sixth has snapshots
    assert group.recover()
    assert len(group.made) == 6
    assert group.step([Fate.LIVES, Fate.LIVES])
    assert group.step([Fate.DIES_PREPARED, Fate.LIVES])
    assert group.recover()
    assert len(group.made) == 6
    group.check()


def test_nothing_can_be_done_without_snapshots():
    group = Group(2, every=None)
    group.step([Fate.LIVES, Fate.DIES_COMMITTED])

    assert not group.recover()
