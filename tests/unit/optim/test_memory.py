"""Stand-ins and parameters stay the same part of the same memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradwire.optim._local import _give_memory, _stand_in

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other memory": Tensor.clone,
    "another shape": lambda value: value[:1],
    "other strides": Tensor.t,
    "another place": lambda value: value[1:],
}


@pytest.fixture(params=["with is_set_to", "without"], autouse=True)
def _device(request, monkeypatch):
    def refuse(*_: Tensor) -> bool:
        raise NotImplementedError("not for this device")

    if request.param == "without":
        monkeypatch.setattr(Tensor, "is_set_to", refuse)


def make_pairs() -> tuple[list[Tensor], list[Tensor]]:
    parameters: list[Tensor] = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    return parameters, [_stand_in(parameter) for parameter in parameters]


def form_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@pytest.mark.parametrize("changed", [0, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_change_of_one_is_followed(name, changed):
    givers, takers = make_pairs()
    giver = givers[changed]
    giver.data = CHANGES[name](giver.detach())
    expected = [form_of(giver) for giver in givers]

    _give_memory(givers, takers)

    assert [form_of(taker) for taker in takers] == expected
    assert [form_of(giver) for giver in givers] == expected


def test_what_has_not_changed_is_left_alone():
    givers, takers = make_pairs()
    before = [form_of(tensor) for tensor in takers]
    versions = [tensor._version for tensor in givers + takers]

    _give_memory(givers, takers)

    assert [form_of(tensor) for tensor in takers] == before
    assert [tensor._version for tensor in givers + takers] == versions
