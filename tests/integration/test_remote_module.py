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
    RemoteError,
    UnknownWorker,
    UsageError,
)
from gradwire.nn import RemoteModule, parameter_rrefs
from gradwire.nn._placement import parse_placement
from gradwire.optim import DistributedOptimizer
from nn_functions import SIZE, Block, make
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


def remote_layer(
    on: str, seed: int, cls: Any, *args: Any, **kwargs: Any
) -> RemoteModule:
    return RemoteModule(on, make, (seed, cls, *args), kwargs)


def mixed_model() -> nn.Sequential:
    """Local and remote layers in turn."""
    return nn.Sequential(
        make(1, nn.Linear, SIZE, SIZE),
        remote_layer("w1", 2, Block),
        nn.ReLU(),
        remote_layer("w2/cpu", 3, nn.BatchNorm1d, SIZE),
        make(4, nn.Linear, SIZE, SIZE),
        remote_layer("rank:1", 5, nn.Linear, SIZE, 1),
    )


def local_model() -> nn.Sequential:
    """The same in one process."""
    return nn.Sequential(
        make(1, nn.Linear, SIZE, SIZE),
        make(2, Block),
        nn.ReLU(),
        make(3, nn.BatchNorm1d, SIZE),
        make(4, nn.Linear, SIZE, SIZE),
        make(5, nn.Linear, SIZE, 1),
    )


def ask(module: RemoteModule, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(module.on, function, (module.get_module_rref(), *args))


def all_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for path, part in model.named_modules():
        own: dict[str, Tensor | None]
        if isinstance(part, RemoteModule):
            own = ask(part, fn.gradients)
        else:
            own = {n: p.grad for n, p in part.named_parameters(recurse=False)}
        found |= {f"{path}.{name}": gradient for name, gradient in own.items()}
    return found


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ----------------------------------------------------------------------------- placement


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


# ------------------------------------------------------------------- forward, backward


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


# --------------------------------------------------------------------------------- state


@on_worker(0)
def test_state_dict_of_a_mixed_model_is_that_of_one_process():
    state, expected = mixed_model().state_dict(), local_model().state_dict()

    assert list(state) == list(expected)
    assert_same(dict(state), dict(expected))
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    assert not any(value.requires_grad for value in state.values())


@on_worker(0)
def test_state_dict_of_a_remote_module_goes_to_and_fro():
    module, twin = remote_layer("w1", 1, Block), make(2, Block)

    assert str(module.load_state_dict(twin.state_dict())) == str(
        twin.load_state_dict(twin.state_dict())
    )
    x = fn.batch()
    assert_same(module(x), twin(x))

    other = make(3, Block)
    other.load_state_dict(module.state_dict())
    assert_same(other(x), twin(x))


@on_worker(0)
def test_state_dict_can_be_saved_and_loaded_into_a_mixed_model():
    model, twin = mixed_model(), local_model()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.add_(1)
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)

    model.load_state_dict(torch.load(file))

    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = local_model()
    other.load_state_dict(torch.load(file))
    assert_same(dict(other.state_dict()), dict(twin.state_dict()))


def damage(state: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "missing":
        del state["1.outer.bias"], state["3.num_batches_tracked"]
    elif how == "unexpected":
        state["1.inner.7"] = state["1.stranger"] = torch.ones(1)
    elif how == "shape":
        state["1.inner.0.weight"] = state["5.bias"] = torch.ones(7)
        del state["1.inner.0.bias"]
    elif how == "no metadata":
        state = dict(state)
        del state["3.num_batches_tracked"]  # may be missing in a state that old
    return state


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "no metadata"])
@pytest.mark.parametrize("strict", [True, False])
@on_worker(0)
def test_loading_a_wrong_state_says_what_one_process_says(how, strict):
    answers = []
    for model in (mixed_model(), local_model()):
        state: dict[str, Any] = damage(local_model().state_dict(), how)
        try:
            answers.append(str(model.load_state_dict(state, strict)))
        except RuntimeError as error:
            answers.append(str(error))

    assert answers[0] == answers[1]


@on_worker(0)
def test_loading_an_old_state_directly_uses_its_versions():
    answers = []
    for module in (remote_layer("w1", 1, BatchNorms), make(1, BatchNorms)):
        state = make(2, BatchNorms).state_dict()
        del state["part.num_batches_tracked"]
        state._metadata["part"]["version"] = 1  # type: ignore[attr-defined]
        answers.append(str(module.load_state_dict(state)))

    assert answers[0] == answers[1] == "<All keys matched successfully>"


class BatchNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.BatchNorm1d(SIZE)


@on_worker(0)
def test_loading_with_assign_replaces_the_parameters():
    module = remote_layer("w1", 1, nn.Linear, SIZE, SIZE)
    state = make(2, nn.Linear, SIZE, SIZE).float().state_dict()

    module.load_state_dict(state, assign=True)

    assert ask(module, fn.dtypes) == {torch.float32}
    assert_same(dict(module.state_dict()), dict(state))


