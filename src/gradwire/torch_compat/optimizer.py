"""What ``torch.distributed.optim.optimizer`` is while the drop-in is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire.optim
from gradwire.torch_compat._errors import torch_errors

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(gradwire.optim.DistributedOptimizer):
    """Gradwire's, with errors of the types that torch raises."""

    def __init__(
        self, optimizer_class: Any, params_rref: Any, *args: Any, **kwargs: Any
    ) -> None:
        with torch_errors():
            super().__init__(optimizer_class, params_rref, *args, **kwargs)

    def step(  # type: ignore[override]
        self,
        context_id: int | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Updates the parameters, on their owners, by the gradients of a context."""
        with torch_errors():
            return super().step(context_id, closure)

    # Gradwire's calls the hooks: torch must not wrap this one to call them, too.
    step.hooked = True  # type: ignore[attr-defined]
