from __future__ import annotations

import functools
import gc
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from gradwire.errors import DecodeError
from gradwire.wire import name_of, resolve


def plain(x):
    return x


class Owner:
    @staticmethod
    def static(x):
        return x

    @classmethod
    def create(cls):
        return cls()

    def method(self):
        return self

    class Inner:
        @staticmethod
        def deep():
            return 1


class Heir(Owner):
    pass


@functools.wraps(plain)
def plain_wrapper(x):
    return x


@functools.lru_cache
def cached(x):
    return x


NAMED = [
    plain,
    cached,
    Owner,
    Owner.static,
    Owner.Inner.deep,
    Owner.method,
    torch.add,
    torch.mul,
    torch.matmul,
    torch.nn.functional.linear,
    torch.nn.functional.relu,
    torch.nn.functional.gelu,
    torch._C._nn.linear,
    torch.linalg.norm,
    torch.special.erf,
    torch.fft.fft,
    torch.sparse.mm,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.relu.default,
    torch.ops.aten.add,
    torch.Tensor.add,
    torch.Tensor,
    torch.nn.Linear,
    math.sqrt,
    operator.add,
    len,
    int,
]


@pytest.mark.parametrize("function", NAMED, ids=range(len(NAMED)))
def test_name_leads_back_to_the_function(function):
    name = name_of(function)

    assert name is not None
    assert resolve(name) is function


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch:add"),
        (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch:ops.aten.add"),
        (Owner.static, f"{__name__}:Owner.static"),
        (Owner.create, f"{__name__}:Owner.create"),
        (Heir.create, f"{__name__}:Heir.create"),
    ],
)
def test_name_is_module_and_qualified_name(function, name):
    assert name_of(function) == name


def test_class_method_resolves_to_the_same_class():
    assert isinstance(resolve(name_of(Heir.create) or "")(), Heir)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        Owner().method,
        functools.partial(plain, 1),
        torch.nn.Linear(1, 1),
        [].append,
        plain_wrapper,
    ],
    ids=["lambda", "bound", "partial", "instance", "builtin bound", "impostor"],
)
def test_what_cannot_be_imported_has_no_name(function):
    assert name_of(function) is None


def test_local_function_has_no_name():
    def local():
        pass

    assert name_of(local) is None


def test_replaced_function_loses_its_name(monkeypatch):
    original = plain
    monkeypatch.setattr(sys.modules[__name__], "plain", len)

    assert name_of(original) is None


def test_replaced_builtin_loses_its_name(monkeypatch):
    original = torch.add
    assert name_of(original) == "torch:add"
    monkeypatch.setattr(torch, "add", torch.mul)

    assert name_of(original) != "torch:add"


def test_spawned_main_is_named_as_main(monkeypatch):
    main = types.ModuleType("__mp_main__")
    exec("def in_script(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)

    assert name_of(main.in_script) == "__main__:in_script"
    assert resolve("__main__:in_script") is main.in_script
    assert resolve("__mp_main__:in_script") is main.in_script


def test_resolve_imports_the_module():
    sys.modules.pop("colorsys", None)

    assert resolve("colorsys:rgb_to_hsv")(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:f", ["no_such_module", "'f'", "import"]),
        ("math:no_such", ["'math'", "no_such", "by name"]),
        ("math:sqrt.deeper", ["'math'", "sqrt.deeper"]),
        ("math:pi", ["pi", "float"]),
        ("__main__:no_such_function", ["__main__", "no_such_function"]),
        ("torch:ops.no_such.op", ["ops.no_such.op"]),
        ("math", ["module:name"]),
        (":x", ["module:name"]),
        ("math:", ["module:name"]),
        (".:x", ["'.'"]),
        ("math:a..b", ["a..b"]),
    ],
)
def test_resolve_of_a_missing_function_says_what_is_missing(name, words):
    with pytest.raises(DecodeError) as caught:
        resolve(name)

    assert all(word in str(caught.value) for word in words)


# -------------------------------------------------- functions whose place is known already


@pytest.fixture
def module(monkeypatch):
    made = ModuleType("module_of_this_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def define(module: ModuleType, result: int) -> Callable[[], int]:
    exec(f"def function(): return {result}", vars(module))
    return module.function


def test_function_that_was_replaced_has_no_name_any_more(module):
    old = define(module, 1)
    assert name_of(old) == "module_of_this_test:function"

    new = define(module, 2)

    assert name_of(old) is None
    assert name_of(new) == "module_of_this_test:function"


def test_name_leads_to_what_is_there_now(module):
    define(module, 1)
    assert resolve("module_of_this_test:function")() == 1

    define(module, 2)
    assert resolve("module_of_this_test:function")() == 2

    del module.function
    with pytest.raises(DecodeError, match="cannot find 'function'"):
        resolve("module_of_this_test:function")


def test_name_leads_to_the_module_that_is_there_now(module, monkeypatch):
    old = define(module, 1)
    assert name_of(old) is not None
    assert resolve("module_of_this_test:function") is old
    other = ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, other)
    new = define(other, 2)

    assert name_of(old) is None
    assert resolve("module_of_this_test:function") is new


def test_place_that_is_known_does_not_keep_a_function_alive(module):
    function = define(module, 1)
    assert name_of(function) is not None
    alive = weakref.ref(function)

    del function, module.function
    gc.collect()

    assert alive() is None


def test_known_place_opens_nothing_that_is_refused(module):
    define(module, 1)
    resolve("module_of_this_test:function")

    def refuse(module: str, qualname: str) -> Any:
        raise DecodeError("not here")

    with pytest.raises(DecodeError, match="not here"):
        resolve("module_of_this_test:function", refuse)
