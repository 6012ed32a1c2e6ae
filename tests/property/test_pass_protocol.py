"""The pass protocol alone, on simulated workers: every pass ends, every send is answered.

Each run is decided by a seed, which a failure names together with all that happened.
``GRADWIRE_PASS_RUNS=20000`` makes more runs of each setting, ``GRADWIRE_TEST_SEED=7`` only
that one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from gradwire.autograd._passes import (
    ContextState,
    Instruction,
    Pass,
    PassId,
    TellStale,
)
from property.pass_simulator import Failed, Setting, simulate

Method: TypeAlias = Callable[..., Any]

NUM_RUNS = int(os.environ.get("GRADWIRE_PASS_RUNS", "250"))

SETTINGS = {
    "in silence": Setting(),
    "in silence, with overtaking": Setting(overtaking=True),
    "in silence, with drops": Setting(overtaking=True, dropped=0.2),
    "in silence, with copies": Setting(overtaking=True, copied=0.2),
    "with traffic": Setting(traffic=True),
    "with traffic and overtaking": Setting(traffic=True, overtaking=True),
    "with traffic, drops and copies": Setting(
        traffic=True, overtaking=True, dropped=0.2, copied=0.2
    ),
    "with traffic, all retained": Setting(
        traffic=True, overtaking=True, dropped=0.1, consuming=0.0
    ),
    "with rivals": Setting(traffic=True, overtaking=True, rivals=True),
    "with failures": Setting(failing=0.05, overtaking=True),
    "with failures and rivals": Setting(
        traffic=True, overtaking=True, rivals=True, failing=0.05, dropped=0.1
    ),
    "with deaths": Setting(traffic=True, overtaking=True, dying=True),
    "with everything": Setting(
        traffic=True,
        overtaking=True,
        rivals=True,
        dropped=0.1,
        copied=0.1,
        failing=0.03,
        dying=True,
    ),
}

SITUATIONS = {
    "in silence, with drops": ["early answer", "gradient with a history"],
    "with traffic": ["straggler during a pass", "straggler after a pass"],
    "with traffic and overtaking": [
        "start before a call",
        "gradient for something consumed",
    ],
    "with traffic, drops and copies": ["death of a message that is waited for"],
    "with rivals": ["rivals meet", "second pass of a worker"],
    "with failures": ["failure at the starter", "failure", "start after abort"],
    "with deaths": ["death of a worker in a pass"],
}
"""What must have happened in some runs of a setting, or they prove little."""


def seeds() -> list[int]:
    given = os.environ.get("GRADWIRE_TEST_SEED")
    return [int(given)] if given else list(range(NUM_RUNS))


@pytest.mark.timeout(60 + NUM_RUNS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_pass_ends_and_every_send_is_answered(name):
    seen: Counter[str] = Counter()
    for seed in seeds():
        seen += simulate(seed, SETTINGS[name]).seen

    if len(seeds()) >= 100:
        assert [s for s in SITUATIONS.get(name, []) if not seen[s]] == []


# ------------------------------------------------------------- protocols that are broken


def without_answers_to_stragglers(method: Method) -> Method:
    return lambda *args: (*method(*args)[:2], [])


def without_effect(method: Method) -> Method:
    return lambda *args: None


def without_instructions(method: Method) -> Method:
    def change(*args: Any) -> list[Instruction]:
        method(*args)
        return []

    return change


def without_early_answers(method: Method) -> Method:
    def change(state: ContextState, pass_id: PassId, *args: Any) -> Any:
        if state.current is None:
            return False, []
        return method(state, pass_id, *args)

    return change


def without_last_answers(method: Method) -> Method:
    return lambda state, pass_id, message, answer, is_last, history: method(
        state, pass_id, message, answer, False, history
    )


def without_histories(method: Method) -> Method:
    return lambda state, pass_id, message, answer, is_last, history: method(
        state, pass_id, message, answer, is_last, None
    )


def without_recvs(method: Method) -> Method:
    return lambda state, pass_id, cause, sender, recvs: method(
        state, pass_id, cause, sender, []
    )


def with_second_chance(method: Method) -> Method:
    def change(state: ContextState, pass_id: PassId, *args: Any) -> list[Instruction]:
        instructions: list[Instruction] = method(state, pass_id, *args)
        state.latest.pop(pass_id.starter, None)
        return instructions

    return change


def with_one_child(method: Method) -> Method:
    def change(*args: Any) -> tuple[Pass | None, list[Instruction]]:
        pass_, instructions = method(*args)
        if pass_ is not None:
            pass_.told = pass_.told & {i.to for i in instructions[:1]}
        return pass_, instructions[:1]

    return change


def without_stale(method: Method) -> Method:
    return lambda *args: [i for i in method(*args) if not isinstance(i, TellStale)]


def with_nothing_lost(method: Method) -> Method:
    return lambda *args: False


BROKEN: dict[str, tuple[str, Callable[[Method], Method], str]] = {
    "stragglers are not answered": (
        "record_recv",
        without_answers_to_stragglers,
        "with traffic",
    ),
    "dead messages live": ("mark_dead", without_effect, "in silence, with drops"),
    "early answers are dropped": ("on_answer", without_early_answers, "in silence"),
    "last answers are not marked": (
        "on_answer",
        without_last_answers,
        "with traffic and overtaking",
    ),
    "gradients nobody took stay alive": (
        "on_answer",
        without_histories,
        "with failures",
    ),
    "newcomers know of no pass": ("join", without_effect, "in silence"),
    "only one worker is told": ("start", with_one_child, "in silence"),
    "nobody says that it is done": ("local_end", without_instructions, "in silence"),
    "failures are not told": ("fail", without_instructions, "with failures"),
    "failed passes kill nothing": ("fail", without_recvs, "with failures"),
    "failed passes begin again": ("fail", with_second_chance, "with failures"),
    "nothing is stale": ("fail", without_stale, "with failures and rivals"),
    "gradients in vain are not noticed": (
        "is_in_vain",
        with_nothing_lost,
        "with failures",
    ),
    "losses are not told": ("lose", without_instructions, "with deaths"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_protocol_is_found_out(monkeypatch, name):
    method, change, setting = BROKEN[name]
    monkeypatch.setattr(ContextState, method, change(getattr(ContextState, method)))

    with pytest.raises(Failed, match="seed"):
        for seed in range(1000):
            simulate(seed, SETTINGS[setting])
