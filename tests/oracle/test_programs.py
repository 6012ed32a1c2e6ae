"""The programs of the tests are what they should be: various, large, repeatable."""

from __future__ import annotations

from collections import Counter

import pytest

from oracle.generator import make_program
from oracle.operations import IN_PLACE, OPERATIONS
from oracle.programs import (
    IN_CONTEXT,
    MODES,
    SECOND_ORDER,
    Backward,
    BackwardThere,
    Call,
    Compute,
    Forward,
    Gradient,
    InPlace,
    Penalty,
    Program,
    Step,
    TakeGradient,
)
from oracle.reference import run_reference
from oracle.test_oracle import PROGRAMS_PER_TEST, TESTS_PER_MODE, first_seed

SEEDS = range(first_seed(0), first_seed(TESTS_PER_MODE))


def programs(mode: str) -> list[Program]:
    return [make_program(mode, seed) for seed in SEEDS]


def routes(program: Program) -> list[tuple[int, ...]]:
    """The workers of each call and of those around it, from the driver on."""
    found: list[tuple[int, ...]] = []

    def walk(steps: tuple[Step, ...], route: tuple[int, ...]) -> None:
        for step in steps:
            if isinstance(step, Call):
                found.append((*route, step.to))
                walk(program.bodies[step.body].steps, (*route, step.to))

    for act in program.acts:
        if isinstance(act, Forward):
            walk(act.steps, (0,))
    return found


def test_there_are_enough_programs():
    assert PROGRAMS_PER_TEST * TESTS_PER_MODE * len(MODES) >= 300


@pytest.mark.parametrize("mode", list(MODES))
def test_programs_of_a_mode_have_all_kinds_of_calls(mode):
    all_routes = [route for program in programs(mode) for route in routes(program)]
    calls = [s for p in programs(mode) for s in p.all_steps() if isinstance(s, Call)]

    assert {program.num_workers for program in programs(mode)} == {2, 3, 4, 5}
    assert any(route[-1] == route[-2] for route in all_routes), "to oneself"
    assert any(
        len(route) > 2 and route[-1] == route[-3] != route[-2] for route in all_routes
    ), "there and back"
    assert max(map(len, all_routes)) >= 5, "deep"
    assert {call.style for call in calls} == {"sync", "async", "kept", "dropped"}
    assert {call.is_recorded for call in calls} == {True, False}
    assert any(len(set(c.arguments.refs())) < len(c.arguments.refs()) for c in calls)


@pytest.mark.parametrize("mode", list(MODES))
def test_programs_of_a_mode_have_all_operations(mode):
    steps = [step for program in programs(mode) for step in program.all_steps()]
    used = {step.operation for step in steps if isinstance(step, Compute)}
    twice = {n for n, o in OPERATIONS.items() if o.twice or mode not in SECOND_ORDER}

    assert used == twice
    assert {s.operation for s in steps if isinstance(s, InPlace)} == set(IN_PLACE)


@pytest.mark.parametrize("mode", list(MODES))
def test_programs_of_a_mode_have_all_kinds_of_passes(mode):
    acts = [act for program in programs(mode) for act in program.acts]
    passes = [act for act in acts if isinstance(act, (Backward, BackwardThere))]
    ways = {
        "a": {"api", "method"},
        "b": {"plain", "api"},
        "c": {"plain", "api", "method"},
        "d": {"plain", "inputs"},
        "e": {"plain"},
    }

    assert {act.how for act in passes} == ways[mode]
    if mode in "abd":
        assert any(act.retain for act in passes)
    if mode in "ab":
        assert any(isinstance(act, BackwardThere) for act in passes)
        assert any(program.contexts == 2 for program in programs(mode))
    if mode != "b":
        assert any(isinstance(act, TakeGradient) for act in acts)
    if mode in SECOND_ORDER:
        assert any(isinstance(act, Penalty) for act in acts)
    if mode not in IN_CONTEXT:
        steps = [step for program in programs(mode) for step in program.all_steps()]
        gradients = [step for step in steps if isinstance(step, Gradient)]
        assert {s.create_graph for s in gradients} == {mode in SECOND_ORDER}


@pytest.mark.parametrize("mode", "abd")
def test_programs_have_gradients_of_zeros_for_none(mode):
    """The documented difference is met: zeros where one process has None."""
    found: Counter[bool] = Counter()
    for program in programs(mode):
        reference = run_reference(program)
        found.update(expected.is_zeros for expected in reference.gradients.values())

    assert found[True] > 0


@pytest.mark.parametrize("mode", list(MODES))
def test_a_seed_gives_the_same_program_again(mode):
    assert programs(mode) == programs(mode)


def test_a_program_without_a_call_gets_constants_for_its_results():
    program = make_program("a", SEEDS[0])
    calls = [s for a in program.acts if isinstance(a, Forward) for s in a.steps]
    call = next(step for step in calls if isinstance(step, Call))

    smaller = program.without({call.id})

    assert len(smaller.reached_bodies()) < len(program.reached_bodies())
    assert call.id not in smaller.removable()
    run_reference(smaller)
