"""Optimizers for parameters that live on other workers.

Example:
    >>> weight = remote("worker1", nn.Parameter, args=(torch.ones(2),))
    >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    >>> with context() as ctx:
    ...     ctx.backward(weight.to_here().sum())
    ...     optimizer.step(ctx)
    >>> weight.to_here().detach()
    tensor([0.5000, 0.5000])
"""

from __future__ import annotations

from gradwire.optim._clip import clip_grad_norm_
from gradwire.optim._optimizer import DistributedOptimizer
from gradwire.optim._owners import OwnersFailed
from gradwire.optim._snapshots import Snapshots
from gradwire.optim._sources import ParametersOf

__all__ = [
    "DistributedOptimizer",
    "OwnersFailed",
    "ParametersOf",
    "Snapshots",
    "clip_grad_norm_",
]
