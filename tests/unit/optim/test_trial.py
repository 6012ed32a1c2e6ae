"""Steps that nobody sees: shown they are those of torch, undone they never were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.optim._local import _stand_in
from gradwire.optim._trial import Trial
from optim_functions import Replaces, assert_same

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "other memory": (Replaces, {"lr": 0.1}),
}


class Bench:
    """Two parameters, an optimizer over stand-ins, and torch's own beside it."""

    def __init__(self, kind: str) -> None:
        optimizer_class, options = KINDS[kind]
        self.parameters = [nn.Parameter(torch.arange(3.0) + n) for n in range(3)]
        self.expected = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.stand_ins = [_stand_in(parameter) for parameter in self.parameters]
        self.optimizer = optimizer_class(self.stand_ins, **options)
        self.torch_optimizer = optimizer_class(self.expected, **options)

    def gradients(self, number: int) -> list[Tensor | None]:
        return [torch.full((3,), number + 1.0), torch.arange(3.0), None]

    def step_of_torch(self, number: int) -> None:
        for parameter, gradient in zip(
            self.expected, self.gradients(number), strict=True
        ):
            parameter.grad = gradient
        self.torch_optimizer.step()

    def trial(self, number: int) -> Trial:
        trial = Trial(self.optimizer, self.parameters, self.stand_ins)
        for stand_in, gradient in zip(
            self.stand_ins, self.gradients(number), strict=True
        ):
            stand_in.grad = gradient
        trial.step()
        return trial

    def check_same(self) -> None:
        assert_same(list(self.parameters), list(self.expected))
        found, expected = (
            optimizer.state_dict()
            for optimizer in (self.optimizer, self.torch_optimizer)
        )
        assert_same(found, expected)
        for parameter, stand_in in zip(self.parameters, self.stand_ins, strict=True):
            assert stand_in.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_shown_steps_are_those_of_torch(kind):
    bench = Bench(kind)

    for number in range(3):
        bench.step_of_torch(number)
        bench.trial(number).show()

    bench.check_same()


@pytest.mark.parametrize("kind", KINDS)
def test_undone_steps_leave_nothing(kind):
    bench = Bench(kind)

    for number in range(3):
        bench.trial(number + 10).undo()
        bench.step_of_torch(number)
        bench.trial(number).show()
        bench.trial(number + 20).undo()

    bench.check_same()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_seen_before_it_is_shown(kind):
    bench = Bench(kind)

    trial = bench.trial(0)

    assert_same(list(bench.parameters), list(bench.expected))
    trial.show()
    assert not torch.equal(bench.parameters[0], bench.expected[0])


PARTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "the same": lambda memory: [memory, memory],
    "overlapping": lambda memory: [memory[:4], memory[2:5], memory[5:]],
    "interleaved": lambda memory: [memory[::2], memory[1::2]],
}


@pytest.mark.parametrize("parts", PARTS)
def test_parameters_may_share_memory(parts):
    expected, found = (
        [nn.Parameter(part) for part in PARTS[parts](torch.arange(8.0))]
        for _ in range(2)
    )
    stand_ins = [_stand_in(parameter) for parameter in found]
    optimizer = torch.optim.SGD(stand_ins, lr=0.1)
    for n, members in enumerate(zip(expected, stand_ins, strict=True)):
        for member in members:
            member.grad = torch.full_like(member, n + 1.0)

    torch.optim.SGD(expected, lr=0.1).step()
    trial = Trial(optimizer, found, stand_ins)
    trial.step()
    trial.show()

    assert_same(list(found), list(expected))


def test_hyperparameters_are_undone_too():
    bench = Bench("SGD")
    trial = Trial(bench.optimizer, bench.parameters, bench.stand_ins)
    bench.optimizer.param_groups[0].update(lr=7.0, extra="new")

    trial.undo()

    assert bench.optimizer.param_groups[0]["lr"] == 0.1
    assert "extra" not in bench.optimizer.param_groups[0]
    bench.check_same()


def test_undone_step_does_not_look_like_a_change():
    bench = Bench("SGD")
    versions = [parameter._version for parameter in bench.parameters]

    bench.trial(0).undo()

    assert [parameter._version for parameter in bench.parameters] == versions


def test_parameter_without_gradient_does_not_look_changed():
    bench = Bench("SGD")
    left_alone, moved = bench.parameters[2], bench.parameters[0]
    versions = left_alone._version, moved._version

    bench.trial(0).show()

    assert left_alone._version == versions[0]
    assert moved._version > versions[1]
