"""The contexts that a worker takes part in, from their begin to their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.autograd._context import ContextName
from gradwire.autograd._messages import key_of_call, key_of_context
from gradwire.autograd._registry import Registry

ME, OTHER = 0, 1
MINE, OTHERS = 77, 88  # incarnations
PEER: Any = SimpleNamespace(info=SimpleNamespace(id=OTHER, name="other"))


def make_registry() -> Registry:
    agent = SimpleNamespace(limits=SimpleNamespace(contexts=100))
    exchange: Any = SimpleNamespace(me=ME, describe=str, agent=agent)
    return Registry(exchange, MINE)


def of_other(counter: int) -> ContextName:
    return ContextName(key_of_context(OTHER, counter), OTHERS)


def end(registry: Registry, name: ContextName) -> None:
    side = registry.drop(name)
    assert side is not None and side.is_released
    side.forget_graph()
    assert registry.drop(name) is None
    assert registry.find(name) is None


def test_own_context_is_over_for_ever():
    registry = make_registry()
    name = registry.open(into_grad=False).name
    assert registry.ended_so_far() == (0, (0,))

    end(registry, name)

    assert registry.ended_so_far() == (0, ())
    assert registry.join(name, "", False, PEER) is None


def test_context_of_another_worker_is_over_when_its_opener_says_so():
    registry = make_registry()
    first, second, third = (of_other(counter) for counter in range(3))
    for name in (first, second):
        assert registry.join(name, "", False, PEER) is not None

    end(registry, first)

    assert registry.note_ended(OTHER, OTHERS, 2, (2,)) == [second]
    end(registry, second)
    assert registry.note_ended(OTHER, OTHERS, 2, (2,)) == []
    assert registry.join(first, "", False, PEER) is None
    assert registry.join(third, "", False, PEER) is not None


def test_broken_context_is_over_when_its_opener_says_so():
    registry = make_registry()
    broken, joined = of_other(0), of_other(1)
    registry.mark_broken(broken, "a worker is lost", {ME, 5})
    assert registry.join(broken, "", False, PEER) is None
    assert registry.join(joined, "", False, PEER) is not None

    assert registry.note_ended(OTHER, OTHERS, 1, ()) == [broken, joined]
    assert registry.take_broken(broken) == {ME, 5}
    assert registry.take_broken(broken) == frozenset()


def test_broken_contexts_of_an_earlier_life_of_the_opener_are_forgotten():
    registry = make_registry()
    registry.mark_broken(of_other(0), "a worker is lost")

    assert registry.note_ended(OTHER, OTHERS + 1, -1, ()) == []
    assert registry.why_broken(of_other(0)) is None


def test_context_with_the_key_of_a_call_leaves_nothing():
    registry = make_registry()
    name = ContextName(key_of_call(OTHER, 0), OTHERS)
    assert registry.join(name, "", False, PEER) is not None

    end(registry, name)

    assert registry.note_ended(OTHER, OTHERS, 10, ()) == []
    assert registry.counts()["contexts"] == 0


@pytest.mark.parametrize("is_mine", [False, True])
def test_released_context_is_counted_while_a_node_is_there(is_mine):
    registry = make_registry()
    if is_mine:
        name = registry.open(into_grad=False).name
    else:
        name = of_other(0)
        registry.join(name, "", False, PEER)
    tensors = [torch.ones(2), torch.ones(2)]
    for number, tensor in enumerate(tensors):
        side = registry.find(name)
        assert side is not None
        side.record_recv(OTHER, number, None, [tensor], may_wait=True)
    del side, tensor

    end(registry, name)

    while tensors:
        assert registry.counts()["released_contexts_kept_alive"] == 1
        tensors.pop()
    assert registry.counts()["released_contexts_kept_alive"] == 0
