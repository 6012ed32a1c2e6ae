"""The pass protocol: what one worker does about events, answers, passes and failures."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.autograd._passes import (
    NONE,
    WAIT,
    ContextState,
    Instruction,
    Pass,
    PassId,
    PassKind,
    TellAbort,
    TellDead,
    TellDone,
    TellNone,
    TellStale,
    TellStart,
)
from gradwire.errors import BackwardFailed

ME, PARENT, CHILD, OTHER = 0, 1, 2, 3
FIRST = PassId(PARENT, 0)
SECOND = PassId(PARENT, 1)
CAUSE = "it broke"
CONSUMING = PassKind(0, retain=False, create_graph=False)
RETAINING = PassKind(0, retain=True, create_graph=False)


def make_state(*known: int) -> ContextState:
    state = ContextState(ME)
    for worker in known:
        state.meet(worker)
    return state


def start(state: ContextState, kind: PassKind = CONSUMING) -> Pass:
    return state.start(kind)[0]


def join(
    state: ContextState,
    pass_id: PassId = FIRST,
    sender: int = PARENT,
    kind: PassKind = CONSUMING,
) -> Pass:
    pass_, _ = state.on_start(pass_id, sender, kind)
    assert pass_ is not None
    return pass_


def end(state: ContextState) -> list[Instruction]:
    """Lets everybody end the current pass; returns what is told at its end."""
    pass_ = state.current
    assert pass_ is not None
    for worker in list(pass_.told):
        assert state.on_done(pass_.id, worker) == []
    instructions = state.local_end()
    assert state.current is None
    return instructions


def run_alone(state: ContextState, kind: PassKind = CONSUMING) -> Pass:
    """A pass of ours, from its begin to its end."""
    pass_ = start(state, kind)
    end(state)
    return pass_


def answer(
    state: ContextState, pass_id: PassId, message: int, value: Any = "gradients"
) -> bool:
    """An answer that leads to nothing but that it may be wanted."""
    is_wanted, instructions = state.on_answer(pass_id, message, value)
    assert instructions == []
    return is_wanted


def receive(
    state: ContextState, sender: int, message: int, after: PassId | None = None
) -> int:
    """Records a recv that is answered by its node."""
    event, is_stale, answers = state.record_recv(sender, message, after)
    assert not is_stale
    assert answers == []
    return event


def is_refused(state: ContextState, pass_id: PassId, sender: int) -> bool:
    pass_, instructions = state.on_start(pass_id, sender, CONSUMING)
    return pass_ is None and [type(i) for i in instructions] == [TellAbort]


def size(state: ContextState) -> int:
    """How many things a worker keeps about a context."""
    values = [getattr(state, name) for name in ContextState.__slots__]
    values += [
        inner for value in values if isinstance(value, dict) for inner in value.values()
    ]
    return sum(len(value) for value in values if isinstance(value, (dict, list, set)))


# ------------------------------------------------------------------------ known workers


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


# -------------------------------------------------------------------- events and chains


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


# ------------------------------------------------------------------------------ answers


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


# --------------------------------------------------------------------------- stragglers


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


# -------------------------------------------------------------------------- outrunners


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


# ---------------------------------------------- gradients that nobody can use, histories


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


# ------------------------------------------------------------------------ dead messages


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


# ----------------------------------------------------------------------------- the echo


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


# ----------------------------------------------------------------- the order of passes


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


# -------------------------------------------------------------------------- second pass


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


# ------------------------------------------------------------------------------ failure


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


# --------------------------------------------------------------------------- lost peers


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


# ----------------------------------------------------------------------- nothing grows


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


# ------------------------------------------------------------------------ stale messages


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
