"""What a worker does about passes: it starts, joins, runs and ends them.

There is one `Exchange` per agent. It knows the worker's sides of all contexts, turns
messages into events of the pure protocol in `_passes`, and does what that says. The
messages behind the autograd nodes, `SentMessage` and `ReceivedMessage`, lead the local
engine here.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.autograd._autocast import apply_autocast, autocast_state
from gradwire.autograd._averaged import refuse_averaged
from gradwire.autograd._context import ContextName, Lease, Received, Side
from gradwire.autograd._engine import (
    Destination,
    accumulate,
    leaves_of,
    run_backward,
)
from gradwire.autograd._messages import (
    Dead,
    Gradient,
    GradientAndStart,
    PassAbort,
    PassDone,
    PassStart,
    Release,
    is_implicit,
    opener_of,
)
from gradwire.autograd._passes import (
    NONE,
    WAIT,
    Instruction,
    Pass,
    PassId,
    TellAbort,
    TellDone,
    TellNone,
    TellStart,
)
from gradwire.autograd._registry import Registry
from gradwire.autograd._torch_private import (
    current_task,
    is_into_grad,
    keeps_graph,
    queue_callback,
    will_execute,
)
from gradwire.errors import (
    AutogradError,
    BackwardFailed,
    BackwardTimeout,
    ContextReleased,
    ForeignGraph,
    GradwireError,
    GraphConsumed,
    RemoteProtocolError,
)
from gradwire.rpc.extension import (
    Agent,
    Outcome,
    Peer,
    describe,
    rebuild,
    serving_agent,
)
from gradwire.transport import Frame
from gradwire.wire import (
    TRACKED,
    Outgoing,
    decode_value,
    encode,
    tracked_tensors,
)

__all__ = ["Exchange", "ReceivedMessage", "Run", "SentMessage"]

_log = logging.getLogger("gradwire.autograd")

_CLOSE_S = 5.0
_GATHER_S = 0.002  # leftovers are collected for so long, to be sent together


class Answer(NamedTuple):
    """The gradients of one message, with the history that they may have themselves."""

    present: tuple[bool, ...]
    gradients: tuple[Tensor, ...]
    tracked: list[Tensor]
    history: int
    after: tuple[int, int] | None


class Run:
    """A pass at work on this worker. Its side's lock guards it."""

    __slots__ = (
        "autocast",
        "children",
        "create_graph",
        "destination",
        "failure",
        "limit",
        "pass_",
        "recvs",
        "retain",
        "side",
        "task",
        "thread",
        "waiting",
    )

    def __init__(
        self,
        side: Side,
        pass_: Pass,
        destination: Destination,
        retain: bool,
        create_graph: bool,
        recvs: list[Received],
    ) -> None:
        self.side = side
        self.pass_ = pass_
        self.destination = destination
        self.retain = retain
        self.create_graph = create_graph
        self.recvs = recvs
        self.task: int | None = None  # the engine's number for our part
        self.thread = 0  # where our part runs, if it begins with tokens only
        self.autocast: list[tuple[str, str]] | None = None
        self.limit = 0.0  # when the starter gives up, 0: never
        self.failure: BaseException | None = None
        self.waiting: dict[int, Outcome] = {}  # sends that the engine waits in
        self.children = {rank: Outcome() for rank in pass_.told}

    def forget(self) -> None:
        """The pass failed, and the error is about to be raised to the program.

        The error's traceback knows this run; if the run also knew the error, both would
        live until the cyclic collector comes, and the graph with them.
        """
        self.failure = None
        self.children, self.waiting = {}, {}


