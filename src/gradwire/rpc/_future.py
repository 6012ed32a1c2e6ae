"""Futures: torch's, and more: they can be awaited, and waiting ends on Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import msgspec
import torch

from gradwire.errors import DeadlineExceeded, RemoteError, UsageError
from gradwire.rpc._log import log as _log
from gradwire.rpc._signals import interruptible, may_be_of_a_signal, shielded
from gradwire.rpc._turn import about_to_block, let_others_read

__all__ = ["Eventually", "Future", "Later", "Outcome"]

T = TypeVar("T")
S = TypeVar("S")

_init_torch_future = torch._C.Future.__init__
_set_torch_result = torch._C.Future.set_result

FOREVER_S = 1e9
"""A limit that is none: clocks and locks do not take any number."""
DEEPEST = 20
"""Callbacks that are run by callbacks, one inside the other: Python's stack has an end."""

Executor = Callable[[Callable[[], None]], None]
Eventually: TypeAlias = Coroutine[Any, Any, T] | torch.futures.Future[T]
"""What a function returns whose caller gets a ``T`` later: see `async_execution`."""


class Outcome(msgspec.Struct, eq=False):
    """A value or an error that comes once, and those who wait for it."""

    num_woken: ClassVar[int] = 0
    """Goes up whenever threads are woken. Not guarded: it tells that there were some."""

    done: bool = False
    value: Any = None
    error: BaseException | None = None
    # Guards the decision who finishes, and both lists.
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    _waiters: list[threading.Lock] | None = None
    _callbacks: list[Callable[[], None]] | None = None

    def finish(self, value: Any, error: BaseException | None) -> bool:
        """Sets the outcome and wakes the waiters; False if there was one already."""
        with self._lock:
            if self.done:
                return False
            self.value, self.error = value, error
            self.done = True
            waiters, self._waiters = self._waiters, None
        if waiters:
            Outcome.num_woken += 1
            for waiter in waiters:
                waiter.release()
        return True

    def take_callbacks(self) -> list[Callable[[], None]]:
        """The callbacks that were added before the end, each to be run once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        return callbacks or []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Adds a callback; False if it is too late and the caller has to run it."""
        with self._lock:
            if self.done:
                return False
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
            return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; False if the limit came first. Signals interrupt it."""
        return self.block(timeout_s)

    def block(self, timeout_s: float | None) -> bool:
        """Waits until another thread calls `finish`; see `wait`."""
        if self.done:
            return True
        about_to_block()
        let_others_read()
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self.done:
                return True
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
        # A lock with a limit can be interrupted by signals on every platform; one
        # without cannot on Windows.
        limit = 3600.0 if timeout_s is None else timeout_s
        try:
            while not interruptible(waiter.acquire, True, limit):
                if timeout_s is not None:
                    return self.done
        finally:
            with self._lock:
                if self._waiters and waiter in self._waiters:
                    self._waiters.remove(waiter)
        return True

    def what(self) -> tuple[str, str | None]:
        """What is waited for, in words; and the worker, if it is a call of one."""
        return "the future", None

    def result(self) -> Any:
        """The value, or raises the error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                # With its traceback the error keeps this frame, and by it all frames of
                # those who wait, until the collector comes.
                del self
        return self.value


def _twin_of(error: BaseException) -> BaseException:
    twin: object = None
    try:
        twin = copy.copy(error)
    except Exception:  # its class wants other arguments than it keeps
        pass
    if not isinstance(twin, BaseException):  # or it says that it is something else
        twin = RemoteError(f"{type(error).__name__}: {error}")
    return twin.with_traceback(None)


