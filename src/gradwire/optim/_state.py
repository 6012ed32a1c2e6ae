"""State dictionaries: of the whole from those of the owners, and the other way round.

In torch's form parameters are numbered in the order in which they were given. An owner
numbers its own from zero; its share says which places they have among all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Places", "gather", "scatter"]

StateDict = dict[str, Any]


class Places(Protocol):
    """Where the parameters of an owner belong."""

    @property
    def groups(self) -> list[int]:
        """Numbers of its groups, in the order in which the owner has them."""

    @property
    def positions(self) -> list[list[int]]:
        """For each of these groups the places of its parameters among all."""


def gather(
    shares: Sequence[Places], parts: Sequence[StateDict], sizes: Sequence[int]
) -> StateDict:
    """The state dictionary of the whole; the first owner has the word on what is common.

    Args:
        shares: The owners' shares.
        parts: Their state dictionaries.
        sizes: Number of parameters in each group.
    """
    state: dict[Any, Any] = {}
    common: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = [{} for _ in sizes]
    rest: StateDict = {}
    for share, part in zip(shares, parts, strict=True):
        places = list(itertools.chain(*share.positions))
        for key, value in part["state"].items():
            if key in range(len(places)):
                state[places[key]] = value
            else:
                common.setdefault(key, value)
        for number, group in zip(share.groups, part["param_groups"], strict=True):
            groups[number] = groups[number] or group
        rest = {**part, **rest}
    for group, positions in zip(groups, _count(sizes), strict=True):
        group["params"] = positions
    in_order = {position: state[position] for position in sorted(state)}
    return {**rest, "state": {**in_order, **common}, "param_groups": groups}


def scatter(
    shares: Sequence[Places], whole: StateDict, sizes: Sequence[int]
) -> list[StateDict]:
    """The state dictionaries of the owners.

    Args:
        shares: Their shares.
        whole: The state dictionary of the whole.
        sizes: Number of parameters in each group.

    Raises:
        ValueError: It has other groups.
    """
    saved = whole["param_groups"]
    found = [len(group["params"]) for group in saved]
    if found != list(sizes):
        raise ValueError(
            "the state dictionary is of another optimizer: expected groups of "
            f"{list(sizes)} parameters, found {found}"
        )
    # The numbers in it need not be in order, only their places count.
    names = list(itertools.chain(*(group["params"] for group in saved)))
    common = {k: v for k, v in whole["state"].items() if k not in set(names)}
    parts = []
    for share in shares:
        places = itertools.chain(*share.positions)
        state = {
            local: whole["state"][names[place]]
            for local, place in enumerate(places)
            if names[place] in whole["state"]
        }
        own = _count([len(positions) for positions in share.positions])
        groups = [
            {**saved[number], "params": numbers}
            for number, numbers in zip(share.groups, own, strict=True)
        ]
        parts.append({**whole, "state": {**state, **common}, "param_groups": groups})
    return parts


def _count(sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers, in groups of these sizes."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, size)) for size in sizes]
