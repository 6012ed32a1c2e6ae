"""Distributed autograd for PyTorch: calls between workers, and backward through them."""

from __future__ import annotations

from gradwire import autograd, errors, launch, nn, optim, rpc

__all__ = ["autograd", "errors", "launch", "nn", "optim", "rpc"]