class SentMessage:
    """What a `Send` node knows: a message of ours whose gradients are waited for."""

    __slots__ = ("_count", "_event", "_exchange", "_mark", "_name", "_peer")

    def __init__(
        self, exchange: Exchange, side: Side, event: int, peer: int, count: int
    ) -> None:
        self._exchange = exchange
        self._name = side.name  # never the side itself: nodes must not keep it alive
        self._mark = side.mark
        self._event = event
        self._peer = peer
        self._count = count

    def await_gradients(self) -> Sequence[Tensor | None]:
        """Called by the engine. Outside of a pass of ours nobody will answer."""
        exchange = self._exchange
        side = exchange.registry.find(self._name)
        run = side.run if side is not None else None
        if side is None or run is None or not exchange.is_part_of(run):
            return [None] * self._count
        answer = exchange.await_answer(side, run, self._event, self._peer)
        if answer is NONE:
            return [None] * self._count
        if len(answer.present) != self._count:
            raise RemoteProtocolError(
                f"{len(answer.present)} gradients arrived for {self._count} tensors"
            )
        if answer.history >= 0:  # the gradients themselves arrive differentiably
            exchange.perform(
                side,
                run,
                side.record_recv(
                    self._peer, answer.history, answer.after, answer.tracked
                ),
            )
        gradients = iter(answer.gradients)
        return [next(gradients) if there else None for there in answer.present]


class ReceivedMessage:
    """What a `Recv` node knows: a message of a peer that waits for its gradients."""

    __slots__ = (
        "_exchange",
        "_mark",
        "_name",
        "event",
        "is_request",
        "label",
        "lease",
        "made_in_backward",
        "number",
        "passed_over_in",
        "peer",
    )

    def __init__(
        self,
        exchange: Exchange,
        side: Side,
        event: int,
        peer: int,
        number: int,
        lease: Lease | None,
        is_request: bool,
        made_in_backward: bool,
    ) -> None:
        self._exchange = exchange
        self._name = side.name
        self._mark = side.mark
        self.label = side.label
        self.event = event
        self.peer = peer
        self.number = number
        self.lease = lease
        self.is_request = is_request
        self.made_in_backward = made_in_backward
        self.passed_over_in: int | None = None

    def ship(self, gradients: Sequence[Tensor | None]) -> None:
        """Called by the engine, once per backward."""
        exchange = self._exchange
        side = exchange.registry.find(self._name)
        has_gradient = any(g is not None for g in gradients)
        if side is None:
            if has_gradient:
                raise exchange.gone(self._name, self)
            return
        run, instructions = exchange.admit(side, self, has_gradient)
        if run is None:
            self.passed_over_in = current_task()
            return
        try:
            exchange.ship(side, run, self, gradients, instructions)
        finally:
            exchange.perform(side, run, instructions)


