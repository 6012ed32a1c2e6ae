"""States of the pass protocol, and steps of it that tests take again and again."""

from __future__ import annotations

from typing import Any

from gradwire.autograd._passes import (
    ContextState,
    Instruction,
    Pass,
    PassId,
    PassKind,
    TellAbort,
)

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