@on_worker(0)
def test_extra_state_travels():
    module = remote_layer("w1", 1, fn.Extra, SIZE, SIZE)
    twin: Any = make(1, fn.Extra, SIZE, SIZE)
    twin.note = "old"

    assert module.state_dict()["_extra_state"] == {"note": "new"}
    module.load_state_dict(twin.state_dict())

    assert module.note == "old"
    assert module.get_extra_state() == {"note": "old"}


@on_worker(0)
def test_hooks_of_state_dicts_run():
    module = remote_layer("w1", 1, nn.Linear, SIZE, SIZE)
    seen: list[Any] = []
    module.register_state_dict_post_hook(lambda *args: seen.append(args[2]))
    module.register_load_state_dict_pre_hook(lambda *args: seen.append(args[2]))
    model = nn.Sequential(module)

    model.load_state_dict(model.state_dict())

    assert seen == ["0.", "0."]


# ------------------------------------------------------------------- modes, conversions


@on_worker(0)
def test_train_and_eval_reach_the_module_and_all_its_parts():
    module = remote_layer("w1", 1, Block)

    for change, expected in (
        (module.eval, False),
        (module.train, True),
        (lambda: module.train(False), False),
        (lambda: module.train(mode=True), True),
    ):
        assert change() is module
        assert set(ask(module, fn.training_modes).values()) == {expected}
        assert module.training is expected


@on_worker(0)
def test_train_and_eval_of_a_local_model_reach_remote_parts():
    model = nn.Sequential(remote_layer("w1", 1, nn.Dropout, 1.0), nn.Identity())
    x = fn.batch()

    assert_same(model(x), torch.zeros_like(x))
    assert model.eval() is model
    assert_same(model(x), x)
    model.train()
    assert_same(model(x), torch.zeros_like(x))


@on_worker(0)
def test_batch_norm_keeps_its_statistics_as_in_one_process():
    module = remote_layer("w1", 1, nn.BatchNorm1d, SIZE)
    twin = make(1, nn.BatchNorm1d, SIZE)

    for step in range(3):
        assert_same(module(fn.batch(step)), twin(fn.batch(step)))
    assert_same(dict(module.state_dict()), dict(twin.state_dict()))
    module.eval()
    twin.eval()
    assert_same(module(fn.batch(9)), twin(fn.batch(9)))
    assert module.state_dict()["num_batches_tracked"] == 3


@on_worker(0)
def test_conversions_run_on_the_owner():
    module = remote_layer("w1", 1, Block)

    for convert, expected in (
        (module.float, torch.float32),
        (module.double, torch.float64),
        (lambda: module.to(torch.bfloat16), torch.bfloat16),
        (lambda: module.to("cpu", dtype=torch.float16), torch.float16),
        (lambda: module.type(torch.float32), torch.float32),
        (module.cpu, torch.float32),
    ):
        assert convert() is module
        assert ask(module, fn.dtypes) == {expected}
        assert module.device == "cpu"


@on_worker(0)
def test_device_of_a_module_that_was_moved_is_known():
    module = remote_layer("w1", 1, Block)

    assert module.to("meta") is module

    assert module.device == "meta"
    assert module.inner.device == "meta"


@on_worker(0)
def test_conversion_of_a_local_model_changes_the_dtypes_of_remote_parts():
    module = RemoteModule("w1", nn.BatchNorm1d, (SIZE,))
    model = nn.Sequential(nn.Linear(SIZE, SIZE), module)

    assert model.double() is model

    assert ask(module, fn.dtypes) == {torch.float64, torch.int64}
    assert model(fn.batch()).dtype == torch.float64


@on_worker(0)
def test_move_of_a_local_model_leaves_remote_parts_where_they_are():
    model = nn.Sequential(
        nn.Linear(SIZE, SIZE), RemoteModule("w1", nn.Linear, (SIZE, SIZE))
    )

    model.to("meta")

    assert next(model.parameters()).is_meta
    assert model[1].device == "cpu"
    assert not model[1].weight.is_meta


@on_worker(0)
def test_requires_grad_and_zero_grad_reach_the_parameters():
    module = remote_layer("w1", 1, Block)

    assert module.requires_grad_(False) is module
    assert ask(module, fn.requires_grad) == {False}
    assert not module(fn.batch()).requires_grad

    module.requires_grad_()
    module(fn.batch()).sum().backward()
    assert None not in ask(module, fn.gradients).values()
    module.zero_grad()
    assert set(ask(module, fn.gradients).values()) == {None}


@on_worker(0)
def test_apply_runs_the_function_on_the_owner():
    module = remote_layer("w1", 1, Block)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), module)

    model.apply(fn.fill_with_ones)

    assert_same(module.outer.weight, torch.ones(SIZE, SIZE, dtype=torch.float64))
    with pytest.raises(EncodeError, match="lambda"):
        model.apply(lambda module: None)


# ----------------------------------------------------------------- attributes, methods


