"""Which parameters are whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.optim._local import Changes, Group, LocalOptimizer
from gradwire.optim._owners import Call
from gradwire.optim._places import Place
from gradwire.rpc import RRef
from gradwire.rpc.extension import start_method

__all__ = ["Part", "Share", "calls_to"]


class Share(NamedTuple):
    """What one owner has of the parameters; see `Places`."""

    owner: str
    rref: RRef[LocalOptimizer]
    groups: list[int]
    positions: list[list[int]]
    is_plain: bool
    """The program gave a list of parameters, and no groups."""
    place: Place | None = None
    """Where its snapshots are."""

    def select(self, changes: Changes) -> Changes:
        """Changes of its groups, under the owner's numbers."""
        if not changes:
            return changes
        return {
            local: changes[number]
            for local, number in enumerate(self.groups)
            if number in changes
        }


class Part:
    """What an owner will be asked to make an optimizer for."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.numbers: list[int] = []
        self.positions: list[list[int]] = []

    def add(
        self,
        number: int,
        options: dict[str, Any] | None,
        rref: RRef[Tensor],
        position: int,
    ) -> None:
        """Adds a parameter of the group with this number; groups come in order."""
        if number not in self.numbers[-1:]:
            self.groups.append(Group([], options))
            self.numbers.append(number)
            self.positions.append([])
        self.groups[-1].rrefs.append(rref)
        self.positions[-1].append(position)


def calls_to(
    shares: Sequence[Share],
    method: str,
    arguments: tuple[Any, ...] | Callable[[Share], tuple[Any, ...]] = (),
) -> list[Call]:
    """Calls of a method of the optimizers of owners, for `ask_all`.

    Args:
        shares: Whom to ask.
        method: Its name.
        arguments: Its arguments; or what makes those for one share.
    """
    calls: list[Call] = []
    for share in shares:
        given = arguments if isinstance(arguments, tuple) else arguments(share)
        start = partial(start_method, share.rref, method, given, 0)
        calls.append((share.owner, start))
    return calls
