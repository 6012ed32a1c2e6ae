"""The pass protocol: what one worker does about events, answers and dead messages."""

from __future__ import annotations

import pytest

from gradwire.autograd._passes import (
    NONE,
    WAIT,
    ContextState,
    PassId,
    TellAbort,
    TellDead,
    TellDone,
    TellNone,
)
from pass_states import (
    CAUSE,
    CHILD,
    CONSUMING,
    FIRST,
    ME,
    OTHER,
    PARENT,
    RETAINING,
    SECOND,
    answer,
    end,
    join,
    make_state,
    receive,
    run_alone,
    start,
)

# -------------------------------------------------------------------------- known workers


def test_worker_that_was_met_is_known():
    state = make_state(CHILD, OTHER, CHILD)

    assert state.known == {CHILD, OTHER}


def test_worker_does_not_meet_itself():
    state = make_state(ME)

    assert state.known == set()


def test_worker_that_tells_of_a_pass_is_known():
    state = make_state()

    join(state)

    assert state.known == {PARENT}


# ---------------------------------------------------------------------- events and chains


def test_events_are_numbered_as_they_are_recorded():
    state = make_state()

    numbers = [
        state.record_send(1),
        receive(state, OTHER, 7),
        state.record_send(1),
    ]

    assert numbers == [0, 1, 2]


def test_pass_covers_what_was_recorded_before_it():
    state = make_state(OTHER)
    events = [state.record_send(1), receive(state, OTHER, 7)]

    pass_ = start(state)

    assert all(map(pass_.covers, events))


def test_pass_does_not_cover_what_is_recorded_while_it_runs():
    state = make_state(OTHER)
    pass_ = start(state)

    events = [state.record_send(1), receive(state, OTHER, 7, pass_.id)]

    assert not any(map(pass_.covers, events))


def test_pass_that_we_join_covers_what_we_have_recorded():
    state = make_state(OTHER)
    before = state.record_send(1)

    pass_ = join(state)

    assert pass_.covers(before)
    assert not pass_.covers(state.record_send(1))


def test_consuming_pass_leaves_nothing_to_the_next():
    state = make_state(OTHER)
    old = state.record_send(1)
    run_alone(state)
    new = state.record_send(1)

    pass_ = start(state)

    assert not pass_.covers(old)
    assert pass_.covers(new)


def test_retaining_pass_leaves_everything_to_the_next():
    state = make_state(OTHER)
    old = state.record_send(1)
    run_alone(state, RETAINING)
    new = state.record_send(1)

    pass_ = start(state)

    assert pass_.covers(old)
    assert pass_.covers(new)


def test_chain_goes_on_where_a_consuming_pass_began():
    state = make_state(OTHER)
    run_alone(state)
    pass_ = start(state)
    during = state.record_send(1)
    state.on_done(pass_.id, OTHER)
    state.local_end()

    assert start(state).covers(during)


# -------------------------------------------------------------------------------- answers


def test_send_waits_until_its_answer_comes():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state)
    assert state.take_answer(event) is WAIT

    assert answer(state, pass_.id, event, "gradients")

    assert state.take_answer(event) == "gradients"


def test_answer_is_taken_once():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state)
    answer(state, pass_.id, event, "gradients")
    state.take_answer(event)

    assert state.take_answer(event) is WAIT


def test_answers_go_to_their_own_sends():
    state = make_state(OTHER)
    events = [state.record_send(1) for _ in range(3)]
    pass_ = start(state)
    for event in reversed(events):
        answer(state, pass_.id, event, f"gradients {event}")

    answers = [state.take_answer(event) for event in events]

    assert answers == ["gradients 0", "gradients 1", "gradients 2"]


def test_answer_that_comes_before_its_pass_is_kept():
    state = make_state(OTHER)
    event = state.record_send(1)
    assert not answer(state, FIRST, event, "gradients")

    join(state)

    assert state.take_answer(event) == "gradients"


def test_early_answer_is_for_its_own_pass_only():
    state = make_state(OTHER)
    event = state.record_send(1)
    answer(state, SECOND, event, "gradients")

    join(state, FIRST)

    assert state.take_answer(event) is WAIT


def test_first_of_two_answers_counts():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state)
    answer(state, pass_.id, event, "gradients")

    answer(state, pass_.id, event, NONE)

    assert state.take_answer(event) == "gradients"


