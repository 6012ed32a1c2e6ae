"""References on simulated workers: never freed too early, and nothing left at the end.

What happens is decided twice over: by chance with a seed, which a failure names together
with all that happened, and by hypothesis, which looks for the shortest failure.
``GRADWIRE_RREF_RUNS=20000`` makes more runs of each setting, ``GRADWIRE_TEST_SEED=7`` only
that one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gradwire.rpc._rref_service import RefService
from gradwire.rpc._rref_table import RefTable
from property.rref_simulator import MAX_HANDLES, Failed, Setting, Simulation, simulate

Method: TypeAlias = Callable[..., Any]

NUM_RUNS = int(os.environ.get("GRADWIRE_RREF_RUNS", "150"))
MAX_EXAMPLES = max(25, NUM_RUNS // 6)

SETTINGS = {
    "two workers": Setting(num_workers=2),
    "three workers": Setting(),
    "overtaking": Setting(overtaking=True),
    "breaking": Setting(breaking=True),
    "overtaking and breaking": Setting(num_workers=2, overtaking=True, breaking=True),
    "dying": Setting(num_workers=4, dying=True),
    "dying and overtaking": Setting(num_workers=3, dying=True, overtaking=True),
    "everything": Setting(num_workers=4, overtaking=True, breaking=True, dying=True),
}

SITUATIONS = {
    "two workers": ["awaited value"],
    "overtaking": ["overtaking"],
    "breaking": ["given up", "not packed", "not sent", "unread call", "unread result"],
    "dying": ["death", "call to a lost worker", "result for a lost worker"],
    "dying and overtaking": ["call of a lost worker"],
}
"""What must have happened in some runs of a setting, or they prove little."""


def seeds() -> list[int]:
    given = os.environ.get("GRADWIRE_TEST_SEED")
    return [int(given)] if given else list(range(NUM_RUNS))


@pytest.mark.timeout(60 + NUM_RUNS)
@pytest.mark.parametrize("name", SETTINGS)
def test_references_end_neither_too_early_nor_never(name):
    seen: Counter[str] = Counter()
    for seed in seeds():
        seen += simulate(seed, SETTINGS[name]).seen

    if len(seeds()) >= 150:
        assert [s for s in SITUATIONS.get(name, []) if not seen[s]] == []


# ---------------------------------------------------------- what hypothesis makes of it

numbers = st.integers(0, 7)
picks = st.lists(numbers, max_size=2)


class Machine(RuleBasedStateMachine):
    """The same workers; hypothesis decides, and shortens what fails."""

    setting: ClassVar[Setting]

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(self.setting)

    def worker(self, number: int) -> int:
        alive = [w.rank for w in self.simulation.workers if w.is_alive]
        return alive[number % len(alive)]

    def has_room(self, rank: int) -> bool:
        return len(self.simulation.workers[rank].handles) < MAX_HANDLES

    @rule(at=numbers)
    def share(self, at: int) -> None:
        if self.has_room(rank := self.worker(at)):
            self.simulation.share(rank)

    @rule(
        at=numbers,
        to=numbers,
        kind=st.sampled_from(["remote", "send", "fetch"]),
        picks=picks,
        moment=st.sampled_from(["begun", "packed", "sent"]),
    )
    def call(self, at: int, to: int, kind: str, picks: list[int], moment: str) -> None:
        rank = self.worker(at)
        if not self.has_room(rank):
            return
        if self.simulation.begin(rank, self.worker(to), kind, picks):
            if moment != "begun":
                self.simulation.encode(rank, -1)
            if moment == "sent":
                self.simulation.send(rank, -1)

    @rule(at=numbers, index=numbers, fails=st.booleans())
    def encode(self, at: int, index: int, fails: bool) -> None:
        fails_at = 1 if fails and self.setting.breaking else None
        self.simulation.encode(self.worker(at), index, fails_at)

    @rule(at=numbers, index=numbers, is_refused=st.booleans())
    def send(self, at: int, index: int, is_refused: bool) -> None:
        is_refused = is_refused and self.setting.breaking
        self.simulation.send(self.worker(at), index, is_refused=is_refused)

    @precondition(lambda self: self.simulation.busy_links())
    @rule(link=st.integers(0, 15), index=numbers)
    def deliver(self, link: int, index: int) -> None:
        links = self.simulation.busy_links()
        self.simulation.deliver(links[link % len(links)], index)

    @rule(at=numbers, index=numbers, unread_from=st.none() | st.integers(0, 2))
    def decode(self, at: int, index: int, unread_from: int | None) -> None:
        unread_from = unread_from if self.setting.breaking else None
        self.simulation.decode(self.worker(at), index, unread_from)

    @rule(at=numbers, index=numbers, picks=picks, keep=st.booleans())
    def run(self, at: int, index: int, picks: list[int], keep: bool) -> None:
        self.simulation.run(self.worker(at), index, picks, keep)

    @rule(at=numbers, index=numbers)
    def drop(self, at: int, index: int) -> None:
        if self.simulation.drop(rank := self.worker(at), index) and index % 2:
            self.simulation.work_off(rank)

    @rule(at=numbers)
    def work_off(self, at: int) -> None:
        self.simulation.work_off(self.worker(at))

    @precondition(lambda self: self.setting.breaking)
    @rule(at=numbers, index=numbers)
    def give_up(self, at: int, index: int) -> None:
        self.simulation.give_up(self.worker(at), index)

    @precondition(lambda self: self.setting.dying)
    @rule(at=numbers, num_last_words=st.integers(0, 2))
    def kill(self, at: int, num_last_words: int) -> None:
        self.simulation.kill(self.worker(at), num_last_words)

    @invariant()
    def holds(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        self.simulation.finish()


@pytest.mark.timeout(400)  # to shorten a failure takes long
@pytest.mark.parametrize("name", ["overtaking", "breaking", "dying", "everything"])
def test_hypothesis_finds_no_way_to_end_references_wrongly(name):
    machine = type("References", (Machine,), {"setting": SETTINGS[name]})

    run_state_machine_as_test(
        machine,
        settings=settings(
            deadline=None,
            derandomize=True,
            database=None,
            max_examples=MAX_EXAMPLES,
            stateful_step_count=60,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ------------------------------------------------------------- accounting that is broken


def without_effect(method: Method) -> Method:
    return lambda *args: None


def without_instructions(method: Method) -> Method:
    def change(*args: Any) -> list[Any]:
        method(*args)
        return []

    return change


def with_nothing_done(method: Method) -> Method:
    return lambda *args: []


def with_uncounted_children(method: Method) -> Method:
    def change(table: RefTable, fork: Any, child: Any, to: int) -> None:
        method(table, fork, child, to)
        table.users[fork].num_children -= 1

    return change


def with_early_confirmation(method: Method) -> Method:
    def change(table: RefTable, *args: Any) -> list[Any]:
        result: list[Any] = method(table, *args)
        for user in table.users.values():
            user.is_confirmed = True
        return result

    return change


def with_forgotten_holders(method: Method) -> Method:
    def change(table: RefTable, worker: int) -> tuple[Any, ...]:
        forks, table.forks = table.forks, {}
        result: tuple[Any, ...] = method(table, worker)
        table.forks = forks
        return result

    return change


def with_forgotten_children(method: Method) -> Method:
    def change(table: RefTable, worker: int) -> tuple[Any, ...]:
        children, table.children = table.children, {}
        result: tuple[Any, ...] = method(table, worker)
        table.children = children
        return result

    return change


BROKEN: dict[str, tuple[type, str, Callable[[Method], Method], str]] = {
    "children are not counted": (
        RefTable,
        "send",
        with_uncounted_children,
        "three workers",
    ),
    "arrivals are not noted": (
        RefTable,
        "on_arrived",
        with_nothing_done,
        "two workers",
    ),
    "forks that arrive count as confirmed": (
        RefTable,
        "arrive",
        with_early_confirmation,
        "three workers",
    ),
    "nobody asks and answers": (
        RefTable,
        "arrive",
        without_instructions,
        "three workers",
    ),
    "parents are not told": (
        RefTable,
        "_tell_parent",
        without_instructions,
        "three workers",
    ),
    "drops are not told": (RefTable, "drop", without_instructions, "two workers"),
    "holders that are lost stay": (RefTable, "lose", with_forgotten_holders, "dying"),
    "children of the lost stay": (RefTable, "lose", with_forgotten_children, "dying"),
    "what is not sent stays": (RefService, "cancel", without_effect, "breaking"),
    "what is not read stays": (
        RefService,
        "_settle_unseen",
        without_effect,
        "breaking",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_accounting_is_found_out(monkeypatch, name):
    owner, method, change, setting = BROKEN[name]
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))

    with pytest.raises(Failed, match="seed"):
        for seed in range(1000):
            simulate(seed, SETTINGS[setting])
