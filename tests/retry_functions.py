"""A training that is disturbed, and the same training in one process.

The model: w2 owns the first layer, w3 the second; between them w1, which keeps nothing,
bends what w2 hands to it. w0 trains. Workers kill themselves at points that a test has
armed: `reach` is all that happens there otherwise.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.rpc import RRef
from optim_functions import SIZE, Layer, _random

BENDER, FIRST, SECOND = "w1", "w2", "w3"
OWNERS = (FIRST, SECOND)

# ------------------------------------------------------------------------ points of death

_armed: dict[str, int] = {}


def arm(point: str, times: int = 1) -> None:
    """Lets this process die when it has come to a point so many times."""
    _armed[point] = times


def reach(point: str) -> None:
    if point in _armed:
        _armed[point] -= 1
        if not _armed[point]:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # the signal is on its way


# ------------------------------------------------------------------------------ the model

_layers: dict[int, Layer] = {}


def layer(seed: int) -> Layer:
    """A layer of this worker; made at first use, as after a restart."""
    if seed not in _layers:
        _layers[seed] = Layer(seed)
    return _layers[seed]


def forget_layers() -> None:
    _layers.clear()


def parameters(seed: int) -> list[Tensor]:
    return list(layer(seed).parameters())


def parameters_but_one(seed: int) -> list[Tensor]:
    return parameters(seed)[1:]


def apply_layer(seed: int, x: Tensor) -> Tensor:
    return layer(seed)(x)


class Odd:
    """A hyperparameter that no snapshot can hold."""

    def __bool__(self) -> bool:
        return False


def references(seed: int) -> list[RRef[Tensor]]:
    return [RRef(parameter) for parameter in parameters(seed)]


def values(seed: int) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters(seed)]


class Bend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * 0.75 + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        reach("backward")
        (x,) = ctx.saved_tensors
        return grad * (1.5 * x + 1)


def bend(x: Tensor) -> Tensor:
    reach("forward")
    bent: Tensor = Bend.apply(x)
    return bent


def first_half(x: Tensor) -> Tensor:
    """On the first owner."""
    reach("forward")
    return rpc.rpc_sync(BENDER, bend, args=(layer(0)(x),))


def second_half(x: Tensor) -> Tensor:
    """On the second owner."""
    reach("forward")
    return layer(1)(x, with_spare=True)


def data_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    return _random((3, SIZE), generator), _random((3, SIZE), generator)


def loss_of(number: int) -> Tensor:
    x, target = data_of(number)
    y = rpc.rpc_sync(FIRST, first_half, args=(x,))
    y = rpc.rpc_sync(SECOND, second_half, args=(y,))
    return ((y - target) ** 2).sum()


def expected_training(
    optimizer_class: Any,
    num_steps: int,
    *,
    owners: int = 2,
    gamma: float = 1.0,
    **options: Any,
) -> tuple[list[float], list[Tensor]]:
    """Losses, and parameters at the end, of the same training in one process.

    Args:
        optimizer_class: One of torch's.
        num_steps: How many.
        owners: Of how many owners the parameters are trained.
        gamma: The learning rate is multiplied by this after each step.
        options: For the optimizer.
    """
    layers = [Layer(0), Layer(1)]
    trained = [p for layer in layers[:owners] for p in layer.parameters()]
    optimizer = optimizer_class(trained, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    losses = []
    for number in range(num_steps):
        x, target = data_of(number)
        optimizer.zero_grad()
        y = layers[1](Bend.apply(layers[0](x)), with_spare=True)
        loss = ((y - target) ** 2).sum()
        loss.backward()
        optimizer.step()
        if gamma != 1.0:
            scheduler.step()
        losses.append(loss.item())
    return losses, [p.detach() for layer in layers for p in layer.parameters()]


def parameters_now() -> list[Tensor]:
    return [
        value
        for seed, owner in enumerate(OWNERS)
        for value in rpc.rpc_sync(owner, values, args=(seed,))
    ]


def all_references() -> list[RRef[Tensor]]:
    return [
        rref
        for seed, owner in enumerate(OWNERS)
        for rref in rpc.rpc_sync(owner, references, args=(seed,))
    ]


def step_of(number: int, optimizer: Any) -> Callable[[autograd.Context], float]:
    def step(ctx: autograd.Context) -> float:
        loss = loss_of(number)
        ctx.backward(loss)
        optimizer.step(ctx)
        return loss.item()

    return step


# ----------------------------------------------------------------- deaths inside a method


def die_in(cls: type, method: str, *, times: int = 1, afterwards: bool = False) -> None:
    """Lets this process die when a method of a class has been called so many times."""
    point = f"{cls.__name__}.{method}"
    original = getattr(cls, method)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if afterwards:
            result = original(*args, **kwargs)
            reach(point)
            return result
        reach(point)
        return original(*args, **kwargs)

    setattr(cls, method, dying)
    arm(point, times)
