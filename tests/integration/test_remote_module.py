"""Modules on other workers: each does what it would do in one process.

The oracle is the same model, made of the same layers, in this process.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nn_functions as fn
from gradwire import autograd, rpc
from gradwire.errors import (
    EncodeError,
    NotInitialized,
    PeerLostError,
    UnknownWorker,
    UsageError,
)
from gradwire.nn import RemoteModule, parameter_rrefs
from gradwire.nn._placement import parse_placement
from gradwire.optim import DistributedOptimizer
from nn_functions import (
    SIZE,
    Block,
    all_gradients,
    ask,
    assert_same,
    local_model,
    make,
    mixed_model,
    remote_layer,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ------------------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w1", ("w1", "cpu")),
        ("w1/cpu", ("w1", "cpu")),
        ("trainer:0/cuda:1", ("trainer:0", "cuda:1")),
        ("rank:3", (3, "cpu")),
        ("rank:0/cuda", (0, "cuda")),
    ],
)
def test_remote_device_is_a_worker_and_a_device(text, expected):
    assert parse_placement(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "/", "w1/", "/cpu", "w1/cpu/0", "w1/nowhere", "w1/cpu:x", "w 1/cpu"],
)
def test_remote_device_malformed_is_refused(text):
    with pytest.raises(ValueError, match=r"remote_device|Worker name"):
        RemoteModule(text, nn.Linear, (1, 1))


def test_remote_device_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"'w1/gpu': 'gpu' is no device of torch"):
        RemoteModule("w1/gpu", nn.Linear, (1, 1))


@pytest.mark.parametrize("text", ["rank:", "rank:x/cpu", "rank:-1", "rank:1.5"])
def test_remote_device_with_a_malformed_rank_is_refused(text):
    with pytest.raises(ValueError, match="remote_device must be"):
        RemoteModule(text, nn.Linear, (1, 1))


def test_remote_device_of_another_type_is_refused():
    with pytest.raises(TypeError, match="must be a str, not int"):
        RemoteModule(1, nn.Linear, (1, 1))  # type: ignore[arg-type]


def test_remote_module_without_rpc_is_refused():
    with pytest.raises(NotInitialized, match="init_rpc"):
        RemoteModule("w1", nn.Linear, (1, 1))


@on_worker(0)
def test_module_instead_of_its_class_is_refused():
    module: Any = nn.Linear(1, 1)

    with pytest.raises(TypeError, match=r"class or function.*an instance of Linear"):
        RemoteModule("w1", module)


@on_worker(0)
def test_remote_module_on_an_unknown_worker_is_refused():
    with pytest.raises(UnknownWorker, match="nobody"):
        RemoteModule("nobody", nn.Linear, (1, 1))


@pytest.mark.parametrize("text", ["w2", "w2/cpu", "rank:2", "rank:2/cpu"])
@on_worker(0)
def test_module_is_made_on_the_worker_that_was_named(text):
    module = RemoteModule(text, nn.Linear, (1, 1))

    assert (module.on, module.device) == ("w2", "cpu")
    assert module.get_module_rref().owner_name() == "w2"
    assert repr(module) == "RemoteModule(on='w2', device='cpu')"


@on_worker(0)
def test_what_is_no_module_is_refused_at_first_use():
    module = RemoteModule("w1", fn.make_nothing, (1,))  # type: ignore[arg-type]

    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of "
            "<class nn.Module>, but it returns an instance of <class 'NoneType'>",
        ):
            module.forward()
    with pytest.raises(ValueError, match="Expect `module_cls"):
        module.remote_parameters()


@on_worker(0)
def test_error_of_the_class_comes_at_first_use():
    with pytest.raises(LookupError, match="no such layer"):
        RemoteModule("w1", fn.make_failing)(fn.batch())


@on_worker(0)
def test_what_makes_no_module_here_is_refused_at_once():
    with pytest.raises(TypeError, match="module_cls must be a class or function"):
        RemoteModule("w1", "Linear")  # type: ignore[arg-type]
    with pytest.raises(EncodeError, match="lambda"):
        RemoteModule("w1", lambda: nn.Linear(1, 1))


# ---------------------------------------------------------------------- forward, backward


@pytest.mark.parametrize("worker", ["w1", "w0"])
@on_worker(0)
def test_forward_matches_one_process(worker):
    module, twin = remote_layer(worker, 1, Block, scale=2.0), make(1, Block, scale=2.0)
    x = fn.batch()

    assert isinstance(module, nn.Module)
    assert_same(module(x, shift=1.0), twin(x, shift=1.0))
    assert_same(module.forward(x), twin(x))
    future = module.forward_async(x, shift=2.0)
    assert_same(future.wait(), twin(x, shift=2.0))


@pytest.mark.parametrize("worker", ["w1", "w0"])
@pytest.mark.parametrize("mode", ["plain", "future", "grad", "dict"])
@on_worker(0)
def test_backward_matches_one_process(worker, mode):
    module, twin = remote_layer(worker, 1, Block), make(1, Block)
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)
    twin(y).pow(2).sum().backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}

    if mode == "plain":
        module(x).pow(2).sum().backward()
    elif mode == "future":
        module.forward_async(x).wait().pow(2).sum().backward()
    elif mode == "grad":
        with autograd.context(accumulate="grad") as ctx:
            ctx.backward(module(x).pow(2).sum())
    else:
        with autograd.context() as ctx:
            ctx.backward(module(x).pow(2).sum())
            assert_same(ctx.gradients()[x], y.grad)
            found = ask(module, read_dictionary, ctx)
        assert_same(found, expected)
        assert x.grad is None
        assert set(ask(module, fn.gradients).values()) == {None}
        return

    assert_same(x.grad, y.grad)
    assert_same(ask(module, fn.gradients), expected)


def read_dictionary(rref: Any, ctx: autograd.Context) -> dict[str, Tensor]:
    found = ctx.gradients()
    return {name: found[p] for name, p in rref.local_value().named_parameters()}


@on_worker(0)
def test_no_grad_reaches_the_owner():
    module = remote_layer("w1", 1, Block)

    with torch.no_grad():
        out = module(fn.batch())

    assert not out.requires_grad
    assert module(fn.batch()).requires_grad


@on_worker(0)
def test_gradients_of_gradients_match_one_process():
    def penalty(module: nn.Module) -> Tensor:
        x = fn.batch(requires_grad=True)
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same(penalty(remote_layer("w1", 1, Block)), penalty(make(1, Block)))


# ------------------------------------------------------------- as a part of a local model


@on_worker(0)
def test_mixed_model_matches_one_process():
    model, twin = mixed_model(), local_model()
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    out, expected = model(x), twin(y)
    out.sum().backward()
    expected.sum().backward()

    assert_same(out, expected)
    assert_same(x.grad, y.grad)
    names = {f".{n}" if "." not in n else n: p.grad for n, p in twin.named_parameters()}
    assert_same(all_gradients(model), names)


@on_worker(0)
def test_training_of_a_mixed_model_matches_one_process():
    model, twin = mixed_model(), local_model()
    layers = [part for part in model.modules() if isinstance(part, RemoteModule)]
    local = torch.optim.SGD(model.parameters(), lr=0.05)
    whole = torch.optim.SGD(twin.parameters(), lr=0.05)
    losses = []

    for step in range(4):
        for net in (model, twin):
            loss = (net(fn.batch(step)) - 1).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        local.step()
        whole.step()
        for layer in layers:
            ask(layer, descend, 0.05)
            layer.zero_grad()
        model.zero_grad()
        twin.zero_grad()

    assert_same(losses[::2], losses[1::2])
    assert losses[-1] < losses[0]
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def descend(rref: Any, rate: float) -> None:
    torch.optim.SGD(rref.local_value().parameters(), lr=rate).step()


@on_worker(0)
def test_training_with_the_distributed_optimizer_matches_one_process():
    model, twin = mixed_model(), local_model()
    whole = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, parameter_rrefs(model), lr=0.05, momentum=0.9
    )

    for step in range(3):
        with autograd.context() as ctx:
            ctx.backward((model(fn.batch(step)) - 1).pow(2).mean())
            optimizer.step(ctx)
        whole.zero_grad()
        (twin(fn.batch(step)) - 1).pow(2).mean().backward()
        whole.step()

    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@on_worker(0)
def test_parameters_of_a_local_model_are_the_local_ones():
    model = mixed_model()

    assert [n for n, _ in model.named_parameters()] == [
        "0.weight",
        "0.bias",
        "4.weight",
        "4.bias",
    ]
    assert len(list(model.parameters())) == 4
    assert list(model.buffers()) == []
    assert [n for n, _ in model.named_modules()] == ["", *"012345"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("parameters", "use ``remote_parameters``"),
        ("named_parameters", "use ``remote_named_parameters``"),
        ("buffers", "``state_dict``"),
        ("named_buffers", "``state_dict``"),
    ],
)
@on_worker(0)
def test_parameters_of_a_remote_module_are_refused(name, remedy):
    module = remote_layer("w1", 1, Block)

    with pytest.raises(
        UsageError, match=f"Method ``{name}`` not supported.*{remedy}.*'w1'"
    ):
        getattr(module, name)()


@on_worker(0)
def test_remote_parameters_refer_to_the_parameters():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)

    found = module.remote_named_parameters()

    assert list(found) == [name for name, _ in twin.named_parameters()]
    assert {rref.owner_name() for rref in found.values()} == {"w1"}
    values = [rref.to_here().detach() for rref in module.remote_parameters()]
    assert_same(values, [p.detach() for p in twin.parameters()])
    assert ask(module, is_parameter, found["inner.0.weight"]) == "inner.0.weight"
    assert module.remote_parameters(recurse=False) == []


def is_parameter(module: Any, rref: Any) -> str:
    (name,) = (
        name
        for name, parameter in module.local_value().named_parameters()
        if parameter is rref.local_value()
    )
    return name


@on_worker(0)
def test_tied_parameters_are_referred_to_once():
    module = remote_layer("w1", 1, fn.Tied)

    assert list(module.remote_named_parameters()) == ["first.weight"]


@on_worker(0)
def test_parameter_rrefs_are_those_of_all_workers():
    model = mixed_model()

    found = parameter_rrefs(model)

    twin = list(local_model().parameters())
    owners = [rref.owner_name() for rref in found]
    assert owners == ["w0"] * 2 + ["w1"] * 4 + ["w2"] * 2 + ["w0"] * 2 + ["w1"] * 2
    assert_same([r.to_here().detach() for r in found], [p.detach() for p in twin])
    assert found[0].local_value() is next(model.parameters())


@pytest.mark.parametrize("is_second_local", [False, True])
@on_worker(0)
def test_parameters_that_parts_share_are_given_once(is_second_local):
    """As torch does: a layer that a model has twice."""
    here = "w0" if is_second_local else "w1"
    layer = RemoteModule(here, make, (1, nn.Linear, SIZE, SIZE))
    again: nn.Module = RemoteModule.init_from_module_rref(here, layer.module_rref)
    if is_second_local:
        again = layer.module_rref.local_value()
    other = RemoteModule("w1", make, (2, nn.Linear, SIZE, SIZE))
    model = nn.Sequential(layer, nn.Tanh(), again, other)
    twin_layer = make(1, nn.Linear, SIZE, SIZE)
    twin = nn.Sequential(
        twin_layer, nn.Tanh(), twin_layer, make(2, nn.Linear, SIZE, SIZE)
    )

    optimizer = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=0.1)
    whole = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        with autograd.context() as ctx:
            ctx.backward(model(fn.batch(step)).sum())
            optimizer.step(ctx)
        whole.zero_grad()
        twin(fn.batch(step)).sum().backward()
        whole.step()

    found = [rref.to_here().detach() for rref in parameter_rrefs(model)]
    assert_same(found, [p.detach() for p in twin.parameters()])


@on_worker(0)
def test_module_with_a_part_on_a_third_worker_matches_one_process():
    module = RemoteModule("w1", fn.Nested, ("w2", 1))
    twin = nn.Sequential(
        make(1, nn.Linear, SIZE, SIZE), nn.Tanh(), make(2, nn.Linear, SIZE, SIZE)
    )
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    module(x).sum().backward()
    twin(y).sum().backward()

    assert_same(x.grad, y.grad)
    named = module.remote_named_parameters()
    assert [(name, rref.owner_name()) for name, rref in named.items()] == [
        ("here.weight", "w1"),
        ("here.bias", "w1"),
        ("there.weight", "w2"),
        ("there.bias", "w2"),
    ]
    assert_same(list(module.state_dict().values()), list(twin.state_dict().values()))
    inner = module.there
    assert isinstance(inner, RemoteModule) and inner.on == "w2"
    expected = [twin[2].weight.grad, twin[2].bias.grad]
    assert_same(list(ask(inner, fn.gradients).values()), expected)


# -------------------------------------------------------------------------- other workers


@on_worker(0)
def test_module_that_is_sent_means_the_same_module():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    assert rpc.rpc_sync("w2", fn.get_fields, (module,)) == ("w1", "cpu", "w1")
    out = rpc.rpc_sync("w2", fn.call_module, (module, x))
    out.sum().backward()
    expected = twin(y)
    expected.sum().backward()

    assert_same(out, expected)
    assert_same(x.grad, y.grad)
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert_same(ask(module, fn.gradients), gradients)


@on_worker(0)
def test_module_can_be_used_on_its_owner():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)

    assert_same(
        rpc.rpc_sync("w1", fn.call_module, (module, fn.batch())), twin(fn.batch())
    )


@on_worker(0)
def test_local_model_with_remote_parts_can_be_sent():
    model, twin = mixed_model().eval(), local_model().eval()

    out = rpc.rpc_sync("w3", fn.call_module, (model, fn.batch()))

    assert_same(out, twin(fn.batch()))


@on_worker(0)
def test_several_workers_train_one_module():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)

    for worker, seed in (("w0", 0), ("w2", 1), ("w3", 2)):
        rpc.rpc_sync(worker, fn.train_elsewhere, (module, fn.batch(seed)))
        twin(fn.batch(seed)).pow(2).sum().backward()

    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert_same(ask(module, fn.gradients), expected)


@on_worker(0)
def test_module_from_a_reference_is_the_same_module():
    module = remote_layer("w1", 1, Block)

    other = RemoteModule.init_from_module_rref("w1/cpu", module.get_module_rref())
    other.scale = 9.0

    assert module.scale == 9.0
    there = rpc.rpc_sync(
        "w2", RemoteModule.init_from_module_rref, ("w1", module.get_module_rref())
    )
    assert there.scale == 9.0
    mine = RemoteModule.init_from_module_rref("w0", rpc.RRef(make(1, Block)))
    assert_same(mine(fn.batch()), make(1, Block)(fn.batch()))


@on_worker(0)
def test_module_from_a_wrong_reference_is_refused():
    rref = remote_layer("w1", 1, Block).get_module_rref()

    with pytest.raises(
        ValueError, match=r"is on worker 'w2', but the module is on .*'w1'"
    ):
        RemoteModule.init_from_module_rref("w2", rref)
    with pytest.raises(TypeError, match="must be an RRef, found Linear"):
        RemoteModule.init_from_module_rref("w1", nn.Linear(1, 1))  # type: ignore[arg-type]


@on_worker(0)
def test_module_cannot_be_pickled_outside_rpc():
    module = remote_layer("w1", 1, Block)

    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        pickle.dumps(module)
    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        torch.save(nn.Sequential(module), io.BytesIO())


@on_worker(0)
def test_copy_is_another_stand_in_and_deepcopy_is_refused():
    module = remote_layer("w1", 1, Block)

    copy.copy(module).scale = 7.0

    assert module.scale == 7.0
    with pytest.raises(UsageError, match=r"cannot be copied.*to_here\(\)"):
        copy.deepcopy(nn.Sequential(module))


@on_worker(0)
def test_module_dies_with_its_last_stand_in():
    module = remote_layer("w1", 1, Block)
    assert ask(module, fn.is_here)
    other = copy.copy(module)

    del module
    assert_same(other(fn.batch()), make(1, Block)(fn.batch()))
    # That nothing is left after the test is checked by the fixture.


@pytest.mark.chaos
def test_module_of_a_lost_worker_raises(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, hold_module)

    cluster.kill(1)

    cluster.run(0, use_lost_module)


_held: list[RemoteModule] = []


def hold_module() -> None:
    _held.append(remote_layer("w1", 1, Block))
    _held[0](fn.batch())


def use_lost_module() -> None:
    module = _held.pop()
    for use in (
        lambda: module(fn.batch()),
        lambda: module.scale,
        module.state_dict,
        lambda: nn.Sequential(module).eval(),
    ):
        with pytest.raises(PeerLostError, match="w1"):
            use()


@on_worker(0)
def test_subclass_has_attributes_of_its_own_and_can_be_sent():
    module = fn.Named("w1", make, (1, Block))

    module.title = "mine"
    module.scale = 2.0

    assert module.__dict__["title"] == "mine"
    assert "scale" not in module.__dict__
    assert rpc.rpc_sync("w2", fn.get_class, (module,)) == "Named"


# -------------------------------------------------------------------------- other devices


def test_values_are_moved_in_their_containers():
    value = {"a": [torch.ones(2), 1], "b": fn.Outputs(torch.ones(1), [torch.ones(1)])}

    moved = fn.move_to("cpu", value)

    assert torch.equal(moved["a"][0], torch.ones(2))
    assert type(moved["b"]) is fn.Outputs
    meta = fn.move_to("meta", value)
    assert (
        meta["a"][0].is_meta and meta["b"].hidden.is_meta and meta["b"].rest[0].is_meta
    )
    assert meta["a"][1] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@on_worker(0)
def test_module_on_a_gpu_matches_one_on_the_cpu():
    module = RemoteModule("w1/cuda:0", make, (1, Block))
    twin = make(1, Block)
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    out, expected = module(x), twin(y)
    out.sum().backward()
    expected.sum().backward()

    assert out.device == torch.device("cpu")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(module.forward_async(x).wait(), expected)
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()))
    assert isinstance(twin, Block)
    torch.testing.assert_close(module.residual(x), twin.residual(x))
    torch.testing.assert_close(module.offset, twin.offset)
    assert module.cpu().device == "cpu"
    torch.testing.assert_close(module(x), expected)
