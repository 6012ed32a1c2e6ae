"""The event loop of ``async def`` targets."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch

from gradwire.errors import NotInitialized, UsageError
from gradwire.rpc import _future

__all__ = ["EventLoop"]


class Request(Protocol):
    """Who waits for a coroutine; called on a thread of the pool."""

    def succeed(self, value: Any) -> None:
        """The coroutine has returned a value."""

    def fail(self, error: BaseException) -> None:
        """It has raised, or was not run."""


class EventLoop:
    """A thread with an event loop for ``async def`` targets, started when needed.

    Args:
        name: Name of the worker, for the thread's name.
        submit: Runs something on a thread of the pool.
    """

    def __init__(self, name: str, submit: Callable[[Callable[[], None]], None]) -> None:
        self._name = name
        self._submit = submit
        # Guards the start and the end of the loop.
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        request: Request,
    ) -> None:
        """Runs a coroutine in the handler's context and answers with its result."""
        loop = self._start()
        if loop is None:
            coroutine.close()
            request.fail(NotInitialized("this worker was shut down meanwhile"))
            return

        def begin() -> None:
            task = context.run(loop.create_task, coroutine)
            self._tasks.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                answer = lambda: request.fail(UsageError("the coroutine was cancelled"))  # noqa: E731
            elif (error := task.exception()) is not None:
                answer = lambda: request.fail(error)  # noqa: E731
            else:
                answer = lambda: request.succeed(task.result())  # noqa: E731
            # Encoding may take long or run user code: not on the loop's thread.
            self._submit(answer)

        loop.call_soon_threadsafe(begin)

    def _start(self) -> asyncio.AbstractEventLoop | None:
        """The loop, which runs from now on; None if it was closed."""
        with self._lock:
            if self._is_closed:
                return None
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                _future.forbid_blocking_in(self._loop)
                self._loop.call_soon(torch.get_num_threads)  # see `WorkerPool`
                self._thread = threading.Thread(
                    target=self._loop.run_forever,
                    name=f"gradwire-{self._name}-asyncio",
                    daemon=True,
                )
                self._thread.start()
            return self._loop

    def close(self, timeout_s: float) -> None:
        """Cancels what still runs and ends the thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        def stop() -> None:
            for task in list(self._tasks):
                task.cancel()
            loop.call_soon(loop.call_soon, loop.stop)

        loop.call_soon_threadsafe(stop)
        thread.join(timeout_s)
        _future.allow_blocking_in(loop)
        if not thread.is_alive():
            loop.close()
