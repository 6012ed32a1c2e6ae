"""Snapshots of one owner's optimizer: making them, and going back to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import GradwireError, SnapshotError
from gradwire.optim._places import Place
from gradwire.optim._protocol import Mark
from gradwire.optim._snapshot_format import Content, check_readable, pack, unpack

__all__ = ["Keeper"]


class Keeper:
    """Keeps snapshots of an optimizer. Whoever calls it has locked the parameters.

    Args:
        place: Where they are kept.
        optimizer: The torch optimizer.
        stand_ins: What it works on, which is what is saved and written to.
    """

    def __init__(
        self,
        place: Place,
        optimizer: torch.optim.Optimizer,
        stand_ins: Sequence[Tensor],
    ) -> None:
        self._place = place
        self._optimizer = optimizer
        self._stand_ins = stand_ins
        self._num_checked = -1  # entries of the state when it was found to be readable

    def save(self, mark: Mark, kept: Mark | None) -> None:
        """Makes a snapshot; see `Place.save`."""
        content = self._content()
        data = pack(content)
        if len(content.state) > self._num_checked:
            check_readable(data, content.optimizer)
            self._num_checked = len(content.state)
        else:
            # Hyperparameters are small, and may become anything: a scheduler that counts
            # with numpy makes numbers of numpy of them.
            options = content._replace(parameters=[], state={})
            check_readable(pack(options), content.optimizer)
        self._place.save(mark, data, kept)

    def restore(self, mark: Mark) -> None:
        """Goes back to a snapshot, and forgets all others.

        Raises:
            SnapshotError: It is missing, damaged, or of other parameters.
        """
        where = self._place.describe(mark)
        content = unpack(self._place.load(mark), where)
        self._check(content, where)
        with torch.no_grad():
            for stand_in, value in zip(
                self._stand_ins, content.parameters, strict=True
            ):
                stand_in.detach().copy_(value)
        state = self._optimizer.state
        state.clear()
        for key, entry in content.state.items():
            state[self._stand_ins[key] if isinstance(key, int) else key] = entry
        for group, options in zip(
            self._optimizer.param_groups, content.options, strict=True
        ):
            members = group["params"]
            group.clear()
            group.update(options)
            group["params"] = members
        self._drop_others({mark})

    def drop(self, mark: Mark) -> None:
        """Forgets the snapshot of a step that was undone."""
        marks = self.find_marks()
        if marks is not None and mark in marks:
            self._drop_others(set(marks) - {mark})

    def _drop_others(self, kept: set[Mark]) -> None:
        # If that cannot be done now, what stays does no harm: nobody will ask for it, and
        # the next snapshot replaces it.
        try:
            self._place.drop_others(kept)
        except (GradwireError, OSError) as error:
            _forget_frames(error)

    def find_marks(self) -> list[Mark] | None:
        """Which snapshots there are; None if they cannot be reached."""
        try:
            return self._place.marks()
        except (GradwireError, OSError) as error:
            _forget_frames(error)
            return None

    def _content(self) -> Content:
        numbers: dict[Any, int] = {s: n for n, s in enumerate(self._stand_ins)}
        return Content(
            [_compact(stand_in) for stand_in in self._stand_ins],
            {
                numbers[key] if isinstance(key, Tensor) else key: entry
                for key, entry in self._optimizer.state.items()
            },
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ],
            _name_of(self._optimizer),
        )

    def _check(self, content: Content, where: str) -> None:
        saved = [(tuple(p.shape), p.dtype) for p in content.parameters]
        here = [(tuple(p.shape), p.dtype) for p in self._stand_ins]
        groups = len(self._optimizer.param_groups)
        if saved != here or len(content.options) != groups:
            raise SnapshotError(
                f"{where} is of other parameters: expected {len(here)} in {groups} groups, "
                f"{here[:8]}, found {len(saved)} in {len(content.options)} groups, "
                f"{saved[:8]}"
            )
        if content.optimizer != _name_of(self._optimizer):
            raise SnapshotError(
                f"{where} is of an optimizer of class {content.optimizer}, and this one is "
                f"of class {_name_of(self._optimizer)}"
            )


def _forget_frames(error: Exception) -> None:
    """A reference to a lost value keeps its error, which so must not lead back to it."""
    error.with_traceback(None)


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _compact(tensor: Tensor) -> Tensor:
    """Its values; without the rest of the memory that it may be a view of."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        return values
    is_whole = values.untyped_storage().nbytes() == values.nbytes
    return values if is_whole else values.clone()
