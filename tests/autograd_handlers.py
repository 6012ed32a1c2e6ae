"""What workers run for the tests of the autograd layer; see autograd_functions.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functions
import probes
from autograd_functions import (
    SIZE,
    Box,
    call,
    call_async,
    count_run,
    get_kept,
    here,
    keep,
    num_runs,
    on_all_workers,
    parameter,
)
from gradwire import rpc

# -------------------------------------------------------------- nodes that tests watch


class Broken(Exception):
    """Raised in backward; its arguments are not those of its base."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"broken with {code}: {reason}")
        self.code = code
        self.reason = reason


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:  # a pass of the same context with another loss
            raise Broken(7, reason=f"by {here()}")


def break_backward(x: Tensor) -> Tensor:
    return _Break.apply(x)


class _BreakOddly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        functions.raise_unpicklable("held in backward")


def break_oddly(x: Tensor) -> Tensor:
    """Breaks with an error that cannot be sent."""
    return _BreakOddly.apply(x)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        functions.block_until_set(ctx.name)
        return gradient, None


def pause_backward(x: Tensor, name: str) -> Tensor:
    """The backward blocks here; see `functions.block_until_set`."""
    return _Pause.apply(x, name)


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        count_run(ctx.name)
        return gradient, None


def count_backward(x: Tensor, name: str) -> Tensor:
    return _Count.apply(x, name)


def num_backwards(name: str) -> int:
    """How often the backward of `count_backward` has run on this worker."""
    return num_runs(name)


class Witness:
    """Lives as long as the graph that it is part of."""


_witnesses: weakref.WeakSet[Witness] = weakref.WeakSet()


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.witness = Witness()
        _witnesses.add(ctx.witness)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def watch_graph(x: Tensor) -> Tensor:
    return _Watch.apply(x)


def num_graphs() -> int:
    """How many graphs with a `watch_graph` are alive on this worker."""
    return len(_witnesses)


def wait_until_graphs(worker: str, number: int) -> None:
    """Returns when so many watched graphs are alive on a worker."""
    probes.wait_until(
        lambda: on_all_workers(num_graphs)[worker] == number,
        f"{number} graphs on {worker}, found {on_all_workers(num_graphs)}",
        5,
    )


class _CallBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[..., Any], *args: Any
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.args = function, args
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.function(*ctx.args)
        return gradient, None, *[None] * len(ctx.args)


def run_in_backward(x: Tensor, function: Callable[..., Any], *args: Any) -> Tensor:
    """Calls a function when the backward comes through here."""
    return _CallBack.apply(x, function, *args)


# ------------------------------------------------------------- what is called on workers


class Pair(NamedTuple):
    first: Any
    second: Any


def linear(x: Tensor) -> Tensor:
    return x @ parameter("weight")


def affine(x: Tensor) -> Tensor:
    return torch.tanh(x @ parameter("weight") + parameter("bias"))


def counted(x: Tensor, name: str = "counted") -> Tensor:
    return count_backward(linear(x), name)


def watched(x: Tensor) -> Tensor:
    return watch_graph(linear(x))


def paused(x: Tensor, name: str) -> Tensor:
    return pause_backward(affine(x), name)


def double(x: Any) -> Any:
    return x * 2


def join(*tensors: Tensor) -> Tensor:
    """Uses each of them differently."""
    return sum((t * (i + 1) for i, t in enumerate(tensors)), parameter("bias"))  # type: ignore[return-value]


def join_by_name(*, left: Tensor, right: Tensor) -> Tensor:
    return left @ parameter("weight") - right


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ parameter("weight"), x * parameter("bias")


def pack(x: Tensor) -> dict[str, Any]:
    """Tensors of all kinds, in containers of all kinds."""
    y = affine(x)
    return {
        "list": [y, x.detach() * 3, {"deep": (y * 2, 7)}],
        "named": Pair(y.sum(), y.argmax()),
        "box": Box(linear(x)),
        "integers": torch.arange(SIZE),
        "flags": y > 0,
        "again": y,
        "nothing": None,
    }