@on_worker(0)
def test_attributes_are_those_of_the_module():
    module = remote_layer("w1", 1, Block, scale=3.0)

    assert module.scale == 3.0
    assert module.names == ["inner", "outer"]
    assert_same(module.offset, torch.full((SIZE,), 0.5, dtype=torch.float64))
    assert hasattr(module, "scale")
    assert not hasattr(module, "nothing")


@on_worker(0)
def test_attribute_that_is_not_there_is_an_attribute_error():
    module = remote_layer("w1", 1, Block)

    with pytest.raises(
        AttributeError, match="'Block' object has no attribute 'nothing'"
    ):
        module.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="underscore are not looked for"):
        module._private  # noqa: B018


@on_worker(0)
def test_attribute_that_cannot_be_sent_says_so():
    module = remote_layer("w1", 1, Block)

    with pytest.raises(
        EncodeError, match=r"'lock' of the module on worker 'w1' cannot"
    ):
        module.lock  # noqa: B018


@on_worker(0)
def test_attribute_that_is_set_is_set_there():
    module = remote_layer("w1", 1, Block)

    module.scale = 5.0
    module.novelty = {"a": 1}
    module.offset = torch.zeros(SIZE, dtype=torch.float64)
    module.extra = nn.Parameter(torch.ones(2))

    assert ask(module, read_attributes, "scale", "novelty") == [5.0, {"a": 1}]
    assert "scale" not in module.__dict__
    assert_same(module.state_dict()["offset"], torch.zeros(SIZE, dtype=torch.float64))
    assert "extra" in module.remote_named_parameters()
    module.training = False
    assert ask(module, fn.training_modes)[""] is False


def read_attributes(rref: Any, *names: str) -> list[Any]:
    return [getattr(rref.local_value(), name) for name in names]


@on_worker(0)
def test_parts_are_remote_modules():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)
    x = fn.batch()

    inner = module.inner
    assert isinstance(inner, RemoteModule)
    assert inner.on == "w1"
    assert_same(inner(x), twin.get_submodule("inner")(x))
    first, expected = module.get_submodule("inner.0"), twin.get_submodule("inner.0")
    assert_same(first(x), expected(x))
    assert nn.Sequential(module).get_submodule("0.inner").on == "w1"
    inner.eval()
    modes = ask(module, fn.training_modes)
    assert (modes["inner.0"], modes["outer"]) == (False, True)


@on_worker(0)
def test_parameter_that_is_read_is_part_of_the_graph():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)
    x = fn.batch()

    (module(x).sum() + module.outer.weight.pow(2).sum()).backward()
    (twin(x).sum() + twin.get_parameter("outer.weight").pow(2).sum()).backward()

    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert_same(ask(module, fn.gradients), expected)
    found = module.get_parameter("outer.weight")
    assert_same(found.detach(), twin.get_parameter("outer.weight").detach())
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD([module.outer.weight], lr=0.1)


@on_worker(0)
def test_methods_run_there_and_are_part_of_the_graph():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)
    assert isinstance(twin, Block)
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    out = module.residual(x, weight=2.0)
    expected = twin.residual(y, weight=2.0)
    out.sum().backward()
    expected.sum().backward()

    assert_same(out, expected)
    assert_same(x.grad, y.grad)
    assert_same(module.split(x), twin.split(x))
    assert_same(module.later(x), twin(x))
    assert_same(module.activation(x), torch.relu(x))


@on_worker(0)
def test_method_that_returns_its_module_returns_the_stand_in():
    module = remote_layer("w1", 1, Block)

    assert module.rescale(4.0) is module
    assert module.scale == 4.0


@on_worker(0)
def test_error_of_a_method_keeps_its_type_and_names_the_worker():
    module = remote_layer("w1", 1, Block)

    with pytest.raises(LookupError, match="nothing to be found") as caught:
        module.fail()

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w1"


@on_worker(0)
def test_what_is_registered_is_registered_there():
    module = remote_layer("w1", 1, Block)

    module.register_buffer("table", torch.ones(3))
    module.register_parameter("gain", nn.Parameter(torch.ones(2)))
    module.add_module("more", nn.Linear(1, 1))

    names = set(module.state_dict())
    assert {"table", "gain", "more.weight", "more.bias"} <= names
    assert {"gain", "more.weight"} <= set(module.remote_named_parameters())
    assert list(module.children()) == []


@on_worker(0)
def test_hooks_run_on_both_sides():
    module = remote_layer("w1", 1, Block)
    ask(module, fn.count_hook_runs)
    seen: list[str] = []
    module.register_forward_hook(lambda *args: seen.append("forward"))
    module.register_full_backward_hook(lambda *args: seen.append("backward"))

    module(fn.batch(requires_grad=True)).sum().backward()

    assert seen == ["forward", "backward"]
    assert module.num_runs == 1


# --------------------------------------------------------------------- other workers


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


# ------------------------------------------------------------------------- other devices


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
