"""The pass protocol: how passes begin and end, one after the other."""

from __future__ import annotations

import pytest

from gradwire.autograd._passes import (
    ContextState,
    PassId,
    TellAbort,
    TellDone,
    TellStart,
)
from gradwire.errors import BackwardFailed
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
    run_alone,
    start,
)

# ------------------------------------------------------------------------------- the echo


def test_starter_tells_all_whom_it_knows():
    state = make_state(OTHER, CHILD)

    pass_, instructions = state.start(CONSUMING)

    assert pass_.parent is None
    assert instructions == [TellStart(CHILD), TellStart(OTHER)]


def test_passes_of_a_starter_are_numbered():
    state = make_state()

    passes = [run_alone(state).id for _ in range(3)]

    assert passes == [PassId(ME, 0), PassId(ME, 1), PassId(ME, 2)]


def test_worker_tells_all_but_the_one_it_heard_it_from():
    state = make_state(PARENT, CHILD, OTHER)

    pass_, instructions = state.on_start(FIRST, PARENT, CONSUMING)

    assert pass_ is not None
    assert pass_.parent == PARENT
    assert instructions == [TellStart(CHILD), TellStart(OTHER)]


def test_worker_without_children_is_done_when_its_part_is():
    state = make_state(PARENT)
    join(state)

    assert state.local_end() == [TellDone(PARENT, FIRST)]

    assert state.current is None


def test_worker_whose_part_is_over_waits_for_its_children():
    state = make_state(PARENT, CHILD, OTHER)
    join(state)
    assert state.local_end() == []
    assert state.on_done(FIRST, CHILD) == []

    assert state.on_done(FIRST, OTHER) == [TellDone(PARENT, FIRST)]

    assert state.current is None


def test_worker_whose_children_are_done_waits_for_its_part():
    state = make_state(PARENT, CHILD)
    join(state)
    assert state.on_done(FIRST, CHILD) == []

    assert state.local_end() == [TellDone(PARENT, FIRST)]

    assert state.current is None


def test_starter_is_over_when_everybody_is_done():
    state = make_state(CHILD)
    pass_ = start(state)
    state.local_end()

    assert state.on_done(pass_.id, CHILD) == []

    assert state.current is None


def test_worker_that_nobody_knows_runs_alone():
    state = make_state()
    _, instructions = state.start(CONSUMING)
    assert instructions == []

    assert state.local_end() == []

    assert state.current is None


def test_worker_that_hears_of_a_pass_again_is_done_for_that_edge():
    state = make_state(PARENT, OTHER)
    running = join(state)

    answer = state.on_start(FIRST, OTHER, CONSUMING)

    assert answer == (None, [TellDone(OTHER, FIRST)])
    assert state.current is running


def test_worker_that_was_not_known_is_answered_too():
    state = make_state(PARENT)
    join(state)

    answer = state.on_start(FIRST, OTHER, CONSUMING)

    assert answer == (None, [TellDone(OTHER, FIRST)])


def test_starter_that_hears_of_its_own_pass_is_done_for_that_edge():
    state = make_state(CHILD)
    pass_ = start(state)

    answer = state.on_start(pass_.id, CHILD, CONSUMING)

    assert answer == (None, [TellDone(CHILD, pass_.id)])


def test_start_that_comes_twice_from_the_parent_is_ignored():
    state = make_state(PARENT)
    running = join(state)

    answer = state.on_start(FIRST, PARENT, CONSUMING)

    assert answer == (None, [])
    assert state.current is running


def test_start_that_comes_when_all_is_over_is_answered():
    state = make_state(PARENT)
    join(state)
    state.local_end()

    answer = state.on_start(FIRST, PARENT, CONSUMING)

    assert answer == (None, [TellDone(PARENT, FIRST)])


def test_worker_met_during_a_pass_is_told_of_the_next():
    state = make_state(CHILD)
    pass_ = start(state)
    state.meet(OTHER)
    state.local_end()
    state.on_done(pass_.id, CHILD)
    assert state.current is None

    _, instructions = state.start(CONSUMING)

    assert instructions == [TellStart(CHILD), TellStart(OTHER)]


def test_done_of_somebody_who_was_not_told_is_ignored():
    state = make_state(CHILD)
    pass_ = start(state)
    state.local_end()

    assert state.on_done(pass_.id, OTHER) == []

    assert state.current is pass_


def test_done_of_another_pass_is_ignored():
    state = make_state(CHILD)
    before = run_alone(state)
    pass_ = start(state)
    state.local_end()

    assert state.on_done(before.id, CHILD) == []

    assert state.current is pass_


def test_done_that_comes_twice_counts_once():
    state = make_state(PARENT, CHILD, OTHER)
    pass_ = join(state)
    state.local_end()
    state.on_done(FIRST, CHILD)

    assert state.on_done(FIRST, CHILD) == []

    assert state.current is pass_


def test_done_that_comes_when_all_is_over_is_ignored():
    state = make_state(PARENT, CHILD)
    join(state)
    state.local_end()
    state.on_done(FIRST, CHILD)

    assert state.on_done(FIRST, CHILD) == []


