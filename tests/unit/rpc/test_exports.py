"""What others may call: the table of exports, without any network."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from gradwire.errors import NotExported
from gradwire.rpc._exports import Exports


def double(x: int) -> int:
    return 2 * x


class Base:
    def inherited(self) -> str:
        return "inherited"


class Model(Base):
    size = 3

    def __init__(self) -> None:
        self.secret = "s"
        self.hook = print

    def forward(self, x: int) -> int:
        return x + 1

    def _private(self) -> str:
        return "private"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def computed(self) -> str:
        return self.secret

    def __call__(self) -> str:
        return "called"


@pytest.fixture
def table() -> Exports:
    return Exports()


def find(table: Exports, name: str, caller: str = "w1") -> Any:
    return table.find(name, caller, "w0")


def method(table: Exports, value: object, name: Any, caller: str = "w1") -> Any:
    return table.method(value, name, caller, "w0")


def test_default_name_is_that_of_calls(table):
    table.add(double, None, None)
    table.add(torch.add, None, None)
    table.add(torch.ops.aten.mul.Tensor, None, None)

    assert find(table, f"{__name__}:double") is double
    assert find(table, "torch:add") is torch.add
    assert find(table, "torch:ops.aten.mul.Tensor") is torch.ops.aten.mul.Tensor
    assert table.name(double) == f"{__name__}:double"


def test_name_may_be_given_and_is_then_the_only_one(table):
    table.add(double, "twice", None)

    assert find(table, "twice") is double
    assert table.name(double) == "twice"
    assert table.name("twice") == "twice"
    with pytest.raises(NotExported):
        find(table, f"{__name__}:double")


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "", "double", "torch:add", "gradwire.rpc._rref:x"],
)
def test_what_is_not_exported_is_refused_with_all_facts(table, name):
    with pytest.raises(NotExported) as caught:
        find(table, name)

    text = str(caught.value)
    for fact in ("'w1' asked for", repr(name), "'w0' has not exported", "rpc.export"):
        assert fact in text
    assert caught.value.worker == "w0"


def test_export_for_some_peers_is_no_export_for_others(table):
    table.add(double, "twice", ["w1", "w2"])

    assert find(table, "twice", "w1") is double
    assert find(table, "twice", "w0") is double  # the worker itself
    with pytest.raises(NotExported, match=r"'w3' asked for 'twice'"):
        find(table, "twice", "w3")


def test_names_must_be_unique(table):
    table.add(double, "twice", None)
    table.add(double, "twice", ["w1"])  # the same again: the last word counts

    with pytest.raises(ValueError, match=r"'twice' is exported already"):
        table.add(operator.add, "twice", None)
    with pytest.raises(NotExported):
        find(table, "twice", "w2")


@pytest.mark.parametrize(
    ("target", "name", "peers", "error", "text"),
    [
        (3, None, None, TypeError, "only functions and classes"),
        (lambda: 1, None, None, ValueError, r"has no name of its own.*name="),
        (double, "", None, ValueError, "1 to 256 printable"),
        (double, "a\nb", None, ValueError, "1 to 256 printable"),
        (double, "gradwire.rpc:x", None, ValueError, "are taken"),
        (double, 3, None, TypeError, "name must be a str"),
        (double, None, "w1", TypeError, "list of names"),
        (double, None, ["no name"], ValueError, "no name"),
    ],
)
def test_bad_exports_are_clear_errors(table, target, name, peers, error, text):
    with pytest.raises(error, match=text):
        table.add(target, name, peers)


def test_public_methods_of_an_exported_class_can_be_called(table):
    table.add(Model, None, None)
    model = Model()

    assert method(table, model, "forward")(1) == 2
    assert method(table, model, "static")() == "static"
    assert method(table, model, "of_class")() == "Model"
    assert method(table, model, "__call__")() == "called"


@pytest.mark.parametrize(
    "name",
    [
        "_private",
        "__init__",
        "__class__",
        "__dict__",
        "__reduce__",
        "__getattribute__",
        "secret",
        "hook",
        "size",
        "computed",
        "inherited",
        "nothing",
        "",
        "forward.__globals__",
        3,
        None,
    ],
)
def test_nothing_else_of_an_exported_class_can_be_reached(table, name):
    table.add(Model, None, None)

    with pytest.raises(NotExported, match="only public methods"):
        method(table, Model(), name)


def test_inherited_methods_belong_to_the_class_that_defines_them(table):
    table.add(Model, None, None)
    table.add(Base, None, ["w2"])

    assert method(table, Model(), "inherited", "w2")() == "inherited"
    with pytest.raises(NotExported):
        method(table, Model(), "inherited", "w1")


def test_an_instance_cannot_give_a_method_another_meaning(table):
    table.add(Model, None, None)
    model = Model()
    model.forward = operator.attrgetter("__class__")  # type: ignore[assignment]

    assert method(table, model, "forward")(1) == 2


@pytest.mark.parametrize(
    "value", [Base(), [1], torch.ones(1), double, Model], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("name", ["inherited", "append", "add_", "__call__", "mro"])
def test_methods_of_other_classes_are_refused(table, value, name):
    table.add(Model, None, None)
    table.add(double, None, None)

    with pytest.raises(NotExported):
        method(table, value, name)
