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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["set_aside", "watch_wrappers", "wrappers_among"]

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_LOOK_S = 0.1
# Which threads use ``.grad`` of which leaves for a pass into a dictionary, by their ids.
_users: dict[int, int] = {}
_changed = threading.Condition()  # guards it


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


def wrappers_among(leaves: Sequence[Tensor]) -> list[DistributedDataParallel]:
    """The wrappers that some leaves belong to; mostly none."""
    if not _wrappers:
        return []
    ids = {id(leaf) for leaf in leaves}
    return [
        wrapper
        for wrapper in list(_wrappers)
        if any(id(parameter) in ids for parameter in _parameters_of(wrapper))
    ]


def _parameters_of(wrapper: DistributedDataParallel) -> list[Tensor]:
    ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
    return [
        parameter
        for name, parameter in wrapper.module.named_parameters()
        if name not in ignored
    ]


@contextmanager
def set_aside(
    leaves: Sequence[Tensor],
    wrappers: Sequence[DistributedDataParallel],
    check: Callable[[], None],
) -> Iterator[list[Tensor]]:
    """Leaves have no ``.grad`` inside, and their old one again afterwards.

    One pass at a time uses a leaf in this way, for ``.grad`` is one for all passes.

    Args:
        leaves: Those of a pass.
        wrappers: What some of them belong to.
        check: Called now and then while it waits for another pass; raises to give up.

    Yields:
        The leaves, and all other parameters of the wrappers: another process may have a
        gradient for them.
    """
    more = [parameter for wrapper in wrappers for parameter in _parameters_of(wrapper)]
    together = list({id(leaf): leaf for leaf in [*leaves, *more]}.values())
    with _alone_with({id(leaf) for leaf in together}, check):
        before = [leaf.grad for leaf in together]
        for leaf in together:
            leaf.grad = None
        try:
            yield together
        finally:
            for leaf, gradient in zip(together, before, strict=True):
                leaf.grad = gradient


@contextmanager
def _alone_with(ids: set[int], check: Callable[[], None]) -> Iterator[None]:
    """No other thread uses any of these leaves meanwhile; all are taken at once."""
    me = threading.get_ident()
    with _changed:
        while any(_users.get(leaf, me) != me for leaf in ids):
            _changed.wait(_LOOK_S)
            check()
        taken = ids.difference(_users)  # not those of a pass around this one
        _users.update(dict.fromkeys(taken, me))
    try:
        yield
    finally:
        with _changed:
            for leaf in taken:
                del _users[leaf]
            _changed.notify_all()
