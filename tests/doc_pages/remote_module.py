"""What docs/remote-module.md takes for granted."""

from __future__ import annotations

import torch
from torch import nn

from gradwire import autograd  # noqa: F401
from gradwire.nn import parameter_rrefs  # noqa: F401
from gradwire.optim import DistributedOptimizer  # noqa: F401

WORKERS = ("worker0", "worker1")

x = torch.ones(4, 10)
y = torch.zeros(4, 30)
loss_function = nn.MSELoss()
