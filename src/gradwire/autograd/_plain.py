"""How a plain ``loss.backward()`` becomes a pass.

The local engine runs already when it reaches the first recv of a context. That recv
starts a pass for the context, asks the engine what kind of backward this is, and answers
for the recvs that the engine will not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradwire.autograd._autocast import autocast_state
from gradwire.autograd._engine import Destination
from gradwire.autograd._functions import is_into_grad, will_execute
from gradwire.autograd._messages import is_implicit
from gradwire.autograd._passes import Instruction, PassKind, TellNone
from gradwire.autograd._run import Run
from gradwire.autograd._torch_private import (
    current_task,
    keeps_graph,
    queue_callback,
)
from gradwire.errors import (
    AutogradError,
    BackwardFailed,
    ContextReleased,
    ForeignGraph,
    GradwireError,
    GraphConsumed,
    NotInitialized,
    UsageError,
)
from gradwire.rpc.extension import shielded

if TYPE_CHECKING:
    from gradwire.autograd._context import ContextName, Received, Side
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._nodes import ReceivedMessage

__all__ = ["admit", "asked_for_leaf", "changed", "consumed", "gone"]


def admit(
    exchange: Exchange, side: Side, message: ReceivedMessage, has_gradient: bool
) -> tuple[Run | None, list[Instruction]]:
    """The pass in which a recv that the engine has reached ships its gradients.

    If there is none, and it has some to ship, it starts one: this is how a plain
    ``loss.backward()`` becomes a pass.
    """
    task = current_task()
    owner = exchange.tasks.get(task)
    if owner is not None and owner.failure is not None:
        # Its worker goes on with what it had begun, but nothing of it may go out any more,
        # also not by way of another context.
        raise owner.failure
    other = side.run
    if other is not None and other.task not in (None, task):
        exchange.leftovers.work_off()  # of a backward that has failed just now
    with shielded():  # no pass may begin to whose end nobody sees
        with side.lock:
            run = exchange.run_here(side)
            if run is not None and run.pass_.covers(message.event):
                return run, []
            if not has_gradient:
                return None, []
            _check_may_start(exchange, side, message, task)
            exchange.check_whole(side)
            create_graph = torch.is_grad_enabled()
            retain = keeps_graph() or create_graph
            destination = (
                Destination.INTO_GRAD if is_into_grad() else Destination.THROUGH
            )
            if side.attempt is not None and destination is Destination.INTO_GRAD:
                raise UsageError(
                    "a plain backward() puts gradients into .grad, and from there they cannot "
                    "be taken back if the step has to be run again. Inside of retry() call "
                    "ctx.backward(loss)"
                )
            pass_, instructions = side.state.start(
                PassKind(destination, retain, create_graph)
            )
            run = exchange.begin(side, pass_)
            run.task, run.autocast = task, autocast_state()
            instructions += [
                TellNone(recv.peer, pass_.id, recv.number, is_last=not retain)
                for recv in run.recvs
                if not _is_reached(recv, message, task)
            ]
        end = _PlainEnd(exchange, side, run)
    if message.lease is not None:
        message.lease.is_over = not retain  # from now on the pass's end is the call's
    queue_callback(end)
    return run, instructions


def _check_may_start(
    exchange: Exchange, side: Side, message: ReceivedMessage, task: int
) -> None:
    """Raises if a gradient has come where it would be lost or counted twice."""
    owner = exchange.tasks.get(task)
    run = side.run
    if message.event < (side.state.first if run is None else run.pass_.first):
        raise consumed(exchange, side.label)
    if run is not None and message.made_in is None and side.is_implicit:
        raise AutogradError(
            f"another backward() is going through {side.label} already: run them one "
            "after the other, or make a call for each",
            worker=exchange.agent.info.name,
        )
    if run is not None or (
        not side.is_implicit
        and message.made_in is not None
        and not message.made_in.is_over
    ):
        raise AutogradError(
            f"a backward reached a tensor that arrived in {side.label} while another "
            "backward was running there, and not as part of it. Calls that are made "
            "inside a backward, as reentrant checkpointing makes them, cannot be "
            "differentiated inside that same backward: use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or make "
            "the call outside of any context"
        )
    if side.is_implicit and not (side.holds_weakly or side.is_serving):
        raise _foreign_call(exchange, side.label)
    if owner is not None and (
        not side.is_implicit or owner.destination is Destination.INTO_DICTIONARY
    ):
        raise ForeignGraph(
            f"a pass over {owner.side.label} reached a tensor that belongs to "
            f"{side.label}. Make both in one context, or detach() the tensor where it "
            "crosses over",
            worker=exchange.agent.info.name,
        )


def _foreign_call(exchange: Exchange, label: str) -> ForeignGraph:
    owner = exchange.tasks.get(current_task())
    here = f"the backward of {owner.side.label}" if owner is not None else "a backward"
    return ForeignGraph(
        f"{here} reached a tensor that had arrived in another call, {label}, and "
        "was kept. Its gradient cannot be sent back any more: put both calls into one "
        "context (with gradwire.autograd.context() as ctx), or detach() what you keep",
        worker=exchange.agent.info.name,
    )


def consumed(exchange: Exchange, label: str) -> GraphConsumed:
    return GraphConsumed(
        f"the graph of {label} was used by an earlier backward and is gone. To use it "
        "several times: one backward over the sum, backward([loss1, loss2]), or "
        "retain_graph=True for all but the last, or a context for each forward, or "
        "no context at all; and if calls share what a worker computed before, one "
        "context around all of them",
        worker=exchange.agent.info.name,
    )


def asked_for_leaf(exchange: Exchange, label: str) -> AutogradError:
    return AutogradError(
        f"a hook asked torch whether a leaf will get a gradient in {label}, as those of "
        "torch.autograd.graph.register_multi_grad_hook do. Torch can tell only where "
        "gradients go to .grad: use gradwire.autograd.context(accumulate='grad'), or "
        "loss.backward()",
        worker=exchange.agent.info.name,
    )


def changed(exchange: Exchange, label: str) -> AutogradError:
    return AutogradError(
        f"a tensor that was sent in {label} was changed in place by another thread at the "
        "same time, so its gradient cannot be passed on. Send a clone(), or wait until "
        "the call has returned before you change it",
        worker=exchange.agent.info.name,
    )


def gone(
    exchange: Exchange, name: ContextName, message: ReceivedMessage
) -> GradwireError:
    """Why there is no side of a message's context any more."""
    if exchange.registry.is_closed:
        return NotInitialized(
            f"a backward reached a tensor that arrived in {message.label}, and worker "
            f"{exchange.agent.info.name!r} has been shut down since. Call backward() "
            "before shutdown()",
            worker=exchange.agent.info.name,
        )
    if is_implicit(name.key):
        if message.is_request:
            return _foreign_call(exchange, message.label)
        return consumed(exchange, message.label)
    return ContextReleased(
        f"a backward reached a tensor that arrived in {message.label}, which has been "
        "released. Call backward() before its `with` block is left",
        worker=exchange.agent.info.name,
    )


