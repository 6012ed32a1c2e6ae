"""The pass protocol: failures, lost workers, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.autograd._passes import (
    NONE,
    ContextState,
    PassId,
    TellAbort,
    TellDead,
    TellDone,
    TellStale,
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
    is_refused,
    join,
    make_state,
    receive,
    run_alone,
    size,
    start,
)

# -------------------------------------------------------------------------------- failure


def test_failure_here_is_told_to_parent_and_children():
    state = make_state(PARENT, CHILD, OTHER)
    join(state, kind=RETAINING)

    instructions = state.fail(FIRST, CAUSE)

    assert instructions == [
        TellAbort(PARENT, FIRST, CAUSE),
        TellAbort(CHILD, FIRST, CAUSE),
        TellAbort(OTHER, FIRST, CAUSE),
    ]
    assert state.current is None


def test_failure_is_told_also_to_those_who_are_done():
    state = make_state(PARENT, CHILD, OTHER)
    join(state, kind=RETAINING)
    state.on_done(FIRST, CHILD)

    instructions = state.fail(FIRST, CAUSE)

    assert TellAbort(CHILD, FIRST, CAUSE) in instructions


def test_failed_pass_kills_the_messages_that_it_has_consumed():
    state = make_state(CHILD)
    receive(state, CHILD, 7)
    pass_ = start(state, CONSUMING)

    instructions = state.fail(pass_.id, CAUSE, recvs=[(CHILD, 7)])

    assert set(instructions) == {
        TellAbort(CHILD, pass_.id, CAUSE),
        TellDead(CHILD, 7),
    }


def test_failed_pass_that_retains_kills_nothing():
    state = make_state(CHILD)
    receive(state, CHILD, 7)
    pass_ = start(state, RETAINING)

    instructions = state.fail(pass_.id, CAUSE, recvs=[(CHILD, 7)])

    assert instructions == [TellAbort(CHILD, pass_.id, CAUSE)]


def test_failure_of_another_pass_kills_nothing():
    state = make_state(CHILD)
    receive(state, CHILD, 7)
    start(state, CONSUMING)

    assert state.fail(SECOND, CAUSE, recvs=[(CHILD, 7)]) == []


def test_failure_elsewhere_is_passed_on():
    state = make_state(PARENT, CHILD, OTHER)
    join(state, kind=RETAINING)

    instructions = state.fail(FIRST, CAUSE, sender=CHILD)

    assert instructions == [
        TellAbort(PARENT, FIRST, CAUSE),
        TellAbort(OTHER, FIRST, CAUSE),
    ]
    assert state.current is None


def test_failure_at_the_starter_is_told_to_its_children():
    state = make_state(CHILD)
    pass_ = start(state, RETAINING)

    instructions = state.fail(pass_.id, CAUSE)

    assert instructions == [TellAbort(CHILD, pass_.id, CAUSE)]


def test_failure_after_our_part_was_over_ends_the_wait():
    state = make_state(CHILD)
    pass_ = start(state)
    state.local_end()

    state.fail(pass_.id, CAUSE, sender=CHILD)

    assert state.current is None


def test_failure_is_told_once():
    state = make_state(CHILD)
    pass_ = start(state)
    state.fail(pass_.id, CAUSE)

    assert state.fail(pass_.id, CAUSE, sender=CHILD) == []


def test_failure_of_another_pass_is_ignored():
    state = make_state(PARENT, CHILD)
    before = run_alone(state)
    running = start(state)

    assert state.fail(before.id, CAUSE, sender=CHILD) == []

    assert state.current is running


def test_failure_of_a_pass_that_is_over_is_ignored():
    state = make_state(PARENT)
    join(state)
    state.local_end()

    assert state.fail(FIRST, CAUSE, sender=PARENT) == []
    assert state.on_start(FIRST, PARENT, CONSUMING) == (None, [TellDone(PARENT, FIRST)])


def test_end_of_a_part_that_failed_meanwhile_is_ignored():
    state = make_state(PARENT)
    join(state)
    state.fail(FIRST, CAUSE, sender=PARENT)

    assert state.local_end() == []


def test_done_of_a_child_after_a_failure_is_ignored():
    state = make_state(PARENT, CHILD)
    join(state)
    state.fail(FIRST, CAUSE)

    assert state.on_done(FIRST, CHILD) == []


def test_pass_after_a_failed_one_has_a_new_number():
    state = make_state(CHILD)
    failed = start(state, RETAINING)
    state.fail(failed.id, CAUSE)

    assert start(state).id == PassId(ME, 1)


def test_retained_chain_survives_a_failed_pass():
    state = make_state(CHILD)
    event = state.record_send(1)
    failed = start(state, RETAINING)
    state.fail(failed.id, CAUSE)

    assert start(state).covers(event)


def test_start_that_comes_after_the_abort_is_answered_with_it():
    state = make_state(PARENT)
    assert state.fail(FIRST, CAUSE, sender=PARENT) == []

    answer = state.on_start(FIRST, OTHER, CONSUMING)

    assert answer == (None, [TellAbort(OTHER, FIRST, CAUSE)])
    assert state.current is None


def test_message_after_the_abort_of_a_pass_that_never_began_is_not_of_it():
    state = make_state(PARENT)

    state.fail(FIRST, CAUSE, PARENT)

    assert state.begun == FIRST


def test_start_that_comes_again_after_a_failure_is_answered_with_it():
    state = make_state(PARENT)
    join(state)
    state.fail(FIRST, CAUSE)

    answer = state.on_start(FIRST, OTHER, CONSUMING)

    assert answer == (None, [TellAbort(OTHER, FIRST, CAUSE)])


def test_answer_for_a_pass_that_was_aborted_before_it_began_is_ignored():
    state = make_state(PARENT)
    event = state.record_send(1)
    state.fail(FIRST, CAUSE, sender=PARENT)
    before = size(state)

    assert not answer(state, FIRST, event)

    assert size(state) == before


def test_abort_drops_the_early_answers():
    state = make_state(PARENT)
    event = state.record_send(1)
    state.fail(FIRST, CAUSE, sender=PARENT)
    before = size(state)
    answer(state, SECOND, event)
    assert size(state) > before

    state.fail(SECOND, CAUSE, sender=PARENT)

    assert size(state) == before


def test_next_pass_of_a_starter_whose_last_one_failed_begins():
    state = make_state(PARENT)
    state.fail(FIRST, CAUSE, sender=PARENT)

    assert join(state, SECOND).id == SECOND


def test_failed_passes_are_remembered_for_each_starter():
    state = make_state(PARENT, OTHER)
    theirs = PassId(OTHER, 0)
    state.fail(FIRST, CAUSE, sender=PARENT)
    state.fail(theirs, CAUSE, sender=OTHER)

    assert is_refused(state, FIRST, PARENT)
    assert is_refused(state, theirs, OTHER)


def test_late_abort_does_not_revive_a_refused_pass():
    state = make_state(PARENT, OTHER)
    join(state, FIRST, kind=RETAINING)
    assert is_refused(state, SECOND, PARENT)
    state.fail(FIRST, CAUSE, sender=PARENT)

    assert is_refused(state, SECOND, OTHER)

    assert state.current is None


def test_pass_that_is_older_than_another_of_its_starter_has_failed():
    # Whoever tells of it so late is in it, and alone.
    state = make_state(PARENT, OTHER)
    state.fail(FIRST, CAUSE, sender=PARENT)
    state.fail(SECOND, CAUSE, sender=PARENT)

    assert is_refused(state, FIRST, OTHER)


def test_refused_pass_does_not_consume_the_chain():
    state = make_state(PARENT, OTHER)
    event = state.record_send(1)
    running = start(state, RETAINING)
    state.on_start(FIRST, PARENT, CONSUMING)
    state.fail(running.id, CAUSE)

    assert start(state).covers(event)


# ----------------------------------------------------------------------------- lost peers


def test_lost_worker_fails_the_pass():
    state = make_state(PARENT, CHILD, OTHER)
    join(state)

    instructions = state.lose(CHILD, CAUSE)

    assert instructions == [
        TellAbort(PARENT, FIRST, CAUSE),
        TellAbort(OTHER, FIRST, CAUSE),
    ]
    assert state.current is None


def test_lost_parent_fails_the_pass():
    state = make_state(PARENT, CHILD)
    join(state)

    assert state.lose(PARENT, CAUSE) == [TellAbort(CHILD, FIRST, CAUSE)]

    assert state.current is None


def test_lost_worker_that_was_done_fails_the_pass():
    state = make_state(PARENT, CHILD)
    join(state)
    state.on_done(FIRST, CHILD)

    assert state.lose(CHILD, CAUSE) == [TellAbort(PARENT, FIRST, CAUSE)]


def test_lost_worker_breaks_the_context():
    state = make_state(PARENT, CHILD)

    assert state.lose(CHILD, CAUSE) == []

    assert state.broken == CAUSE
    answer = state.on_start(FIRST, PARENT, CONSUMING)
    assert answer == (None, [TellAbort(PARENT, FIRST, CAUSE)])


def test_lost_worker_breaks_the_context_during_a_pass():
    state = make_state(PARENT, CHILD)
    join(state, FIRST)

    state.lose(CHILD, CAUSE)

    answer = state.on_start(SECOND, PARENT, CONSUMING)
    assert answer == (None, [TellAbort(PARENT, SECOND, CAUSE)])


def test_first_loss_is_the_one_that_is_told():
    state = make_state(CHILD, OTHER)
    state.lose(CHILD, CAUSE)

    state.lose(OTHER, "another one")

    assert state.broken == CAUSE


def test_loss_of_a_stranger_does_not_matter():
    state = make_state(PARENT)
    pass_ = join(state)

    assert state.lose(OTHER, CAUSE) == []

    assert state.current is pass_
    assert state.broken is None


def test_lost_worker_is_not_known_any_more():
    state = make_state(CHILD, OTHER)

    state.lose(CHILD, CAUSE)

    assert state.known == {OTHER}


# -------------------------------------------------------------------------- nothing grows


def grow(step: Any) -> tuple[int, int]:
    """The size of a state after a few steps, and after many more."""
    state = make_state(PARENT, OTHER)
    sizes = {}
    for number in range(50):
        step(state, number)
        sizes[number] = size(state)
    return sizes[4], sizes[49]


def send_in_a_pass(state: ContextState, number: int) -> None:
    event = state.record_send(1)
    pass_id = PassId(PARENT, number)
    join(state, pass_id)
    answer(state, pass_id, event)
    answer(state, pass_id, event)
    state.take_answer(event)
    answer(state, pass_id, event)
    end(state)
    answer(state, pass_id, event)


def send_in_a_pass_that_fails(state: ContextState, number: int) -> None:
    event = state.record_send(1)
    pass_id = PassId(PARENT, number)
    answer(state, pass_id, event)
    join(state, pass_id)
    state.fail(pass_id, CAUSE, sender=PARENT)
    answer(state, pass_id, event)
    state.on_start(pass_id, OTHER, CONSUMING)


def be_told_of_a_failed_pass(state: ContextState, number: int) -> None:
    pass_id = PassId(PARENT, number)
    answer(state, pass_id, 0, NONE)
    state.fail(pass_id, CAUSE, sender=PARENT)
    state.on_start(pass_id, PARENT, CONSUMING)


def refuse_a_pass(state: ContextState, number: int) -> None:
    mine = start(state, RETAINING)
    state.on_start(PassId(PARENT, mine.id.number), PARENT, CONSUMING)
    state.fail(mine.id, CAUSE)


def lose_a_message(state: ContextState, number: int) -> None:
    event = state.record_send(1)
    state.mark_dead(event)
    run_alone(state)
    state.mark_dead(event)


def send_to_somebody_whose_pass_does_not_come_here(
    state: ContextState, number: int
) -> None:
    # It had begun a pass when it did not know us yet: its answer to a straggler is
    # early, and stays so.
    event = state.record_send(1)
    answer(state, PassId(PARENT, 2 * number), event, NONE)
    join(state, PassId(PARENT, 2 * number + 1))
    end(state)


def send_to_somebody_whose_passes_never_come_here(
    state: ContextState, number: int
) -> None:
    event = state.record_send(1)
    answer(state, PassId(OTHER, 1000 + number), event, NONE)
    run_alone(state)
    answer(state, PassId(OTHER, 1000 + number), event, NONE)


@pytest.mark.parametrize(
    "step",
    [
        send_in_a_pass,
        send_in_a_pass_that_fails,
        be_told_of_a_failed_pass,
        refuse_a_pass,
        lose_a_message,
        send_to_somebody_whose_pass_does_not_come_here,
        send_to_somebody_whose_passes_never_come_here,
    ],
    ids=lambda step: step.__name__,
)
def test_state_does_not_grow(step):
    early, late = grow(step)

    assert late == early


# ------------------------------------------------------------------------- stale messages


def test_failed_pass_makes_the_messages_that_it_consumed_stale():
    state = make_state(OTHER)
    message = state.record_send(OTHER)
    pass_, _ = state.start(CONSUMING)

    told = state.fail(pass_.id, "why")

    assert TellStale(OTHER, message) in told


def test_failed_pass_that_retains_makes_nothing_stale():
    state = make_state(OTHER)
    state.record_send(OTHER)
    pass_, _ = state.start(RETAINING)

    told = state.fail(pass_.id, "why")

    assert not [t for t in told if isinstance(t, TellStale)]


def test_messages_of_earlier_passes_are_not_stale_again():
    state = make_state(OTHER)
    state.record_send(OTHER)
    first, _ = state.start(CONSUMING)
    state.local_end()
    state.on_done(first.id, OTHER)
    second, _ = state.start(CONSUMING)

    told = state.fail(second.id, "why")

    assert not [t for t in told if isinstance(t, TellStale)]


def test_gradient_for_a_stale_message_was_in_vain():
    state = make_state(OTHER)
    receive(state, OTHER, 7)
    state.start(CONSUMING)
    assert not state.is_in_vain(OTHER, 7)

    state.note_shipped(OTHER, 7)

    assert state.is_in_vain(OTHER, 7)
    assert not state.is_in_vain(OTHER, 8)


def test_gradient_of_a_pass_that_is_over_was_not_in_vain():
    state = make_state(OTHER)
    receive(state, OTHER, 7)
    pass_, _ = state.start(CONSUMING)
    state.note_shipped(OTHER, 7)
    state.local_end()
    state.on_done(pass_.id, OTHER)

    assert not state.is_in_vain(OTHER, 7)
