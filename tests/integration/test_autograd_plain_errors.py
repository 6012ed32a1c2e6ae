"""What goes wrong in plain backwards, and tensors whose gradients would be lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import functions
import probes
from autograd_functions import call, parameter
from bare_workers import join
from gradwire import autograd, rpc
from gradwire.autograd import _recorder
from gradwire.errors import EncodeError, NotInitialized, RemoteError
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ------------------------------------------------------- failures of a plain backward here


class FailsOnce(torch.autograd.Function):
    """Its first backward fails."""

    has_failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not FailsOnce.has_failed:
            FailsOnce.has_failed = True
            raise KeyError("only once")
        return gradient


def run_plain_backward(y: Tensor, x: Tensor, how: str) -> None:
    if how == "backward":
        y.sum().backward(retain_graph=True)
    else:
        torch.autograd.grad(y.sum(), x, retain_graph=True)


@pytest.mark.parametrize("how", ["backward", "grad"])
@pytest.mark.parametrize("has_context", [False, True])
@on_worker(0)
def test_plain_backward_that_failed_here_can_be_repeated_at_once(how, has_context):
    x = parameter("x")
    with autograd.context(accumulate="grad") if has_context else nullcontext() as ctx:
        for _ in range(20):
            FailsOnce.has_failed = False
            y = call("w1", handlers.affine, FailsOnce.apply(x * 1))
            with pytest.raises(KeyError, match="only once"):
                run_plain_backward(y, x, how)

            run_plain_backward(y, x, how)
            run_plain_backward(y, x, how)
            if ctx is not None:
                ctx.backward(y.sum(), retain_graph=True)


def shut_down_before_backward(url: str, has_context: bool) -> None:
    join(0, 1, url)
    with autograd.context() if has_context else nullcontext():
        loss = rpc.rpc_sync("w0", torch.mul, args=(torch.ones(2).requires_grad_(), 2))
        rpc.shutdown()
        with pytest.raises(NotInitialized, match=r"torch:mul|the context") as caught:
            loss.sum().backward()
    assert "'w0' has been shut down since" in str(caught.value)


@pytest.mark.parametrize("has_context", [False, True])
def test_backward_after_shutdown_says_so(bare, file_url, has_context):
    bare.run(0, shut_down_before_backward, file_url, has_context)


@on_worker(0)
def test_gradient_that_cannot_be_sent_leaves_nothing_behind():
    x = parameter("x")
    y = call("w1", handlers.affine, x * 1)
    batch = torch.ones(2, *y.shape, dtype=y.dtype)

    with pytest.raises(EncodeError):
        torch.autograd.grad(y, x, batch, is_grads_batched=True)


# ----------------------------------------------------------- a pass that is faster than us


def backward_of_what_came(x: Tensor) -> float:
    weight = torch.ones((), dtype=x.dtype, requires_grad=True)
    (x.sum() * weight).backward()
    return 1.0


@on_worker(0)
def test_callee_may_start_a_pass_before_the_caller_has_noted_its_call():
    sent = _recorder._CallNote.sent
    caller = threading.current_thread()

    def send_late(self: _recorder._CallNote) -> None:
        if threading.current_thread() is caller:
            # Until the pass has come, and whoever reads it has noted the call.
            unfinished = self._exchange.unfinished
            probes.wait_until(lambda: self not in unfinished, "the call is noted")
        sent(self)

    x = parameter("x")
    _recorder._CallNote.sent = send_late  # type: ignore[method-assign]
    try:
        assert call("w1", backward_of_what_came, x * 3) == 1.0
    finally:
        _recorder._CallNote.sent = sent  # type: ignore[method-assign]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


# ------------------------------------------------------------------ tensors of subclasses


class Wrapped(torch.Tensor):
    """Travels as any object does: torch pickles it, without its history."""


def wrap(x: Tensor) -> Tensor:
    return (x * 2).as_subclass(Wrapped)


def total(x: Tensor) -> Tensor:
    return x.as_subclass(torch.Tensor).sum()


@pytest.mark.parametrize("has_context", [False, True])
@on_worker(0)
def test_tensor_of_a_subclass_does_not_lose_its_gradient_in_silence(has_context):
    x = parameter("x")
    with autograd.context() if has_context else nullcontext():
        with pytest.raises(EncodeError, match=r"class Wrapped.*as_subclass"):
            call("w1", total, wrap(x))
        with pytest.raises(RemoteError, match=r"class Wrapped.*as_subclass"):
            call("w1", wrap, x)

        with torch.no_grad():
            assert torch.equal(call("w1", total, wrap(x)), total(wrap(x)))
            assert torch.equal(call("w1", wrap, x), wrap(x))
        assert call("w1", total, wrap(x).detach()) == total(wrap(x))


class OwnParameter(torch.nn.Parameter):
    """As libraries have them."""


@on_worker(0)
def test_module_with_parameters_of_a_subclass_can_be_sent():
    layer = torch.nn.Linear(2, 2)
    layer.weight = OwnParameter(layer.weight.detach())

    copy = call("w1", functions.echo, layer)

    assert torch.equal(copy.weight, layer.weight)
    assert copy.weight.is_leaf
    assert copy.weight.requires_grad
