"""The accounting of references, one event at a time. Orders of events: tests/property."""

from __future__ import annotations

import pytest

from gradwire.rpc._rref_table import (
    AskFork,
    RefId,
    RefTable,
    TellArrived,
    TellDelete,
    TellForked,
)

OWNER, USER, THIRD = 0, 1, 2


def ref(number: int, created_on: int = OWNER) -> RefId:
    return RefId(created_on, 7, number)


VALUE, FORK, CHILD, OTHER = (ref(number) for number in range(4))


@pytest.fixture
def owner():
    return RefTable(OWNER)


@pytest.fixture
def user():
    return RefTable(USER)


def is_empty(table: RefTable) -> bool:
    return not any(table.counts().values())


def with_confirmed_fork() -> RefTable:
    """A user that was given a fork by the owner."""
    table = RefTable(USER)
    table.arrive(VALUE, FORK, OWNER, parent=OWNER)
    return table


# --------------------------------------------------------------------------- as the owner


def test_new_table_is_empty(owner):
    assert is_empty(owner)


def test_value_is_known_while_it_has_forks(owner):
    owner.add_fork(VALUE, FORK, USER)
    owner.add_fork(VALUE, OTHER, THIRD)

    assert not owner.remove_fork(VALUE, FORK)
    assert owner.remove_fork(VALUE, OTHER)
    assert is_empty(owner)


def test_removing_a_fork_twice_frees_nothing(owner):
    owner.add_fork(VALUE, FORK, USER)
    owner.add_fork(VALUE, OTHER, USER)
    owner.remove_fork(VALUE, FORK)

    assert not owner.remove_fork(VALUE, FORK)
    assert owner.counts()["forks"] == 1


def test_removing_an_unknown_value_does_nothing(owner):
    assert not owner.remove_fork(VALUE, FORK)


def test_fork_request_enters_the_fork_and_is_answered(owner):
    owner.add_fork(VALUE, FORK, USER)

    answer = owner.on_fork_request(VALUE, CHILD, THIRD, True)

    assert answer == [TellForked(THIRD, CHILD, True)]
    assert owner.forks == {VALUE: {FORK: USER, CHILD: THIRD}}


def test_fork_request_that_comes_twice_counts_once(owner):
    owner.on_fork_request(VALUE, CHILD, THIRD, True)
    owner.on_fork_request(VALUE, CHILD, THIRD, True)

    assert owner.counts()["forks"] == 1


def test_fork_request_for_nothing_is_refused(owner):
    assert owner.on_fork_request(VALUE, CHILD, THIRD, False) == [
        TellForked(THIRD, CHILD, False)
    ]
    assert is_empty(owner)


def test_reference_that_comes_home_is_only_answered(owner):
    owner.add_fork(VALUE, FORK, USER)

    assert owner.arrive(VALUE, CHILD, OWNER, parent=USER) == [TellArrived(USER, CHILD)]
    assert owner.forks == {VALUE: {FORK: USER}}


def test_reference_that_the_owner_sends_to_itself_ends_on_arrival(owner):
    owner.add_fork(VALUE, FORK, OWNER)

    assert owner.arrive(VALUE, FORK, OWNER, parent=OWNER) == []
    assert is_empty(owner)


# ----------------------------------------------------------------------------- as a user


def test_fork_of_the_owner_is_confirmed_at_once(user):
    assert user.arrive(VALUE, FORK, OWNER, parent=OWNER) == []
    assert user.users[FORK].is_confirmed


def test_fork_of_another_user_asks_the_owner_and_then_tells_its_parent(user):
    assert user.arrive(VALUE, FORK, OWNER, parent=THIRD) == [
        AskFork(OWNER, VALUE, FORK)
    ]
    assert not user.users[FORK].is_confirmed
    assert user.confirm(FORK) == [TellArrived(THIRD, FORK)]
    assert user.users[FORK].is_confirmed


def test_parent_is_told_once(user):
    user.arrive(VALUE, FORK, OWNER, parent=THIRD)
    user.confirm(FORK)

    assert user.confirm(FORK) == []


def test_drop_of_a_confirmed_fork_is_told_at_once():
    table = with_confirmed_fork()

    assert table.drop(FORK) == [TellDelete(OWNER, VALUE, FORK)]
    assert is_empty(table)


def test_drop_is_told_once():
    table = with_confirmed_fork()
    table.drop(FORK)

    assert table.drop(FORK) == []


def test_drop_before_the_confirmation_is_told_after_it(user):
    user.arrive(VALUE, FORK, OWNER, parent=THIRD)

    assert user.drop(FORK) == []
    assert user.confirm(FORK) == [
        TellArrived(THIRD, FORK),
        TellDelete(OWNER, VALUE, FORK),
    ]
    assert is_empty(user)