class Exchange:
    """A worker's part in passes."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.info.id
        self.registry = Registry(self, agent.network.incarnation)
        # Engine's numbers of the backwards that are our parts of passes. Plain
        # dictionary operations, each atomic.
        self._tasks: dict[int, Run] = {}
        self.leftovers: SimpleQueue[Any] = SimpleQueue()
        # Guards the start of the thread that works the leftovers off.
        self._lock = threading.Lock()
        self._sweeper: threading.Thread | None = None
        self._is_closed = False

    def sent_message(
        self, side: Side, event: int, peer: int, count: int
    ) -> SentMessage:
        """For `Side`, which does not know this module."""
        return SentMessage(self, side, event, peer, count)

    def received_message(
        self,
        side: Side,
        event: int,
        peer: int,
        number: int,
        lease: Lease | None,
        is_request: bool,
        made_in_backward: bool,
    ) -> ReceivedMessage:
        """Likewise."""
        return ReceivedMessage(
            self, side, event, peer, number, lease, is_request, made_in_backward
        )

    # -------------------------------------------------------------- passes we start

    def backward(
        self,
        side: Side,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        destination: Destination,
        *,
        retain: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        timeout_s: float = 0.0,
    ) -> list[tuple[Any, Tensor | None]]:
        """Runs a pass over a whole context, from its begin to its end everywhere."""
        limit = time.monotonic() + timeout_s if timeout_s else 0.0
        self._wait_for_calls(side, limit)
        retain = retain or create_graph
        if destination is Destination.INTO_DICTIONARY:
            # As long as nothing has begun, the context stays as it is.
            refuse_averaged(self._leaves(side, roots), side.label)
        with side.lock:
            self._check_whole(side)
            pass_, instructions = side.state.start(retain)
            run, tail = self._begin(side, pass_, destination, retain, create_graph)
            run.limit, run.autocast = limit, autocast_state()
        try:
            self.perform(side, run, instructions)
            gradients = self._run_part(run, roots, seeds, tail, inputs)
            del tail
            self._local_end(side, run)
            self._wait_for_children(run)
        except BaseException as error:
            self.fail(side, run, error)
            run.forget()
            raise
        if destination is Destination.INTO_DICTIONARY:
            self._keep(side, run, gradients)
        return gradients

    def _leaves(self, side: Side, roots: Sequence[Tensor]) -> Iterator[Tensor]:
        """The leaves that a pass would reach here; only walks if it is asked."""
        with side.lock:
            tail = side.peek_tail()
        yield from leaves_of([*roots, *tail])

    def _wait_for_calls(self, side: Side, limit: float) -> None:
        for call in [note.call for note in list(side.calls)]:
            left = max(0.0, limit - time.monotonic()) if limit else None
            if call is not None and not call.wait(left):
                raise BackwardTimeout(
                    f"backward() waited until its limit for a call of {call.target}, made "
                    f"in {side.label}, to return"
                )

    def _begin(
        self,
        side: Side,
        pass_: Pass,
        destination: Destination,
        retain: bool,
        create_graph: bool,
    ) -> tuple[Run, list[Tensor]]:
        """Takes the chain for a pass; the caller holds the side's lock."""
        tail, recvs = side.take_tail(retain)
        run = Run(side, pass_, destination, retain, create_graph, recvs)
        side.run = run
        return run, tail

    def _run_part(
        self,
        run: Run,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        tail: list[Tensor],
        inputs: Sequence[Any] = (),
    ) -> list[tuple[Any, Tensor | None]]:
        if not roots and not tail:
            return []
        if not roots:
            run.thread = threading.get_ident()
        try:
            return run_backward(
                roots,
                seeds,
                tail,
                run.destination,
                run.side.anchor,
                lambda: self._claim(run, current_task()),
                label=run.side.label,
                retain_graph=run.retain,
                create_graph=run.create_graph,
                inputs=inputs,
            )
        finally:
            if run.task is not None:
                self._tasks.pop(run.task, None)

    def is_part_of(self, run: Run) -> bool:
        """Whether the node that the engine executes here is executed for a pass.

        In a part that began with tokens only, the first node is a wire node: there is
        no code of the user's before it, so whatever backward it is in, is the pass's.
        """
        task = current_task()
        if run.task is None and run.thread == threading.get_ident():
            self._claim(run, task)
        return run.task == task

    def _claim(self, run: Run, task: int) -> None:
        run.task = task
        self._tasks[task] = run

    def _wait_for_children(self, run: Run) -> None:
        for rank, outcome in run.children.items():
            self._wait(run, outcome, rank)
        if run.failure is not None:
            raise run.failure

    def _check_whole(self, side: Side) -> None:
        if side.state.broken is not None:
            raise rebuild(side.state.broken)

    def _wait(self, run: Run, outcome: Outcome, rank: int) -> Any:
        peer = self.agent.network.find(rank)
        if not self.agent.wait_for(outcome, peer, run.limit):
            raise BackwardTimeout(
                f"a backward pass over {run.side.label} reached its limit while it waited "
                f"for worker {peer.info.name!r} (rank {rank})",
                worker=peer.info.name,
            )
        answer, error = outcome.value, outcome.error
        del outcome
        if error is not None:
            try:
                raise error
            finally:
                del error  # with its traceback it would keep this frame, and that all
        return answer

    def _keep(
        self, side: Side, run: Run, gradients: list[tuple[Any, Tensor | None]]
    ) -> None:
        with side.lock:
            accumulate(side.gradients, gradients, create_graph=run.create_graph)

    # ------------------------------------------------- passes that plain backwards start

    def admit(
        self, side: Side, message: ReceivedMessage, has_gradient: bool
    ) -> tuple[Run | None, list[Instruction]]:
        """The pass in which a recv that the engine has reached ships its gradients.

        If there is none, and it has some to ship, it starts one: this is how a plain
        ``loss.backward()`` becomes a pass.
        """
        task = current_task()
        with side.lock:
            run = side.run
            if (
                run is not None
                and self.is_part_of(run)
                and run.pass_.covers(message.event)
            ):
                return run, []
            if not has_gradient:
                return None, []
            self._check_may_start(side, message, task)
            self._check_whole(side)
            create_graph = torch.is_grad_enabled()
            retain = keeps_graph() or create_graph
            pass_, instructions = side.state.start(retain)
            destination = (
                Destination.INTO_GRAD if is_into_grad() else Destination.THROUGH
            )
            run, _ = self._begin(side, pass_, destination, retain, create_graph)
            run.task, run.autocast = task, autocast_state()
            if message.lease is not None:
                message.lease.is_over = not retain
            instructions += [
                TellNone(recv.peer, pass_.id, recv.number)
                for recv in run.recvs
                if not _is_reached(recv, task)
            ]
        queue_callback(_PlainEnd(self, side, run))
        return run, instructions

    def _check_may_start(self, side: Side, message: ReceivedMessage, task: int) -> None:
        """Raises if a gradient has come where it would be lost or counted twice."""
        owner = self._tasks.get(task)
        run = side.run
        if message.event < (side.state.first if run is None else run.pass_.first):
            raise self._consumed(side.label)
        if run is not None or (message.made_in_backward and not side.is_implicit):
            raise AutogradError(
                f"a backward reached a tensor that arrived in {side.label} while another "
                "backward was running there, and not as part of it. Calls that are made "
                "inside a backward, as reentrant checkpointing makes them, cannot be "
                "differentiated inside that same backward: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or make "
                "the call outside of any context"
            )
        if side.is_implicit and not (side.holds_weakly or side.is_serving):
            raise self._foreign_call(side.label)
        if owner is not None and (
            not side.is_implicit or owner.destination is Destination.INTO_DICTIONARY
        ):
            raise ForeignGraph(
                f"a pass over {owner.side.label} reached a tensor that belongs to "
                f"{side.label}. Make both in one context, or detach() the tensor where it "
                "crosses over",
                worker=self.agent.info.name,
            )

    def _foreign_call(self, label: str) -> ForeignGraph:
        owner = self._tasks.get(current_task())
        here = (
            f"the backward of {owner.side.label}" if owner is not None else "a backward"
        )
        return ForeignGraph(
            f"{here} reached a tensor that had arrived in another call, {label}, and "
            "was kept. Its gradient cannot be sent back any more: put both calls into one "
            "context (with gradwire.autograd.context() as ctx), or detach() what you keep",
            worker=self.agent.info.name,
        )

    def _consumed(self, label: str) -> GraphConsumed:
        return GraphConsumed(
            f"the graph of {label} was used by an earlier backward and is gone. To use it "
            "several times: one backward over the sum, backward([loss1, loss2]), or "
            "retain_graph=True for all but the last, or a context for each forward, or "
            "no context at all",
            worker=self.agent.info.name,
        )

    def gone(self, name: ContextName, message: ReceivedMessage) -> GradwireError:
        """Why there is no side of a message's context any more."""
        if is_implicit(name.key):
            if message.is_request:
                return self._foreign_call(message.label)
            return self._consumed(message.label)
        return ContextReleased(
            f"a backward reached a tensor that arrived in {message.label}, which has been "
            "released. Call backward() before its `with` block is left",
            worker=self.agent.info.name,
        )

    def ship(
        self,
        side: Side,
        run: Run,
        message: ReceivedMessage,
        gradients: Sequence[Tensor | None],
        instructions: list[Instruction],
    ) -> None:
        """Sends the gradients of a message back; enqueues, never blocks.

        If the same worker is to be told that the pass begins, it is told with them, and
        the instruction is taken out.
        """
        present = tuple([g is not None for g in gradients])
        values = tuple(g for g in gradients if g is not None)
        pass_id, name = run.pass_.id, side.name
        tracked: list[Tensor] = []
        history, after = -1, None
        if run.create_graph:
            tracked = list({id(g): g for g in values if g.requires_grad}.values())
            if tracked:
                history, after = side.record_send(message.peer, tracked)
        if not values:
            present = ()
        if message.peer == self.me:
            own = {id(g): g.detach() for g in values}
            values = tuple(own[id(g)] for g in values)
            copies = [own[id(g)] for g in tracked]
            self._on_answer(
                side,
                pass_id,
                message.number,
                Answer(present, values, copies, history, after) if present else NONE,
            )
            return
        out: Gradient | GradientAndStart
        start = TellStart(message.peer)
        if start in instructions:
            instructions.remove(start)
            out = GradientAndStart(
                *name,
                *pass_id,
                message.number,
                present,
                history,
                after,
                run.destination,
                run.retain,
                run.create_graph,
                run.autocast,
            )
        else:
            out = Gradient(*name, *pass_id, message.number, present, history, after)
        if not values:
            outgoing = encode(out)
        elif run.create_graph:
            marked = {id(g) for g in tracked}

            def flags(tensors: list[Tensor], _: set[int]) -> dict[int, int]:
                return {
                    i: TRACKED if id(t) in marked else 0 for i, t in enumerate(tensors)
                }

            outgoing = encode(out, values, flags)
        else:
            outgoing = encode(out, values)
        self._send(message.peer, outgoing)

    # ------------------------------------------------------------------- passes we join

    def on_gradient_and_start(
        self, peer: Peer, message: GradientAndStart, frame: Frame
    ) -> None:
        """A pass begins, and the first answer is there."""
        self.on_gradient(peer, message, frame)
        frame.buffers.clear()
        self.on_start(peer, message, frame)

    def on_start(
        self, peer: Peer, message: PassStart | GradientAndStart, frame: Frame
    ) -> None:
        """A pass begins; runs our part of it."""
        name = ContextName(message.key, message.incarnation)
        pass_id = PassId(message.starter, message.number)
        side = self.registry.find(name)
        if side is None and not is_implicit(name.key):
            # It may overtake the request that brings the context.
            side = self.registry.join(name, "", False)
        if side is None:
            cause = self.describe(self._no_side(name))
            self._tell_abort(name, pass_id, peer.info.id, cause)
            return
        with side.lock:
            pass_, instructions = side.state.on_start(
                pass_id, peer.info.id, message.retain
            )
            run: Run | None = None
            tail: list[Tensor] = []
            if pass_ is not None:
                run, tail = self._begin(
                    side,
                    pass_,
                    Destination(message.destination),
                    message.retain,
                    message.create_graph,
                )
                run.autocast = message.autocast
                instructions += [
                    TellNone(recv.peer, pass_id, recv.number)
                    for recv in run.recvs
                    if recv.node() is None  # on a side that holds weakly
                ]
        self.perform(side, run, instructions)
        if run is not None:
            roots, tail = tail, []
            contextvars.copy_context().run(self._join, side, run, roots)

    def _no_side(self, name: ContextName) -> GradwireError:
        if is_implicit(name.key):
            return self._consumed("a call")
        return ContextReleased(f"the context {name.key} has been released")

    def _join(self, side: Side, run: Run, tail: list[Tensor]) -> None:
        serving_agent.set(self.agent)
        autocast = run.autocast
        try:
            with apply_autocast(autocast) if autocast else contextlib.nullcontext():
                gradients = self._run_part(run, (), (), tail)
            tail.clear()
            if run.failure is not None:
                return
            if run.destination is Destination.INTO_DICTIONARY:
                self._keep(side, run, gradients)
        except BaseException as error:
            self.fail(side, run, error)
            error.__traceback__ = None  # it holds the frames of backward functions
        else:
            self._local_end(side, run)

    def await_answer(self, side: Side, run: Run, event: int, peer: int) -> Any:
        """Waits for the gradients of a message; the engine's thread does."""
        with side.lock:
            if run.failure is not None:
                raise run.failure
            if not run.pass_.covers(event):
                return NONE
            answer = side.state.take_answer(event)
            if answer is not WAIT:
                return answer
            outcome = run.waiting[event] = Outcome()
        return self._wait(run, outcome, peer)

    # ------------------------------------------------------------------------ messages

    def on_gradient(
        self, peer: Peer, message: Gradient | GradientAndStart, frame: Frame
    ) -> None:
        """The answer to a message of ours."""
        side = self.registry.find(ContextName(message.key, message.incarnation))
        if side is None:
            return
        answer: Any = NONE
        if message.present:
            values, tensors = decode_value(message, frame.head, frame.buffers)
            tracked = tracked_tensors(message, tensors) if message.history >= 0 else []
            if type(values) is not tuple or len(values) != sum(message.present):
                raise RemoteProtocolError("a gradient message is malformed")
            answer = Answer(
                message.present, values, tracked, message.history, message.after
            )
        pass_id = PassId(message.starter, message.number)
        self._on_answer(side, pass_id, message.message, answer)

    def _on_answer(self, side: Side, pass_id: PassId, number: int, answer: Any) -> None:
        with side.lock:
            if not side.state.on_answer(pass_id, number, answer) or side.run is None:
                return
            outcome = side.run.waiting.pop(number, None)
            if outcome is None:
                return
            answer = side.state.take_answer(number)
        outcome.finish(answer, None)

    def on_dead(self, peer: Peer, message: Dead, frame: Frame) -> None:
        """A message of ours was dropped on its way."""
        side = self.registry.find(ContextName(message.key, message.incarnation))
        if side is not None:
            self.mark_dead(side, message.message)

    def mark_dead(self, side: Side, number: int) -> None:
        """A message of ours will be answered in no pass."""
        with side.lock:
            side.state.mark_dead(number)
            outcome = side.run.waiting.pop(number, None) if side.run else None
        if outcome is not None:
            outcome.finish(NONE, None)

    def tell_dead(self, peer: Peer, name: ContextName, number: int) -> None:
        """A message of a peer was dropped here."""
        self._send(peer.info.id, encode(Dead(*name, number)))

    def on_done(self, peer: Peer, message: PassDone, frame: Frame) -> None:
        """Somebody whom we told of a pass is done with it."""
        side = self.registry.find(ContextName(message.key, message.incarnation))
        if side is None:
            return
        with side.lock:
            run = side.run
            pass_id = PassId(message.starter, message.number)
            instructions = side.state.on_done(pass_id, peer.info.id)
            outcome = None
            if run is not None and run.pass_.id == pass_id:
                outcome = run.children.get(peer.info.id)
            self._settle(side)
        self._after_end(side, run, instructions)
        if outcome is not None:
            outcome.finish(None, None)

    def on_abort(self, peer: Peer, message: PassAbort, frame: Frame) -> None:
        """A pass failed on another worker."""
        side = self.registry.find(ContextName(message.key, message.incarnation))
        if side is None:
            return
        value, _ = decode_value(message, frame.head, frame.buffers)
        pass_id = PassId(message.starter, message.number)
        self._fail(side, pass_id, value, rebuild(value), peer.info.id)

    # ---------------------------------------------------------------------------- ends

    def _local_end(self, side: Side, run: Run) -> None:
        with side.lock:
            instructions = side.state.local_end() if side.run is run else []
            self._settle(side)
        self._after_end(side, run, instructions)

    def _settle(self, side: Side) -> None:
        """Notes that a pass is over here, if it is; the caller holds the lock."""
        if side.run is not None and side.state.current is not side.run.pass_:
            side.run = None
            side.shed_sends()

    def _after_end(
        self, side: Side, run: Run | None, instructions: list[Instruction]
    ) -> None:
        is_over = run is not None and side.run is not run and not run.retain
        # A call's context is used up by a pass that does not retain it.
        if is_over and side.is_implicit and not side.is_busy():
            self.registry.drop(side.name)
            side.forget_graph()
        self.perform(side, run, instructions)

    def describe(self, error: BaseException) -> Any:
        """What others are told of an error; kept instead of it, which keeps its frames."""
        return describe(error, self.agent.info.name)

    def fail(self, side: Side, run: Run, error: BaseException) -> None:
        """Our part of a pass failed; everybody is told. Nothing if it is over already.

        Whoever calls this raises the error, or nobody does.
        """
        if side.run is run:
            here = BackwardFailed(f"a backward pass over {side.label} failed here")
            self._fail(side, run.pass_.id, self.describe(error), here)

    def _fail(
        self,
        side: Side,
        pass_id: PassId,
        cause: Any,
        error: BaseException,
        sender: int | None = None,
    ) -> None:
        """Ends a pass that failed; ``error`` is for those who wait for it here."""
        with side.lock:
            run = side.run
            instructions = side.state.fail(pass_id, cause, sender)
            self._settle(side)
            if run is None or run.pass_.id != pass_id:
                return
            outcomes = self._break(run, error)
        self._after_end(side, run, instructions)
        for outcome in outcomes:
            outcome.finish(None, error)

    def _break(self, run: Run, error: BaseException) -> list[Outcome]:
        run.failure = run.failure or error
        outcomes = [*run.waiting.values(), *run.children.values()]
        run.waiting.clear()
        return outcomes

    def peer_lost(self, peer: Peer) -> None:
        """Contexts that a lost worker opened are over; passes that need it fail."""
        rank = peer.info.id
        if rank == self.me:
            return
        error = peer.error()
        cause = self.describe(error)
        for side in self.registry.sides():
            with side.lock:
                run = side.run
                instructions = side.state.lose(rank, cause)
                self._settle(side)
                is_over = run is not None and side.run is not run
                outcomes = self._break(run, error) if run and is_over else []
            if is_over:
                self._after_end(side, run, instructions)
            for outcome in outcomes:
                outcome.finish(None, error)
            if opener_of(side.name.key) == rank:
                self._end(side, error)

    # ------------------------------------------------------------------------- telling

    def perform(
        self, side: Side, run: Run | None, instructions: Sequence[Instruction]
    ) -> None:
        """Does what the protocol says."""
        start: Outgoing | None = None
        for instruction in instructions:
            to = instruction.to
            if isinstance(instruction, TellStart):
                if run is None:
                    raise AssertionError("a pass begins that nobody runs")
                start = start or self._encode_start(run)
                # If it cannot be told, the pass cannot succeed.
                if (error := self._send(to, start)) is not None:
                    self.fail(side, run, error)
            elif isinstance(instruction, TellDone):
                self._send(to, encode(PassDone(*side.name, *instruction.pass_id)))
            elif isinstance(instruction, TellAbort):
                self._tell_abort(side.name, instruction.pass_id, to, instruction.cause)
            elif to == self.me:
                self._on_answer(side, instruction.pass_id, instruction.message, NONE)
            else:
                _, pass_id, number = instruction
                self._send(to, encode(Gradient(*side.name, *pass_id, number)))

    def _encode_start(self, run: Run) -> Outgoing:
        return encode(
            PassStart(
                *run.side.name,
                *run.pass_.id,
                run.destination,
                run.retain,
                run.create_graph,
                run.autocast,
            )
        )

    def _tell_abort(
        self, name: ContextName, pass_id: PassId, to: int, cause: Any
    ) -> None:
        self._send(to, encode(PassAbort(*name, *pass_id), cause))

    def _send(self, rank: int, outgoing: Outgoing) -> GradwireError | None:
        """Sends to a worker; returns why not. Whoever needs it is told by `peer_lost`."""
        try:
            self.agent.send(self.agent.network.find(rank), outgoing)
        except GradwireError as error:
            return error
        return None

    # --------------------------------------------------------------------------- release

    def release(self, side: Side) -> None:
        """An explicit context of ours is left: it is over everywhere."""
        if self.registry.drop(side.name) is None:
            return
        issued, live = self.registry.ended_so_far()
        message = Release(side.name.incarnation, [side.name.key], issued, live)
        self._spread_release(side, message, None)

    def _spread_release(self, side: Side, message: Release, sender: int | None) -> None:
        known = side.state.known - {sender}
        self._end(side, ContextReleased(f"{side.label} was released while it was used"))
        outgoing = encode(message)
        for rank in known:
            self._send(rank, outgoing)

    def on_release(self, peer: Peer, message: Release, frame: Frame) -> None:
        """Contexts are over; we tell those whom we know in them."""
        for key in message.keys:
            if message.issued >= 0:
                self.registry.note_ended(
                    opener_of(key), message.incarnation, message.issued, message.live
                )
            side = self.registry.drop(ContextName(key, message.incarnation))
            if side is None:
                continue
            if side.is_implicit:
                self._end(side, ContextReleased(f"{side.label} was dropped"))
            else:
                self._spread_release(side, message, peer.info.id)

    def end_call(self, side: Side) -> None:
        """The context of a call is over on this worker."""
        self.registry.drop(side.name)
        self._end(side, ContextReleased(f"{side.label} was dropped"))

    def _end(self, side: Side, error: BaseException) -> None:
        self.registry.drop(side.name)
        if side.run is not None:
            self.fail(side, side.run, error)
        side.forget_graph()

    def release_call(self, peer: int, name: ContextName) -> None:
        """The caller of a call does not need it any more: the callee may drop it."""
        self._send(peer, encode(Release(name.incarnation, [name.key])))

    # ------------------------------------------------------------------------- leftovers

    def lease(self, name: ContextName) -> Lease:
        """A lease on the context of a call; see `Lease`."""
        self.ensure_sweeper()
        return Lease(self, name)

    def ensure_sweeper(self) -> None:
        """Starts the thread that does what finalisers may not do themselves."""
        if self._sweeper is None:
            with self._lock:
                if self._sweeper is None and not self._is_closed:
                    self._sweeper = threading.Thread(
                        target=self._sweep,
                        name=f"gradwire-{self.agent.info.name}-sweeper",
                        daemon=True,
                    )
                    self._sweeper.start()

    def _sweep(self) -> None:
        while True:
            item = self.leftovers.get()
            if item is None:
                return
            if isinstance(item, ContextName):
                time.sleep(_GATHER_S)
            self._sweep_one(item)
            self.sweep()

    def sweep(self) -> None:
        """Works off what finalisers left."""
        by_peer: dict[int, list[int]] = {}
        while not self.leftovers.empty():
            item = self.leftovers.get()
            if item is None:
                self.leftovers.put(None)
                break
            self._sweep_one(item, by_peer)
        incarnation = self.agent.network.incarnation
        for rank, keys in by_peer.items():
            self._send(rank, encode(Release(incarnation, keys)))

    def _sweep_one(
        self, item: Any, by_peer: dict[int, list[int]] | None = None
    ) -> None:
        try:
            if not isinstance(item, ContextName):
                item()
                return
            side = self.registry.drop(item)
            if side is None:
                return
            known = set(side.state.known)
            self._end(side, ContextReleased(f"{side.label} was dropped"))
            for rank in known:
                if by_peer is None:
                    self.release_call(rank, item)
                else:
                    by_peer.setdefault(rank, []).append(item.key)
        except Exception:
            _log.exception("%s: an internal task failed", self.agent.info.name)

    def counts(self) -> dict[str, Any]:
        """What there is; see `gradwire.autograd.get_debug_info`."""
        self.sweep()
        return self.registry.counts()

    def close(self) -> None:
        """The agent ends: passes fail, contexts are dropped, the sweeper ends."""
        with self._lock:
            self._is_closed = True
            sweeper = self._sweeper
        error = BackwardFailed(
            f"worker {self.agent.info.name!r} was shut down during a backward pass"
        )
        for side in self.registry.close():
            if side.run is not None:
                self.fail(side, side.run, error)
            side.forget_graph()
        self.leftovers.put(None)
        if sweeper is not None and sweeper is not threading.current_thread():
            sweeper.join(_CLOSE_S)


