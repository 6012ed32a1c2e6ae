"""Checks of references to parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.rpc import RRef, get_worker_info

__all__ = ["check_references", "values_of"]


def check_references(rrefs: Sequence[Any]) -> list[RRef[Tensor]]:
    """On the trainer: that they are references, and some.

    Raises:
        TypeError: One of them is something else.
        ValueError: There are none.
    """
    for number, rref in enumerate(rrefs):
        if not isinstance(rref, RRef):
            hint = (
                "; for a parameter of this worker pass gradwire.rpc.RRef(parameter)"
                if isinstance(rref, Tensor)
                else ""
            )
            raise TypeError(
                f"parameters must be RRefs, found {type(rref).__name__} at {number}{hint}"
            )
    if not rrefs:
        raise ValueError("expected references to parameters, found an empty list")
    return list(rrefs)


def values_of(rrefs: Sequence[RRef[Tensor]]) -> list[Tensor]:
    """On the owner: the parameters themselves.

    Raises:
        TypeError: One of the references is to something else than a tensor.
    """
    values = [rref.local_value() for rref in rrefs]
    for value in values:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"an RRef of worker {get_worker_info().name!r} that was given as a "
                f"parameter refers to an instance of {type(value).__name__}; expected a "
                "tensor"
            )
    return values