def test_drop_while_the_value_is_made_is_told_when_it_is(user):
    user.create(VALUE, FORK, OWNER)

    assert user.drop(FORK) == []
    assert user.confirm(FORK) == [TellDelete(OWNER, VALUE, FORK)]


def test_fork_outlives_its_children_on_their_way():
    table = with_confirmed_fork()
    table.send(FORK, CHILD, THIRD)
    table.send(FORK, OTHER, OWNER)

    assert table.drop(FORK) == []
    assert table.on_arrived(CHILD) == []
    assert table.on_arrived(OTHER) == [TellDelete(OWNER, VALUE, FORK)]
    assert is_empty(table)


def test_child_arrives_once():
    table = with_confirmed_fork()
    table.send(FORK, CHILD, THIRD)
    table.send(FORK, OTHER, THIRD)
    table.drop(FORK)
    table.on_arrived(CHILD)

    assert table.on_arrived(CHILD) == []
    assert FORK in table.users


def test_children_do_not_end_a_fork_that_is_held():
    table = with_confirmed_fork()
    table.send(FORK, CHILD, THIRD)

    assert table.on_arrived(CHILD) == []
    assert FORK in table.users


def test_child_of_an_unconfirmed_fork_waits_for_both(user):
    user.create(VALUE, FORK, OWNER)
    user.send(FORK, CHILD, THIRD)
    user.drop(FORK)

    assert user.on_arrived(CHILD) == []
    assert user.confirm(FORK) == [TellDelete(OWNER, VALUE, FORK)]


def test_refused_fork_is_forgotten_and_its_parent_told(user):
    user.arrive(VALUE, FORK, OWNER, parent=THIRD)

    assert user.fail(FORK) == [TellArrived(THIRD, FORK)]
    assert is_empty(user)
    assert user.drop(FORK) == user.confirm(FORK) == user.fail(FORK) == []


def test_creation_that_failed_is_told_when_its_children_have_arrived(user):
    user.create(VALUE, FORK, OWNER)
    user.send(FORK, CHILD, THIRD)

    assert user.give_up(FORK) == []
    assert user.on_arrived(CHILD) == [TellDelete(OWNER, VALUE, FORK, True)]
    assert is_empty(user)


def test_creation_that_failed_ends_once(user):
    user.create(VALUE, FORK, OWNER)

    assert user.give_up(FORK) == [TellDelete(OWNER, VALUE, FORK, True)]
    assert user.give_up(FORK) == user.drop(FORK) == []


# -------------------------------------------------------------------------------- losses


def test_forks_of_a_lost_worker_are_dropped(owner):
    owner.add_fork(VALUE, FORK, USER)
    owner.add_fork(VALUE, CHILD, THIRD)
    owner.add_fork(OTHER, ref(9), USER)

    free, orphans, instructions = owner.lose(USER)

    assert (free, orphans, instructions) == ([OTHER], [], [])
    assert owner.forks == {VALUE: {CHILD: THIRD}}


def test_forks_whose_owner_is_lost_are_orphans(user):
    user.arrive(VALUE, FORK, OWNER, parent=OWNER)
    user.arrive(ref(1, THIRD), OTHER, THIRD, parent=THIRD)

    free, orphans, instructions = user.lose(OWNER)

    assert (free, orphans, instructions) == ([], [FORK], [])
    assert list(user.users) == [OTHER]


def test_parents_of_orphans_are_told(user):
    user.arrive(VALUE, FORK, OWNER, parent=THIRD)

    assert user.lose(OWNER) == ([], [FORK], [TellArrived(THIRD, FORK)])


def test_children_on_their_way_to_a_lost_worker_have_ended():
    table = with_confirmed_fork()
    table.send(FORK, CHILD, THIRD)
    table.drop(FORK)

    assert table.lose(THIRD) == ([], [], [TellDelete(OWNER, VALUE, FORK)])
    assert is_empty(table)


def test_nothing_is_told_to_the_lost(user):
    user.arrive(VALUE, FORK, OWNER, parent=OWNER)
    user.send(FORK, CHILD, OWNER)
    user.drop(FORK)

    assert user.lose(OWNER) == ([], [FORK], [])
    assert is_empty(user)


def test_parent_that_is_lost_needs_no_answer_to_end_the_fork(user):
    user.arrive(VALUE, FORK, OWNER, parent=THIRD)
    user.lose(THIRD)

    user.confirm(FORK)
    assert user.drop(FORK) == [TellDelete(OWNER, VALUE, FORK)]
