"""Sending a call again after its worker was lost: only calls of idempotent functions.

Whether a lost worker has run a call cannot be known. So a call is sent again only if its
function is marked as one that may run twice, and only until the call's own deadline.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradwire.errors import ConnectError, ConnectTimeout, PeerLostError, RemoteError
from gradwire.rpc._future import Future
from gradwire.rpc.functions import IDEMPOTENT_ATTRIBUTE

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = [
    "LOST",
    "Comebacks",
    "Resending",
    "call_again",
    "is_idempotent",
    "may_be_sent_again",
]

LOST = (PeerLostError, ConnectError)
"""Errors that say that a worker is not there."""

_LOOK_S = 1.0  # how often those are looked for whose limit has come
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
    limit = deadline or time.monotonic() + _NO_DEADLINE_S
    name = agent.network.find(to).info.name
    left = max(0.0, limit - time.monotonic())
    try:
        agent.membership.wait_for(name, left, or_role=False)
    except ConnectTimeout:
        raise error from None
    return agent.call(to, function, args, kwargs, _timeout_until(deadline))


def _timeout_until(deadline: float) -> float:
    """The timeout of a call that ends at a deadline; 0 for none, in both."""
    return max(0.001, deadline - time.monotonic()) if deadline else 0.0


class Resending:
    """An asynchronous call of an idempotent function.

    It is sent again with the arguments that it had, in the state of its caller's thread.
    """

    def __init__(
        self,
        comebacks: Comebacks,
        send: Callable[[Any, Any, float], Future[Any]],
        to: str,
        args: Any,
        kwargs: Any,
        deadline: float,
        future: Future[Any],
    ) -> None:
        self._comebacks = comebacks
        self._send = send
        self._to = to
        self._args, self._kwargs = _same_for_ever((args, kwargs), {})
        self._versions = [(t, _version_of(t)) for t in _tensors_in((args, kwargs), {})]
        self._context = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._deadline = deadline
        self._future = future

    def begin(self, timeout: float) -> None:
        """Sends the call, or raises; what comes of it goes to the future."""
        try:
            sent = self._send(self._args, self._kwargs, timeout)
        except LOST as error:
            self._try_again(error)
        else:
            sent.add_done_callback(self._on_done)

    def _attempt(self, timeout: float) -> None:
        try:
            self.begin(timeout)
        except Exception as error:
            self._future.set_exception(error)

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
        limit = self._deadline or time.monotonic() + _NO_DEADLINE_S

        def go_on(problem: Exception | None) -> None:
            if problem is None and any(_version_of(t) != v for t, v in self._versions):
                problem = PeerLostError(
                    f"{error}. The call was not sent again: one of its tensors was changed "
                    "in place meanwhile; send a clone()",
                    worker=self._to,
                )
            if problem is not None:
                self._future.set_exception(problem)
                return
            with torch.set_grad_enabled(self._is_grad_enabled):
                # A copy, for this may come while another attempt is about to end.
                context = self._context.copy()
                context.run(self._attempt, _timeout_until(self._deadline))

        self._comebacks.wait(self._to, limit, error, go_on)


class _Waiter(NamedTuple):
    """A call that waits for a worker."""

    limit: float
    error: Exception
    go_on: Callable[[Exception | None], None]


class Comebacks:
    """Calls that wait until lost workers are back: one thread for each worker.

    Args:
        agent: Whose calls.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards what is below; any thread
        self._waiters: dict[str, list[_Waiter]] = {}

    def wait(
        self,
        name: str,
        limit: float,
        error: Exception,
        go_on: Callable[[Exception | None], None],
    ) -> None:
        """Has something called on a thread of the pool when a worker is back.

        Args:
            name: The worker.
            limit: When to give up, on the monotonic clock.
            error: What ``go_on`` is given then; None if the worker is back.
            go_on: What to call.
        """
        with self._lock:
            is_first = name not in self._waiters
            self._waiters.setdefault(name, []).append(_Waiter(limit, error, go_on))
        if is_first:
            self._agent.run_soon(lambda: self._watch(name))

    def _watch(self, name: str) -> None:
        problem: Exception | None = None
        while next_limit := self._give_up_overdue(name):
            left = min(_LOOK_S, max(0.0, next_limit - time.monotonic()))
            try:
                self._agent.membership.wait_for(name, left, or_role=False)
            except ConnectTimeout:
                continue
            except Exception as error:  # this worker ends
                problem = error
            with self._lock:
                waiters = self._waiters.pop(name)
            for waiter in waiters:
                waiter.go_on(problem)
            return

    def _give_up_overdue(self, name: str) -> float:
        """Ends those whose limit has come; returns that of the next, 0 if there is none."""
        now = time.monotonic()
        with self._lock:
            waiters = self._waiters[name]
            overdue = [waiter for waiter in waiters if waiter.limit <= now]
            waiters[:] = [waiter for waiter in waiters if waiter.limit > now]
            next_limit = min((waiter.limit for waiter in waiters), default=0.0)
            if not waiters:
                del self._waiters[name]
        for waiter in overdue:
            waiter.go_on(waiter.error)
        return next_limit


def _same_for_ever(value: Any, known: dict[int, Any]) -> Any:
    """A copy of the containers of a value, which the program may change.

    Args:
        value: The value.
        known: Copies by ids of containers: one may be there twice, or inside itself.
    """
    kind = type(value)
    if kind not in (tuple, list, dict):
        return value
    key = id(value)
    if key in known:
        return known[key]
    if kind is tuple:
        copy: Any = tuple([_same_for_ever(item, known) for item in value])
        return known.setdefault(key, copy)
    known[key] = copy = kind()
    if kind is list:
        copy.extend([_same_for_ever(item, known) for item in value])
    else:
        copy.update({k: _same_for_ever(item, known) for k, item in value.items()})
    return copy


def _tensors_in(value: Any, known: dict[int, Any]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)) and id(value) not in known:
        known[id(value)] = value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, known)


def _version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version
