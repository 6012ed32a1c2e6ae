"""Classes of optimizers where nothing is unpickled: they are named.

Those of torch are in a fixed table; others must be exported by the owner.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.rpc.extension import current_agent, serving_peer

__all__ = ["find_optimizer", "name_optimizer"]

_PREFIX = "torch.optim:"
_KNOWN: dict[str, type[torch.optim.Optimizer]] = {
    _PREFIX + cls.__name__: cls
    for cls in list(vars(torch.optim).values())
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
}
_NAMES = {cls: name for name, cls in _KNOWN.items()}


def name_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
) -> type[torch.optim.Optimizer] | str:
    """On the trainer: what is sent of a class. Itself, between workers that trust."""
    agent = current_agent()
    if not agent.is_safe:
        return optimizer_class
    return _NAMES.get(optimizer_class) or agent.targets.name(optimizer_class) or ""


def find_optimizer(name: str) -> Any:
    """On the owner: the class of a name.

    Raises:
        NotExported: It is neither one of torch nor exported to the caller.
    """
    known = _KNOWN.get(name)
    if known is not None:
        return known
    found: Any = current_agent().targets.find_class(name, serving_peer.get())
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise TypeError(f"{name!r:.80} is exported, but it is no class of optimizers")
    return found
