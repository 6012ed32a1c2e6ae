"""Steps that all owners make, or none: whatever fails, and whoever dies."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import functions
import optim_functions
import probes
import retry_functions as fn
from gradwire import autograd, rpc
from gradwire.errors import NotRepeatable, PeerLostError, UsageError
from gradwire.optim import DistributedOptimizer
from gradwire.optim._local import LocalOptimizer
from gradwire.optim._transactions import Transactions
from on_worker import on_worker
from optim_functions import HERE, Model, assert_same

pytestmark = pytest.mark.multiproc

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Replaces": (optim_functions.Replaces, {"lr": 0.1}),
}


# ------------------------------------------------------------------------------- training


@pytest.mark.parametrize("owners", [("w1",), ("w1", "w2"), ("w1", "w0", "w2", "w1")])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_worker(0)
def test_training_equals_one_process(name, owners):
    optimizer_class, options = OPTIMIZERS[name]
    expected, found = Model(HERE, len(owners)), Model(owners)

    expected.train(expected.optimizer(optimizer_class, **options), range(4))
    found.train(found.optimizer(optimizer_class, two_phase=True, **options), range(4))

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_groups_that_come_later_take_part():
    expected, found = Model(HERE, 3), Model(("w1", "w2", "w1"))

    for model in (expected, found):
        options = {} if model.is_here else {"two_phase": True}
        early, late = model.parameters()[:6], model.parameters()[6:]
        optimizer = model.optimizer_of(early, torch.optim.Adam, lr=0.1, **options)
        model.train(optimizer, range(2))
        optimizer.add_param_group({"params": late, "lr": 0.2})
        model.train(optimizer, range(2, 4))

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_groups_that_come_later_are_where_the_others_are():
    model = Model()
    first, *rest = model.parameters()
    optimizer = model.optimizer_of([first], torch.optim.SGD, lr=0.1, two_phase=True)
    model.train(optimizer, range(2))

    optimizer.add_param_group({"params": rest})

    assert optimizer.recover() == 2


@pytest.mark.parametrize("owners", [("w0",), ("w0", "w1"), ("w0", "w1", "w2")])
@on_worker(0)
def test_trainers_do_not_wait_for_each_other_for_ever(owners):
    """All want the same parameters, of several owners, at once."""
    optim_functions.train_with_others(
        owners, ["w1", "w2", "w3"], torch.optim.SGD, 8, two_phase=True
    )


@on_worker(0)
def test_parts_of_an_optimizer_may_need_the_same_lock():
    """Of two parameters in one group of another trainer, one was added later."""
    model = Model(("w1",))
    other = model.optimizer(torch.optim.SGD, lr=0.1)
    first, *rest = model.parameters()
    optimizer = model.optimizer_of([first], torch.optim.SGD, lr=0.1, two_phase=True)
    optimizer.add_param_group({"params": rest})
    expected = Model(HERE, 1)

    model.train(optimizer, range(2))
    model.train(other, range(2, 3))

    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(3))
    assert_same(model.values(), expected.values())


# ------------------------------------------------------------------------------- failures


@on_worker(0)
def test_step_that_fails_on_one_owner_is_made_by_none():
    expected, found = Model(HERE), Model()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    expected.train(expected.optimizer(torch.optim.SGD, **options), range(3))
    optimizer = found.optimizer(FailsOnce, two_phase=True, **options)

    found.train(optimizer, range(1))
    rpc.rpc_sync("w2", fail_next)
    with pytest.raises(FloatingPointError, match="once") as caught:
        found.train(optimizer, range(7, 8))
    found.train(optimizer, range(1, 3))

    assert "undone on all of them" in vars(caught.value)["__notes__"][-1]
    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("num_owners", [1, 2])
@on_worker(0)
def test_step_that_is_interrupted_is_made_by_none(num_owners):
    owners = ("w1", "w2")[:num_owners]
    expected, found = Model(HERE, num_owners), Model(owners)
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), range(2))
    optimizer = found.optimizer(
        optim_functions.Pauses, lr=0.1, momentum=0.9, two_phase=True
    )
    for owner in owners:
        rpc.rpc_sync(owner, optim_functions.end_pause)
    found.train(optimizer, range(1))
    rpc.rpc_sync("w1", optim_functions.prepare_pause)

    def interrupt() -> None:
        rpc.rpc_sync("w1", optim_functions.wait_for_pause)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            found.train(optimizer, range(2, 3))
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    local = optimizer._shares[0].rref
    probes.wait_until(
        lambda: rpc.rpc_sync("w1", optim_functions.was_aborted, (local,)), "aborted"
    )
    rpc.rpc_sync("w1", optim_functions.end_pause)
    found.train(optimizer, range(1, 2))

    assert optimizer.committed_steps == 2
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_step_that_is_undone_does_not_disturb_graphs_of_others():
    expected, found = Model(HERE), Model()
    reference = expected.optimizer(torch.optim.SGD, lr=0.1)
    expected.train(reference, range(1), with_spare=True)
    failing = found.optimizer(optim_functions.FailsOn, "w2", two_phase=True)
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)

    with autograd.context() as ctx:
        loss = found.loss(0, with_spare=True)
        with pytest.raises(FloatingPointError):
            found.train(failing, range(7, 8), with_spare=True)
        ctx.backward(loss)
        optimizer.step(ctx)

    assert_same(found.values(), expected.values())


class FailsOnce(torch.optim.SGD):
    """Fails when it has changed everything."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if _fail_next:
            _fail_next.clear()
            raise FloatingPointError("once")


