"""What docs/how-to/from-torch.md takes for granted."""

from __future__ import annotations

import torch

from gradwire import autograd, rpc  # noqa: F401

WORKERS = ("worker0", "worker1")

x = torch.ones(2, requires_grad=True)
