"""Telling autograd which parameters a step changes.

Torch counts the changes of a tensor, and a graph that needs the value from before is
refused. Stand-ins are changed in place of parameters and have counters of their own, so
that a step which is undone leaves no trace; one that is not is noted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_

from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["Versions"]


class Versions:
    """The version counters of the parameters of one optimizer.

    Args:
        parameters: What all can see.
        stand_ins: What the optimizer changes.
    """

    def __init__(
        self, parameters: Sequence[Tensor], stand_ins: Sequence[Tensor]
    ) -> None:
        self._parameters = parameters
        self._stand_ins = stand_ins
        self._moving: Sequence[Tensor] = ()
        # Those without a gradient: mostly left alone, but that is up to the optimizer.
        self._others: list[tuple[Tensor, Tensor, int]] = []

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """Parameters change from now on: graphs from before are no good."""
        if any(map(is_, gradients, repeat(None))):
            self._divide(gradients)
        else:  # the usual case
            self._moving = self._parameters
        increment_version(self._moving)

    def end(self) -> None:
        """They have changed: nor are graphs that were made meanwhile."""
        increment_version(self._moving)
        self._moving = ()
        if self._others:
            others, self._others = self._others, []
            increment_version(
                [
                    parameter
                    for parameter, stand_in, before in others
                    if stand_in._version != before
                ]
            )

    def _divide(self, gradients: Sequence[Tensor | None]) -> None:
        moving: list[Tensor] = []
        for parameter, stand_in, gradient in zip(
            self._parameters, self._stand_ins, gradients, strict=True
        ):
            if gradient is not None:
                moving.append(parameter)
            else:
                self._others.append((parameter, stand_in, stand_in._version))
        self._moving = moving
