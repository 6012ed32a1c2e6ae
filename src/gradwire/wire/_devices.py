"""Tensors of a value on another device: messages hold what is on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["move"]


def move(value: Any, device: str) -> Any:
    """The value with its tensors on a device, also those in plain containers."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if kind in (dict, OrderedDict):
        return kind((key, move(item, device)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(move(item, device) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(move(item, device) for item in value))
    return value
