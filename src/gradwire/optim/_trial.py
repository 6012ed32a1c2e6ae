"""One step of an owner's optimizer that nobody sees until it is kept.

The optimizer works on stand-ins; for a trial these are given copies of the parameters'
memory. So parameters stay as they are, for forwards of other trainers too, until `show`
copies the new values over; that cannot fail. The optimizer's state is changed in place,
and a copy of it is kept for `undo`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.optim._torch_private import run_step

__all__ = ["Trial"]


class Trial:
    """A step that can be shown or undone.

    What the optimizer keeps in ``state`` and ``param_groups`` is undone; what its class
    keeps elsewhere is not known here.

    Args:
        optimizer: Works on the stand-ins.
        parameters: What all can see.
        stand_ins: Likewise, with the same memory so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        stand_ins: Sequence[Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._pairs = list(zip(parameters, stand_ins, strict=True))
        # Keys of the state are stand-ins, and these are not copied.
        memo = {id(stand_in): stand_in for stand_in in stand_ins}
        self._state = copy.deepcopy(dict(optimizer.state), memo)
        self._options = [
            {key: copy.deepcopy(value, memo) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        for parameter, stand_in in self._pairs:
            stand_in.data = parameter.detach().clone()
        self._before = [_place_of(stand_in) for stand_in in stand_ins]
        self._is_moved = [False] * len(self._pairs)

    def step(self) -> None:
        """Makes the step; if it fails, `undo` must follow."""
        had_gradient = [stand_in.grad is not None for _, stand_in in self._pairs]
        run_step(self._optimizer)
        # A parameter that was left alone must not look changed to autograd either.
        self._is_moved = [
            had or _place_of(stand_in) != before
            for had, before, (_, stand_in) in zip(
                had_gradient, self._before, self._pairs, strict=True
            )
        ]

    def show(self) -> None:
        """Gives the parameters their new values."""
        for is_moved, (parameter, stand_in) in zip(
            self._is_moved, self._pairs, strict=True
        ):
            if is_moved and _is_alike(parameter, stand_in):
                parameter.detach().copy_(stand_in.detach())
            elif is_moved:  # the optimizer has given it memory of another kind
                parameter.data = stand_in.detach()
            stand_in.data = parameter.detach()

    def undo(self) -> None:
        """Puts the optimizer back to where it was; parameters have never left."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        groups = self._optimizer.param_groups
        for group, options in zip(groups, self._options, strict=True):
            group.clear()
            group.update(options)
        for parameter, stand_in in self._pairs:
            stand_in.data = parameter.detach()


def _place_of(tensor: Tensor) -> tuple[int, Any]:
    return tensor.data_ptr(), tensor._version


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.layout == other.layout
    )