def test_answer_for_a_send_that_the_pass_does_not_cover_is_ignored():
    state = make_state(OTHER)
    pass_ = start(state, RETAINING)
    event = state.record_send(1)
    assert not answer(state, pass_.id, event, NONE)
    state.on_done(pass_.id, OTHER)
    state.local_end()

    start(state)

    assert state.take_answer(event) is WAIT


def test_answer_for_a_send_that_was_consumed_is_ignored():
    state = make_state(OTHER)
    event = state.record_send(1)
    run_alone(state)

    pass_ = start(state)

    assert not answer(state, pass_.id, event, NONE)


def test_answer_for_a_pass_that_is_over_is_ignored():
    state = make_state(OTHER)
    event = state.record_send(1)
    before = run_alone(state, RETAINING)
    assert not answer(state, before.id, event, "gradients of the first pass")

    start(state)

    assert state.take_answer(event) is WAIT


def test_answer_for_a_pass_that_failed_is_ignored():
    state = make_state(OTHER)
    event = state.record_send(1)
    failed = start(state, RETAINING)
    state.fail(failed.id, CAUSE)

    assert not answer(state, failed.id, event, "gradients")


def test_asking_outside_a_pass_is_an_error_of_ours():
    state = make_state(OTHER)
    event = state.record_send(1)

    with pytest.raises(AssertionError, match="outside a pass"):
        state.take_answer(event)


# ----------------------------------------------------------------------------- stragglers


def test_recv_before_any_pass_answers_nothing():
    state = make_state(OTHER)

    *_, answers = state.record_recv(OTHER, 7, None)

    assert answers == []


def test_recv_during_a_pass_answers_none_at_once():
    state = make_state(OTHER)
    pass_ = start(state)

    *_, answers = state.record_recv(OTHER, 7, None)

    assert answers == [TellNone(OTHER, pass_.id, 7)]


def test_recv_after_a_pass_answers_none_at_once():
    state = make_state(OTHER)
    pass_ = run_alone(state)

    *_, answers = state.record_recv(OTHER, 7, None)

    assert answers == [TellNone(OTHER, pass_.id, 7)]


def test_recv_of_a_message_that_the_pass_does_not_cover_answers_nothing():
    state = make_state(OTHER)
    pass_ = start(state)

    *_, answers = state.record_recv(OTHER, 7, pass_.id)

    assert answers == []


def test_recv_answers_for_the_last_pass_of_each_starter():
    state = make_state(PARENT)
    for number in range(2):
        join(state, PassId(PARENT, number))
        state.local_end()
    mine = run_alone(state)

    *_, answers = state.record_recv(PARENT, 7, None)

    assert set(answers) == {
        TellNone(PARENT, SECOND, 7),
        TellNone(PARENT, mine.id, 7),
    }


def test_recv_of_a_message_that_no_pass_covers_yet_answers_for_later_ones_only():
    state = make_state(PARENT)
    join(state, FIRST)
    end(state)
    join(state, SECOND)

    *_, answers = state.record_recv(PARENT, 7, FIRST)

    assert answers == [TellNone(PARENT, SECOND, 7)]


def test_straggler_of_a_consuming_pass_is_stale():
    state = make_state(OTHER)
    start(state, CONSUMING)

    _, is_stale, _ = state.record_recv(OTHER, 7, None)

    assert is_stale


def test_straggler_of_a_pass_that_is_over_is_stale():
    state = make_state(OTHER)
    run_alone(state, CONSUMING)
    run_alone(state, RETAINING)

    _, is_stale, _ = state.record_recv(OTHER, 7, None)

    assert is_stale


def test_straggler_of_a_retaining_pass_is_not_stale():
    state = make_state(OTHER)
    start(state, RETAINING)

    _, is_stale, _ = state.record_recv(OTHER, 7, None)

    assert not is_stale


def test_message_that_was_sent_after_the_pass_had_begun_is_not_stale():
    state = make_state(OTHER)
    pass_ = run_alone(state, CONSUMING)

    _, is_stale, _ = state.record_recv(OTHER, 7, pass_.id)

    assert not is_stale


def test_recv_during_a_pass_is_covered_by_the_next():
    state = make_state(OTHER)
    pass_ = start(state)
    event, *_ = state.record_recv(OTHER, 7, None)
    state.on_done(pass_.id, OTHER)
    state.local_end()

    assert start(state).covers(event)


