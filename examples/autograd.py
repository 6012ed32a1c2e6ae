"""Backward through calls, between three workers: ``python examples/autograd.py``.

The script starts three workers, as processes of their own; alice leads. Each has a
``weight`` of its own; what they compute with it is part of one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire import autograd, launch, rpc

ROLES = {"alice": 1, "bob": 1, "carol": 1}
LIMIT_S = 60.0

weight = torch.tensor([2.0, 3.0], requires_grad=True)  # each worker has its own
kept: dict[str, Tensor] = {}


# ------------------------------------------------------------- what the others can do


def scale(x: Tensor) -> Tensor:
    return weight * x


def scale_twice(to: str, x: Tensor) -> Tensor:
    """A call inside a call: backward runs through both."""
    return rpc.rpc_sync(to, scale, args=(weight * x,))


def begin(x: Tensor) -> None:
    kept["hidden"] = torch.tanh(weight * x)


def finish() -> Tensor:
    return kept.pop("hidden").sum()


def take_gradient() -> Tensor | None:
    found, weight.grad = weight.grad, None
    return found


def gradient_in(context: autograd.Context) -> Tensor:
    return context.gradients()[weight]


def train(rate: float) -> None:
    gradient = take_gradient()
    assert gradient is not None
    with torch.no_grad():
        weight.sub_(rate * gradient)


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient today")


def refuse(x: Tensor) -> Tensor:
    return Refuse.apply(weight * x)


# --------------------------------------------------------------------------- the tour


def show_calls() -> None:
    print("A call is part of the graph; no context is needed:")
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("bob", scale, args=(x,)).sum()
    loss.backward()  # fills .grad here and on bob
    print("    x.grad", x.grad, "bob's", rpc.rpc_sync("bob", take_gradient))

    print("So is a call that is made inside a call, here on bob to carol:")
    loss = rpc.rpc_sync("bob", scale_twice, args=("carol", x)).sum()
    (gradient,) = torch.autograd.grad(loss, x)  # leaves .grad alone, on all workers
    print("    gradient", gradient, "carol's", rpc.rpc_sync("carol", take_gradient))


def show_context() -> None:
    print("A context joins calls, and may keep gradients apart from .grad:")
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as ctx:
        first = rpc.rpc_sync("bob", scale, args=(x,))
        second = rpc.rpc_sync("carol", scale, args=(x,))
        ctx.backward((first * second).sum())
        print("    x", ctx.gradients()[x], "and x.grad", x.grad)
        print("    bob's", rpc.rpc_sync("bob", gradient_in, args=(ctx,)))

    print("In it, values may stay on a worker from one call to the next:")
    with autograd.context(accumulate="grad") as ctx:
        rpc.rpc_sync("bob", begin, args=(x,))
        loss = rpc.rpc_sync("bob", finish)
        ctx.backward(loss)  # or loss.backward()
    print("    x.grad", x.grad, "bob's", rpc.rpc_sync("bob", take_gradient))


def show_second_order() -> None:
    print("Gradients of gradients, for a penalty on the slope:")
    x = torch.ones(2, requires_grad=True)
    output = rpc.rpc_sync("bob", scale, args=(x * x,)).sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    (slope**2).sum().backward()
    print("    x.grad", x.grad, "bob's", rpc.rpc_sync("bob", take_gradient))


def show_failure() -> None:
    print("An error in a backward function on bob is raised here, with its own type:")
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("bob", refuse, args=(x,)).sum()
    try:
        loss.backward()
    except ArithmeticError as error:
        print(f"    {error.args[0]}; it came from worker {error.worker}")  # type: ignore[attr-defined]


def show_training() -> None:
    print("Training a weight on each of three workers; the loss:")
    data, target = torch.tensor([0.2, 0.1]), torch.ones(2)
    losses = []
    for _ in range(20):
        output = rpc.rpc_sync("bob", scale_twice, args=("carol", weight * data))
        loss = ((output - target) ** 2).sum()
        loss.backward()
        losses.append(f"{loss.item():.2g}")
        for name in ROLES:
            rpc.rpc_sync(name, train, args=(0.01,))
    print("   ", " ".join([*losses[:3], "...", *losses[-2:]]))


def tour() -> None:
    show_calls()
    show_context()
    show_second_order()
    show_failure()
    show_training()
    print("What is left of all this:", autograd.get_debug_info())


def main() -> None:
    launch.main({"alice": tour}, ROLES, timeout=LIMIT_S)


if __name__ == "__main__":
    main()
