"""Backwards inside of other things: handlers, hooks, failed passes, ``torch.func``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import functions
import probes
from autograd_functions import call, parameter
from gradwire import autograd
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# -------------------------------------------------------- a part that is aborted and slow


class _Slow(torch.autograd.Function):
    """Its backward waits to be let on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        functions.block_until_set("go on")
        return gradient


class _FailsMeanwhile(torch.autograd.Function):
    """Its backward fails when the slow one has begun."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        call("w1", functions.block_until_set, "go on:entered")
        raise ValueError("meanwhile")


def call_then_be_slow(x: Tensor) -> Any:
    return _Slow.apply(call("w3", handlers.affine, x))


def fail_meanwhile(x: Tensor) -> Any:
    return _FailsMeanwhile.apply(x)


def weight() -> Tensor:
    return parameter("weight").detach()


def grad_of_weight() -> Tensor | None:
    return parameter("weight").grad


def is_idle() -> bool:
    return not any(autograd.get_debug_info().values())


@on_worker(0)
def test_aborted_part_starts_no_pass_over_the_calls_that_it_made():
    x = parameter("x")
    slow, failing = call("w1", call_then_be_slow, x), call("w2", fail_meanwhile, x)
    with pytest.raises(ValueError, match="meanwhile"):
        (slow.sum() + failing.sum()).backward()
    del slow, failing
    probes.wait_until(is_idle, "the others were told of the failure")
    call("w1", functions.set_event, "go on")

    probes.wait_until(lambda: call("w1", is_idle), "the slow part has ended")
    assert call("w3", grad_of_weight) is None


# ----------------------------------------------------------------------- inside a handler


def backward_here(ctx: int, x: Tensor) -> None:
    autograd.backward(ctx, [(x * parameter("bias")).sum()])


def backward_there(to: str, ctx: int, x: Tensor) -> None:
    call(to, backward_here, ctx, x * parameter("weight"))


@pytest.mark.parametrize("route", ["to oneself", "and back"])
@on_worker(0)
def test_handler_runs_a_pass_while_its_own_caller_waits(route):
    x = parameter("x")
    with autograd.context() as ctx:
        if route == "to oneself":
            call("w0", backward_here, int(ctx), x)
        else:
            call("w1", backward_there, "w0", int(ctx), x)
        found = autograd.get_gradients(ctx)

    expected = parameter("bias").detach()
    if route == "and back":
        expected = expected * call("w1", weight)
    assert torch.equal(found[x], expected)


def async_call_then_backward(ctx: int, x: Tensor) -> bool:
    forgotten = fn.call_async("w2", handlers.wait_then, "gate", handlers.affine, x)
    timer = threading.Thread(
        target=fn.outside, args=(call, "w2", functions.set_event, "gate")
    )
    timer.start()
    autograd.backward(ctx, [(x * parameter("bias")).sum()])
    timer.join()
    return forgotten.done()


@on_worker(0)
def test_handler_waits_for_the_calls_that_it_made_itself():
    with autograd.context() as ctx:
        assert call("w1", async_call_then_backward, int(ctx), parameter("x"))


# ------------------------------------------------------------ inside of another backward


class _RunsBackward(torch.autograd.Function):
    """Its backward computes again, with a call in it, and runs a backward of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, remember: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.remember = remember
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            copy = x.detach().requires_grad_()
            torch.autograd.backward(call("w1", handlers.affine, copy), gradient)
        ctx.remember(copy.grad)
        return gradient, None


@pytest.mark.parametrize("outer", ["backward", "grad"])
@on_worker(0)
def test_backward_inside_of_another_one_fills_grad_everywhere(outer):
    def program() -> None:
        inner: list[Tensor] = []
        x = parameter("x")
        loss = _RunsBackward.apply(x, inner.append).sum()
        if outer == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, x)
        x.grad = inner[0]

    program()
    found = fn.fetch_grad()

    fn.assert_same(found, fn.in_one_process(program).gradients)


# --------------------------------------------------------------------- inside torch.func


@pytest.mark.parametrize("is_recorded", [False, True])
@on_worker(0)
def test_values_are_fetched_inside_a_transform(is_recorded):
    outer = parameter("x") if is_recorded else parameter("x").detach()

    def program(x: Tensor) -> Tensor:
        return (x * call("w1", handlers.linear, outer).detach()).sum()

    found = torch.func.grad(program)(torch.ones_like(outer))

    expected = call("w1", handlers.linear, outer.detach())
    assert torch.equal(found, expected)


@on_worker(0)
def test_thread_inside_a_transform_does_not_spoil_what_others_receive():
    x = parameter("x").detach()
    expected = call("w1", handlers.linear, x)
    problems: list[BaseException] = []

    def call_often() -> None:
        try:
            for _ in range(50):
                assert torch.equal(call("w1", handlers.linear, x), expected)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=call_often)

    def program(y: Tensor) -> Tensor:
        thread.start()
        while thread.is_alive():
            call("w1", functions.add, 2, 2)
        return y.sum()

    torch.func.grad(program)(torch.ones(2))
    thread.join()

    assert not problems
