"""Steps without torch's wrapper do what the wrapper does."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.optimizer import (
    _use_grad_for_differentiable,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from gradwire.optim._torch_private import run_step, shown_to_profiler


class Halving(torch.optim.Optimizer):
    """A class that torch does not know."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
        return loss


class Shown(Halving):
    step = shown_to_profiler(Halving.step)


def watched(wrap):
    """A class whose step notes who has called it, and in which grad mode."""

    class Watched(torch.optim.Optimizer):
        def __init__(self, params, *, differentiable=False):
            super().__init__(params, {"differentiable": differentiable})
            self.called_by_us = self.had_grad = None

        @wrap
        def step(self, closure=None):
            caller = sys._getframe(1).f_globals["__name__"]
            self.called_by_us = caller == run_step.__module__
            self.had_grad = torch.is_grad_enabled()
            return None if closure is None else closure()

    return Watched


def make_parameter():
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    return parameter


def test_step_is_that_of_the_class():
    parameter = make_parameter()

    run_step(SGD([parameter], lr=0.5))

    assert parameter.tolist() == [0.5, 0.5]


def test_result_of_a_closure_comes_back():
    parameter = make_parameter()

    assert run_step(Halving([parameter]), lambda: 7) == 7
    assert parameter.tolist() == [0.5, 0.5]


def test_step_of_one_instance_comes_first():
    optimizer = SGD([make_parameter()], lr=0.5)
    vars(optimizer)["step"] = lambda: "its own"

    assert run_step(optimizer) == "its own"


@pytest.mark.parametrize("step", [run_step, Shown.step])
def test_hooks_of_an_instance_are_called(step):
    seen = []
    optimizer = Shown([make_parameter()])
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    step(optimizer)

    assert seen == ["before", "after"]


@pytest.mark.parametrize("step", [run_step, Shown.step])
def test_hooks_of_all_optimizers_are_called(step):
    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        step(Shown([make_parameter()]))
    finally:
        for hook in hooks:
            hook.remove()

    assert seen == ["before", "after"]


@pytest.mark.parametrize("step", [run_step, Shown.step])
def test_profiler_shows_the_step(step):
    optimizer = Shown([make_parameter()])

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(optimizer)

    names = [event.name for event in profiler.events()]
    assert names.count("Optimizer.step#Shown.step") == 1


def test_torch_does_not_wrap_it_once_more():
    before = Shown.step

    Shown([make_parameter()])

    assert Shown.step is before


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("differentiable", [True, False])
def test_wrapper_that_sets_the_grad_mode_is_left_out(differentiable, is_enabled):
    cls = watched(_use_grad_for_differentiable)
    optimizer = cls([make_parameter()], differentiable=differentiable)

    with torch.set_grad_enabled(is_enabled):
        assert run_step(optimizer, lambda: 7) == 7
        assert torch.is_grad_enabled() is is_enabled

    assert optimizer.called_by_us
    assert optimizer.had_grad is differentiable


def test_grad_mode_is_put_back_when_a_step_fails():
    optimizer = watched(_use_grad_for_differentiable)([make_parameter()])

    def closure():
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        run_step(optimizer, closure)

    assert torch.is_grad_enabled()


def renamed(step):
    """A wrapper around that of torch, which looks like it."""

    @functools.wraps(_use_grad_for_differentiable(step))
    def outer(*args):
        with torch.enable_grad():
            return step(*args)

    return outer


@pytest.mark.parametrize("wrap", [torch.enable_grad(), renamed])
def test_other_wrappers_are_called(wrap):
    optimizer = watched(wrap)([make_parameter()])

    with torch.no_grad():
        run_step(optimizer)

    assert not optimizer.called_by_us
    assert optimizer.had_grad


@pytest.mark.parametrize("cls", [SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_classes_of_torch_come_to_the_same(cls):
    ours, theirs = make_parameter(), make_parameter()
    short, long = cls([ours], lr=0.1), cls([theirs], lr=0.1)

    for _ in range(3):
        run_step(short)
        long.step()

    assert torch.equal(ours, theirs)


def test_step_of_a_subclass_that_looks_like_the_one_it_wraps_is_called():
    """`functools.wraps` takes over the marks that torch leaves on a function."""
    torch.optim.SGD([make_parameter()])  # from now on its class is marked

    looks_like_it: Any = functools.wraps(torch.optim.SGD.step)

    class Clipping(torch.optim.SGD):
        @looks_like_it
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.clamp_(-0.25, 0.25)
            return super().step(closure)

    parameter, twin = make_parameter(), make_parameter()
    for one in (parameter, twin):
        one.grad = torch.ones_like(one)

    run_step(Clipping([parameter], lr=1.0))
    Clipping([twin], lr=1.0).step()

    assert torch.equal(parameter, twin)
    assert torch.equal(parameter, make_parameter() - 0.25)


def test_step_that_a_program_has_replaced_in_a_class_is_called(monkeypatch):
    torch.optim.Adam([make_parameter()])
    seen = []
    original: Any = torch.optim.Adam.step

    @functools.wraps(original)
    def noted(*args):
        seen.append(args)
        return original(*args)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)

    run_step(torch.optim.Adam([make_parameter()]))

    assert len(seen) == 1
