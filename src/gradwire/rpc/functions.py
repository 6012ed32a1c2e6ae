"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["async_execution"]

P = ParamSpec("P")
T = TypeVar("T")

ASYNC_ATTRIBUTE = "_wrapped_async_rpc_function"


def async_execution(function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that returns a future; the caller gets the future's value.

    The reply is sent when the future completes, and no thread is held until then. Put
    it innermost, below ``staticmethod`` or ``classmethod``. Coroutine functions
    (``async def``) need no mark.

    Example:
        >>> @async_execution
        ... def add_elsewhere(to, x, y):
        ...     return rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.value() + 1)
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_ATTRIBUTE, wrapper)
    return wrapper