_fail_next: list[int] = []


def fail_next() -> None:
    _fail_next.append(1)


@pytest.mark.parametrize("num_owners", [1, 2])
@on_worker(0)
def test_hyperparameters_of_a_failed_step_come_with_the_next(num_owners):
    expected, found = Model(HERE, num_owners), Model(("w1", "w2")[:num_owners])
    reference = expected.optimizer(torch.optim.SGD, lr=0.1)
    optimizer = found.optimizer(FailsOnce, lr=0.1, two_phase=True)

    rpc.rpc_sync("w1", fail_next)
    for group in (*reference.param_groups, *optimizer.param_groups):
        group["lr"] = 0.5
    with pytest.raises(FloatingPointError):
        found.train(optimizer, range(7, 8))
    found.train(optimizer, range(1))
    expected.train(reference, range(1))

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_optimizer_that_decides_itself_is_refused():
    model = Model(("w1",))
    optimizer = model.optimizer(torch.optim.LBFGS, two_phase=True)

    with autograd.context() as ctx, pytest.raises(UsageError, match="cannot be undone"):
        optimizer.step(ctx, closure=lambda: model.loss(0))


# --------------------------------------------------------------------------------- deaths


def optimizer_of_all(optimizer_class: Any = torch.optim.Adam, **options: Any) -> Any:
    return DistributedOptimizer(
        optimizer_class, fn.all_references(), lr=0.05, **options
    )


def lose_owner(method: str) -> tuple[Exception, list[Tensor], list[Tensor]]:
    """The second owner dies in a method; the first one's parameters before and after."""
    optimizer = optimizer_of_all(two_phase=True)
    autograd.retry(fn.step_of(0, optimizer))
    before = rpc.rpc_sync(fn.FIRST, fn.values, args=(0,))
    rpc.rpc_sync(fn.SECOND, fn.die_in, args=(LocalOptimizer, method))
    try:
        autograd.retry(fn.step_of(1, optimizer), attempts=1)
    except Exception as error:
        return error, before, rpc.rpc_sync(fn.FIRST, fn.values, args=(0,))
    raise AssertionError("nobody has noticed")