def unpack(pack: dict[str, Any], scale: float) -> Tensor:
    """Takes what `pack` made, as an argument."""
    first, constant, rest = pack["list"]
    deep, number = rest["deep"]
    total = first * constant + deep * number + pack["box"].value * scale
    total = total[pack["integers"]] * pack["flags"] + pack["again"]
    return total * pack["named"].first + pack["named"].second


def split_three_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return affine(x), x.detach() * 2, linear(x)


def get_constant(x: Tensor) -> Tensor:
    return x.detach() * 2


def get_indices(x: Tensor) -> Tensor:
    return x.argmax(dim=0)


def get_parameter(name: str) -> Tensor:
    """A leaf of this worker, as it is."""
    return parameter(name)


def get_own(x: Any = None) -> Tensor:
    """Needs grad because of what is here, not because of what came."""
    return parameter("weight") * 2


def return_argument(x: Tensor) -> Tensor:
    return x


def forward_along(route: list[str], x: Tensor) -> Tensor:
    """Goes from worker to worker, with something to do on the way there and back."""
    y = affine(x)
    if route:
        y = y + call(route[0], forward_along, route[1:], y * 2)
    return linear(y)


def relay(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return call(to, function, *args)


def affine_relay(to: str, function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Computes, passes on, computes."""
    return linear(call(to, function, affine(x), *args))


def fan_out(workers: list[str], function: Callable[..., Any], x: Tensor) -> Tensor:
    y = affine(x)
    futures = [call_async(worker, function, y) for worker in workers]
    return sum(future.wait() for future in futures)  # type: ignore[return-value]


async def affine_soon(x: Tensor) -> Tensor:
    return affine(x)


async def await_relay(to: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    """Awaits a call of its own."""
    y = await call_async(to, function, affine(x))
    return linear(y)


@rpc.functions.async_execution
def relay_through_future(
    to: str, function: Callable[..., Any], x: Tensor
) -> rpc.Future[Tensor]:
    """Its reply is made in a callback."""
    future = call_async(to, function, affine(x))
    return future.then(lambda done: linear(done.value()))


@rpc.functions.async_execution
def relay_twice_through_futures(
    to: str, function: Callable[..., Any], x: Tensor
) -> rpc.Future[Tensor]:
    """The second call is made by a callback of the first."""
    ended: rpc.Future[Tensor] = rpc.Future()

    def go_on(first: rpc.Future[Tensor]) -> None:
        second = call_async(to, function, linear(first.value()))
        second.add_done_callback(lambda done: ended.set_result(done.value()))

    call_async(to, function, affine(x)).add_done_callback(go_on)
    return ended


def affine_broken(x: Tensor) -> Tensor:
    return break_backward(affine(x))


def affine_broken_oddly(x: Tensor) -> Tensor:
    return break_oddly(affine(x))


def break_along(route: list[str], broken: list[str], x: Tensor) -> Tensor:
    """As `forward_along`; the backward fails half-way on some workers."""
    y = affine(x)
    if here() in broken:
        y = break_backward(y)
    if route:
        y = call(route[0], break_along, route[1:], broken, y)
    return linear(y)


def keep_linear(name: str, x: Tensor) -> None:
    """The value stays here."""
    keep(name, linear(x))


def use_kept(name: str, x: Tensor) -> Tensor:
    return get_kept(name) * x


def add_to_kept(name: str, x: Tensor) -> None:
    keep(name, get_kept(name) + linear(x))


def kept_total(name: str) -> Tensor:
    total: Tensor = get_kept(name).sum()
    return total


def call_until_set(name: str, to: str, function: Callable[..., Any], x: Tensor) -> int:
    """Calls again and again; returns how often."""
    number = 0
    while not functions.get_event(name).is_set():
        call(to, function, x)
        number += 1
        functions.set_event(f"{name}:entered")
    return number


def wait_then(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Blocks in the handler first; see `functions.block_until_set`."""
    functions.block_until_set(name)
    return function(*args)


def fail_after(x: Tensor) -> Tensor:
    """A handler that records, and fails then."""
    watched(x)
    raise ValueError("after the forward")
