"""Optimizers for parameters that live on other workers.

Example:
    ::

        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        with autograd.context() as ctx:
            ctx.backward(loss)
            optimizer.step(ctx)
"""

from __future__ import annotations

from gradwire.optim._clip import clip_grad_norm_
from gradwire.optim._optimizer import DistributedOptimizer
from gradwire.optim._owners import OwnersFailed

__all__ = ["DistributedOptimizer", "OwnersFailed", "clip_grad_norm_"]
