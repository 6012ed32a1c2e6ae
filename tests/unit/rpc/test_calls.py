"""Calls in flight and the bytes that they make a peer hold."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gradwire.rpc._calls import CallTable, Credits, PendingCall

LIMIT_S = 10.0


def soon() -> float:
    return time.monotonic() + LIMIT_S


def past() -> float:
    return time.monotonic() - 1.0


def start_taking(credits_: Credits, cost: int, deadline: float):
    """Takes credit on another thread; returns the thread and where its answer goes."""
    answers: list[bool] = []
    thread = threading.Thread(
        target=lambda: answers.append(credits_.take(cost, deadline))
    )
    thread.start()
    return thread, answers


def make_call(call_id: int, *, cost: int = 10, deadline: float = 0.0) -> PendingCall:
    link: Any = None  # none of these tests sends anything
    return PendingCall(
        id=call_id,
        target=f"function{call_id}",
        deadline=deadline,
        cost=cost,
        link=link,
        await_answer=PendingCall.block,
    )


# -------------------------------------------------------------------------- credits


def test_credit_is_taken_up_to_the_bound():
    credits_ = Credits(100)

    assert credits_.take(60, past())
    assert credits_.take(40, past())
    assert not credits_.take(1, past())
    assert credits_.used == 100


def test_credit_that_was_given_back_can_be_taken():
    credits_ = Credits(100)
    credits_.take(100, past())

    credits_.give(30)

    assert not credits_.take(31, past())
    assert credits_.take(30, past())


def test_cost_above_the_bound_is_granted_alone():
    credits_ = Credits(100)

    assert credits_.take(1000, past())
    assert not credits_.take(1, past())
    credits_.give(1000)
    assert credits_.take(7, past())
    assert not credits_.take(1000, past())


def test_cost_above_the_bound_does_not_wait_for_a_few_small_ones():
    credits_ = Credits(100)

    assert credits_.take(6, past())
    assert credits_.take(1000, past())


def wait_for_waiters(credits_: Credits, count: int) -> None:
    limit = time.monotonic() + LIMIT_S
    while len(credits_._waiters) < count:
        assert time.monotonic() < limit
        threading.Event().wait(0.001)


def test_nobody_who_comes_later_is_served_before():
    credits_ = Credits(100)
    credits_.take(90, past())
    large, large_answers = start_taking(credits_, 80, soon())
    wait_for_waiters(credits_, 1)

    assert not credits_.take(10, past())
    credits_.give(90)

    large.join(LIMIT_S)
    assert large_answers == [True]
    assert credits_.used == 80


def test_small_ones_pass_those_who_wait():
    """What a large one waits for may wait for a small one itself."""
    credits_ = Credits(2560)
    credits_.take(2000, past())
    large, large_answers = start_taking(credits_, 600, soon())
    wait_for_waiters(credits_, 1)

    assert credits_.take(10, past())
    assert not credits_.take(11, past())
    credits_.give(2000)

    large.join(LIMIT_S)
    assert large_answers == [True]
    assert credits_.used == 610


def test_who_gives_up_makes_room_for_those_behind():
    credits_ = Credits(100)
    credits_.take(50, past())
    large, large_answers = start_taking(credits_, 80, time.monotonic() + 0.05)
    wait_for_waiters(credits_, 1)
    other, other_answers = start_taking(credits_, 30, soon())

    large.join(LIMIT_S)
    other.join(LIMIT_S)

    assert (large_answers, other_answers) == ([False], [True])
    assert credits_.used == 80


def test_credit_is_waited_for():
    credits_ = Credits(100)
    credits_.take(100, past())
    thread, answers = start_taking(credits_, 50, soon())

    credits_.give(50)

    thread.join(LIMIT_S)
    assert answers == [True]
    assert credits_.used == 100


def test_waiting_for_credit_without_a_deadline_goes_on():
    credits_ = Credits(100)
    credits_.take(100, past())
    thread, answers = start_taking(credits_, 50, 0.0)
    thread.join(0.05)
    assert answers == []

    credits_.give(100)

    thread.join(LIMIT_S)
    assert answers == [True]


def test_waiting_for_credit_ends_at_the_deadline():
    credits_ = Credits(100)
    credits_.take(100, past())
    start = time.monotonic()

    assert not credits_.take(1, start + 0.05)
    assert time.monotonic() - start >= 0.05
    assert credits_.used == 100


def test_forced_credit_never_waits_and_counts():
    credits_ = Credits(100)
    credits_.take(100, past())

    credits_.force(70)

    assert credits_.used == 170
    credits_.give(100)
    assert not credits_.take(31, past())
    assert credits_.take(30, past())


def test_all_waiting_threads_get_their_credit_in_the_end():
    credits_ = Credits(100)
    credits_.take(100, past())
    waiting = [start_taking(credits_, 10, soon()) for _ in range(10)]

    for _ in range(10):
        credits_.give(10)

    for thread, answers in waiting:
        thread.join(LIMIT_S)
        assert answers == [True]
    assert credits_.used == 100


def test_loss_of_the_peer_ends_the_waiting():
    table = CallTable(100)
    table.credits.take(100, past())
    thread, answers = start_taking(table.credits, 50, 0.0)

    table.take_all()

    thread.join(LIMIT_S)
    assert answers == [True]  # the call then finds that the peer is lost


def test_loss_of_the_peer_frees_all_bytes():
    table = CallTable(100)
    table.credits.take(10, past())
    table.add(make_call(1))
    table.credits.force(500)

    table.take_all()

    assert table.credits.used == 0


# ---------------------------------------------------------------------- table of calls


@pytest.fixture
def table() -> CallTable:
    return CallTable(1000)


def enter(table: CallTable, call: PendingCall) -> PendingCall:
    assert table.credits.take(call.cost, past())
    table.add(call)
    return call


def test_call_is_taken_once_and_gives_its_credit_back(table):
    call = enter(table, make_call(1, cost=70))
    assert table.credits.used == 70

    assert table.take(1) is call
    assert table.take(1) is None
    assert table.credits.used == 0
    assert len(table) == 0


def test_unknown_answer_is_nobodys(table):
    enter(table, make_call(1))

    assert table.take(2) is None
    assert len(table) == 1
    assert table.credits.used == 10


def test_call_that_is_given_up_holds_its_credit_until_the_answer(table):
    call = enter(table, make_call(1, cost=70))

    assert table.give_up(call)
    assert table.pending() == []
    assert table.overdue(float("inf")) == []
    assert table.credits.used == 70

    assert table.take(1) is None
    assert table.credits.used == 0
    table.take(1)
    assert table.credits.used == 0


def test_call_that_was_answered_cannot_be_given_up(table):
    call = enter(table, make_call(1))
    table.take(1)

    assert not table.give_up(call)
    assert table.credits.used == 0
    table.take(1)
    assert table.credits.used == 0


def test_answer_and_deadline_at_once_lose_neither_call_nor_credit(table):
    for number in range(300):
        call = enter(table, make_call(number))
        start = threading.Barrier(3)
        winners: list[str] = []

        def answer(number=number, start=start, winners=winners) -> None:
            start.wait(LIMIT_S)
            if table.take(number) is not None:
                winners.append("answer")

        def expire(call=call, start=start, winners=winners) -> None:
            start.wait(LIMIT_S)
            if table.give_up(call):
                winners.append("deadline")

        threads = [threading.Thread(target=work) for work in (answer, expire)]
        for thread in threads:
            thread.start()
        start.wait(LIMIT_S)
        for thread in threads:
            thread.join(LIMIT_S)
        assert winners  # both may win; the call takes the first outcome only
        table.take(number)
    assert table.credits.used == 0


def test_take_all_empties_the_table(table):
    calls = [enter(table, make_call(number)) for number in range(5)]
    table.give_up(calls[4])

    found = table.take_all()

    assert sorted(call.id for call in found) == [0, 1, 2, 3]
    assert len(table) == 0
    assert table.take_all() == []


def test_overdue_calls_are_those_past_their_deadline(table):
    for number, deadline in enumerate([0.0, 5.0, 10.0, 15.0]):
        enter(table, make_call(number, deadline=deadline))

    assert [call.id for call in table.overdue(10.0)] == [1, 2]


def test_next_deadline_is_the_earliest(table):
    assert table.next_deadline() == float("inf")
    for number, deadline in enumerate([0.0, 15.0, 5.0]):
        enter(table, make_call(number, deadline=deadline))

    assert table.next_deadline() == 5.0


def test_pending_calls_are_those_that_somebody_waits_for(table):
    calls = [enter(table, make_call(number)) for number in range(3)]
    table.give_up(calls[0])
    table.take(1)

    assert table.pending() == [calls[2]]


def test_call_is_settled_once():
    call = make_call(1)

    call.settle("first", None)
    call.settle("second", ValueError("late"))

    assert call.done
    assert call.value == "first"
    assert call.error is None


def test_settled_call_wakes_who_waits():
    call = make_call(1)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(call.wait(LIMIT_S)))
    thread.start()

    call.settle(None, ValueError("no"))

    thread.join(LIMIT_S)
    assert answers == [True]
    assert isinstance(call.error, ValueError)
