"""A step of SGD for all parameters at once is torch's, to the last bit, or is not made."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import (
    _use_grad_for_differentiable,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from gradwire.optim._at_once import step_at_once
from gradwire.optim._torch_private import Foreach

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
SHAPES = ((), (3,), (4, 5), (0,), (2, 1, 3))

numbers = st.sampled_from((0, 0.0, 0.1, 1, 0.9, -0.3, 1e-8))
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((0.0, 0.1, 1, 1e-3)),
        "momentum": st.sampled_from((0, 0.9, 0.5)),
        "weight_decay": st.sampled_from((0, 0.01, 1)),
        "maximize": st.booleans(),
    }
)
shapes = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=4
)


class Twins:
    """The same parameters twice: torch changes the ones, what is tested the others."""

    def __init__(self, groups: list[list[Tensor]], **given: Any) -> None:
        self.theirs = [nn.Parameter(p) for group in groups for p in group]
        self.ours = [nn.Parameter(p.detach().clone()) for p in self.theirs]
        # As an owner has them: they share memory with the parameters.
        stand_ins = [nn.Parameter(p.data) for p in self.ours]
        self.long = self._make(self.theirs, groups, given)
        self.short = self._make(stand_ins, groups, given)
        self._stand_ins = stand_ins

    def _make(self, params: list[Any], groups: Any, given: dict[str, Any]) -> SGD:
        left = iter(params)
        parts = [{"params": [next(left) for _ in group]} for group in groups]
        return SGD(parts, **given)

    def step(self, gradients: list[Tensor]) -> bool:
        """One step of both; returns whether ours was made at once."""
        before = [gradient.clone() for gradient in gradients]
        for parameter, gradient in zip(self.theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.long.step()
        is_made = step_at_once(self.short, self.ours, gradients)
        if not is_made:
            for stand_in, gradient in zip(self._stand_ins, gradients, strict=True):
                stand_in.grad = gradient
            self.short.step()
        assert_equal(gradients, before)
        return is_made

    def check(self) -> None:
        assert_equal(self.ours, self.theirs)
        ours, theirs = self.short.state_dict(), self.long.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            buffers = [s["momentum_buffer"] for s in (ours["state"][number], state)]
            assert (buffers[0] is None) == (buffers[1] is None)
            if buffers[0] is not None:
                assert_equal(buffers[:1], buffers[1:])


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        # The sign of zero counts, and NaN is the same as NaN.
        assert one.dtype == other.dtype
        ones, others = (t.detach().contiguous().flatten() for t in (one, other))
        assert torch.equal(ones.view(torch.uint8), others.view(torch.uint8))


def randoms(shapes: list[Any], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape, dtype in shapes
    ]


@settings(deadline=None, max_examples=200)
@given(
    groups=st.lists(shapes, min_size=1, max_size=3),
    given_=options,
    nesterov=st.booleans(),
    dampening=st.sampled_from((0, 0.1, 0.5)),
    lrs=st.lists(numbers, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_steps_are_those_of_torch(groups, given_, nesterov, dampening, lrs, seed):
    if nesterov and given_["momentum"]:
        given_ = {**given_, "nesterov": True}
    else:
        given_ = {**given_, "dampening": dampening}
    flat = [shape for group in groups for shape in group]
    values = iter(randoms(flat, seed))
    twins = Twins([[next(values) for _ in group] for group in groups], **given_)
    has_others = any(d in (torch.bfloat16, torch.complex64) for _, d in flat)

    for number, lr in enumerate(lrs):
        for optimizer in (twins.long, twins.short):
            optimizer.param_groups[-1]["lr"] = lr
        is_made = twins.step(randoms(flat, seed + 1 + number))
        # The first step makes the buffers.
        assert is_made == (not given_["momentum"] or (number > 0 and not has_others))
        twins.check()


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0])
def test_numbers_that_are_none_come_to_the_same(special):
    twins = Twins([[torch.tensor([1.0, -0.0, special])]], lr=0.1, weight_decay=0.1)

    assert twins.step([torch.tensor([special, -0.0, 1.0])])

    twins.check()


def shared(**given: Any) -> tuple[SGD, list[Any], list[Tensor], list[Any]]:
    """Parameters that overlap, and those of torch; the optimizer of ours comes first."""
    ours, theirs = (torch.arange(6.0) for _ in range(2))
    pairs = [[nn.Parameter(t[:4]), nn.Parameter(t[2:])] for t in (ours, theirs)]
    gradients = [torch.full((4,), 2.0), torch.full((4,), 3.0)]
    optimizers = [SGD(p, lr=0.1, **given) for p in pairs]
    for parameter, gradient in zip(pairs[1], gradients, strict=True):
        parameter.grad = gradient
    optimizers[1].step()
    return optimizers[0], pairs[0], gradients, [ours, theirs]


def test_parameters_that_share_memory_come_one_after_the_other():
    optimizer, parameters, gradients, memory = shared()

    assert step_at_once(optimizer, parameters, gradients)

    assert_equal(memory[:1], memory[1:])


# ------------------------------------------------------------------ what is left to torch


@pytest.mark.parametrize("given_", [{"weight_decay": 0.5}, {"maximize": True}])
def test_parameters_that_share_memory_are_left_to_torch_if_the_order_matters(given_):
    optimizer, parameters, gradients, memory = shared(**given_)

    assert not step_at_once(optimizer, parameters, gradients)

    assert_equal(memory[:1], [torch.arange(6.0)])


def test_memory_may_be_shared_by_several_storages():
    array = numpy.ones(6, dtype=numpy.float32)
    parameters = [nn.Parameter(torch.from_numpy(a)) for a in (array[:4], array[2:])]
    optimizer = SGD(parameters, lr=0.1, weight_decay=0.5)

    assert not step_at_once(optimizer, parameters, [torch.ones(4)] * 2)


def test_gradient_in_the_memory_of_a_parameter_is_left_to_torch():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = SGD([first, second], lr=1.0, weight_decay=0.5)
    gradients = [torch.ones(2), first.detach()]

    assert not step_at_once(optimizer, [first, second], gradients)


def test_buffer_in_the_memory_of_a_parameter_is_left_to_torch():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    optimizer.state[parameter]["momentum_buffer"] = parameter.detach()

    assert not step_at_once(optimizer, [parameter], [torch.ones(2)])


def test_gradient_without_memory_is_left_to_torch():
    parameter = nn.Parameter(torch.ones(2))
    nothing = torch._efficientzerotensor(2)

    assert not step_at_once(
        SGD([parameter], lr=0.1, weight_decay=0.1), [parameter], [nothing]
    )


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(1)])
def test_gradient_that_does_not_fit_is_left_to_torch(other, momentum):
    """The parameter was given other memory since then."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = SGD(parameters, lr=0.1, momentum=momentum)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.ones(2)

    assert not step_at_once(optimizer, parameters, [torch.ones(2), other])

    assert_equal(parameters, [torch.ones(2)] * 2)


