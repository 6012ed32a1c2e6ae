"""The event loop of ``async def`` targets.

All of them share one thread. Each has modes of torch of its own, as if it had a thread to
itself, and so have the tasks that it starts.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

import torch

from gradwire.errors import NotInitialized, UsageError
from gradwire.rpc import _future
from gradwire.rpc._log import log as _log
from gradwire.rpc._torch_modes import Modes

__all__ = ["EventLoop", "Target"]


class Request(Protocol):
    """Who waits for a coroutine; called on a thread of the pool."""

    def succeed(self, value: Any) -> None:
        """The coroutine has returned a value."""

    def fail(self, error: BaseException) -> None:
        """It has raised, or was not run."""


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine that runs with modes of torch of its own."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], modes: Modes) -> None:
        self._coroutine = coroutine
        self._modes = modes

    def send(self, value: Any) -> Any:
        with self._modes:
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._modes:
            return self._coroutine.throw(*error)

    def close(self) -> None:
        with self._modes:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("this is run by its task alone")

    def __getattr__(self, name: str) -> Any:
        # For what asyncio shows of a task: names, frames.
        return getattr(self._coroutine, name)


class _Exited(Exception):
    """Its cause is an exit of a target."""


class Target(_Steps):
    """The coroutine of an ``async def`` target.

    Asyncio lets an exit or an interrupt end the loop, and all other targets with it. Here
    it is an error of the one that raised it.
    """

    def send(self, value: Any) -> Any:
        try:
            return super().send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _Exited from error

    def throw(self, *error: Any) -> Any:
        try:
            return super().throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit_:
            raise _Exited from exit_


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """A task that a target has started. It begins with the modes of who starts it."""
    modes = Modes(is_grad_enabled=torch.is_grad_enabled())
    return asyncio.Task(_Steps(coroutine, modes), loop=loop, **options)


class EventLoop:
    """A thread with an event loop for ``async def`` targets, started when needed.

    Args:
        name: Name of the worker, for the thread's name.
        submit: Runs something on a thread of the pool.
    """

    def __init__(self, name: str, submit: Callable[[Callable[[], None]], None]) -> None:
        self._name = name
        self._submit = submit
        # Guards the start and the end of the loop, and what is put into it from outside.
        self._lock = threading.Lock()
        self._is_closed = False
        self._end_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps none alive

    def run(
        self, target: Target, context: contextvars.Context, request: Request
    ) -> None:
        """Runs a coroutine in the handler's context and answers with its result."""

        def begin() -> None:
            task = context.run(asyncio.Task, target, loop=loop)
            self._tasks.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            # Encoding may take long or run user code: not on the loop's thread.
            self._submit(lambda: _answer(request, task))

        with self._lock:
            loop = self._start()
            if loop is not None:
                loop.call_soon_threadsafe(begin)
                return
        target.close()
        request.fail(
            NotInitialized(f"worker {self._name!r} was shut down before it ran this")
        )

    def _start(self) -> asyncio.AbstractEventLoop | None:
        """The loop, which runs from now on; None if it was closed."""
        if self._is_closed:
            return None
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_task_factory(_make_task)
            _future.forbid_blocking_in(self._loop)
            self._loop.call_soon(torch.get_num_threads)  # see `WorkerPool`
            self._thread = threading.Thread(
                target=self._run_loop,
                args=(self._loop,),
                name=f"gradwire-{self._name}-asyncio",
                daemon=True,
            )
            self._thread.start()
        return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            # Again and again: a task that a target has started may exit, or stop the loop.
            while not self._is_closed:
                self._guard(loop.run_forever)
            self._end_tasks(loop)
        finally:
            _future.allow_blocking_in(loop)
            loop.close()

    def _guard(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except (SystemExit, KeyboardInterrupt):
            _log.exception(
                "worker %s goes on, though code in its event loop exited", self._name
            )

    def _end_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels all tasks, also those that targets have started, and waits for them."""
        limit = time.monotonic() + self._end_s
        while tasks := asyncio.all_tasks(loop):
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return
            for task in tasks:
                task.cancel()
            ended = asyncio.wait(tasks, timeout=left_s)
            self._guard(lambda: loop.run_until_complete(ended))  # noqa: B023

    def close(self, timeout_s: float) -> None:
        """Cancels what still runs and ends the thread; if it is this one, soon after."""
        with self._lock:
            self._is_closed = True
            self._end_s = timeout_s / 2  # the other half is for the thread itself
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)


def _answer(request: Request, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        request.fail(UsageError("the coroutine was cancelled"))
        return
    error = task.exception()
    if isinstance(error, _Exited):
        error = error.__cause__
    if error is not None:
        request.fail(error)
    else:
        request.succeed(task.result())
