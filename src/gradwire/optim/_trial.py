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

_ALIGNMENT = 16  # of the largest elements


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
        for stand_in, copied in zip(stand_ins, _copy_all(parameters), strict=True):
            stand_in.data = copied
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


def _copy_all(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies that have memory in common where the parameters have."""
    values = [parameter.detach() for parameter in parameters]
    copies = [value.clone() for value in values]
    for numbers in _find_overlaps(values):
        spans = [_span_of(values[n]) for n in numbers]
        start = min(start for start, _ in spans)
        start -= start % _ALIGNMENT
        size = max(end for _, end in spans) - start
        device = values[numbers[0]].device
        memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        for n, (at, _) in zip(numbers, spans, strict=True):
            value = values[n]
            part = torch.empty(0, dtype=value.dtype, device=device)
            offset = (at - start) // value.element_size()
            part.set_(memory, offset, value.shape, value.stride())
            copies[n] = part.copy_(value)
    return copies


def _find_overlaps(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of tensors that are, several of them, in one stretch of memory."""
    spans = sorted((*_span_of(tensor), n) for n, tensor in enumerate(tensors))
    found: list[list[int]] = []
    reached = 0
    for start, end, n in spans:
        if start >= reached:
            found.append([])
        found[-1].append(n)
        reached = max(reached, end)
    return [numbers for numbers in found if len(numbers) > 1]


def _span_of(tensor: Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and of the one behind its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def _place_of(tensor: Tensor) -> tuple[int, Any]:
    return tensor.data_ptr(), tensor._version


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.layout == other.layout
    )
