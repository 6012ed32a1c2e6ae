"""Parameters whose gradients DistributedDataParallel averages between processes.

It averages in hooks on the nodes that add to ``.grad``, which a pass into a dictionary
does not run: the result would silently be that of one process. Torch leaves no mark on
such parameters, so wrappers are noted as they are made.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import UsageError

__all__ = ["refuse_averaged", "watch_wrappers"]

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def watch_wrappers() -> Any:
    """Notes wrappers from now on, and those that exist; returns a handle to ``remove()``."""
    handle = register_module_module_registration_hook(_note)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        types, more = [], [DistributedDataParallel]
        while more:
            types.append(more.pop())
            more += types[-1].__subclasses__()
        for found in gc.get_referrers(*types):  # instances refer to their class
            _note(found, "", None)
    return handle


def _note(parent: object, name: str, child: object) -> None:
    if isinstance(parent, DistributedDataParallel):
        _wrappers.add(parent)


def refuse_averaged(leaves: Iterable[Tensor], label: str) -> None:
    """Raises if one of the leaves is such a parameter. Free where there are none."""
    if not _wrappers:
        return
    averaged: set[int] = set()
    for wrapper in list(_wrappers):
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        averaged.update(
            id(parameter)
            for name, parameter in wrapper.module.named_parameters()
            if name not in ignored
        )
    if any(id(leaf) in averaged for leaf in leaves):
        raise UsageError(
            f"a backward over {label} into its dictionary reached parameters that "
            "DistributedDataParallel averages between processes, which it only does for "
            '.grad: use context(accumulate="grad"), or plain loss.backward() inside the '
            "context"
        )
