"""What docs/how-to/stuck-step.md takes for granted."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from gradwire import autograd, errors, rpc  # noqa: F401

WORKERS = ("alice", "bob")

x = torch.ones(2, requires_grad=True)
SLOW_S = 1.0


def sleep(seconds: float) -> None:
    """Much shorter than the page says: the test waits for its end."""
    threading.Event().wait(min(seconds, SLOW_S))


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleep(SLOW_S)
        return gradient


def slow_backward(x: Tensor) -> Tensor:
    return _Slow.apply(x)
