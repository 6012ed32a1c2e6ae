"""Running a training step again when a worker was lost under it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from gradwire._ids import WorkerInfo, check_worker_name
from gradwire.autograd._api import Context, context, current_exchange
from gradwire.autograd._attempts import Attempt, Attempts, Pause, add_note
from gradwire.autograd._context import active_context
from gradwire.errors import (
    CallTimeout,
    ConnectError,
    ConnectTimeout,
    DeadlineExceeded,
    GradwireError,
    PeerLostError,
    UsageError,
)
from gradwire.rpc import is_initialized, rpc_async, rpc_sync
from gradwire.rpc.extension import current_agent, for_agents

__all__ = ["aretry", "retry"]

T = TypeVar("T")
Recover = Callable[[WorkerInfo], object]

LOST = (PeerLostError, ConnectError, ConnectTimeout)
"""Errors that mean that a worker is not there."""

_POLL_S = 0.01
_SLICE_S = 0.1


def retry(
    step: Callable[[Context], T],
    attempts: int = 3,
    backoff: float = 0.5,
    *,
    timeout: float = 60.0,
    or_role: bool = False,
    errors: Sequence[type[Exception]] = LOST,
    recover: Recover | None = None,
) -> T:
    """Runs a step in a context of its own; if a worker is lost meanwhile, once more.

    After a loss the context is dropped, on all workers, and gradients in it with it. When
    the worker is back, under its name, the step is run again. That is exact, bit by
    bit, if all that the step does for good is ``optimizer.step(ctx)``, at its end: the
    optimizer works in two phases here, on all owners or on none. Gradients in ``.grad``
    cannot be taken back, so backwards into ``.grad`` are refused in here.

    Args:
        step: Is given the context, in which it is run. It must find workers and values
            anew, for references to values of a lost worker are of no use any more.
        attempts: How often it is run at most.
        backoff: Seconds between the first two attempts at least; twice as many after
            each further one.
        timeout: For how many seconds a lost worker is awaited.
        or_role: Another worker of the same role will do, see
            `gradwire.rpc.wait_for_worker`.
        errors: Kinds of errors after which the step is run again. They are also found
            among the causes of an error. All others are raised at once.
        recover: Called before the step is run again, with the worker that is back, for
            what it has to have; see `gradwire.optim.DistributedOptimizer.recover`.

    Returns:
        What the step returned.

    Raises:
        NotRepeatable: A worker was lost after an optimizer's step was applied.
        UsageError: The step puts gradients into ``.grad``, or is an ``async def``.
        Exception: Whatever else the step raised; or the last error, with a note on all
            attempts, if there were enough or the worker did not come back.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(weight)], lr=0.5)
        >>> def step(ctx):
        ...     loss = rpc_sync("worker1", torch.mul, args=(weight, 3)).sum()
        ...     ctx.backward(loss)
        ...     optimizer.step(ctx)
        ...     return loss.item()
        >>> retry(step), retry(step)
        (6.0, -3.0)
    """
    if inspect.iscoroutinefunction(step):
        raise UsageError(
            "the step is an async def, which would run when its context has been left: "
            "await aretry(step)"
        )
    trials = _Trials(attempts, backoff, timeout, or_role, errors, recover)
    while True:
        attempt = Attempt(_current_attempt())
        try:
            trials.get_ready()
            with _opened(attempt) as ctx:
                return step(ctx)
        except Exception as error:
            if not trials.may_go_on(error, attempt):
                raise


async def aretry(
    step: Callable[[Context], Awaitable[T]],
    attempts: int = 3,
    backoff: float = 0.5,
    *,
    timeout: float = 60.0,
    or_role: bool = False,
    errors: Sequence[type[Exception]] = LOST,
    recover: Recover | None = None,
) -> T:
    """Like `retry`, for a step that is a coroutine function; waits without blocking.

    ``recover`` is called on another thread. If this is cancelled, nobody is awaited any
    more, and ``recover`` is not called; if it runs already, it is not broken off.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> async def step(ctx):
        ...     output = await rpc_async("worker1", torch.mul, args=(weight, 3))
        ...     ctx.backward(output.sum())
        ...     return ctx.gradients()[weight]
        >>> asyncio.run(aretry(step))
        tensor([3., 3.])
    """
    given_up = threading.Event()
    trials = _Trials(attempts, backoff, timeout, or_role, errors, recover, given_up)
    while True:
        attempt = Attempt(_current_attempt())
        try:
            try:
                await asyncio.to_thread(trials.get_ready)
            except asyncio.CancelledError:
                given_up.set()  # the thread goes on otherwise
                raise
            with _opened(attempt) as ctx:
                return await step(ctx)
        except Exception as error:
            if not trials.may_go_on(error, attempt):
                raise


def _current_attempt() -> Attempt | None:
    name = active_context.get()
    side = None if name is None else current_exchange().registry.find(name)
    return None if side is None else side.attempt


@contextmanager
def _opened(attempt: Attempt) -> Iterator[Context]:
    with context() as ctx:
        current_exchange().registry.get(ctx).attempt = attempt
        yield ctx


class _Trials:
    """What happens between the attempts of one step.

    Args:
        attempts: As for `retry`, like all that follow but the last.
        backoff: Likewise.
        timeout: Likewise.
        or_role: Likewise.
        errors: Likewise.
        recover: Likewise.
        given_up: Set by another thread when there will be no further attempt.
    """

    def __init__(
        self,
        attempts: int,
        backoff: float,
        timeout: float,
        or_role: bool,
        errors: Sequence[type[Exception]],
        recover: Recover | None,
        given_up: threading.Event | None = None,
    ) -> None:
        if not isinstance(attempts, int) or attempts < 1:
            raise ValueError(
                f"attempts must be an int of at least 1, found {attempts!r}"
            )
        for name, value in (("backoff", backoff), ("timeout", timeout)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, found {value!r}")
        kinds = tuple(errors) if isinstance(errors, Sequence) else (errors,)
        for kind in kinds:
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                raise TypeError(f"errors must be classes of exceptions, found {kind!r}")
        if recover is not None and not callable(recover):
            raise TypeError(f"recover must be a function, found {recover!r}")
        self._attempts = Attempts(attempts, backoff, kinds)
        self._timeout_s = timeout
        self._or_role = or_role
        self._recover = recover
        self._given_up = given_up
        self._pause: Pause | None = None
        self._last: Exception | None = None

    def may_go_on(self, error: Exception, attempt: Attempt) -> bool:
        """Whether there is another attempt after this error; else it is to be raised."""
        if error is self._last:  # nobody came back
            return False
        self._pause = self._attempts.after(error, attempt, current_agent().info.name)
        if self._pause is not None:
            # Its frames hold what the attempt has made, on other workers too.
            self._last = error.with_traceback(None)
        return self._pause is not None

    def get_ready(self) -> None:
        """Waits for the worker that was lost, and recovers; nothing at the beginning."""
        if self._pause is None:
            return
        next_start = time.monotonic() + self._pause.delay_s
        token = active_context.set(None)
        try:
            worker = self._wait(self._pause)
            rest_s = max(0.0, next_start - time.monotonic())
            if self._given_up is None:
                time.sleep(rest_s)
            elif self._given_up.wait(rest_s):
                return
            if self._recover is not None and worker is not None:
                self._recover(worker)
        finally:
            active_context.reset(token)

    def _wait(self, pause: Pause) -> WorkerInfo | None:
        if pause.worker is None or self._last is None:
            return None
        arguments = (pause.worker, self._timeout_s, self._or_role)
        try:
            if pause.witness not in (None, current_agent().info.name):
                # It may have needed a worker that we have not even met.
                _ask(pause.witness, find_again, arguments, 0, self._given_up)
            return _find_again(*arguments, self._given_up)
        except ConnectTimeout as error:
            add_note(self._last, f"{_text_of(error)}\n{self._attempts.report()}")
        raise self._last


@for_agents
def find_again(name: str, timeout: float, or_role: bool) -> WorkerInfo:
    """Waits until a worker that was lost, or its successor, can be called from here.

    Raises:
        ConnectTimeout: It was not there within the limit.
    """
    check_worker_name(name)
    return _find_again(name, timeout, or_role, None)


def _find_again(
    name: str, timeout: float, or_role: bool, given_up: threading.Event | None
) -> WorkerInfo:
    """As `find_again`; ends early, as if at the limit, when it is given up."""
    membership = current_agent().membership
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        worker = membership.wait_for(name, left, or_role=or_role, given_up=given_up)
        # We may not have noticed yet that it is gone; or it is back, but others do not
        # know it yet. It is there for all when its init_rpc has returned.
        try:
            if _ask(worker, is_initialized, (), max(left, _POLL_S), given_up):
                return worker
        except (*LOST, CallTimeout):
            pass
        if not left or (given_up is not None and given_up.is_set()):
            raise ConnectTimeout(
                f"worker {current_agent().info.name!r} has waited {timeout} s for worker "
                f"{name!r}, in vain",
                worker=name,
            )
        time.sleep(_POLL_S)


def _ask(
    worker: WorkerInfo | str,
    function: Callable[..., T],
    args: tuple[Any, ...],
    timeout: float,
    given_up: threading.Event | None,
) -> T:
    """Calls a function of a worker; the answer is not awaited any more if given up.

    Raises:
        CallTimeout: It was given up; or the limit came first.
    """
    if given_up is None:
        return rpc_sync(worker, function, args, timeout=timeout)
    call = rpc_async(worker, function, args, timeout=timeout)
    while not call.done():
        if given_up.is_set():
            raise CallTimeout(f"the answer of {worker} is not awaited any more")
        with suppress(DeadlineExceeded):
            call.wait(_SLICE_S)
    return call.wait()


def _text_of(error: GradwireError) -> str:
    return str(error.args[0]) if error.args else type(error).__name__
