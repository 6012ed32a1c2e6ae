"""Decorators for functions that are called remotely.

Example:
    >>> @idempotent
    ... def predict(x):
    ...     return x.sigmoid()
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["async_execution", "idempotent"]

P = ParamSpec("P")
T = TypeVar("T")

ASYNC_ATTRIBUTE = "_wrapped_async_rpc_function"
IDEMPOTENT_ATTRIBUTE = "_gradwire_idempotent"


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


def idempotent(function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that may run twice for one call without harm.

    If the worker is lost before it has answered, the caller's agent waits until it is
    back, at most until the call's deadline, and sends the call again. Calls of all other
    functions fail with `PeerLostError`, for nobody can know whether they have run. If a
    tensor among the arguments of an `rpc_async` was changed in place meanwhile, it is not
    sent again.

    Inside an explicit autograd context the new call fails too: the context has lost a
    worker. See `gradwire.autograd.retry`.

    Example:
        >>> @idempotent
        ... def predict(x):
        ...     return model(x)
    """
    if not callable(function):
        raise TypeError(
            f"idempotent marks a function, found {type(function).__name__}: {function!r}"
        )
    setattr(function, IDEMPOTENT_ATTRIBUTE, True)
    return function
