"""Sending a call again after its worker was lost: only calls of idempotent functions.

Whether a lost worker has run a call cannot be known. So a call is sent again only if its
function is marked as one that may run twice, and only until the call's own deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.errors import ConnectError, ConnectTimeout, PeerLostError, RemoteError
from gradwire.rpc._future import Future
from gradwire.rpc.functions import IDEMPOTENT_ATTRIBUTE

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = [
    "LOST",
    "Resending",
    "call_again",
    "is_idempotent",
    "may_be_sent_again",
]

LOST = (PeerLostError, ConnectError)
"""Errors that say that a worker is not there."""

_NO_DEADLINE_S = 60.0  # for calls that are bounded by the life of their worker only


def is_idempotent(function: Callable[..., Any] | str) -> bool:
    """Whether calls of a function may be sent again."""
    return getattr(function, IDEMPOTENT_ATTRIBUTE, False) is True


def may_be_sent_again(function: Callable[..., Any] | str, error: Exception) -> bool:
    """Whether a call that failed with one of `LOST` is to be sent again."""
    # The function itself may have raised such an error, about a third worker.
    return is_idempotent(function) and not isinstance(error, RemoteError)


def call_again(
    agent: Agent,
    to: object,
    function: Callable[..., Any] | str,
    args: Any,
    kwargs: Any,
    deadline: float,
    error: Exception,
) -> Any:
    """Waits until a lost worker is back, and calls it anew.

    If it does not come back by the deadline (0: none), raises ``error``.
    """
    left = _await_return(agent, to, deadline, error)
    return agent.call(to, function, args, kwargs, left)


def _await_return(agent: Agent, to: object, deadline: float, error: Exception) -> float:
    """Waits for a worker; returns how many seconds are left then."""
    limit = deadline or time.monotonic() + _NO_DEADLINE_S
    name = agent.network.find(to).info.name
    try:
        agent.membership.wait_for(
            name, max(0.0, limit - time.monotonic()), or_role=False
        )
    except ConnectTimeout:
        raise error from None
    return max(0.001, limit - time.monotonic())


class Resending:
    """An asynchronous call of an idempotent function."""

    def __init__(
        self,
        agent: Agent,
        send: Callable[[float], Future[Any]],
        to: object,
        timeout: float,
        future: Future[Any],
    ) -> None:
        self._agent = agent
        self._send = send
        self._to = to
        self._deadline = agent.deadline(timeout)
        self._future = future
        self._attempt(timeout)

    def _attempt(self, timeout: float) -> None:
        try:
            sent = self._send(timeout)
        except LOST as error:
            self._try_again(error)
        except Exception as error:
            self._future.set_exception(error)
        else:
            sent.add_done_callback(self._on_done)

    def _on_done(self, sent: Future[Any]) -> None:
        try:
            value = sent.value()
        except Exception as error:
            if isinstance(error, LOST) and not isinstance(error, RemoteError):
                self._try_again(error)
            else:
                self._future.set_exception(error)
        else:
            self._future.set_result(value)

    def _try_again(self, error: Exception) -> None:
        self._agent.run_soon(lambda: self._wait_and_attempt(error))

    def _wait_and_attempt(self, error: Exception) -> None:
        try:
            left = _await_return(self._agent, self._to, self._deadline, error)
        except Exception as problem:
            self._future.set_exception(problem)
        else:
            self._attempt(left)