def test_group_without_parameters_is_left_to_torch():
    parameter = nn.Parameter(torch.ones(2))
    groups: list[Any] = [{"params": [parameter]}, {"params": []}]

    assert not step_at_once(SGD(groups, lr=0.1), [parameter], [torch.ones(2)])


class OfProgram(SGD):
    """Looks like torch's."""


class Strange(torch.Tensor):
    """A tensor that may do anything."""


def sparse() -> Tensor:
    return torch.eye(2).to_sparse()


def of_class(tensor: Tensor) -> Any:
    return tensor.as_subclass(Strange)


@pytest.mark.parametrize(
    ("cls", "given_"),
    [
        (OfProgram, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1}),
        (SGD, {"lr": torch.tensor(0.1)}),
        (SGD, {"lr": True}),
        (SGD, {"lr": 0.1, "foreach": True}),
        (SGD, {"lr": 0.1, "fused": True}),
        (SGD, {"lr": 0.1, "differentiable": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_other_optimizers_are_left_to_torch(cls, given_):
    parameter = nn.Parameter(torch.ones(2, 2))

    assert not step_at_once(cls([parameter], **given_), [parameter], [torch.eye(2)])

    assert_equal([parameter], [torch.ones(2, 2)])


@pytest.mark.parametrize("gradient", [None, sparse(), of_class(torch.eye(2))])
def test_other_gradients_are_left_to_torch(gradient):
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = SGD(parameters, lr=0.1)

    assert not step_at_once(optimizer, parameters, [torch.eye(2), gradient])

    assert_equal(parameters, [torch.ones(2, 2)] * 2)


def test_parameters_of_other_classes_are_left_to_torch():
    parameter: Any = nn.Parameter(of_class(torch.ones(2)))

    assert not step_at_once(SGD([parameter], lr=0.1), [parameter], [torch.ones(2)])


def test_group_that_is_left_to_torch_leaves_it_the_others():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups: list[Any] = [{"params": [p]} for p in parameters]
    groups[1]["foreach"] = True
    optimizer = SGD(groups, lr=0.1)

    assert not step_at_once(optimizer, parameters, [torch.ones(2)] * 2)

    assert_equal(parameters, [torch.ones(2)] * 2)


@pytest.fixture
def plain() -> tuple[SGD, list[Any], list[Tensor]]:
    """What is not left to torch, as long as nobody else is interested."""
    parameters = [nn.Parameter(torch.ones(2))]
    arguments = SGD(parameters, lr=0.5), parameters, [torch.ones(2)]
    assert step_at_once(*arguments)
    return arguments


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_are_left_to_torch(plain, when):
    getattr(plain[0], f"register_step_{when}_hook")(lambda *_: None)

    assert not step_at_once(*plain)


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_hooks_of_all_optimizers_are_left_to_torch(plain, register):
    hook = register(lambda *_: None)
    try:
        assert not step_at_once(*plain)
    finally:
        hook.remove()
    assert step_at_once(*plain)


def test_profiler_is_left_to_torch(plain):
    with profile(activities=[ProfilerActivity.CPU]):
        assert not step_at_once(*plain)
    assert step_at_once(*plain)


def test_step_that_a_program_has_replaced_is_left_to_it(plain, monkeypatch):
    vars(plain[0])["step"] = lambda: None
    assert not step_at_once(*plain)
    del vars(plain[0])["step"]
    assert step_at_once(*plain)

    def step(*_: Any) -> None:
        """Not torch's, but in torch's wrappers perhaps."""

    hooked: Any = torch.optim.Optimizer.profile_hook_step
    for replacement in (
        step,
        hooked(step),
        hooked(_use_grad_for_differentiable(step)),
        _use_grad_for_differentiable(SGD.step),
    ):
        monkeypatch.setattr(SGD, "step", replacement)
        assert not step_at_once(*plain)


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_gradient_scalers_are_left_to_torch(plain, name):
    setattr(plain[0], name, torch.ones(()))

    assert not step_at_once(*plain)


def test_step_that_is_to_be_differentiated_is_left_to_torch():
    """Torch looks at the default, whatever the group says."""
    parameter = nn.Parameter(torch.ones(2))
    groups: list[Any] = [{"params": [parameter], "differentiable": False}]
    optimizer = SGD(groups, lr=0.1, differentiable=True)

    assert not step_at_once(optimizer, [parameter], [torch.ones(2)])


# ------------------------------------------------------------------- what autograd is told


def test_graph_that_the_step_makes_invalid_is_noticed(plain):
    optimizer, (parameter,), gradients = plain
    loss = (parameter * parameter).sum()
    before = parameter._version

    assert step_at_once(optimizer, [parameter], gradients)

    assert parameter._version == before + 2  # when it begins, and when it ends
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_history_is_not_recorded_and_the_grad_mode_is_as_before(plain):
    optimizer, (parameter,), gradients = plain
    recorded = gradients[0].clone().requires_grad_()

    assert step_at_once(optimizer, [parameter], [recorded * 2])

    assert torch.is_grad_enabled()
    assert parameter.grad_fn is None
    assert parameter.is_leaf


def test_grad_mode_is_put_back_when_a_step_fails(plain):
    optimizer, parameters, gradients = plain
    failing = patch.object(Foreach, "add", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(RuntimeError, match="no memory"):
        step_at_once(optimizer, parameters, gradients)

    assert torch.is_grad_enabled()


def test_other_state_of_the_optimizer_stays(plain):
    optimizer = plain[0]
    before = copy.deepcopy(optimizer.state_dict())

    assert step_at_once(*plain)

    assert optimizer.state_dict() == before
