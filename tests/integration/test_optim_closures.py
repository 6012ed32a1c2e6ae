"""Closures of distributed optimizers, and what becomes of errors."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import optim_functions as fn
import probes
from gradwire import autograd, rpc
from gradwire.errors import (
    PeerLostError,
    RemoteError,
    UsageError,
)
from gradwire.optim import OwnersFailed
from on_worker import on_worker
from optim_functions import (
    HERE,
    Model,
    assert_same,
    step_in_context,
)

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.nothing_stays(request)


# ------------------------------------------------------------------------------- closures


@on_worker(0)
def test_closure_is_evaluated_once_with_grad_and_its_loss_returned():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)
    losses = []

    with autograd.context() as ctx, torch.no_grad():

        def closure() -> Tensor:
            losses.append(found.loss(0))
            ctx.backward(losses[-1])
            return losses[-1]

        returned = optimizer.step(ctx, closure=closure)

    assert len(losses) == 1
    assert returned is losses[0]
    assert_same(found.values(), expected.values())


def steps_with_closure(
    model: Model, optimizer: Any, num_steps: int, *, in_context: bool = False
) -> list[float]:
    """A few steps; returns the losses of all evaluations, and those returned."""
    losses: list[float] = []
    for number in range(num_steps):
        with autograd.context() if in_context else contextlib.nullcontext() as ctx:

            def closure(ctx: Any = ctx, number: int = number) -> Tensor:
                loss = model.loss(number)
                if ctx is None:
                    optimizer.zero_grad()
                    loss.backward()
                else:
                    optimizer.zero_grad(context_id=ctx)
                    ctx.backward(loss)
                losses.append(loss.item())
                return loss

            if ctx is None:
                losses.append(optimizer.step(closure=closure).item())
            else:
                losses.append(optimizer.step(ctx, closure).item())
    return losses


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@on_worker(0)
def test_lbfgs_on_one_owner_equals_one_process(search, in_context):
    expected, found = Model(HERE), Model(("w1", "w1"))
    options: Any = {"lr": 0.5, "max_iter": 5, "line_search_fn": search}
    theirs = expected.optimizer(torch.optim.LBFGS, **options)
    ours = found.optimizer(torch.optim.LBFGS, **options)

    expected_losses = steps_with_closure(expected, theirs, 2)
    losses = steps_with_closure(found, ours, 2, in_context=in_context)

    assert len(losses) > 6
    assert losses == expected_losses
    assert_same(found.values(), expected.values())
    assert_same(ours.state_dict()["state"], theirs.state_dict()["state"])


@pytest.mark.parametrize("in_context", [False, True])
@on_worker(0)
def test_optimizer_of_ones_own_may_evaluate_the_closure_twice(in_context):
    expected, found = Model(HERE), Model(("w1", "w1"))
    theirs = expected.optimizer(fn.Ascent, lr=0.1)
    ours = found.optimizer(fn.Ascent, lr=0.1)

    expected_losses = steps_with_closure(expected, theirs, 3)
    losses = steps_with_closure(found, ours, 3, in_context=in_context)

    assert losses == expected_losses
    assert len(losses) == 9
    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", [fn.AscentFromZero, fn.Shrinks, fn.Moves])
@on_worker(0)
def test_optimizer_of_ones_own_may_put_others_in_the_place_of_what_it_gets(
    kind, in_context
):
    """Other gradients or none, and other memory: a closure finds what it has left."""
    expected, found = Model(HERE), Model(("w1", "w1"))
    theirs = expected.optimizer(kind, lr=0.1)
    ours = found.optimizer(kind, lr=0.1)
    for number in range(3):
        theirs.zero_grad()

        def closure_here(number: int = number) -> Tensor:
            loss = expected.loss(number)
            loss.backward()
            return loss

        expected_loss = theirs.step(closure_here)
        with autograd.context() if in_context else contextlib.nullcontext() as ctx:
            if ctx is None:
                ours.zero_grad()

            def closure(ctx: Any = ctx, number: int = number) -> Tensor:
                loss = found.loss(number)
                if ctx is None:
                    loss.backward()
                else:
                    ctx.backward(loss)
                return loss

            assert ours.step(ctx, closure=closure).item() == expected_loss.item()
        if not in_context:
            theirs_left = [p.grad for p in expected.parameters()]
            assert_same(found.grads(), theirs_left)

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_optimizer_of_ones_own_may_replace_gradients_without_a_closure():
    expected, found = Model(HERE), Model()
    theirs = expected.optimizer(fn.Shrinks, lr=0.1)
    ours = found.optimizer(fn.Shrinks, lr=0.1)
    for number in range(2):  # the second adds to what the first has left
        for model, optimizer in ((expected, theirs), (found, ours)):
            model.loss(number).backward()
            optimizer.step()

    assert_same(found.values(), expected.values())
    assert_same(found.grads(), [p.grad for p in expected.parameters()])


@on_worker(0)
def test_step_returns_what_the_optimizer_makes_of_the_loss():
    model = Model(("w1",))
    expected = model.loss(0).item() + 1
    optimizer = model.optimizer(fn.ReturnsNumber, lr=0.1)

    assert step_in_context(model, optimizer, 0) == expected


@pytest.mark.parametrize("in_context", [False, True])
@on_worker(0)
def test_step_in_the_closure_of_the_same_optimizer_is_refused(in_context):
    model = Model(("w1",))
    optimizer = model.optimizer(fn.Ascent, lr=0.1)
    with autograd.context() as ctx:
        inner = partial(optimizer.step, ctx if in_context else None)

        with pytest.raises(UsageError, match="of the same optimizer"):
            step_in_context(model, optimizer, 0, inner)

    step_in_context(model, optimizer, 0)


@on_worker(0)
def test_closure_may_call_other_optimizers_of_the_same_parameters():
    expected, found = Model(HERE, 1), Model(("w1",))
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))
    optimizer = found.optimizer(fn.MeetsInClosure, lr=0.1)
    other = found.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    found.ask("set_grads", 3.0)

    def use_other() -> None:
        other.load_state_dict(other.state_dict())
        other.zero_grad()

    step = threading.Thread(
        target=step_in_context, args=(found, optimizer, 0, use_other)
    )
    step.daemon = True
    step.start()
    step.join(probes.LIMIT_S)

    assert not step.is_alive()
    assert found.grads() == [None] * 3
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_lbfgs_on_two_owners_is_refused():
    model = Model()
    optimizer = model.optimizer(torch.optim.LBFGS)

    with pytest.raises(UsageError, match=r"one worker.*'w1', 'w2'"):
        optimizer.step(closure=lambda: model.loss(0))


@on_worker(0)
def test_lbfgs_without_closure_is_refused():
    optimizer = Model(("w1",)).optimizer(torch.optim.LBFGS)

    with pytest.raises(TypeError, match="LBFGS needs a closure"):
        optimizer.step()


@on_worker(0)
def test_closure_is_evaluated_on_the_thread_that_called():
    model = Model(("w1",))
    optimizer = model.optimizer(torch.optim.LBFGS, max_iter=3)
    threads = set()

    def closure() -> Tensor:
        threads.add(threading.get_ident())
        optimizer.zero_grad()
        loss = model.loss(0)
        loss.backward()
        return loss

    optimizer.step(closure=closure)

    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("error_class", [ZeroDivisionError, KeyboardInterrupt])
@on_worker(0)
def test_error_of_a_closure_comes_out_of_the_step_and_blocks_nobody(error_class):
    model = Model(("w1",))
    optimizer = model.optimizer(torch.optim.LBFGS, max_iter=5)
    other = model.optimizer(torch.optim.SGD, lr=0.1)
    error = error_class("no more")
    num_calls = 0

    def closure() -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise error
        loss = model.loss(0)
        loss.backward()
        return loss

    with pytest.raises(error_class) as caught:
        optimizer.step(closure=closure)
    assert caught.value is error
    other.step()
    del caught
    error.__traceback__ = None


# --------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("at_once", [False, True])
@on_worker(0)
def test_error_on_one_owner_keeps_its_type(at_once):
    model = Model()

    with pytest.raises(FloatingPointError, match="it cannot") as caught:
        run_one_step(model, fn.FailsOn, "w2", at_once=at_once)

    assert isinstance(caught.value, RemoteError)
    assert not isinstance(caught.value, OwnersFailed)
    assert caught.value.worker == "w2"


def run_one_step(model: Model, *args: Any, **kwargs: Any) -> None:
    optimizer = model.optimizer(*args, **kwargs)
    with autograd.context() as ctx:
        ctx.backward(model.loss(0))
        optimizer.step(ctx)


@pytest.mark.parametrize("at_once", [False, True])
@on_worker(0)
def test_errors_on_all_owners_are_all_there(at_once):
    model = Model(("w1", "w2", "w3"))

    with pytest.raises(FloatingPointError) as caught:
        run_one_step(model, fn.FailsOn, "w1 w3", at_once=at_once)

    error = caught.value
    assert isinstance(error, OwnersFailed)
    assert isinstance(error, RemoteError)
    assert list(error.failures) == ["w1", "w3"]
    workers = [getattr(failure, "worker", "") for failure in error.failures.values()]
    assert workers == ["w1", "w3"]
    assert "2 owners failed" in str(error)
    assert str(error).count("FloatingPointError: it cannot") >= 2
    assert "on worker 'w1'" in str(error)
    assert "on worker 'w3'" in str(error)


@on_worker(0)
def test_errors_of_different_types_are_one_of_the_first():
    model = Model()

    with pytest.raises(FloatingPointError) as caught:
        run_one_step(model, fn.FailsElsewhere, lr=0.1)

    assert not isinstance(caught.value, KeyError)
    assert isinstance(caught.value, OwnersFailed)
    assert isinstance(caught.value.failures["w2"], KeyError)


@on_worker(0)
def test_several_errors_survive_pickling_and_calls():
    with pytest.raises(FloatingPointError) as caught:
        fn.fail_in_step()
    loaded: Any = pickle.loads(pickle.dumps(caught.value))
    assert type(loaded) is type(caught.value)
    assert isinstance(loaded, OwnersFailed)
    assert list(loaded.failures) == ["w1", "w2"]

    with pytest.raises(FloatingPointError) as sent:
        rpc.rpc_sync("w3", fn.fail_in_step)
    assert isinstance(sent.value, OwnersFailed)
    assert list(sent.value.failures) == ["w1", "w2"]


@on_worker(0)
def test_owners_that_do_not_fail_make_their_step():
    expected, found = Model(HERE), Model()
    before = found.values()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.5), range(1))

    with pytest.raises(FloatingPointError):
        run_one_step(found, fn.FailsOn, "w2")

    assert_same(found.values(), expected.values()[:3] + before[3:])


@on_worker(0)
def test_hyperparameters_are_ours_after_a_state_that_one_owner_has_refused():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))
    optimizer = found.optimizer(fn.FailsToLoad, lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5

    with pytest.raises(FloatingPointError):
        optimizer.load_state_dict(state)

    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    found.train(optimizer, range(1))
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_step_after_a_failed_one_works():
    model = Model(("w1",))
    optimizer = model.optimizer(fn.Fails, lr=0.1)
    other = model.optimizer(torch.optim.SGD, lr=0.1)

    with pytest.raises(FloatingPointError):
        model.train(optimizer, range(1))

    model.train(other, range(1))


def test_lost_owner_is_named_and_the_others_step(make_cluster):
    cluster = make_cluster(3)
    cluster.run(0, prepare_for_loss)
    cluster.kill(2)
    cluster.run(0, step_after_loss)


def prepare_for_loss() -> None:
    model = Model()
    _kept[:] = [model, model.optimizer(torch.optim.SGD, lr=0.1)]


def step_after_loss() -> None:
    model, optimizer = _kept
    rpc.rpc_sync("w1", fn.set_grads, args=(model.layers[0], 1.0))
    before = model.layers[0].rpc_sync().values()
    with pytest.raises(PeerLostError, match="w2"):
        optimizer.step()
    after = model.layers[0].rpc_sync().values()
    assert_same(after, [value - 0.1 for value in before])
    _kept.clear()


_kept: list[Any] = []
