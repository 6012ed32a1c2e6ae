"""When gradients of leaves need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.autograd import _leaves
from gradwire.autograd._context import ContextName, Side
from gradwire.autograd._engine import Destination
from gradwire.autograd._leaves import gradients_of_leaves, take_at_once
from gradwire.autograd._messages import Gradients, key_of_call, key_of_context
from gradwire.autograd._passes import NONE, ContextState, PassId, PassKind
from gradwire.autograd._run import Answer

PASS = PassId(1, 0)


def make_leaf(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*(shape or (2,)), requires_grad=True, **options)


def answer(*gradients: Tensor | None) -> Answer:
    there = tuple([g for g in gradients if g is not None])
    return Answer(tuple([g is not None for g in gradients]), there, [], -1, None)


def gradients_for(*messages: tuple[list[Tensor], Any]) -> Any:
    """What comes out for messages of leaves, each with its answer."""
    state = ContextState(0)
    sends: list[Any] = []
    for leaves, _ in messages:
        message = SimpleNamespace(event=state.record_send(1))
        sends.append((message, [(leaf, leaf.grad_fn) for leaf in leaves]))
    state.on_start(PASS, 1, PassKind(Destination.INTO_DICTIONARY, False, False))
    for (message, _), (_, given) in zip(sends, messages, strict=True):
        if given is not None:
            state.on_answer(PASS, message.event, given)
    return gradients_of_leaves(state, sends)


def test_gradients_are_what_came():
    a, b, c = make_leaf(), make_leaf(3), make_leaf(2, 2)
    da, db, dc = (torch.randn(leaf.shape) for leaf in (a, b, c))

    found = gradients_for(([a], answer(da)), ([b, c], answer(db, dc)))

    assert [(id(leaf), id(g)) for leaf, g in found] == [
        (id(a), id(da)),
        (id(b), id(db)),
        (id(c), id(dc)),
    ]


def test_leaf_without_a_gradient_is_left_out():
    a, b = make_leaf(), make_leaf()
    gradient = torch.zeros(2)

    found = gradients_for(([a], NONE), ([b], answer(gradient)))

    assert [leaf is b for leaf, _ in found] == [True]


def hooked() -> Tensor:
    leaf = make_leaf()
    leaf.register_hook(lambda gradient: gradient)
    return leaf


def frozen() -> Tensor:
    return make_leaf().requires_grad_(False)


@pytest.mark.parametrize(
    ("leaf", "gradient"),
    [
        pytest.param(hooked(), torch.zeros(2), id="hook"),
        pytest.param(frozen(), torch.zeros(2), id="frozen"),
        pytest.param(make_leaf(), torch.zeros(3), id="shape"),
        pytest.param(make_leaf(), torch.zeros(2, dtype=torch.float64), id="dtype"),
        pytest.param(make_leaf(), torch.zeros(2).to_sparse(), id="sparse"),
        pytest.param(make_leaf(), 1, id="no tensor"),
    ],
)
def test_engine_is_asked_where_it_is_not_simple(leaf, gradient):
    assert gradients_for(([leaf], answer(gradient))) is None


def test_engine_is_asked_if_a_leaf_was_sent_twice():
    leaf = make_leaf()

    found = gradients_for(
        ([leaf], answer(torch.zeros(2))), ([leaf], answer(torch.zeros(2)))
    )

    assert found is None


def test_engine_is_asked_if_others_average_a_leaf(monkeypatch):
    """Also if it gets no gradient here."""
    averaged, other = make_leaf(), make_leaf()
    monkeypatch.setattr(
        _leaves,
        "wrappers_among",
        lambda leaves: [leaf for leaf in leaves if leaf is averaged],
    )

    assert gradients_for(([averaged], NONE), ([other], answer(torch.zeros(2)))) is None
    assert gradients_for(([other], answer(torch.zeros(2)))) is not None


@pytest.mark.parametrize(
    "given", [answer(torch.zeros(2)), answer(torch.zeros(2), None)], ids=["few", "part"]
)
def test_engine_is_asked_if_a_gradient_is_missing(given):
    assert gradients_for(([make_leaf(), make_leaf()], given)) is None


def test_engine_is_asked_if_an_answer_is_missing():
    assert gradients_for(([make_leaf()], None)) is None


# ------------------------------------------------------------ passes that are over at once


SENDER = 1
EXPLICIT, CALL = key_of_context(SENDER, 0), key_of_call(SENDER, 0)
NUMBERED = [(0, (True,)), (1, (True,))]
ZEROS = (torch.zeros(2), torch.zeros(3))


def take(
    key: int = EXPLICIT,
    answers: Any = NUMBERED,
    start: Any = (Destination.INTO_DICTIONARY, False, False, None),
    fate: Any = None,
) -> tuple[bool, list[Any], Side]:
    """Lets a pass come to a worker that has handed out two leaves.

    Returns:
        Whether it was over at once, who was told so, and the context.
    """
    told: list[Any] = []
    exchange: Any = SimpleNamespace(
        me=0,
        describe=str,
        telling=SimpleNamespace(done=lambda *args: told.append(args)),
    )
    side = Side(exchange, ContextName(key, 7), "a context")
    for size in (2, 3):
        side.hand_out(SENDER, make_leaf(size), None, -1)
    peer: Any = SimpleNamespace(fate=fate, info=SimpleNamespace(id=SENDER))
    message = Gradients(key, 7, *PASS, answers, True, start)
    return take_at_once(exchange, side, peer, message, ZEROS), told, side


def test_pass_is_over_at_once_where_all_leaves_are_answered():
    is_over, told, side = take()

    assert is_over
    assert told == [(SENDER, side.name, PASS)]
    assert [id(gradient) for gradient in side.gradients.values()] == [*map(id, ZEROS)]
    assert (side.num_sends, side.peek_leaves()) == (0, [])


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"key": CALL}, id="a call"),
        pytest.param({"fate": "lost"}, id="lost"),
        pytest.param({"start": None}, id="no start"),
        pytest.param({"start": (1, True, False, None)}, id="retained"),
        pytest.param({"start": (1, False, True, None)}, id="differentiable"),
        pytest.param({"start": (0, False, False, None)}, id="into grad"),
        pytest.param({"answers": NUMBERED[:1]}, id="too few"),
        pytest.param({"answers": NUMBERED[::-1]}, id="another order"),
        pytest.param({"answers": [(0, (True,)), (2, (True,))]}, id="another"),
    ],
)
def test_pass_is_left_to_the_long_way(given):
    is_over, told, side = take(**given)

    assert not is_over
    assert told == []
    assert side.gradients == {}
    assert side.state.begun is None
    assert side.num_sends == len(side.peek_leaves() or ()) == 2
