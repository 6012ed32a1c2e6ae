"""Leaves whose ``.grad`` is set aside for a pass into a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.autograd._averaged import set_aside

LIMIT_S = 10.0


def leaf(value: float) -> Tensor:
    made = torch.tensor(value, requires_grad=True)
    made.grad = torch.tensor(-value)
    return made


def in_a_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def never() -> None:
    pass


def test_grad_is_away_inside_and_back_afterwards():
    x = leaf(1.0)

    with set_aside([x], [], never) as leaves:
        assert leaves == [x]
        assert x.grad is None
        x.grad = torch.tensor(5.0)

    assert x.grad == torch.tensor(-1.0)


def test_passes_over_different_leaves_do_not_wait_for_each_other():
    x, y = leaf(1.0), leaf(2.0)
    done = threading.Event()

    def use_other() -> None:
        with set_aside([y], [], never):
            done.set()

    with set_aside([x], [], never):
        in_a_thread(use_other)
        assert done.wait(LIMIT_S)


def test_passes_that_share_a_leaf_come_one_after_the_other():
    x, shared, y = leaf(1.0), leaf(2.0), leaf(3.0)
    waits, seen = threading.Event(), []

    def use_shared() -> None:
        with set_aside([shared, y], [], waits.set):
            seen.append(shared.grad)

    with set_aside([x, shared], [], never):
        thread = in_a_thread(use_shared)
        assert waits.wait(LIMIT_S)
        shared.grad = torch.tensor(7.0)
        assert not seen
    thread.join(LIMIT_S)

    assert seen == [None]
    assert shared.grad == torch.tensor(-2.0)


def test_pass_inside_of_a_pass_may_use_the_same_leaves():
    x = leaf(1.0)

    with set_aside([x], [], never):
        x.grad = torch.tensor(3.0)
        with set_aside([x], [], never):
            assert x.grad is None
        assert x.grad == torch.tensor(3.0)

    assert x.grad == torch.tensor(-1.0)


def test_who_waits_gives_up_when_its_pass_has_failed():
    x = leaf(1.0)
    found: list[BaseException] = []

    def fail() -> None:
        raise KeyError("the pass has failed")

    def use_it() -> None:
        try:
            with set_aside([x], [], fail):
                pass
        except KeyError as error:
            found.append(error)

    with set_aside([x], [], never):
        in_a_thread(use_it).join(LIMIT_S)
        assert len(found) == 1
    with set_aside([x], [], never), pytest.raises(KeyError):
        raise KeyError
    assert x.grad == torch.tensor(-1.0)
