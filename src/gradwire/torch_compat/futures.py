"""Futures as programs for torch know them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from gradwire.rpc import Future
from gradwire.torch_compat._errors import as_torch_error, torch_errors

__all__ = ["TorchFuture", "adopt", "collect_all", "wait_all"]

T = TypeVar("T")
S = TypeVar("S")


class TorchFuture(Future[T], Generic[T]):
    """A future whose errors are of the types that torch raises.

    Attributes:
        function: What is called, if it may be an operator of torch.
    """

    function: Any = None

    def wait(self, timeout: float | None = None) -> T:
        """As `gradwire.rpc.Future.wait`."""
        with torch_errors(self.function):
            return super().wait(timeout)

    def value(self) -> T:
        """As `gradwire.rpc.Future.value`."""
        with torch_errors(self.function):
            return super().value()

    def has_failed(self) -> bool:
        """Whether it is done, with an error."""
        return self._outcome.done and self._outcome.error is not None

    def then(self, callback: Callable[[Future[T]], S]) -> TorchFuture[S]:
        """As `gradwire.rpc.Future.then`; an error of the callback is a RuntimeError."""
        if not callable(callback):
            raise TypeError(
                "then(): incompatible function arguments. Expected a callable, found "
                f"{type(callback).__name__}"
            )

        def run(parent: Future[T]) -> S:
            try:
                return callback(parent)
            except RuntimeError:
                raise
            except Exception as error:
                # Torch keeps no other type here.
                raise _as_runtime_error(error) from error

        return adopt(super().then(run))


def adopt(future: Future[T]) -> TorchFuture[T]:
    """The same future, as torch's programs know it."""
    future.__class__ = TorchFuture
    return future  # type: ignore[return-value]


def _as_runtime_error(error: Exception) -> BaseException:
    translated = as_torch_error(error)
    if isinstance(translated, RuntimeError):
        return translated
    return RuntimeError(f"{type(error).__name__}: {error}")


_collect_all = torch.futures.collect_all


def collect_all(
    futures: Iterable[torch.futures.Future[Any]],
) -> TorchFuture[list[torch.futures.Future[Any]]]:
    """A future of all these futures, done when they are; an error of one is its own.

    Torch's own function knows our futures by what they have of torch's, and raises
    errors as they came.
    """
    futures = list(futures)  # torch takes a generator, too
    collected: TorchFuture[list[torch.futures.Future[Any]]] = TorchFuture()

    def finish(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
        try:
            done.value()
        except BaseException as error:
            collected.set_exception(error.with_traceback(None))
        else:
            collected.set_result(futures)

    _collect_all(futures).add_done_callback(finish)
    return collected


def wait_all(futures: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """Waits for all futures and returns their values; ends at the first error.

    Torch's own function sees an error of our futures only when all others are done.
    """
    futures = list(futures)
    # One of ours: a handler that waits for it is known to wait.
    settled: Future[None] = Future()
    failed: list[torch.futures.Future[Any]] = []
    lock = threading.Lock()
    left = len(futures)

    def note(future: torch.futures.Future[Any]) -> None:
        nonlocal left
        try:
            future.value()
        except Exception:
            with lock:
                failed.append(future)
        with lock:
            left -= 1
            if settled.done() or (left and not failed):
                return
            settled.set_result(None)

    for future in futures:
        future.add_done_callback(note)
    if futures:
        settled.wait()
    if failed:
        failed[0].wait()
    return [future.wait() for future in futures]
