"""A pass that is over as soon as it begins leaves what the same pass leaves in steps."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from typing import Any

from gradwire.autograd._passes import (
    NONE,
    ContextState,
    PassId,
    PassKind,
    TellDone,
)

ME, SENDER, OTHER = 0, 1, 2
SIMPLE = PassKind(1, retain=False, create_graph=False)
NUM_STATES = 20 * int(os.environ.get("GRADWIRE_PASS_RUNS", "250"))


class Past:
    """Whatever has happened in a context before, be it likely or not."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.state = ContextState(ME, str)
        self.peers = self.chance.choice(([SENDER], [SENDER], [SENDER, OTHER]))
        things = [
            self.send,
            self.send,
            self.receive,
            self.start,
            self.join,
            self.answer,
            self.end,
            self.end,
            self.fail,
            self.bury,
            self.lose,
        ]
        weights = [6, 6, 2, 2, 4, 2, 6, 6, 1, 1, 0.2]
        for _ in range(self.chance.randint(0, 12)):
            self.chance.choices(things, weights)[0]()

    def peer(self) -> int:
        return self.chance.choice(self.peers)

    def number(self) -> int:
        return self.chance.randint(0, 4)

    def pass_id(self) -> PassId:
        return PassId(self.peer(), self.number())

    def kind(self) -> PassKind:
        return PassKind(1, self.chance.random() < 0.3, False)

    def send(self) -> None:
        peer = self.peer()
        self.state.meet(peer)
        self.state.record_send(peer)

    def receive(self) -> None:
        peer = self.peer()
        self.state.meet(peer)
        after = self.chance.choice((None, self.pass_id()))
        self.state.join(peer, after)
        self.state.record_recv(peer, self.number(), after)

    def start(self) -> None:
        if self.state.current is None:
            self.state.start(self.kind())

    def join(self) -> None:
        self.state.on_start(self.pass_id(), self.peer(), self.kind())

    def answer(self) -> None:
        current = self.state.current
        pass_id = self.pass_id() if current is None else current.id
        history = self.chance.choice((None, None, (self.peer(), self.number())))
        value = "gradient" if history else self.chance.choice((NONE, "gradient"))
        self.state.on_answer(
            pass_id, self.number(), value, self.chance.random() < 0.5, history
        )

    def end(self) -> None:
        if (current := self.state.current) is not None:
            self.state.local_end()
            for worker in list(current.told):
                self.state.on_done(current.id, worker)

    def fail(self) -> None:
        current = self.state.current
        pass_id = self.pass_id() if current is None else current.id
        self.state.fail(pass_id, "it broke", self.peer())

    def bury(self) -> None:
        self.state.mark_dead(self.number())

    def lose(self) -> None:
        self.state.lose(self.peer(), "it is gone")


def contents(state: ContextState) -> dict[str, Any]:
    """All that a worker knows, but for what only people look at."""
    names = set(ContextState.__slots__) - {"_describe", "last"}
    return {name: getattr(state, name) for name in names}


def in_steps(state: ContextState, pass_id: PassId, sender: int) -> bool:
    """The same in steps; whether nothing came of it but that the sender is told."""
    sends = list(state._sends)
    told: list[Any] = []
    for message in sends:
        told += state.on_answer(pass_id, message, "gradient", True)[1]
    pass_, instructions = state.on_start(pass_id, sender, SIMPLE)
    if pass_ is None:
        return False
    seen = [state.see_answer(message) for message in sends]
    told += [*instructions, *state.local_end()]
    return seen == ["gradient"] * len(sends) and told == [TellDone(sender, pass_id)]


def test_pass_at_once_leaves_what_it_leaves_in_steps():
    seen: Counter[tuple[str, bool, bool]] = Counter()
    for seed in range(NUM_STATES):
        past = Past(seed)
        pass_id, sender = PassId(past.peer(), past.number()), past.peer()
        at_once, before = past.state, copy.deepcopy(past.state)
        slowly = copy.deepcopy(past.state)

        is_over = at_once.begin_and_end(pass_id, sender)

        is_simple = in_steps(slowly, pass_id, sender)
        if is_over:
            assert is_simple, seed
            assert contents(at_once) == contents(slowly), seed
        else:
            assert contents(at_once) == contents(before), seed
            if is_simple:  # the long way has more to note, or to clear away
                is_new = sender not in before.known
                assert is_new or before._answers or before._dead, seed
        seen["short" if is_over else "long", is_simple, bool(before._sends)] += 1

    assert min(
        seen["short", True, True], seen["long", False, True], seen["long", True, True]
    ) > (NUM_STATES // 100)
