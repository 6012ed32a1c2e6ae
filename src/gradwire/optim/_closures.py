"""Closures: functions of the trainer that compute the loss and its gradients.

Most optimizers evaluate a closure once, before anything else, and the trainer does that
by itself. Some decide while they step whether and how often; these run on the owner and
ask back, and the closure is evaluated on the thread that called ``step``, which sees its
own context and whatever else belongs to a thread.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.extension import outside_context
from gradwire.errors import UsageError
from gradwire.optim._owners import outcome_of
from gradwire.rpc import Future, functions
from gradwire.rpc.extension import methods_for_agents
from gradwire.wire import move

__all__ = ["Evaluations", "decides_itself", "evaluate", "needs_closure"]

Closure = Callable[[], Any]


def needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether ``step`` of a class cannot do without a closure, as that of LBFGS."""
    parameter = inspect.signature(optimizer_class.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def decides_itself(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether a class may evaluate a closure at other times than once at the beginning.

    Torch's own classes do not if they can do without one. Of others we do not know.
    """
    is_of_torch = optimizer_class.step.__module__.partition(".")[0] == "torch"
    return not is_of_torch or needs_closure(optimizer_class)


def evaluate(closure: Closure) -> Any:
    """The loss."""
    with torch.enable_grad():
        return closure()


@methods_for_agents("request")
class Evaluations:
    """The evaluations of a closure in one step, at the request of the owner."""

    def __init__(self, closure: Closure) -> None:
        self._closure = closure
        self._requests: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        # Guards the flag: handlers of requests, and the thread that evaluates.
        self._lock = threading.Lock()
        self._is_over = False
        self._losses: list[Any] = []
        self._error: Exception | None = None

    @functions.async_execution
    def request(self) -> Future[Any]:
        """For the owner: the loss, evaluated again."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_over:
                raise UsageError("the step that this closure was for is over")
            self._requests.put(answer)
        return answer

    def serve(self, start: Callable[[], Future[tuple[int | None, Any]]]) -> Any:
        """Evaluates the closure until a step is done.

        Args:
            start: Starts the owner's step, whose result is the number of an evaluation;
                or None, and what the optimizer returned instead.

        Returns:
            The loss of that evaluation, as the closure returned it; or that.
        """

        def end(_: Future[Any]) -> None:
            self._requests.put(None)

        step = outside_context(start)
        step.add_done_callback(end)
        try:
            while (answer := self._requests.get()) is not None:
                self._evaluate(answer)
        finally:
            self._give_up()
        outcome, failure = outcome_of(step)
        del step
        if failure is not None:
            # If the closure failed, the step did because of that: where it began says
            # more. Neither may lead to itself by this frame.
            failure, self._error = self._error or failure, None
            try:
                raise failure
            finally:
                del failure
        number, returned = outcome
        return returned if number is None else self._losses[number]

    def _evaluate(self, answer: Future[Any]) -> None:
        try:
            loss = evaluate(self._closure)
        except Exception as error:
            self._error = error
            answer.set_exception(UsageError(f"the closure failed: {error!r}"))
        except BaseException:
            answer.set_exception(
                UsageError("the evaluation of a closure was interrupted")
            )
            raise
        else:
            self._losses.append(loss)
            is_tensor = isinstance(loss, Tensor)
            answer.set_result(move(loss.detach(), "cpu") if is_tensor else loss)

    def _give_up(self) -> None:
        # Only after an interrupt is there anybody left who waits; it holds the locks of
        # the parameters, so it must not wait for ever.
        with self._lock:
            self._is_over = True
        while not self._requests.empty():
            answer = self._requests.get()
            if answer is not None:
                answer.set_exception(UsageError("the step was interrupted"))