# -------------------------------------------------------------------- the order of passes


def test_passes_are_numbered_through_the_context():
    state = make_state(PARENT)
    join(state, PassId(PARENT, 4))
    end(state)

    assert start(state).id == PassId(ME, 5)


def test_number_of_a_pass_that_was_refused_is_not_used_again():
    state = make_state(PARENT)
    mine = start(state, RETAINING)
    assert is_refused(state, PassId(PARENT, 4), PARENT)
    state.fail(mine.id, CAUSE)

    assert start(state).id == PassId(ME, 5)


@pytest.mark.parametrize("number", [3, 4])
def test_pass_that_comes_after_a_later_one_is_refused(number):
    state = make_state(PARENT, OTHER)
    join(state, PassId(PARENT, 4))
    end(state)

    assert is_refused(state, PassId(OTHER, number), OTHER)

    assert state.current is None


def test_messages_say_which_pass_has_begun_last():
    state = make_state(PARENT)
    assert state.begun is None

    join(state)

    assert state.begun == FIRST


def test_worker_that_has_just_come_takes_over_how_far_the_others_are():
    state = make_state()

    state.join(OTHER, FIRST)

    assert state.begun == FIRST
    assert state.on_start(FIRST, OTHER, CONSUMING) == (None, [TellDone(OTHER, FIRST)])
    assert start(state).id == PassId(ME, 1)


def test_worker_that_has_just_come_runs_the_next_pass():
    state = make_state()
    state.join(OTHER, FIRST)

    assert join(state, SECOND, OTHER).id == SECOND


def test_worker_that_takes_part_waits_until_it_is_told():
    state = make_state()
    state.record_send(1)

    state.join(OTHER, FIRST)

    assert state.begun is None
    assert join(state, FIRST, OTHER).id == FIRST


def test_worker_that_somebody_else_will_tell_waits_for_that():
    state = make_state(PARENT)

    state.join(OTHER, FIRST)

    assert state.begun is None
    assert join(state, FIRST, PARENT).id == FIRST


def test_worker_that_has_just_come_knows_what_was_consumed():
    state = make_state()

    state.join(OTHER, SECOND, consumed=FIRST.number)

    assert state.record_recv(OTHER, 7, None)[1]
    assert not state.record_recv(OTHER, 7, FIRST)[1]


def test_worker_takes_over_nothing_old():
    state = make_state()
    state.join(OTHER, SECOND)

    state.join(OTHER, FIRST)

    assert state.begun == SECOND


# ---------------------------------------------------------------------------- second pass


def test_second_pass_of_ours_is_refused():
    state = make_state(PARENT)
    running = join(state)

    with pytest.raises(BackwardFailed, match="worker of rank 1 started"):
        state.start(CONSUMING)

    assert state.current is running


def test_pass_that_meets_another_is_refused():
    state = make_state(PARENT, OTHER)
    running = start(state)

    pass_, instructions = state.on_start(FIRST, PARENT, CONSUMING)

    assert pass_ is None
    assert state.current is running
    (refusal,) = instructions
    assert isinstance(refusal, TellAbort)
    assert refusal[:2] == (PARENT, FIRST)
    assert isinstance(refusal.cause, BackwardFailed)
    assert "two backward passes" in str(refusal.cause)


def test_refusal_is_described_as_the_runtime_wants_it():
    state = ContextState(ME, lambda error: f"described: {error}")
    start(state)

    _, (refusal,) = state.on_start(FIRST, PARENT, CONSUMING)

    assert isinstance(refusal, TellAbort)
    assert refusal.cause.startswith("described: two backward passes")


def test_pass_that_was_refused_stays_refused():
    state = make_state(PARENT, OTHER)
    start(state)
    state.on_start(FIRST, PARENT, CONSUMING)
    state.fail(PassId(ME, 0), CAUSE)

    assert is_refused(state, FIRST, OTHER)

    assert state.current is None


def test_refused_pass_does_not_disturb_the_other():
    state = make_state(PARENT, CHILD)
    event = state.record_send(1)
    running = start(state)
    state.on_start(FIRST, PARENT, CONSUMING)

    assert answer(state, running.id, event, "gradients")
    assert state.take_answer(event) == "gradients"
    state.local_end()
    state.on_done(running.id, PARENT)
    state.on_done(running.id, CHILD)
    assert state.current is None


def test_two_passes_that_begin_at_once_refuse_each_other():
    left, right = ContextState(0), ContextState(1)
    left.meet(1)
    right.meet(0)
    passes = start(left), start(right)

    assert is_refused(left, passes[1].id, 1)
    assert is_refused(right, passes[0].id, 0)
    assert left.fail(passes[0].id, CAUSE, sender=1) == []
    assert right.fail(passes[1].id, CAUSE, sender=0) == []

    assert left.current is right.current is None


def test_next_pass_may_come_from_somebody_else():
    state = make_state(PARENT)
    join(state)
    state.local_end()

    assert join(state, PassId(OTHER, 1), OTHER).parent == OTHER
