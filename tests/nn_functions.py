"""Modules and functions for the tests of remote modules; workers find them by name."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autograd_functions
import probes
from gradwire import rpc
from gradwire.nn import RemoteModule

SIZE = 4
BATCH = 6


class Block(nn.Module):
    """A layer with parts, buffers, data, methods, and things that cannot be sent."""

    def __init__(self, size: int = SIZE, *, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, size), nn.Tanh())
        self.outer = nn.Linear(size, size)
        self.register_buffer("offset", torch.full((size,), 0.5))
        self.scale = scale
        self.names = ["inner", "outer"]
        self.lock = threading.Lock()
        self.activation = torch.relu

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.outer(self.inner(x)) * self.scale + self.offset + shift

    def residual(self, x: Tensor, weight: float = 1.0) -> Tensor:
        return x + weight * self(x)

    def split(self, x: Tensor) -> dict[str, Any]:
        return {"out": self(x), "size": len(x)}

    def rescale(self, scale: float) -> Block:
        self.scale = scale
        return self

    def fail(self) -> None:
        raise LookupError("nothing to be found")

    async def later(self, x: Tensor) -> Tensor:
        return self(x)

    @rpc.functions.async_execution
    def promise(self, x: Tensor | None) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if x is None:
            future.set_exception(LookupError("nothing to be found"))  # type: ignore[arg-type]
        else:
            future.set_result(self(x))
        return future


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE, bias=False)
        self.second = nn.Linear(SIZE, SIZE, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Extra(nn.Linear):
    """A layer with a state that is no tensor."""

    note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Nested(nn.Module):
    """A module that has a part on yet another worker."""

    def __init__(self, to: str, seed: int) -> None:
        super().__init__()
        self.here = make(seed, nn.Linear, SIZE, SIZE)
        self.there = RemoteModule(to, make, (seed + 1, nn.Linear, SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.there(torch.tanh(self.here(x)))


class Named(RemoteModule):
    """A stand-in with an attribute of its own."""

    title = ""


class Outputs(NamedTuple):
    hidden: Tensor
    rest: list[Tensor]


def make(seed: int, cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A module that is the same on whichever worker it is made, in float64."""
    module = cls(*args, **kwargs).double()
    # Not with the generator of the process: several threads may make modules at once.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.7, 0.7, generator=generator)
    return module


def make_nothing(*args: Any) -> None:
    return None


def make_failing() -> nn.Module:
    raise LookupError("no such layer")


def batch(seed: int = 0, *, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, SIZE, dtype=torch.float64, generator=generator)
    return x.requires_grad_(requires_grad)


def fill_with_ones(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


# -------------------------------------------------------------- what workers are asked


def gradients(rref: rpc.RRef[nn.Module]) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in rref.local_value().named_parameters()}


def training_modes(rref: rpc.RRef[nn.Module]) -> dict[str, bool]:
    return {name: part.training for name, part in rref.local_value().named_modules()}


def requires_grad(rref: rpc.RRef[nn.Module]) -> set[bool]:
    return {p.requires_grad for p in rref.local_value().parameters()}


def dtypes(rref: rpc.RRef[nn.Module]) -> set[torch.dtype]:
    module = rref.local_value()
    return {t.dtype for t in (*module.parameters(), *module.buffers())}


def count_hook_runs(rref: rpc.RRef[nn.Module]) -> None:
    def count(module: Any, args: Any, output: Any) -> None:
        module.num_runs += 1

    module = rref.local_value()
    module.num_runs = 0  # type: ignore[assignment]
    module.register_forward_hook(count)


def call_module(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def get_fields(module: RemoteModule) -> tuple[str, str, str]:
    return module.on, module.device, module.get_module_rref().owner_name()


def get_class(module: object) -> str:
    return type(module).__name__


def is_here(rref: rpc.RRef[nn.Module]) -> bool:
    return rref.is_owner()


def train_elsewhere(module: RemoteModule, x: Tensor) -> None:
    """A forward and backward by another worker, outside any context."""
    module(x).pow(2).sum().backward()


def move_to(device: str, value: Any) -> Any:
    from gradwire.wire import move

    return move(value, device)


# --------------------------------------------------------------------------- clean up


def reference_counts() -> dict[str, int]:
    names = ("owner_rrefs", "forks", "user_rrefs", "pending_users", "pending_children")
    info = rpc.get_debug_info()
    return {name: info[name] for name in names}


def finish() -> None:
    """The end of a test: no contexts and no references are left on any worker."""
    autograd_functions.finish()
    found: dict[str, Any] = {}

    def is_clean() -> bool:
        found.update(autograd_functions.on_all_workers(reference_counts))
        return not any(n for counts in found.values() for n in counts.values())

    try:
        try:
            probes.wait_until(is_clean, "no references are left", 0.2)
        except AssertionError:
            # Frames of errors that the test expected hold references, in cycles.
            gc.collect()
            probes.wait_until(is_clean, "no references are left", 3)
    except AssertionError:
        raise AssertionError(f"left: {found}") from None


def clean(request: Any) -> Iterator[None]:
    """Body of a fixture that checks this after each test that passed."""
    cluster = None
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        cluster.run(0, autograd_functions.begin)
    failed_before = request.session.testsfailed
    yield
    if cluster is not None and request.session.testsfailed == failed_before:
        cluster.run(0, finish)


# -------------------------------------------------------------------- remote and local


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
            own = ask(part, gradients)
        else:
            own = {n: p.grad for n, p in part.named_parameters(recurse=False)}
        found |= {f"{path}.{name}": gradient for name, gradient in own.items()}
    return found


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
