"""Parameters whose gradients DistributedDataParallel averages between processes.

It averages in hooks on the nodes that add to ``.grad``, which a pass into a dictionary
does not run. So on a worker with such parameters a pass does go to ``.grad``, with what
was there set aside, and what it brings is moved to the dictionary. Torch leaves no mark
on such parameters, so wrappers are noted as they are made.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["averaged_among", "set_aside", "watch_wrappers"]

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


def averaged_among(leaves: Sequence[Tensor]) -> list[Tensor]:
    """All parameters of the wrappers that some leaves belong to; mostly none.

    Also those that are no leaves here: another process may have a gradient for them.
    """
    if not _wrappers:
        return []
    ids = {id(leaf) for leaf in leaves}
    found: list[Tensor] = []
    for wrapper in list(_wrappers):
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        parameters = [
            parameter
            for name, parameter in wrapper.module.named_parameters()
            if name not in ignored
        ]
        if any(id(parameter) in ids for parameter in parameters):
            found += parameters
    return found


# One at a time in a process: ``.grad`` is one for all passes.
_aside = threading.RLock()


@contextmanager
def set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leaves have no ``.grad`` inside, and their old one again afterwards."""
    with _aside:
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
