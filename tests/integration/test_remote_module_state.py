"""States, modes, attributes and methods of modules on other workers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

import nn_functions as fn
from gradwire.errors import (
    EncodeError,
    RemoteError,
)
from gradwire.nn import RemoteModule
from nn_functions import (
    SIZE,
    Block,
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


# ---------------------------------------------------------------------------------- state


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
def test_state_of_a_lazy_module_goes_to_and_fro():
    module = RemoteModule("w1", nn.LazyLinear, (SIZE,))

    state = module.state_dict()
    assert [type(value) for value in state.values()] == [UninitializedParameter] * 2
    module.load_state_dict(state)
    module.load_state_dict(nn.Linear(SIZE, SIZE).state_dict())

    assert module.weight.shape == (SIZE, SIZE)


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


# --------------------------------------------------------------------- modes, conversions


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


@pytest.mark.parametrize("parts", [[nn.Linear(SIZE, SIZE)], []], ids=["some", "none"])
@on_worker(0)
def test_conversion_of_a_local_model_changes_parts_of_parts_on_third_workers(parts):
    inner = RemoteModule("w2", nn.BatchNorm1d, (SIZE,))
    module = RemoteModule("w1", nn.Sequential, (*parts, inner))
    model = nn.Sequential(module)

    model.double()

    assert ask(inner, fn.dtypes) == {torch.float64, torch.int64}
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
def test_requires_grad_and_zero_grad_reach_parts_on_third_workers():
    module = RemoteModule("w1", fn.Nested, ("w2", 1))
    inner = module.there

    module.requires_grad_(False)
    assert ask(inner, fn.requires_grad) == {False}
    assert not module(fn.batch()).requires_grad

    module.requires_grad_()
    module(fn.batch()).sum().backward()
    assert None not in ask(inner, fn.gradients).values()
    module.zero_grad(set_to_none=False)
    assert not any(g.any() for g in ask(inner, fn.gradients).values())
    module.zero_grad()
    assert set(ask(inner, fn.gradients).values()) == {None}


@on_worker(0)
def test_apply_runs_the_function_on_the_owner():
    module = remote_layer("w1", 1, Block)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), module)

    model.apply(fn.fill_with_ones)

    assert_same(module.outer.weight, torch.ones(SIZE, SIZE, dtype=torch.float64))
    with pytest.raises(EncodeError, match="lambda"):
        model.apply(lambda module: None)


# -------------------------------------------------------------------- attributes, methods


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
def test_method_may_return_a_future_of_torch():
    module, twin = remote_layer("w1", 1, Block), make(1, Block)
    x, y = fn.batch(requires_grad=True), fn.batch(requires_grad=True)

    module.promise(x).sum().backward()
    twin(y).sum().backward()

    assert_same(x.grad, y.grad)
    with pytest.raises(LookupError, match="nothing to be found"):
        module.promise(None)


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