class _PlainEnd:
    """The end of a plain backward that started a pass: waits for the others.

    The engine calls it when the backward has succeeded, and drops it in any case. If it
    dies without having been called, the backward failed, and the others must know.
    """

    __slots__ = ("_exchange", "_is_called", "_run", "_side")

    def __init__(self, exchange: Exchange, side: Side, run: Run) -> None:
        exchange.ensure_sweeper()
        self._exchange, self._side, self._run = exchange, side, run
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        exchange, side, run = self._exchange, self._side, self._run
        try:
            exchange._local_end(side, run)
            exchange._wait_for_children(run)
        except BaseException as error:
            exchange.fail(side, run, error)
            run.forget()
            raise

    def __del__(self) -> None:
        if not self._is_called:
            self._exchange.leftovers.put(self._abort)

    def _abort(self) -> None:
        error = BackwardFailed(
            f"the backward that worker {self._exchange.agent.info.name!r} had started "
            "failed there",
            worker=self._exchange.agent.info.name,
        )
        self._exchange.fail(self._side, self._run, error)
        self._run.forget()


def _is_reached(recv: Received, task: int) -> bool:
    """Whether the running backward executes a recv, now or later."""
    node = recv.node()
    if node is None or node.message.passed_over_in == task:
        return False
    return will_execute(node)
