"""What docs/autograd.md takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradwire import autograd, optim, rpc

WORKERS = ("alice", "bob", "carol")

weight = torch.tensor([2.0, 3.0], requires_grad=True)
kept: dict[str, Tensor] = {}
x = torch.ones(2, requires_grad=True)
target = torch.ones(2)
criterion = nn.MSELoss()


def scale(x: Tensor) -> Tensor:
    return weight * x


forward = scale


def begin(x: Tensor) -> None:
    kept["hidden"] = torch.tanh(weight * x)


def finish() -> Tensor:
    return kept.pop("hidden").sum()


def gradient_in(context: autograd.Context) -> Tensor:
    return context.gradients()[weight]


class OnBob:
    """An optimizer for bob's weight, made when it is used: then bob is there."""

    def step(self, ctx: autograd.Context) -> None:
        there = rpc.remote("bob", get_weight)
        optim.DistributedOptimizer(torch.optim.SGD, [there], lr=0.1).step(ctx)


def get_weight() -> Tensor:
    return weight


optimizer = OnBob()
