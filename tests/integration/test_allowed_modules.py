"""Workers that trust each other, but only with some modules."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import functions
import rref_functions as fn
from gradwire import rpc
from gradwire.errors import DecodeError
from gradwire.rpc._agent import Agent
from gradwire.wire import AllowedModules
from strangers import LIMIT_S, Group


class Reaches:
    """Unpickles as a call of something."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture
def couple() -> Iterator[tuple[Agent, Agent]]:
    group = Group()
    first, second, _ = group.couple(allowed_modules=("functions", "torch"))
    yield first, second
    group.close()


def call(couple: tuple[Agent, Agent], function: Any, *args: Any) -> Any:
    return couple[0].call("w1", function, args, timeout=LIMIT_S)


def test_modules_on_the_list_can_be_used(couple):
    x = torch.ones(2)
    assert torch.equal(call(couple, torch.add, x, 1), x + 1)
    assert call(couple, functions.echo, {"a": [1, {2}, x.dtype]}) == {
        "a": [1, {2}, x.dtype]
    }
    assert isinstance(
        call(couple, functions.echo, torch.nn.Linear(1, 1)), torch.nn.Linear
    )


@pytest.mark.parametrize("function", [os.getpid, operator.add, max, fn.catch, eval])
def test_functions_of_other_modules_cannot_be_called(couple, function):
    with pytest.raises(
        DecodeError, match=r"is not allowed on this worker.*'functions'"
    ):
        call(couple, function, 1)


def test_other_globals_are_not_unpickled(couple, tmp_path):
    path = tmp_path / "canary"

    for value in (
        Reaches(os.mkdir, str(path)),
        Reaches(operator.add, 1, 2),
        fn.MyError,
    ):
        with pytest.raises(DecodeError, match="is not allowed on this worker"):
            call(couple, functions.echo, [value])

    assert not path.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "os.system"),
        ("functions", "os.system"),
        ("torch", "serialization.os.system"),
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("gradwire.wire._functions", "resolve"),
        ("gradwire.rpc._remote_exceptions", "rebuild"),
        ("torchx", "thing"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(module, name):
    allowed = AllowedModules(("functions", "torch"))

    with pytest.raises(DecodeError):
        allowed.find(module, name)


def test_option_must_be_a_tuple_of_names():
    with pytest.raises(TypeError, match="allowed_modules"):
        rpc.RpcBackendOptions(allowed_modules="torch")  # type: ignore[arg-type]
