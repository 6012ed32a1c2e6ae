"""For layers above: contexts without a ``with`` block, and what calls outside them mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gradwire.autograd._api import check_repeatable as _check_repeatable
from gradwire.autograd._api import current_exchange
from gradwire.autograd._attempts import Attempt, add_note
from gradwire.autograd._context import Side, active_context
from gradwire.autograd._cuts import set_implicit

__all__ = [
    "Attempt",
    "add_note",
    "check_repeatable",
    "current_context",
    "find_context",
    "open_context",
    "outside_context",
    "release_context",
    "set_implicit",
]

P = ParamSpec("P")
T = TypeVar("T")


def open_context(*, into_grad: bool = False) -> int:
    """Opens a context and makes it the current one; returns its id."""
    side = current_exchange().registry.open(into_grad)
    active_context.set(side.name)
    return side.name.key


def release_context(context_id: int) -> None:
    """Ends a context everywhere; any of its workers may do so.

    Raises:
        UnknownContext: This worker has not taken part in it, or it is over.
    """
    exchange = current_exchange()
    side = exchange.registry.get(context_id)
    if active_context.get() == side.name:
        active_context.set(None)
    exchange.releases.release(side)


def current_context() -> int | None:
    """The id of the context around this code."""
    name = active_context.get()
    return None if name is None else name.key


def outside_context(
    function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Calls a function; calls that it makes belong to no context."""
    token = active_context.set(None)
    try:
        return function(*args, **kwargs)
    finally:
        active_context.reset(token)


def find_context(context_id: int) -> Side:
    """This worker's side of a context.

    Raises:
        UnknownContext: There is none, or it is over.
    """
    return current_exchange().registry.get(context_id)


def check_repeatable(what: str) -> None:
    """Raises if the step around this code may be run again, as ``.grad`` cannot be undone.

    Args:
        what: What was asked for.
    """
    _check_repeatable(current_exchange(), what)