@pytest.mark.chaos
@pytest.mark.parametrize("method", ["prepare", "commit"])
def test_owner_that_dies(make_cluster, method):
    cluster = make_cluster(4)
    cluster.run(0, autograd_is_there)

    error, before, after = cluster.run(0, lose_owner, method)
    cluster.wait_dead(3)

    _, expected = fn.expected_training(torch.optim.Adam, 2, lr=0.05)
    if method == "prepare":
        assert isinstance(error, PeerLostError)
        assert error.about == "w3"
        assert_same(after, before)
    else:
        assert isinstance(error, NotRepeatable)
        assert error.about == "w3"
        assert "made on all owners but 'w3'" in str(error)
        assert_same(after, expected[:3])


def autograd_is_there() -> None:
    assert autograd.is_available()


def die_as_driver() -> None:
    """Dies when all owners have prepared a step, and none has been told to commit."""
    optimizer = optimizer_of_all(two_phase=True)
    fn.die_in(Transactions, "_commit")
    autograd.retry(fn.step_of(0, optimizer))


def check_others_go_on() -> None:
    """Run by another trainer: nothing has changed, and nothing is locked."""
    _, expected = fn.expected_training(torch.optim.SGD, 0, lr=0.05)
    assert_same(fn.parameters_now(), expected)
    optimizer = optimizer_of_all(torch.optim.SGD, two_phase=True)
    autograd.retry(fn.step_of(0, optimizer))
    _, expected = fn.expected_training(torch.optim.SGD, 1, lr=0.05)
    assert_same(fn.parameters_now(), expected)


@pytest.mark.chaos
def test_abandoned_steps_end_by_themselves(make_cluster):
    cluster = make_cluster(5)
    cluster.start(4, die_as_driver)
    cluster.wait_dead(4)

    cluster.run(0, check_others_go_on)


# ------------------------------------------------------------------- steps that are retried


def train_with_retry(num_steps: int) -> tuple[list[float], list[Tensor]]:
    optimizer = optimizer_of_all()
    losses = [
        autograd.retry(fn.step_of(number, optimizer), backoff=0.01)
        for number in range(num_steps)
    ]
    return losses, fn.parameters_now()


@pytest.mark.chaos
def test_worker_that_dies_before_the_step_is_not_missed(make_cluster):
    """w1 is gone when owners look for gradients: the first had to do with it."""
    cluster = make_cluster(4)
    cluster.run(2, die_when_asked)
    training = cluster.start(0, train_with_retry, 3)
    cluster.wait_dead(1)
    cluster.restart(1)

    losses, parameters = training.result()

    expected = fn.expected_training(torch.optim.Adam, 3, lr=0.05)
    assert losses == expected[0]
    assert_same(parameters, expected[1])


def die_when_asked() -> None:
    """On the first owner: w1 is killed when the second step is about to be prepared."""
    original = LocalOptimizer.prepare
    times = []

    def prepare(self: Any, *args: Any) -> Any:
        times.append(1)
        if len(times) == 2:
            with pytest.raises(PeerLostError):
                rpc.rpc_sync(fn.BENDER, functions.kill_process)
            probes.wait_until(_has_no_context, "the context is dropped")
        return original(self, *args)

    setattr(LocalOptimizer, "prepare", prepare)  # noqa: B010


def _has_no_context() -> bool:
    return not autograd.get_debug_info()["contexts"]


@on_worker(0)
def test_grad_cannot_be_used_in_a_retried_step():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)

    with pytest.raises(UsageError, match=r"optimizer\.step\(\) without a context"):
        autograd.retry(lambda ctx: optimizer.step())


@on_worker(0)
def test_step_that_is_followed_by_a_loss_is_not_repeated():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    expected = Model(HERE)
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))

    def step(ctx: autograd.Context) -> None:
        ctx.backward(model.loss(0))
        optimizer.step(ctx)
        raise PeerLostError("somebody is lost", worker="w3")

    with pytest.raises(NotRepeatable, match=r"after optimizer\.step\(\)"):
        autograd.retry(step)

    assert_same(model.values(), expected.values())
