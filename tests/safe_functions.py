"""What workers of tests in safe mode export, and what they deliberately do not."""

from __future__ import annotations

import pickle
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwire.nn
import gradwire.optim  # noqa: F401 - what they offer to others is there from now on
import worker_process
from gradwire import autograd, rpc
from gradwire.rpc import RRef, export, extension
from gradwire.wire import _pickle

rpc.export(torch.add)
rpc.export(torch.mul, name="product")
rpc.export(nn.Linear)


@export
def echo(*args: Any, **kwargs: Any) -> Any:
    if kwargs:
        return args, kwargs
    return args[0] if len(args) == 1 else args


@export
def worker_name() -> str:
    return rpc.get_worker_info().name


@export
def calls_served() -> int:
    return int(rpc.get_debug_info()["calls_served"])


@export
def types_of(value: Any) -> Any:
    """The names of all types in a value, at their places."""
    if isinstance(value, dict):
        return [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [type(value).__name__, *map(types_of, value)]
    return type(value).__name__


@export
def are_same(left: Any, right: Any) -> bool:
    return left is right


@export
def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("bad value")
    if kind == "os":
        raise FileNotFoundError("no such thing")
    if kind == "own":
        raise OwnError("mine")
    if kind == "unicode":
        b"\xff".decode()
    if kind == "exit":
        raise SystemExit(3)
    raise KeyError(kind)


class OwnError(Exception):
    """A class that no table knows."""


@export
def return_something_else() -> Any:
    return OwnError("cannot be sent")


@export(name="only for w0", peers=["w0"])
def only_for_w0() -> str:
    return "welcome"


@export
def call_on(name: str, function: str, *args: Any) -> Any:
    """A nested call; functions by name."""
    return rpc.rpc_sync(name, function, args)


@export
@rpc.functions.async_execution
def add_later(to: str, x: Tensor, y: Tensor) -> Any:
    return rpc.rpc_async(to, torch.add, (x, y)).then(lambda future: future.value() + 1)


@export
async def coroutine(x: Tensor) -> Tensor:
    return x + 1


def not_exported() -> str:
    touched.set()
    return "executed"


touched = threading.Event()
_gate = threading.Event()


def was_touched() -> bool:
    return touched.is_set()


@export
def wait_for_gate(*_: Any) -> bool:
    return _gate.wait(20.0)


@export
def open_gate() -> None:
    _gate.set()


@export
def close_gate() -> None:
    _gate.clear()


@export
def take(*_: Any) -> None:
    pass


@export
def scale(x: Tensor) -> Tensor:
    return 2 * x


@export
def ask_by_short_name(to: str, name: str, *args: Any) -> Any:
    return rpc.rpc_sync(to, {"add": torch.add}[name], args)


@export
def num_active() -> int:
    return int(rpc.get_debug_info()["server_active_calls"])


@export
def open_calls(peer: str) -> int:
    """How many calls of a peer are not answered yet."""
    return extension.current_agent().network.find(peer).held.calls


@export
def ask_active(to: str) -> int:
    """How many calls are open there, without this one."""
    return rpc.rpc_sync(to, num_active) - 1


@export
def ask_to_open_gate(to: str) -> None:
    rpc.rpc_sync(to, open_gate)


@export
def num_contexts() -> int:
    return int(autograd.get_debug_info()["contexts"])


@export
def num_forks() -> int:
    return int(rpc.get_debug_info()["forks"])


# -------------------------------------------------------------------------- references


@export
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self._hidden = "hidden"

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def again(self) -> RRef[Counter]:
        return RRef(Counter(self.count))

    def _private(self) -> str:
        touched.set()
        return self._hidden

    def raise_error(self) -> None:
        raise ValueError("from a method")


class Hidden:
    """Not exported; references to it can be had all the same."""

    def method(self) -> str:
        touched.set()
        return "executed"


@export
def make_hidden() -> RRef[Hidden]:
    return RRef(Hidden())


@export
def make_list() -> RRef[list[int]]:
    return RRef([1, 2])


@export
def read_counter(rref: RRef[Counter]) -> int:
    return rref.rpc_sync().add(0)  # type: ignore[no-any-return]


@export
def refer(value: Any) -> RRef[Any]:
    return RRef(value)


@export
def keep(*rrefs: Any) -> int:
    _kept.extend(rrefs)
    return len(_kept)


@export
def drop_all() -> None:
    _kept.clear()


_kept: list[Any] = []


# ---------------------------------------------------------------------------- learning


class Bottom(nn.Module):
    def __init__(self, seed: int, size_in: int, size_out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(size_in, size_out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def norm(self) -> float:
        return float(self.linear.weight.norm())


export(Bottom, name="bottom")

_model: Bottom | None = None


@export
def build(seed: int, size_in: int, size_out: int) -> None:
    """A model that stays private: nobody gets a reference to it."""
    global _model
    _model = Bottom(seed, size_in, size_out)


@export
def forward(x: Tensor) -> Tensor:
    assert _model is not None
    return _model(x)  # type: ignore[no-any-return]


@export
def forward_via(x: Tensor, next_worker: str) -> Tensor:
    """Through the model here and the one behind it."""
    assert _model is not None
    return rpc.rpc_sync(next_worker, forward, (_model(x),))


@export
def apply_gradients(context_id: int | None, rate: float) -> None:
    assert _model is not None
    gradients = None if context_id is None else autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in _model.parameters():
            gradient = parameter.grad if gradients is None else gradients.get(parameter)
            if gradient is not None:
                parameter.add_(gradient, alpha=-rate)
            parameter.grad = None


@export
def checksum() -> list[Tensor]:
    assert _model is not None
    return [parameter.detach().clone() for parameter in _model.parameters()]


@export
def sum_of(rref: RRef[Tensor]) -> Tensor:
    return rref.local_value().sum()


@export
def lend_module() -> RRef[Bottom]:
    return RRef(Bottom(0, 4, 3))


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("bad backward")


@export
def fail_in_backward(x: Tensor) -> Tensor:
    return _FailingBackward.apply(x)  # type: ignore[no-any-return]


class OwnOptimizer(torch.optim.SGD):
    """Not exported."""


# ------------------------------------------------------------------------- the canaries


class Bomb:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def forbid_pickling() -> None:
    """From now on whatever pickles or unpickles in this process fails, and is noted.

    The harness of the tests goes on with functions of its own.
    """
    worker_process.pickle = types.SimpleNamespace(  # type: ignore[assignment]
        loads=pickle.loads, dumps=pickle.dumps
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pickled.append("".join(traceback.format_stack()))
        raise AssertionError("somebody pickles or unpickles")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        setattr(pickle, name, refuse)
    _pickle._Pickler = _pickle._Unpickler = refuse  # type: ignore[misc,assignment]


pickled: list[str] = []


def find_pickling() -> list[str]:
    return list(pickled)
