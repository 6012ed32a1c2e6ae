"""The distributed optimizer: the same as torch's in one process, to the last bit."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import optim_functions as fn
import probes
from gradwire import autograd, rpc
from gradwire.errors import (
    ContextReleased,
    UnknownContext,
    UsageError,
)
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, _local, clip_grad_norm_
from gradwire.optim._at_once import step_at_once
from gradwire.optim._locks import find_locks
from gradwire.rpc import RRef
from gradwire.torch_compat import optimizer as drop_in
from on_worker import on_worker
from optim_functions import (
    HERE,
    OPTIMIZERS,
    SGD_WITH_ALL,
    Layer,
    Model,
    assert_same,
    step_in_context,
    two_groups,
)

pytestmark = pytest.mark.multiproc

BOTH = (HERE, fn.DEFAULT_OWNERS)


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.nothing_stays(request)


# ------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_worker(0)
def test_training_in_contexts_equals_one_process(name):
    optimizer_class, options = OPTIMIZERS[name]
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        model.train(model.optimizer(optimizer_class, **options), range(4))

    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("options", [{"lr": 0.1}, SGD_WITH_ALL])
@on_worker(0)
def test_steps_at_once_equal_one_process(options):
    expected, found = Model(HERE), Model(("w0", "w0"))
    made: list[bool] = []

    def noted(*args):
        made.append(step_at_once(*args))
        return made[-1]

    with patch.object(_local, "step_at_once", noted):
        for model in (expected, found):
            optimizer = model.optimizer(torch.optim.SGD, **options)
            model.train(optimizer, range(4), with_spare=True)

    assert made == ["momentum" not in options, True, True, True]
    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("owners", [("w1",), ("w0",), ("w1", "w0", "w2", "w1")])
@on_worker(0)
def test_parameters_may_live_on_any_workers(owners):
    expected, found = Model(HERE, len(owners)), Model(owners)

    for model in (expected, found):
        model.train(model.optimizer(torch.optim.Adam, lr=0.01), range(3))

    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("mode", ["plain", "plain in a context", "context with .grad"])
@on_worker(0)
def test_training_with_grad_equals_one_process(mode):
    expected, found = Model(HERE), Model()
    optimizer = expected.optimizer(torch.optim.SGD, **SGD_WITH_ALL)
    expected.train(optimizer, range(3))
    optimizer = found.optimizer(torch.optim.SGD, **SGD_WITH_ALL)

    for number in range(3):
        optimizer.zero_grad()
        if mode == "plain":
            found.loss(number).backward()
            optimizer.step()
        elif mode == "plain in a context":
            with autograd.context():
                found.loss(number).backward()
                optimizer.step()
        else:
            with autograd.context(accumulate="grad") as ctx:
                ctx.backward(found.loss(number))
                optimizer.step(ctx)

    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("set_to_none", [True, False])
@on_worker(0)
def test_zero_grad_clears_grad_on_all_owners(set_to_none):
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model.loss(0).backward()
        optimizer.zero_grad(set_to_none)

    assert any(grad is None for grad in expected.grads())
    assert all(grad is None for grad in expected.grads()) == set_to_none
    assert_same(found.grads(), expected.grads())


@on_worker(0)
def test_zero_grad_of_a_context_clears_what_it_has_collected():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1, 2))
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)

    with autograd.context() as ctx:
        ctx.backward(found.loss(0))
        optimizer.zero_grad(context_id=ctx)
        ctx.backward(found.loss(1))
        optimizer.step(ctx)

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_step_works_on_a_thread_that_is_not_in_the_context():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)

    with autograd.context() as ctx:
        ctx.backward(found.loss(0))
        run_in_thread(optimizer.step, ctx)

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_step_hooks_of_torch_are_called():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))

    model.train(optimizer, range(1))

    assert seen == ["before", "after"]


# ------------------------------------------------------ whose gradients, and which memory


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_worker(0)
def test_parameter_without_gradient_is_left_alone(name):
    optimizer_class, options = OPTIMIZERS[name]
    expected, found = Model(HERE), Model()
    found.ask("set_grads", 7.0)  # stale

    for model in (expected, found):
        optimizer = model.optimizer(optimizer_class, **options)
        # Momentum first, so that there is something that could move it.
        model.train(optimizer, range(2), with_spare=True)
        model.train(optimizer, range(2, 4))
        state = optimizer.state_dict()["state"]
        if model is expected:
            expected_state = state

    assert_same(found.values(), expected.values())
    assert_same(state, expected_state)


@on_worker(0)
def test_owner_without_part_in_the_context_is_left_alone():
    model, other = Model(("w1",)), Model(("w2",))
    before = other.values()
    rrefs = model.parameters() + other.parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1, weight_decay=0.1)

    with autograd.context() as ctx:
        ctx.backward(model.loss(0))
        run_in_thread(optimizer.step, ctx)

    assert_same(other.values(), before)


@on_worker(0)
def test_grad_of_others_is_neither_read_nor_changed():
    expected, found = Model(HERE), Model()
    expected.train(expected.optimizer(torch.optim.SGD, **SGD_WITH_ALL), range(2))
    found.ask("set_grads", 7.0)
    before = found.grads()

    found.train(found.optimizer(torch.optim.SGD, **SGD_WITH_ALL), range(2))

    assert_same(found.values(), expected.values())
    assert_same(found.grads(), before)


@on_worker(0)
def test_backward_of_another_trainer_during_a_step_is_not_lost():
    expected, found = Model(HERE, 1), Model(("w1",))
    layer = found.layers[0]
    add_plainly(expected.layers[0], 5)
    expected_grads = expected.grads()
    expected.ask("zero_grad")
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))
    optimizer = found.optimizer(fn.Pauses, lr=0.1)
    rpc.rpc_sync("w1", fn.prepare_pause)

    with autograd.context() as ctx:
        ctx.backward(found.loss(0))
        step = threading.Thread(target=optimizer.step, args=(ctx,))
        step.start()
        rpc.rpc_sync("w1", fn.wait_for_pause)
        rpc.rpc_sync("w3", fn.add_to_grad, args=(layer, 5))
        rpc.rpc_sync("w1", fn.end_pause)
        step.join()

    assert_same(found.values(), expected.values())
    assert_same(found.grads(), expected_grads)


def add_plainly(layer: Layer, number: int) -> None:
    layer(fn.data_of(number)).sum().backward()


@on_worker(0)
def test_step_follows_parameters_that_get_other_memory():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer(torch.optim.SGD, **SGD_WITH_ALL)
        model.train(optimizer, range(2))
        model.ask("move")
        model.train(optimizer, range(2, 4))

    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("change", ["turn", "cut"])
@on_worker(0)
def test_step_follows_parameters_that_get_another_form(change):
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model.train(optimizer, range(2), with_spare=True)
        model.ask(change)
        model.train(optimizer, range(2, 4), with_spare=True)

    assert_same(found.values(), expected.values())


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("size", [1, 3])
@on_worker(0)
def test_gradient_from_before_a_parameter_has_changed_its_form_is_refused(cls, size):
    first, second = (torch.ones(n, requires_grad=True) for n in (2, size))
    optimizer = DistributedOptimizer(cls, [RRef(first), RRef(second)], lr=0.1)
    (first.sum() + second.sum()).backward()
    second.data = torch.ones(4)
    versions = [p._version for p in (first, second)]

    with pytest.raises(RuntimeError, match="gradient of size"):
        optimizer.step()

    assert_same([first.detach(), second.detach()], [torch.ones(2), torch.ones(4)])
    assert [p._version for p in (first, second)] == versions


@on_worker(0)
def test_optimizer_may_give_parameters_other_memory():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        model.train(model.optimizer(fn.Replaces, lr=0.1), range(3))

    assert_same(found.values(), expected.values())


@on_worker(0)
def test_graph_that_a_step_makes_invalid_is_noticed():
    model = Model(("w1",))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    loss = model.loss(0, with_spare=True)

    model.train(optimizer, range(1), with_spare=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_worker(0)
def test_graph_that_a_closure_has_made_is_noticed():
    model = Model(("w1",))
    optimizer = model.optimizer(fn.Ascent, lr=0.1)
    losses: list[Tensor] = []

    with autograd.context() as ctx:

        def closure() -> Tensor:
            # The first one is no good in the second evaluation any more.
            if losses:
                with pytest.raises(RuntimeError, match="modified by an inplace"):
                    ctx.backward(losses[0])
            losses.append(model.loss(0, with_spare=True))
            ctx.backward(losses[-1], retain_graph=True)
            return losses[-1]

        optimizer.step(ctx, closure)

    assert len(losses) == 2


# ----------------------------------------------------------------------- several trainers


@pytest.mark.parametrize("num_owners", [1, 2])
def test_trainers_at_once_lose_no_step(cluster, num_owners):
    owners = [f"w{rank + 1}" for rank in range(num_owners)]
    cluster.run(0, fn.train_with_others, owners, ["w0", "w3"], torch.optim.SGD, 8)


def test_steps_of_trainers_on_shared_parameters_do_not_overlap(cluster):
    cluster.run(0, fn.train_with_others, ["w1"], ["w0", "w3"], fn.Meets, 1)

    assert cluster.run(1, fn.take_most_inside) == 1


@on_worker(0)
def test_steps_on_other_parameters_do_not_wait():
    models = [Model(("w1",)), Model(("w1",))]
    threads = [
        threading.Thread(
            target=model.train,
            args=(model.optimizer(fn.MeetsForSure, lr=0.1), range(1)),
        )
        for model in models
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert rpc.rpc_sync("w1", fn.take_most_inside) == 2


@on_worker(0)
def test_steps_with_closures_on_several_threads_do_not_overlap():
    expected, found = Model(HERE, 1), Model(("w1",))
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(2))
    optimizer = found.optimizer(fn.MeetsInClosure, lr=0.1)
    second = threading.Thread(target=step_in_context, args=(found, optimizer, 1))

    def let_another_come() -> None:
        second.start()
        rpc.rpc_sync("w1", fn.wait_for_another)

    step_in_context(found, optimizer, 0, let_another_come)
    second.join(probes.LIMIT_S)

    assert not second.is_alive()
    assert rpc.rpc_sync("w1", fn.take_most_inside) == 1
    assert_same(found.values(), expected.values())


def test_groups_share_a_lock_if_they_share_a_parameter():
    a, b, c, d = tensors = [torch.zeros(1) for _ in range(4)]
    first = find_locks([[a, b], [c]])
    second = find_locks([[c, d], [b]])
    third = find_locks([[d]])

    assert len(first) == 2
    assert set(second) & set(first) == set(first)
    assert len(second) == 3
    assert set(third) <= set(second)
    assert not set(third) & set(first)
    # Everyone takes them in the same order.
    numbers = [lock.number for lock in second]
    assert numbers == sorted(numbers)
    del tensors


def test_locks_go_with_the_optimizers_that_hold_them():
    parameter = torch.zeros(1)
    locks = [weakref.ref(lock) for lock in find_locks([[parameter]])]

    assert [lock() for lock in locks] == [None]
    assert len(find_locks([[parameter]])) == 1


# --------------------------------------------------------------------------------- groups


@on_worker(0)
def test_groups_have_their_own_hyperparameters():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer_of(two_groups(model), torch.optim.SGD, lr=0.1)
        model.train(optimizer, range(3), with_spare=True)

    assert_same(found.values(), expected.values())
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1]
    assert optimizer.defaults["lr"] == 0.1


@on_worker(0)
def test_groups_given_are_not_changed():
    model = Model()
    groups = two_groups(model)
    keys = [set(group) for group in groups]

    model.optimizer_of(groups, torch.optim.SGD, lr=0.1)

    assert [set(group) for group in groups] == keys


@on_worker(0)
def test_group_can_be_added_later():
    expected, found = Model(HERE), Model(("w1", "w2"))
    states = []

    for model in (expected, found):
        parameters = model.parameters()
        optimizer = model.optimizer_of(parameters[:2], torch.optim.Adam, lr=0.01)
        model.train(optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.03})
        model.train(optimizer, range(2, 4), with_spare=True)
        states.append(optimizer.state_dict())

    assert_same(found.values(), expected.values())
    assert_same(states[1], states[0])


@on_worker(0)
def test_parameter_cannot_be_added_twice():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)

    with pytest.raises(ValueError, match="twice"):
        optimizer.add_param_group({"params": model.parameters()[:1]})
    assert len(optimizer.param_groups) == 1
    model.train(optimizer, range(1))


@pytest.mark.parametrize(
    "value", [[torch.ones(2)], {"mask": torch.ones(2)}, numpy.ones(2)]
)
@on_worker(0)
def test_hyperparameter_may_be_what_has_no_plain_equality(value):
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        groups = [{"params": model.parameters(), "extra": value}]
        optimizer = model.optimizer_of(groups, torch.optim.SGD, lr=0.1)
        model.train(optimizer, range(2))

    assert_same(found.values(), expected.values())
    assert_same(optimizer.state_dict()["param_groups"][0]["extra"], value)


@on_worker(0)
def test_changed_hyperparameters_are_used_by_the_next_step():
    expected, found = Model(HERE), Model()

    for model in (expected, found):
        optimizer = model.optimizer_of(two_groups(model), torch.optim.SGD, lr=0.1)
        model.train(optimizer, range(2))
        optimizer.param_groups[1]["lr"] = 0.7
        optimizer.param_groups[0]["nesterov"] = True
        model.train(optimizer, range(2, 4))

    assert_same(found.values(), expected.values())


# ------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 3])
@pytest.mark.parametrize("limit", [0.1, 100.0])
@on_worker(0)
def test_clipping_equals_one_process(order, limit):
    expected, found = Model(HERE, 3), Model(("w1", "w2", "w1"))
    found.ask("set_grads", 7.0)
    expected.loss(0).backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(
        expected.parameters(), limit, norm_type=order
    )
    expected.optimizer(torch.optim.SGD, lr=0.1).step()

    with autograd.context() as ctx:
        ctx.backward(found.loss(0))
        norm = clip_grad_norm_(ctx, found.parameters(), limit, order)
        found.optimizer(torch.optim.SGD, lr=0.1).step(ctx)

    assert_same(norm, expected_norm)
    assert_same(found.values(), expected.values())
    assert all(grad is not None and grad.eq(7.0).all() for grad in found.grads())


@on_worker(0)
def test_clipping_of_grad_equals_one_process():
    expected, found = Model(HERE), Model()
    expected.loss(0).backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)

    found.loss(0).backward()
    clip_grad_norm_(None, found.parameters(), 0.1)

    assert_same(found.grads(), expected.grads())


@on_worker(0)
def test_clipping_follows_the_order_of_the_parameters():
    # The last bits of a sum depend on the order.
    expected, found = Model(HERE, 4), Model(("w1", "w2", "w1", "w2"))
    expected.loss(0, with_spare=True).backward()
    found.loss(0, with_spare=True).backward()
    for shift in range(6):
        theirs, ours = expected.parameters(), found.parameters()
        rotated = theirs[shift:] + theirs[:shift]
        expected_norm = torch.nn.utils.get_total_norm([p.grad for p in rotated])

        norm = clip_grad_norm_(None, ours[shift:] + ours[:shift], 1e9)

        assert_same(norm, expected_norm)


@on_worker(0)
def test_clipping_without_gradients_does_nothing():
    model = Model()

    with autograd.context() as ctx:
        assert clip_grad_norm_(ctx, model.parameters(), 1.0).item() == 0.0


@on_worker(0)
def test_clipping_refuses_a_norm_that_is_not_finite_if_told_to():
    model = Model()
    model.ask("set_grads", float("nan"))

    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(None, model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(None, model.parameters(), 1.0).isnan()


@on_worker(0)
def test_clipping_refuses_what_is_no_list_of_references():
    with pytest.raises(TypeError, match=r"must be RRefs, found Tensor at 0.*RRef\("):
        clip_grad_norm_(None, [torch.ones(1)], 1.0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="empty list"):
        clip_grad_norm_(None, [], 1.0)
    with pytest.raises(UnknownContext):
        clip_grad_norm_(12345, Model().parameters(), 1.0)


# ------------------------------------------------------------------------------ bad input


@on_worker(0)
def test_bad_arguments_are_refused():
    rref = RRef(torch.ones(1, requires_grad=True))
    sgd = torch.optim.SGD
    bad: Any
    for bad, error, text in [
        ([], ValueError, "empty list"),
        ([{"params": []}], ValueError, "empty list"),
        ([torch.ones(1)], TypeError, r"must be RRefs, found Tensor at 0.*RRef\("),
        ([rref, 3], TypeError, "found int at 1"),
        (rref, TypeError, "list of RRefs"),
        (torch.ones(2), TypeError, "list of RRefs"),
        ([{"lr": 1.0}], TypeError, "'params'"),
        ([{"params": [rref]}, rref], TypeError, "'params'"),
        ([{"params": {rref}}], TypeError, r"must have an order.*found set"),
    ]:
        with pytest.raises(error, match=text):
            DistributedOptimizer(sgd, bad, lr=0.1)
    for bad in (torch.optim, int, "SGD"):
        with pytest.raises(TypeError, match=r"derived from torch\.optim\.Optimizer"):
            DistributedOptimizer(bad, [rref], lr=0.1)


@on_worker(0)
def test_bad_hyperparameters_are_refused_by_the_owners():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        Model().optimizer(torch.optim.SGD, lr=-1.0)
    with pytest.raises(TypeError, match="nonsense"):
        Model().optimizer(torch.optim.SGD, nonsense=1)


@on_worker(0)
def test_references_to_other_things_are_refused():
    layer: Any = rpc.remote("w1", Layer, args=(0,))
    computed = layer.rpc_sync().computed()
    with pytest.raises(TypeError, match=r"worker 'w1'.*instance of Layer"):
        DistributedOptimizer(torch.optim.SGD, [layer])
    with pytest.raises(ValueError, match="non-leaf"):
        DistributedOptimizer(torch.optim.SGD, [computed])


@on_worker(0)
def test_same_parameter_twice_is_refused():
    model = Model(("w1",))
    with pytest.raises(ValueError, match="given twice; each may be given once"):
        model.optimizer_of(model.parameters() + model.parameters(), torch.optim.SGD)


@on_worker(0)
def test_unknown_contexts_are_refused():
    model = Model()
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    before = model.values()
    with autograd.context() as ctx:
        ctx.backward(model.loss(0))

    with pytest.raises(ContextReleased, match="Could not find autograd context"):
        optimizer.step(ctx)
    with pytest.raises(UnknownContext, match="Could not find autograd context"):
        optimizer.step(12345)
    with pytest.raises(UnknownContext):
        optimizer.zero_grad(context_id=12345)
    for bad in ("1", True, 1.0):
        with pytest.raises(TypeError, match="context_id"):
            optimizer.step(bad)
    with pytest.raises(TypeError, match="by name"):
        optimizer.step(lambda: 0)
    assert_same(model.values(), before)


# -------------------------------------------------------------------------------- release


@on_worker(0)
def test_optimizer_on_the_owners_goes_with_this_one():
    model = Model()
    optimizer = model.optimizer(fn.Alive, lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    model.train(optimizer, range(2))
    assert [rpc.rpc_sync(name, fn.count_alive) for name in ("w1", "w2")] == [1, 1]

    del optimizer, scheduler
    gc.collect()  # torch's schedulers make a cycle

    for name in ("w1", "w2"):
        probes.wait_until(
            partial(fn.has_none_alive, name),
            f"no optimizer on {name}",
        )


@on_worker(0)
def test_optimizer_alone_is_in_no_cycle():
    optimizer = Model().optimizer(torch.optim.SGD, lr=0.1)
    watched = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert watched() is None
    finally:
        gc.enable()


@on_worker(0)
def test_optimizer_cannot_be_pickled():
    optimizer = Model().optimizer(torch.optim.SGD, lr=0.1)

    with pytest.raises(UsageError, match="rref can only be pickled when using RPC"):
        pickle.dumps(optimizer)


def run_in_thread(function: Any, *args: Any) -> None:
    """Runs it on another thread, outside of this one's context."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@on_worker(0)
