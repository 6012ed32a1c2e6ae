"""Which hyperparameters the owners do not know yet."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradwire.optim._local import Changes

__all__ = ["find_changes"]

_MISSING = object()


def find_changes(
    groups: Sequence[dict[str, Any]], sent: Mapping[int, dict[str, Any]]
) -> Changes:
    """Copies of what is new or changed, by number of the group.

    Args:
        groups: As in torch; ``"params"`` are left out.
        sent: What this has returned before.
    """
    changes: Changes = {}
    for number, group in enumerate(groups):
        known = sent.get(number, {})
        # Mostly the very objects that were sent; this is asked in every step, so there is
        # no loop in Python for that.
        are_known = [*map(is_, group.values(), map(known.get, group, repeat(_MISSING)))]
        if are_known.count(False) == ("params" in group):
            continue
        for key, value in group.items():
            if value is known.get(key, _MISSING) or key == "params":
                continue
            if key not in known or not _is_same(value, known[key]):
                # A copy: a scheduler may write into a tensor, a program into a list.
                changes.setdefault(number, {})[key] = copy.deepcopy(value)
    return changes


def _is_same(value: Any, sent: Any) -> bool:
    if type(value) is not type(sent):
        return False
    try:
        if isinstance(value, Tensor):
            return torch.equal(value, sent)
        return bool(value == sent)
    except (RuntimeError, ValueError):
        return False  # arrays, or tensors in a container: they are just sent again
