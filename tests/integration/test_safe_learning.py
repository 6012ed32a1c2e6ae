"""Learning between parties that do not trust each other: autograd, modules, optimizers.

What comes out is compared with the same program in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import safe_functions as fn
from gradwire import autograd, rpc
from gradwire.errors import EncodeError, GradwireError, NotExported
from gradwire.nn import RemoteModule
from gradwire.optim import (
    DistributedOptimizer,
    ParametersOf,
    Snapshots,
    clip_grad_norm_,
)
from gradwire.optim._places import DiskPlace
from gradwire.rpc import RRef
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

RATE = 0.1
STEPS = 3


def on_safe_worker(body: Any) -> Any:
    return on_worker(0, fixture="safe_cluster")(body)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 4, generator=generator)
    y = torch.randn(8, 2, generator=generator)
    return x, y


def learn_alone() -> tuple[list[float], list[torch.Tensor]]:
    """The oracle: bottom, middle and top of a network, in one process."""
    middle, bottom = fn.Bottom(1, 6, 5), fn.Bottom(0, 4, 6)
    top = fn.Bottom(2, 5, 2)
    modules = [bottom, middle, top]
    x, y = make_data()
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(top(middle(bottom(x))), y)
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-RATE)
                    parameter.grad = None
    return losses, [p for m in modules for p in m.parameters()]


def compare(losses: list[float], parameters: list[torch.Tensor]) -> None:
    expected, weights = learn_alone()
    assert losses == expected
    for found, wanted in zip(parameters, weights, strict=True):
        assert torch.equal(found, wanted)


def build_everywhere() -> fn.Bottom:
    rpc.rpc_sync("w1", fn.build, (0, 4, 6))
    rpc.rpc_sync("w2", fn.build, (1, 6, 5))
    return fn.Bottom(2, 5, 2)


def find_parameters(top: nn.Module) -> list[torch.Tensor]:
    return [
        *rpc.rpc_sync("w1", fn.checksum),
        *rpc.rpc_sync("w2", fn.checksum),
        *top.parameters(),
    ]


@pytest.mark.parametrize("is_nested", [False, True], ids=["in turn", "nested"])
@on_safe_worker
def test_split_learning_without_a_context_is_exact(is_nested):
    top = build_everywhere()
    x, y = make_data()
    losses = []
    for _ in range(STEPS):
        if is_nested:
            activations = rpc.rpc_sync("w1", fn.forward_via, (x, "w2"))
        else:
            hidden = rpc.rpc_sync("w1", fn.forward, (x,))
            activations = rpc.rpc_async(
                "w2", "safe_functions:forward", (hidden,)
            ).wait()
        loss = nn.functional.mse_loss(top(activations), y)
        losses.append(loss.item())
        loss.backward()
        for worker in ("w1", "w2"):
            rpc.rpc_sync(worker, fn.apply_gradients, (None, RATE))
        with torch.no_grad():
            for parameter in top.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-RATE)
                parameter.grad = None

    compare(losses, find_parameters(top))


@on_safe_worker
def test_split_learning_in_a_context_is_exact():
    top = build_everywhere()
    x, y = make_data()
    losses = []
    for _ in range(STEPS):
        with autograd.context() as ctx:
            # The activations of w1 stay there; w0 only has a reference.
            hidden = rpc.remote("w1", fn.forward, (x,))
            loss = nn.functional.mse_loss(
                top(rpc.rpc_sync("w2", fn.forward, (hidden.to_here(),))), y
            )
            losses.append(loss.item())
            autograd.backward(ctx, [loss])
            gradients = autograd.get_gradients(ctx)
            for worker in ("w1", "w2"):
                rpc.rpc_sync(worker, fn.apply_gradients, (int(ctx), RATE))
            with torch.no_grad():
                for parameter in top.parameters():
                    parameter.add_(gradients[parameter], alpha=-RATE)

    compare(losses, find_parameters(top))


@on_safe_worker
def test_gradients_of_gradients_and_of_references():
    x = torch.arange(4.0, requires_grad=True)

    y = rpc.rpc_sync("w1", torch.mul, (x, x))
    y = rpc.rpc_sync("w2", torch.mul, (y, x))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)

    assert torch.equal(first, 3 * x * x)
    assert torch.equal(second, 6 * x)
    with autograd.context() as ctx:
        product = rpc.remote("w1", torch.mul, (x, x))
        total = rpc.remote("w1", fn.sum_of, (product,))
        total.backward(int(ctx))
        assert torch.equal(autograd.get_gradients(ctx)[x], 2 * x.detach())


@on_safe_worker
def test_errors_in_a_backward_end_it_everywhere():
    x = torch.ones(2, requires_grad=True)

    y = rpc.rpc_sync("w1", fn.fail_in_backward, (x,))
    with pytest.raises(ValueError, match="bad backward"):
        y.sum().backward()

    rpc.rpc_sync("w1", torch.mul, (x, x)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())


# -------------------------------------------------------------------- remote modules


@pytest.mark.parametrize("name", ["bottom", fn.Bottom], ids=["name", "class"])
@on_safe_worker
def test_remote_modules_of_exported_classes_are_trained(name):
    remote = [
        RemoteModule("w1", name, (0, 4, 6)),
        RemoteModule("w2", name, (), {"seed": 1, "size_in": 6, "size_out": 5}),
    ]
    top = fn.Bottom(2, 5, 2)
    model = nn.Sequential(*remote, top)
    rrefs = [rref for module in remote for rref in module.remote_parameters()]
    own: list[RRef[torch.Tensor]] = [RRef(parameter) for parameter in top.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*rrefs, *own], lr=RATE)
    x, y = make_data()
    losses = []
    for _ in range(STEPS):
        with autograd.context() as ctx:
            loss = nn.functional.mse_loss(model(x), y)
            losses.append(loss.item())
            autograd.backward(ctx, [loss])
            optimizer.step(ctx)

    parameters = [rref.to_here() for rref in rrefs]
    compare(losses, [*parameters, *top.parameters()])


@on_safe_worker
def test_what_else_remote_modules_can_do():
    module = RemoteModule("w1", nn.Linear, (3, 2))
    x = torch.ones(1, 3)

    assert module.training
    assert module.eval() is module
    assert not module.training
    module.train()
    assert module.weight.shape == (2, 3)
    assert module.in_features == 3
    assert module.forward_async(x).wait().shape == (1, 2)
    state = module.state_dict()
    assert set(state) == {"weight", "bias"}
    module.load_state_dict({name: value * 0 for name, value in state.items()})
    assert module(x).abs().sum() == 0
    module.double()
    assert module(x.double()).dtype == torch.float64
    assert [rref.owner_name() for rref in module.remote_parameters()] == ["w1"] * 2
    again = RemoteModule.init_from_module_rref("w1", module.get_module_rref())
    assert torch.equal(again(x.double()), module(x.double()))
    assert RemoteModule("w1", "bottom", (0, 4, 6)).norm() > 0


@on_safe_worker
def test_what_remote_modules_cannot_do():
    module = RemoteModule("w1", nn.Linear, (3, 2))

    with pytest.raises(NotExported, match=r"asked for 'torch.nn.*:Conv2d'"):
        RemoteModule("w1", nn.Conv2d, (1, 1, 1))(torch.ones(1))
    with pytest.raises(NotExported):
        RemoteModule("w1", "os:system", ("true",))(torch.ones(1))
    with pytest.raises(NotExported):
        RemoteModule("w1", "gradwire.nn._owner:create_module", ())(torch.ones(1))
    for use in (
        module.compile,
        module.share_memory,
        lambda: module.extra_state,
        lambda: setattr(module, "in_features", 5),
        lambda: module.register_buffer("b", torch.ones(1)),
        lambda: module.get_parameter("weight.__class__"),
    ):
        with pytest.raises(NotExported):
            use()
    with pytest.raises(EncodeError, match="RemoteModule"):
        rpc.rpc_sync("w1", fn.echo, (module,))


@on_safe_worker
def test_a_module_that_the_owner_made_keeps_its_weights():
    rref: Any = rpc.rpc_sync("w1", fn.lend_module)
    module = RemoteModule.init_from_module_rref("w1", rref)

    assert module(torch.ones(1, 4)).shape == (1, 3)
    assert module.norm() > 0
    for use in (
        module.remote_parameters,
        module.state_dict,
        module.eval,
        module.double,
        lambda: module.weight,
        lambda: module.training,
        lambda: module.load_state_dict({}),
    ):
        with pytest.raises(NotExported):
            use()


# ------------------------------------------------------------------------ optimizers


@on_safe_worker
def test_nobody_may_say_where_another_worker_writes(tmp_path):
    with pytest.raises(GradwireError):
        DistributedOptimizer(
            torch.optim.SGD,
            [ParametersOf("w1", nn.Linear, 3, 2)],
            snapshots=Snapshots(tmp_path),
        )
    module = RemoteModule("w1", nn.Linear, (3, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters())
    place = DiskPlace(str(tmp_path), "x")
    with pytest.raises(GradwireError):
        optimizer._shares[0].rref.rpc_sync().attach(place)
    with pytest.raises(NotExported):
        optimizer._shares[0].rref.rpc_sync().attach(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("two_phase", [False, True])
@on_safe_worker
def test_optimizers_of_torch_work_with_state_groups_and_clipping(two_phase):
    modules = [RemoteModule(worker, nn.Linear, (3, 2)) for worker in ("w1", "w2")]
    local = [nn.Linear(3, 2) for _ in modules]
    for module, copy in zip(modules, local, strict=True):
        copy.load_state_dict(module.state_dict())
    rrefs = [module.remote_parameters() for module in modules]
    groups = [{"params": r, "lr": 0.1 * (i + 1)} for i, r in enumerate(rrefs)]
    optimizer = DistributedOptimizer(
        torch.optim.Adam, groups, betas=(0.8, 0.9), two_phase=two_phase
    )
    own = torch.optim.Adam(
        [
            {"params": list(m.parameters()), "lr": 0.1 * (i + 1)}
            for i, m in enumerate(local)
        ],
        betas=(0.8, 0.9),
    )
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for group in (*optimizer.param_groups, *own.param_groups):
            group["lr"] *= 0.5  # as a scheduler would
        with autograd.context() as ctx:
            loss = sum(module(x).pow(2).sum() for module in modules)
            autograd.backward(ctx, [loss])
            everything = [r for share in rrefs for r in share]
            norm = clip_grad_norm_(ctx, everything, 0.5)
            optimizer.step(ctx)
        own.zero_grad()
        sum(module(x).pow(2).sum() for module in local).backward()
        wanted = nn.utils.clip_grad_norm_(
            [p for m in local for p in m.parameters()], 0.5
        )
        own.step()
        assert torch.equal(norm, wanted)

    for module, copy in zip(modules, local, strict=True):
        assert all(
            torch.equal(value, copy.state_dict()[name])
            for name, value in module.state_dict().items()
        )
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    assert torch.equal(
        state["state"][0]["exp_avg"], own.state_dict()["state"][0]["exp_avg"]
    )


@on_safe_worker
def test_closures_are_evaluated_at_the_trainer():
    module = RemoteModule("w1", nn.Linear, (3, 1))
    optimizer = DistributedOptimizer(
        torch.optim.LBFGS, module.remote_parameters(), lr=0.5
    )
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).pow(2).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure=closure)
    assert len(losses) > 2
    assert losses[-1] < losses[0]


@on_safe_worker
def test_other_optimizers_must_be_exported():
    module = RemoteModule("w1", nn.Linear, (3, 1))
    for cls in (fn.OwnOptimizer, torch.optim.Optimizer):
        with pytest.raises(NotExported):
            DistributedOptimizer(cls, module.remote_parameters(), lr=0.5)


@on_safe_worker
def test_call_whose_name_cannot_be_sent_leaves_its_context_alone():
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as ctx:
        y = x * 2
        with pytest.raises(EncodeError):
            rpc.rpc_sync("w1", "no such name \ud800", args=(y,))

        autograd.backward(ctx, [y.sum()], timeout=10.0)

        assert torch.equal(ctx.gradients()[x], torch.full((2,), 2.0))