def test_state_of_a_model_on_a_gpu_travels():
    module = RemoteModule("w1/cuda:0", torch.nn.Linear, (3, 2))
    twin = torch.nn.Linear(3, 2)
    module.load_state_dict({k: v.cuda() for k, v in twin.state_dict().items()})
    optimizer = DistributedOptimizer(
        torch.optim.Adam, module.remote_parameters(), lr=0.1
    )
    local = torch.optim.Adam(twin.parameters(), lr=0.1)
    x = torch.ones(4, 3)

    for _ in range(3):
        with autograd.context() as ctx:
            ctx.backward(module(x).pow(2).sum())
            optimizer.step(ctx)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        local.zero_grad()
        twin(x).pow(2).sum().backward()
        local.step()

    torch.testing.assert_close(state["state"], local.state_dict()["state"])
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("is_drop_in", [False, True])
@on_worker(0)
def test_hooks_are_called_once_for_each_step(is_drop_in):
    kind = drop_in.DistributedOptimizer if is_drop_in else DistributedOptimizer
    weight = torch.ones(2, requires_grad=True)
    optimizer = kind(torch.optim.SGD, [RRef(weight)], lr=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    with autograd.context() as ctx:
        ctx.backward(weight.sum())
        optimizer.step(ctx)

    assert seen == ["before", "after"]
    assert torch.equal(weight, torch.full((2,), 0.5))