class Later:
    """What a function of ours returns that answers when a future completes."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future


class Future(torch.futures.Future[T], Generic[T]):
    """The result of `rpc_async`: a ``torch.futures.Future`` with fewer surprises.

    It can be awaited in asyncio; `wait` ends on Ctrl-C; `then` returns this class and
    keeps exception types; callbacks run on the agent's pool and see the context
    variables of the code that added them.

    Example:
        >>> future = Future()
        >>> doubled = future.then(lambda f: f.value() * 2)
        >>> future.set_result(21)
        >>> doubled.wait()
        42
    """

    def __init__(
        self, *, outcome: Outcome | None = None, executor: Executor | None = None
    ) -> None:
        _init_torch_future(self, [])  # the class between converts a list of devices
        self._outcome = Outcome() if outcome is None else outcome
        self._executor = executor

    def done(self) -> bool:
        """Whether there is a value or an error."""
        return self._outcome.done

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until there is a value and returns it, or raises the error.

        Args:
            timeout: Limit in seconds; None: that of the call itself.

        Raises:
            DeadlineExceeded: The limit came first. The call goes on.
        """
        if not self._outcome.done:
            _refuse_in_event_loop()
            if not self._outcome.wait(_check_limit(timeout)):
                what, worker = self._outcome.what()
                raise DeadlineExceeded(
                    f"{what} had no result after {timeout} s; it can be waited for again",
                    worker=worker,
                )
        try:
            return cast(T, self._outcome.result())
        finally:
            del self  # see there

    def value(self) -> T:
        """The value of a future that is done; raises its error."""
        if not self._outcome.done:
            raise UsageError(
                "value() was called on a future that is not done; use wait()"
            )
        try:
            return cast(T, self._outcome.result())
        finally:
            del self  # see there

    def set_result(self, result: T) -> None:
        """Completes the future with a value."""
        self._complete(result, None)

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an error, which `wait` raises."""
        if not isinstance(result, BaseException):
            raise TypeError(
                f"expected an exception instance, found {type(result).__name__}"
            )
        self._complete(None, result)

    def _complete(self, value: Any, error: BaseException | None) -> None:
        is_first = False
        try:
            with shielded():  # of those who wait, none may be forgotten
                is_first = self._outcome.finish(value, error)
        finally:
            if is_first:
                self._settle()
        if not is_first:
            raise UsageError("Future can only be marked completed once")

    def _settle(self) -> None:
        """Completes torch's half, then runs the callbacks where they may block."""
        outcome = self._outcome
        if outcome.error is None:
            _set_torch_result(self, outcome.value)
        else:
            # Torch keeps an error as a value with a function that raises it. A copy: what
            # is raised gets a traceback, whose frames hold the future, and through torch's
            # half the collector cannot see.
            self._set_unwrap_func(_raise)
            _set_torch_result(self, _twin_of(outcome.error))
        executor = self._executor or _run_here
        for callback in outcome.take_callbacks():
            executor(callback)

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Calls ``callback(self)`` when the future is done; at once if it is already."""
        if not callable(callback):
            raise TypeError(f"expected a callable, found {type(callback).__name__}")
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(_with_own_mode, callback, self)
            except BaseException as error:
                if may_be_of_a_signal(error):
                    raise
                # Nobody is there to catch it, and others come after it.
                _log.exception("a callback of a future failed")

        if not self._outcome.add_callback(run):
            run()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what ``callback(self)`` returns or raises."""
        if not callable(callback):
            raise TypeError(f"expected a callable, found {type(callback).__name__}")
        child: Future[S] = Future(executor=self._executor)

        def run(parent: Future[T]) -> None:
            try:
                value = _with_own_mode(callback, parent)
            except BaseException as error:
                child.set_exception(error)
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child

    def __await__(self) -> Generator[Any, None, T]:
        if not self._outcome.done:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def arrive() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            def notify() -> None:
                try:
                    loop.call_soon_threadsafe(arrive)
                except RuntimeError:
                    pass  # the loop was closed: nobody awaits any more

            if self._outcome.add_callback(notify):
                yield from arrived
        try:
            return cast(T, self._outcome.result())
        finally:
            del self  # see there

    def __reduce__(self) -> Any:
        raise TypeError(
            "futures cannot be sent or copied; wait for it and send the result"
        )


class _Local(threading.local):
    """Callbacks that a thread is running, one inside the other, or has still to run."""

    depth = 0

    def __init__(self) -> None:
        self.put_off: deque[Callable[[], None]] = deque()


_local = _Local()


def _run_here(callback: Callable[[], None]) -> None:
    """Runs a callback, which may complete the next future of a chain of any length."""
    if _local.depth >= DEEPEST:
        _local.put_off.append(callback)
        return
    _local.depth += 1
    try:
        callback()
        while _local.depth == 1 and _local.put_off:
            _local.put_off.popleft()()
    finally:
        _local.depth -= 1


def _with_own_mode(callback: Callable[[Future[T]], S], future: Future[T]) -> S:
    """Runs a callback, whose grad mode is not for what its thread does next."""
    is_grad_enabled = torch.is_grad_enabled()
    try:
        return callback(future)
    finally:
        if torch.is_grad_enabled() != is_grad_enabled:
            torch.set_grad_enabled(is_grad_enabled)


def _check_limit(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(
            "timeout must be a number of seconds, or None for the limit of the call, not "
            f"{type(timeout).__name__}"
        )
    if not timeout >= 0:  # written so that it also refuses NaN
        raise ValueError(f"timeout must be at least 0, found {timeout}")
    return float(timeout) if timeout < FOREVER_S else None


def _raise(error: BaseException) -> None:
    raise error


_forbidden_loops: set[asyncio.AbstractEventLoop] = set()


def forbid_blocking_in(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, blocking waits on this loop's thread raise instead of stopping it."""
    _forbidden_loops.add(loop)


def allow_blocking_in(loop: asyncio.AbstractEventLoop) -> None:
    """Takes `forbid_blocking_in` back."""
    _forbidden_loops.discard(loop)


def _refuse_in_event_loop() -> None:
    if _forbidden_loops and asyncio._get_running_loop() in _forbidden_loops:
        raise UsageError(
            "a blocking call inside an `async def` target would stop all such targets of "
            "this worker; use `await rpc_async(...)` instead of rpc_sync() or wait()"
        )