def test_message_to_oneself_is_answered_by_oneself():
    state = make_state(OTHER)
    message = state.record_send(1)
    pass_ = start(state)

    *_, answers = state.record_recv(ME, message, None)

    assert answers == [TellNone(ME, pass_.id, message)]


# ----------------------------------------------------------------------------- outrunners


def test_last_answer_that_comes_for_nothing_kills_the_message():
    state = make_state(OTHER)
    pass_ = start(state)
    event = state.record_send(1)

    assert state.on_answer(pass_.id, event, NONE, is_last=True) == (False, [])

    end(state)
    start(state)
    assert state.take_answer(event) is NONE


def test_last_answer_that_comes_when_the_pass_is_over_kills_the_message():
    state = make_state(OTHER)
    pass_ = run_alone(state)
    event = state.record_send(1)

    state.on_answer(pass_.id, event, NONE, is_last=True)

    start(state)
    assert state.take_answer(event) is NONE


def test_last_answer_in_another_pass_wakes_the_send_that_waits():
    state = make_state(OTHER)
    before = run_alone(state)
    event = state.record_send(1)
    start(state)
    assert state.take_answer(event) is WAIT

    is_wanted, _ = state.on_answer(before.id, event, NONE, is_last=True)

    assert is_wanted
    assert state.take_answer(event) is NONE


def test_last_answer_that_is_wanted_is_taken():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state)

    is_wanted, _ = state.on_answer(pass_.id, event, "gradients", is_last=True)

    assert is_wanted
    assert state.take_answer(event) == "gradients"


def test_answer_that_is_not_the_last_kills_nothing():
    state = make_state(OTHER)
    pass_ = start(state)
    event = state.record_send(1)
    answer(state, pass_.id, event, NONE)
    end(state)

    start(state)

    assert state.take_answer(event) is WAIT


# ----------------------------------------------- gradients that nobody can use, histories


def test_answer_with_a_history_that_is_dropped_is_dead():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = run_alone(state)

    dropped = state.on_answer(pass_.id, event, "gradients", history=(OTHER, 5))

    assert dropped == (False, [TellDead(OTHER, 5)])


def test_answer_with_a_history_that_is_taken_lives():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state)
    state.on_answer(pass_.id, event, "gradients", history=(OTHER, 5))
    assert state.take_answer(event) == "gradients"

    assert end(state) == []


def test_answer_with_a_history_that_nobody_took_is_dead_at_the_end():
    state = make_state(PARENT)
    event = state.record_send(1)
    join(state, FIRST, PARENT)
    state.on_answer(FIRST, event, "gradients", history=(PARENT, 5))

    assert set(end(state)) == {TellDone(PARENT, FIRST), TellDead(PARENT, 5)}


def test_answer_with_a_history_that_nobody_took_is_dead_after_a_failure():
    state = make_state(OTHER)
    event = state.record_send(1)
    pass_ = start(state, RETAINING)
    state.on_answer(pass_.id, event, "gradients", history=(OTHER, 5))

    instructions = state.fail(pass_.id, CAUSE)

    assert set(instructions) == {
        TellAbort(OTHER, pass_.id, CAUSE),
        TellDead(OTHER, 5),
    }


def test_early_answer_with_a_history_is_dead_if_its_pass_is_aborted():
    state = make_state(PARENT)
    event = state.record_send(1)
    state.on_answer(FIRST, event, "gradients", history=(PARENT, 5))

    assert state.fail(FIRST, CAUSE, sender=PARENT) == [TellDead(PARENT, 5)]


def test_early_answer_with_a_history_is_dead_if_its_pass_is_refused():
    state = make_state(PARENT)
    event = state.record_send(1)
    start(state, RETAINING)
    state.on_answer(FIRST, event, "gradients", history=(PARENT, 5))

    _, instructions = state.on_start(FIRST, PARENT, CONSUMING)

    assert TellDead(PARENT, 5) in instructions


def test_early_answer_with_a_history_is_dead_if_its_pass_does_not_come():
    state = make_state(PARENT)
    event = state.record_send(1)
    state.on_answer(FIRST, event, "gradients", history=(PARENT, 5))

    _, instructions = state.on_start(SECOND, PARENT, CONSUMING)

    assert TellDead(PARENT, 5) in instructions


