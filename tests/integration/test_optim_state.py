"""Schedulers and states of distributed optimizers: the same as torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import optim_functions as fn
from gradwire import autograd
from on_worker import on_worker
from optim_functions import (
    HERE,
    OPTIMIZERS,
    Model,
    assert_same,
    two_groups,
)

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.nothing_stays(request)


# ----------------------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(
        o, [lambda n: 1 / (n + 1), lambda n: n]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@on_worker(0)
def test_schedulers_of_torch_drive_it(name):
    expected, found = Model(HERE), Model()
    lrs = []

    for model in (expected, found):
        optimizer = model.optimizer_of(
            two_groups(model), torch.optim.SGD, lr=0.1, momentum=0.9
        )
        scheduler = SCHEDULERS[name](optimizer)
        model.train(optimizer, range(5), fn.stepper(scheduler))
        lrs.append(scheduler.get_last_lr())

    assert_same(found.values(), expected.values())
    assert lrs[0] == lrs[1]


@on_worker(0)
def test_scheduler_that_looks_at_the_loss_drives_it():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer(torch.optim.Adam, lr=0.5)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        model.train(optimizer, range(6), scheduler.step)

    assert optimizer.param_groups[0]["lr"] < 0.5
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_scheduler_that_writes_into_a_tensor_drives_it():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer(torch.optim.Adam, lr=torch.tensor(0.1))
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        model.train(optimizer, range(3), fn.stepper(scheduler))

    assert_same(found.values(), expected.values())


# ---------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_worker(0)
def test_state_is_that_of_one_process_and_can_be_loaded_midway(name):
    optimizer_class, options = OPTIMIZERS[name]
    expected, found = Model(HERE), Model(("w1", "w0"))
    states = []

    for model in (expected, found):
        optimizer = model.optimizer_of(two_groups(model), optimizer_class, **options)
        model.train(optimizer, range(3))
        optimizer.param_groups[0]["lr"] = 0.03  # not sent by any step
        states.append(pickle.loads(pickle.dumps(optimizer.state_dict())))
        model.train(optimizer, range(3, 5))  # forgotten, but it must not change states
        again = model.optimizer_of(two_groups(model), optimizer_class, **options)
        again.load_state_dict(copy.deepcopy(states[-1]))  # torch keeps what it is given
        assert again.param_groups[0]["lr"] == 0.03
        model.train(again, range(5, 8), with_spare=True)

    assert_same(states[1], states[0])
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_state_does_not_change_with_later_steps():
    model = Model(("w0", "w1"))
    optimizer = model.optimizer(torch.optim.Adam, lr=0.1)
    model.train(optimizer, range(1))
    state = optimizer.state_dict()
    copied = pickle.loads(pickle.dumps(state))

    model.train(optimizer, range(1, 3))

    assert_same(state, copied)


@on_worker(0)
def test_asking_for_the_state_leaves_the_owners_alone():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(2))
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)
    found.train(optimizer, range(1))

    optimizer.param_groups[0]["lr"] = 0.7
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.1
    found.train(optimizer, range(1, 2))

    assert state["param_groups"][0]["lr"] == 0.7
    assert_same(found.values(), expected.values())


@on_worker(0)
def test_state_of_one_process_can_be_loaded_and_given_back():
    local, model = Model(HERE), Model()
    theirs = local.optimizer(torch.optim.Adam, lr=0.01)
    local.train(theirs, range(3))
    state = theirs.state_dict()
    # Only the order of the numbers counts.
    numbers = state["param_groups"][0]["params"]
    names = {number: 10 * number + 3 for number in numbers}
    strange = {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [{**state["param_groups"][0], "params": list(names.values())}],
    }
    ours = model.optimizer(torch.optim.Adam, lr=0.5)

    ours.load_state_dict(strange)

    assert_same(ours.state_dict(), state)
    theirs.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["lr"] == 0.01


@on_worker(0)
def test_state_with_other_groups_is_refused():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    other = model.optimizer_of(two_groups(model), torch.optim.SGD, lr=0.1)

    with pytest.raises(ValueError, match=r"expected groups of \[6\] .*found \[3, 3\]"):
        optimizer.load_state_dict(other.state_dict())


@on_worker(0)
def test_hyperparameter_that_goes_back_after_a_step_that_failed_reaches_all_owners():
    model = Model()
    optimizer = model.optimizer(fn.FailsWhenFast, lr=0.1)
    (group,) = optimizer.param_groups
    group["lr"] = 10.0
    with pytest.raises(FloatingPointError), autograd.context() as ctx:
        ctx.backward(model.loss(0))
        optimizer.step(ctx)

    group["lr"] = 0.1
    before = model.values()
    with autograd.context() as ctx:
        ctx.backward(model.loss(1))
        grads = [g for layer in model.ask("grads_in", ctx) for g in layer]
        optimizer.step(ctx)

    expected = [
        value if grad is None else value - 0.1 * grad
        for value, grad in zip(before, grads, strict=True)
    ]
    torch.testing.assert_close(model.values(), expected)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
