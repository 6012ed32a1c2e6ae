"""Backward passes through calls, worker to worker.

No context is needed: a call that is recorded is part of the graph, and ``backward`` runs
through it. A `context` joins many calls, and keeps gradients apart from ``.grad``.

Example:
    >>> x = torch.ones(2, requires_grad=True)
    >>> y = rpc_sync("worker1", torch.mul, args=(x, 3))
    >>> y.sum().backward()
    >>> x.grad
    tensor([3., 3.])
"""

from __future__ import annotations

from gradwire.autograd._api import (
    Context,
    backward,
    context,
    get_debug_info,
    get_gradients,
    grad,
    is_available,
)
from gradwire.autograd._draw import draw
from gradwire.autograd._recorder import Recorder
from gradwire.autograd._retry import aretry, retry
from gradwire.rpc.extension import register_interceptor, set_backward

__all__ = [
    "Context",
    "aretry",
    "backward",
    "context",
    "draw",
    "get_debug_info",
    "get_gradients",
    "grad",
    "is_available",
    "retry",
]

# Agents that are created from now on record calls.
register_interceptor(Recorder)
set_backward(backward)