# -------------------------------------------------------------------------- dead messages


def test_dead_message_is_answered_with_none():
    state = make_state(OTHER)
    event = state.record_send(1)
    start(state)

    assert state.mark_dead(event)

    assert state.take_answer(event) is NONE


def test_message_that_died_before_the_pass_is_answered_with_none():
    state = make_state(OTHER)
    event = state.record_send(1)
    assert not state.mark_dead(event)

    start(state)

    assert state.take_answer(event) is NONE


def test_message_that_the_pass_does_not_cover_dies_for_the_next():
    state = make_state(OTHER)
    pass_ = start(state)
    event = state.record_send(1)
    assert not state.mark_dead(event)
    state.on_done(pass_.id, OTHER)
    state.local_end()

    start(state)

    assert state.take_answer(event) is NONE


def test_dead_message_is_dead_in_every_pass():
    state = make_state(OTHER)
    event = state.record_send(1)
    state.mark_dead(event)
    run_alone(state, RETAINING)

    start(state)

    assert state.take_answer(event) is NONE


def test_dead_message_stays_dead_when_another_pass_is_refused():
    state = make_state(PARENT, OTHER)
    event = state.record_send(1)
    start(state)
    state.mark_dead(event)

    state.on_start(FIRST, PARENT, CONSUMING)
    state.fail(PassId(OTHER, 0), CAUSE, sender=OTHER)

    assert state.take_answer(event) is NONE


def test_message_may_die_twice():
    state = make_state(OTHER)
    event = state.record_send(1)
    start(state)
    state.mark_dead(event)

    state.mark_dead(event)

    assert state.take_answer(event) is NONE


def test_other_messages_live_on():
    state = make_state(OTHER)
    dead, alive = state.record_send(1), state.record_send(1)
    start(state)

    state.mark_dead(dead)

    assert state.take_answer(alive) is WAIT


# ------------------------------------------------------------ passes that are over at once


def test_pass_is_over_at_once_where_all_is_answered():
    state = make_state(PARENT)
    state.record_send(PARENT)

    assert state.begin_and_end(FIRST, PARENT)

    assert state.current is None
    assert state.begun == FIRST
    assert (state.first, state.consumed_by) == (1, FIRST.number)


def test_pass_that_was_over_at_once_consumes_what_it_covered():
    state = make_state(PARENT)
    old = state.record_send(PARENT)
    assert state.begin_and_end(FIRST, PARENT)
    new = state.record_send(PARENT)

    pass_ = join(state, SECOND)

    assert not pass_.covers(old)
    assert pass_.covers(new)
    assert pass_.sends == {new: PARENT}


def test_pass_that_was_over_at_once_is_over_for_who_tells_of_it_again():
    state = make_state(PARENT)
    state.record_send(PARENT)
    assert state.begin_and_end(FIRST, PARENT)

    assert not state.begin_and_end(FIRST, PARENT)
    assert state.on_start(FIRST, OTHER, CONSUMING) == (None, [TellDone(OTHER, FIRST)])


def with_another_worker(state: ContextState) -> None:
    state.meet(OTHER)


def with_a_pass_that_is_on(state: ContextState) -> None:
    start(state)


def with_a_later_pass(state: ContextState) -> None:
    join(state, PassId(OTHER, 3), PARENT)
    end(state)


def with_a_pass_that_failed(state: ContextState) -> None:
    state.fail(FIRST, CAUSE, PARENT)


def with_a_worker_that_is_lost(state: ContextState) -> None:
    state.meet(OTHER)
    state.lose(OTHER, CAUSE)


def with_an_answer_of_another_pass(state: ContextState) -> None:
    answer(state, SECOND, 0)


def with_a_dead_message(state: ContextState) -> None:
    state.mark_dead(0)


@pytest.mark.parametrize(
    "change",
    [
        with_another_worker,
        with_a_pass_that_is_on,
        with_a_later_pass,
        with_a_pass_that_failed,
        with_a_worker_that_is_lost,
        with_an_answer_of_another_pass,
        with_a_dead_message,
    ],
)
def test_pass_is_not_over_at_once(change):
    state = make_state(PARENT)
    state.record_send(PARENT)
    change(state)
    first, begun = state.first, state.begun

    assert not state.begin_and_end(FIRST, PARENT)

    assert (state.first, state.begun) == (first, begun)
