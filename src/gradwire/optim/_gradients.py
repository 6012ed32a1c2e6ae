"""Which gradients a request is about: those of a context, or ``.grad``.

Between workers an int means the dictionary of a context, and None means ``.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from gradwire.autograd.extension import Attempt, find_context
from gradwire.errors import ContextReleased, UnknownContext

__all__ = [
    "Source",
    "check_context",
    "drop_gradients",
    "find_gradients",
    "find_source",
    "replace_gradients",
]


def check_context(context_id: int | None) -> int | None:
    """On the trainer: what to ask owners for.

    Raises:
        UnknownContext: There is no such context here, or it is over.
    """
    return find_source(context_id).context_id


class Source(msgspec.Struct, frozen=True):
    """Which gradients a step is about, and who may run it again."""

    context_id: int | None
    attempt: Attempt | None


def find_source(context_id: int | None) -> Source:
    """As `check_context`; with the attempt that the context belongs to, if any."""
    if context_id is None:
        return Source(None, None)
    if not isinstance(context_id, int) or isinstance(context_id, bool):
        raise TypeError(
            "context_id must be what context() gave, an int, or None for .grad; found "
            f"{type(context_id).__name__}"
        )
    key = int(context_id)
    side = find_context(key)
    return Source(None if side.into_grad else key, side.attempt)


def find_gradients(
    context_id: int | None, parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """On the owner: the gradient of each parameter, None where there is none."""
    if context_id is None:
        return [parameter.grad for parameter in parameters]
    try:
        side = find_context(context_id)
    except ContextReleased:
        raise
    except UnknownContext:
        # The context had no need of this worker.
        return [None] * len(parameters)
    with side.lock:
        return list(map(side.gradients.get, parameters))


def drop_gradients(context_id: int, parameters: Sequence[Tensor]) -> None:
    """On the owner: forgets what a context has collected for parameters."""
    try:
        side = find_context(context_id)
    except ContextReleased:
        raise
    except UnknownContext:
        return
    with side.lock:
        for parameter in parameters:
            side.gradients.pop(parameter, None)


def replace_gradients(
    context_id: int | None,
    replaced: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
) -> None:
    """On the owner: puts others in the place of gradients, if they are still there.

    Args:
        context_id: As in `find_gradients`.
        replaced: Parameters, each with the gradient that there was, and the new one.
    """
    if context_id is None:
        for parameter, before, after in replaced:
            if parameter.grad is before:
                parameter.grad = after
        return
    try:
        side = find_context(context_id)
    except UnknownContext:
        return  # it is over, or had no need of this worker
    with side.lock:
        for parameter, before, after in replaced:
            if side.gradients.get(parameter) is not before:
                continue
            if after is None:
                side.gradients.pop(parameter, None)
            else:
                side.gradients[parameter] = after