class _PlainEnd:
    """The end of a plain backward that started a pass: waits for the others.

    The engine calls it when the backward has succeeded, and drops it in any case. If it
    dies without having been called, the backward failed, and the others must know.
    """

    __slots__ = ("_exchange", "_is_called", "_run", "_side")

    def __init__(self, exchange: Exchange, side: Side, run: Run) -> None:
        exchange.leftovers.ensure_thread()
        self._exchange, self._side, self._run = exchange, side, run
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        exchange, side, run = self._exchange, self._side, self._run
        try:
            exchange.end_part(side, run)
            exchange.wait_for_children(run)
        except BaseException as error:
            exchange.fail(side, run, error)
            exchange.end_failed(side, run)
            raise

    def __del__(self) -> None:
        # It has none if a signal interrupted the constructor.
        if not getattr(self, "_is_called", True):
            self._exchange.leftovers.put(self._abort)

    def _abort(self) -> None:
        error = BackwardFailed(
            f"the backward that worker {self._exchange.agent.info.name!r} had started "
            "failed there",
            worker=self._exchange.agent.info.name,
        )
        self._exchange.fail(self._side, self._run, error)
        self._exchange.end_failed(self._side, self._run)


def _is_reached(recv: Received, running: ReceivedMessage, task: int) -> bool:
    """Whether the running backward executes a recv, now or later."""
    node = recv.node()
    if node is None or node.message.passed_over_in == task:
        return False
    # Of the one that runs torch says no, if it is the root.
    return node.message is running or will_execute(node)
