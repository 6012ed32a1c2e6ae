"""What docs/optim.md takes for granted."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import autograd, errors, optim, rpc

__all__ = ["errors", "functools", "partial"]

WORKERS = ("alice", "bob")

directory = f"{tempfile.gettempdir()}/gradwire-docs-{os.getpid()}"
num_steps = 2

criterion = nn.MSELoss()
batches = [(torch.ones(4, 3), torch.zeros(4, 2)) for _ in range(2)]


@contextmanager
def around(code: str) -> Iterator[None]:
    """Each block begins with a new layer on bob, and inside of a context."""
    names: dict[str, Any] = globals()
    layer = rpc.remote("bob", nn.Linear, args=(3, 2))
    parameters = rpc.rpc_sync("bob", list_parameters, args=(layer,))
    names.update(
        layer=layer,
        parameters=parameters,
        weights=parameters[:1],
        biases=parameters[1:],
        more=refer_to(nn.Linear(2, 2)),
    )
    if "optim.DistributedOptimizer(" not in code:
        names["optimizer"] = optim.DistributedOptimizer(
            torch.optim.SGD, parameters, lr=0.1
        )
    with autograd.context() as ctx:
        names.update(ctx=ctx, loss=compute())
        if "optimizer.step(ctx)" in code and "backward" not in code:
            ctx.backward(names["loss"])
        yield
    shutil.rmtree(directory, ignore_errors=True)
    if "def closure" in code:
        with autograd.context() as ctx:
            names["ctx"] = ctx
            names["optimizer"].step(ctx, closure=names["closure"])


def train_step(number: int, ctx: autograd.Context) -> None:
    ctx.backward(compute())
    globals()["optimizer"].step(ctx)


def compute() -> Tensor:
    images, target = batches[0]
    output: Tensor = globals()["layer"].rpc_sync().forward(images)
    return criterion(output, target)


def list_parameters(layer: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    return refer_to(layer.local_value())


def refer_to(module: nn.Module) -> list[rpc.RRef[Tensor]]:
    return [rpc.RRef(parameter) for parameter in module.parameters()]
