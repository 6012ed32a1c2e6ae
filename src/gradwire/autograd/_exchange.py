"""What a worker does about passes: it runs its part, sends, receives, ends.

There is one `Exchange` per agent. It turns messages into events of the pure protocol in
`_passes`; what comes out is told to others by `_telling`. Passes are started in `_explicit`
and `_plain`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.autograd._answers import read_answer, read_gradients, to_answers
from gradwire.autograd._autocast import apply_autocast
from gradwire.autograd._context import (
    ContextName,
    Side,
    Unrecorded,
    active_context,
    leaving,
    make_nodes,
)
from gradwire.autograd._engine import Destination, accumulate, run_backward
from gradwire.autograd._fetched import run_up_to_leaves
from gradwire.autograd._leaves import (
    are_one_by_one,
    gradients_of_leaves,
    may_skip_engine,
    take_at_once,
)
from gradwire.autograd._messages import (
    Dead,
    Gradient,
    GradientAndStart,
    Gradients,
    PassAbort,
    PassDone,
    PassStart,
    Stale,
    is_implicit,
    key_of_call,
    opener_of,
)
from gradwire.autograd._nodes import ReceivedMessage
from gradwire.autograd._passes import (
    NONE,
    WAIT,
    Instruction,
    Pass,
    PassId,
    PassKind,
    TellNone,
    TellStart,
)
from gradwire.autograd._plain import asked_for_leaf, consumed
from gradwire.autograd._registry import Registry
from gradwire.autograd._release import Releases
from gradwire.autograd._run import Answer, Part, Run
from gradwire.autograd._telling import Telling
from gradwire.autograd._torch_private import current_task
from gradwire.errors import (
    BackwardFailed,
    BackwardTimeout,
    ContextReleased,
    GradwireError,
    LimitExceeded,
    RemoteProtocolError,
)
from gradwire.rpc.extension import (
    Agent,
    Note,
    Outcome,
    Peer,
    Scope,
    serving_agent,
)
from gradwire.transport import Frame
from gradwire.wire import (
    decode_value,
)

__all__ = ["Exchange"]

_DESTINATIONS = tuple(Destination)
_NO_AUTOCAST = contextlib.nullcontext()
_TORCH_CONSUMED = "Trying to backward through the graph a second time"
_TORCH_ASKED_FOR_LEAF = "A leaf node was passed to _will_engine_execute_node"


class Exchange:
    """A worker's part in passes."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.info.id
        self.registry = Registry(self, agent.network.incarnation)
        self.releases = Releases(self)
        self.leftovers = self.releases.leftovers
        self.telling = Telling(self)
        # The parts of passes that run here, by the engine's numbers of the backwards.
        # Plain dictionary operations, each atomic.
        self.tasks: dict[int, Run] = {}
        # Calls and replies that are encoded, and whose nodes are made when they have been
        # written; likewise.
        self.unfinished: set[Note | Scope] = set()

    def tell_held(self, side: Side) -> None:
        """Tells what was held in a pass that is on, before something else is sent."""
        if (run := side.run) is not None:
            self.telling.held(run)

    def finish_sends(self) -> None:
        """Makes the nodes of all that has left: what comes next may change its tensors."""
        for message in list(self.unfinished):
            message.sent()

    # ------------------------------------------------------------------ running a part

    def begin(self, side: Side, pass_: Pass) -> Run:
        """Takes the chain for a pass; the caller holds the side's lock."""
        kind = pass_.kind
        run = side.run = Run(
            side,
            pass_,
            side.take_chain(kind.retain),
            _DESTINATIONS[kind.destination],
            kind.retain,
            kind.create_graph,
            {rank: Outcome() for rank in pass_.told},
        )
        return run

    def run_part(
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
        run.holds = not run.create_graph
        try:
            if run.ends_with_leaves:
                gradients = run_up_to_leaves(self, run, roots, seeds)
                if gradients is not None:
                    return gradients
            gradients = run_backward(
                roots,
                seeds,
                tail,
                run.destination,
                lambda: self._claim(run, current_task()),
                lambda: _check_goes_on(run),
                retain_graph=run.retain,
                create_graph=run.create_graph,
                inputs=inputs,
            )
            self.telling.held(run)
            return gradients
        except RuntimeError as error:
            text = str(error)
            if text.startswith(_TORCH_CONSUMED):
                # Torch met what an earlier pass had freed before we did.
                raise consumed(self, run.side.label) from error
            if text.startswith(_TORCH_ASKED_FOR_LEAF):
                raise asked_for_leaf(self, run.side.label) from error
            raise
        finally:
            if run.task is not None:
                self.tasks.pop(run.task, None)

    def run_here(self, side: Side) -> Run | None:
        """The pass that the engine is executing a node of this context for.

        Raises:
            Exception: What made it fail elsewhere: the engine need not go on.
        """
        for run in (side.run, side.failed):
            if run is not None and self._is_part_of(run):
                if run.failure is not None:
                    raise run.failure
                return run
        return None

    def _is_part_of(self, run: Run) -> bool:
        """Whether the backward that runs on this thread is a pass's.

        In a part that began with tokens only, the first node is a wire node: there is
        no code of the user's before it, so whatever backward it is in, is the pass's.
        """
        task = current_task()
        if run.task is None and run.thread == threading.get_ident():
            self._claim(run, task)
        return run.task == task

    def _claim(self, run: Run, task: int) -> None:
        run.task = task
        self.tasks[task] = run

    def name_of_call(self, call_id: int) -> ContextName:
        """The context that a call of ours is by itself."""
        key = key_of_call(self.me, call_id)
        return ContextName(key, self.agent.network.incarnation)

    def wait_for_children(self, run: Run) -> None:
        for rank, outcome in run.children.items():
            self._wait(run, outcome, rank, "the end of a pass")
        if run.failure is not None:
            raise run.failure

    def check_whole(self, side: Side) -> None:
        """Raises if a worker of the context was lost."""
        if side.state.broken is not None:
            raise self.agent.rebuild(side.state.broken)

    def _wait(self, run: Run, outcome: Outcome, rank: int, what: str) -> Any:
        peer = self.agent.network.find(rank)
        if not self.agent.wait_for(outcome, peer, what, run.limit):
            raise BackwardTimeout(
                f"a backward pass over {run.side.label} reached its limit while it waited "
                f"for worker {peer.info.name!r} (rank {rank})",
                worker=peer.info.name,
            )
        answer, error, outcome.error = outcome.value, outcome.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # with its traceback it would keep this frame, and that all
        return answer

    def keep(
        self,
        side: Side,
        run: Run,
        gradients: list[tuple[Any, Tensor | None]],
        *,
        are_apart: bool = False,
    ) -> None:
        if not gradients:
            return
        with side.lock:
            accumulate(
                side.gradients,
                gradients,
                create_graph=run.create_graph,
                are_apart=are_apart,
            )

    # ------------------------------------------------------------------- passes we join

    def on_gradient_and_start(
        self, peer: Peer, message: GradientAndStart, frame: Frame
    ) -> Part | None:
        """A pass begins, and the first answer is there."""
        if self.unfinished:
            self.finish_sends()  # it may be about one of them
        # The pass may be known here already, and this be the answer that it waits for.
        part = self.on_gradient(peer, message, frame)
        frame.buffers.clear()
        return self.on_start(peer, message, frame) or part

    def on_start(
        self, peer: Peer, message: PassStart | GradientAndStart, frame: Frame
    ) -> Part | None:
        """A pass begins; returns our part of it, if that can be run now."""
        if self.unfinished:
            self.finish_sends()  # it may be about one of them
        name = ContextName(message.key, message.incarnation)
        pass_id = PassId(message.starter, message.number)
        side = self.registry.find(name)
        if side is None and not is_implicit(name.key):
            # It may overtake the request that brings the context.
            try:
                side = self.registry.join(name, "", False, peer)
            except LimitExceeded as error:
                over = self.describe(error)
                self.telling.abort(name, pass_id, peer.info.id, over)
                return None
        if side is None:
            cause = self.registry.why_broken(name)
            cause = cause or self.describe(self._no_side(name))
            self.telling.abort(name, pass_id, peer.info.id, cause)
            return None
        if not 0 <= message.destination < len(_DESTINATIONS):
            raise RemoteProtocolError(f"unknown destination {message.destination}")
        kind = PassKind(message.destination, message.retain, message.create_graph)
        with side.lock:
            pass_, instructions = side.state.on_start(pass_id, peer.info.id, kind)
            run: Run | None = None
            part: Part | None = None
            if pass_ is not None:
                of_leaves = None
                if may_skip_engine(kind.destination, kind.retain, kind.create_graph):
                    of_leaves = side.peek_leaves()
                tail = side.peek_tail() if of_leaves is None else []
                awaited = side.unanswered(tail, of_leaves or [])
                run = self.begin(side, pass_)
                run.autocast = message.autocast
                context = contextvars.copy_context()
                part = functools.partial(
                    context.run, self._join, side, run, tail, of_leaves
                )
                if awaited:
                    run.part, run.awaited, part = part, awaited, None
        self.telling.perform(side, run, instructions)
        if run is not None:
            if peer.link is not None:
                peer.link.shed()  # activations were sent: gradients need the memory
            if peer.fate is not None:
                self.peer_lost(peer)  # those who were told had no side yet
        return part

    def _no_side(self, name: ContextName) -> GradwireError:
        if is_implicit(name.key):
            return consumed(self, "a call")
        return ContextReleased(f"the context {name.key} has been released")

    def _join(
        self,
        side: Side,
        run: Run,
        tail: list[Tensor],
        of_leaves: list[Unrecorded] | None,
    ) -> None:
        """Runs our part of a pass.

        Args:
            side: The context.
            run: The pass.
            tail: What to begin with.
            of_leaves: There is nothing else to begin with than these, which are answered.
        """
        if of_leaves is not None:
            with side.lock:
                gradients = gradients_of_leaves(side.state, of_leaves)
            if gradients is not None:
                are_apart = are_one_by_one(of_leaves)
                self._finish_join(side, run, gradients, are_apart=are_apart)
                return
            tail = make_nodes(of_leaves)
        serving_agent.set(self.agent)
        if not side.is_implicit:
            active_context.set(side.name)
        autocast = run.autocast
        # On a side that holds weakly, recvs may be gone: nobody else answers for them.
        gone = [recv for recv in run.recvs if recv.node() is None]
        if gone:
            answers = [TellNone(r.peer, run.pass_.id, r.number, True) for r in gone]
            self.telling.perform(side, run, answers)
        try:
            with apply_autocast(autocast) if autocast else _NO_AUTOCAST:
                gradients = self.run_part(run, (), (), tail)
            tail.clear()
        except BaseException as error:
            self._fail_join(side, run, error)
        else:
            self._finish_join(side, run, gradients)

    def _finish_join(
        self,
        side: Side,
        run: Run,
        gradients: list[tuple[Any, Tensor | None]],
        *,
        are_apart: bool = False,
    ) -> None:
        """Our part of a pass has come to its end, unless it failed elsewhere."""
        if run.failure is not None:
            self.end_failed(side, run)
            return
        try:
            if run.destination is Destination.INTO_DICTIONARY:
                self.keep(side, run, gradients, are_apart=are_apart)
        except BaseException as error:
            self._fail_join(side, run, error)
        else:
            self.end_part(side, run)
            if side.failed is run:  # elsewhere, since it was asked above
                self.end_failed(side, run)

    def _fail_join(self, side: Side, run: Run, error: BaseException) -> None:
        self.fail(side, run, error)
        self.end_failed(side, run)
        error.with_traceback(None)  # it holds the frames of backward functions

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
        self.telling.held(run)  # what we wait for may depend on it
        return self._wait(run, outcome, peer, "gradients")

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
        values = tuple([g for g in gradients if g is not None])
        tracked: list[Tensor] = []
        history = -1
        after: tuple[int, int] | None = None
        if run.create_graph:
            tracked = list({id(g): g for g in values if g.requires_grad}.values())
            if tracked:
                history, after = side.record_send(message.peer, leaving(tracked))
        if values:
            side.state.note_shipped(message.peer, message.number)
        else:
            present = ()
        answer = Answer(present, values, tracked, history, after)
        if message.peer == self.me:
            self._ship_to_myself(side, run, message.number, answer)
            return
        if (
            message.may_wait
            and run.holds
            and run.hold(message.peer, message.number, answer)
        ):
            return
        is_start = TellStart(message.peer) in instructions
        if is_start:
            instructions.remove(TellStart(message.peer))
        else:
            self.telling.held(run)  # the peer may not know of the pass yet
        error = self.telling.gradients(
            run, message.peer, message.number, answer, is_start=is_start
        )
        if error is not None and is_start:
            self.abort(side, run, error)

    def _ship_to_myself(
        self, side: Side, run: Run, number: int, answer: Answer
    ) -> None:
        own = {id(g): g.detach() for g in answer.gradients}
        arrived = Answer(
            answer.present,
            tuple(own[id(g)] for g in answer.gradients),
            [own[id(g)] for g in answer.tracked],
            answer.history,
            answer.after,
        )
        value = arrived if arrived.present else NONE
        is_last = not run.retain
        self.run_soon(
            self.on_answer(side, run.pass_.id, number, value, is_last, self.me)
        )

    # ------------------------------------------------------------------------ messages

    def on_gradient(
        self, peer: Peer, message: Gradient | GradientAndStart, frame: Frame
    ) -> Part | None:
        """The answer to a message of ours; returns what can be run now, if anything."""
        side = self.registry.find(message)
        if side is None:
            return None
        answer = read_answer(message, frame, self.agent.serializer)
        pass_id = PassId(message.starter, message.number)
        return self.on_answer(
            side, pass_id, message.message, answer, message.is_last, peer.info.id
        )

    def on_gradients(self, peer: Peer, message: Gradients, frame: Frame) -> Part | None:
        """Several answers; perhaps the pass begins, too."""
        if self.unfinished:
            self.finish_sends()  # it may be about one of them
        side = self.registry.find(message)
        part: Part | None = None
        if side is not None:
            values = read_gradients(message, frame, self.agent.serializer)
            # What is large may take its time, so it is a part that is run.
            if not frame.buffers and take_at_once(self, side, peer, message, values):
                return None
            part = self._on_answers(side, peer, message, values)
        frame.buffers.clear()
        if message.start is None:
            return part
        start = PassStart(
            *(message.key, message.incarnation, message.starter, message.number),
            *message.start,
        )
        return self.on_start(peer, start, frame) or part

    def _on_answers(
        self, side: Side, peer: Peer, message: Gradients, values: tuple[Any, ...]
    ) -> Part | None:
        answers = to_answers(message, values)
        pass_id, is_last = PassId(message.starter, message.number), message.is_last
        instructions: list[Instruction] = []
        with side.lock:
            is_early = side.run is None  # as mostly: the pass begins with them
            if is_early:
                for number, answer in answers:
                    instructions += side.state.on_answer(
                        pass_id, number, answer, is_last
                    )[1]
        if is_early:
            self.telling.perform(side, None, instructions)
            return None
        parts = [
            self.on_answer(side, pass_id, number, answer, is_last, peer.info.id)
            for number, answer in answers
        ]
        return next((part for part in parts if part is not None), None)

    def on_answer(
        self,
        side: Side,
        pass_id: PassId,
        number: int,
        answer: Any,
        is_last: bool,
        sender: int,
    ) -> Part | None:
        history = None
        if answer is not NONE and answer.history >= 0:
            history = sender, answer.history
        with side.lock:
            is_wanted, instructions = side.state.on_answer(
                pass_id, number, answer, is_last, history
            )
            run, outcome, part = side.run, None, None
            if is_wanted and run is not None:
                outcome = run.waiting.pop(number, None)
                part = run.answered(number)
            if outcome is not None:
                answer = side.state.take_answer(number)
        if outcome is not None:
            outcome.finish(answer, None)
        self.telling.perform(side, run, instructions)
        return part

    def run_soon(self, part: Part | None) -> None:
        if part is not None:
            self.agent.run_soon(part)

    def on_dead(self, peer: Peer, message: Dead, frame: Frame) -> None:
        """A message of ours was dropped on its way."""
        side = self.registry.find(message)
        if side is not None:
            self.mark_dead(side, message.message)

    def on_stale(self, peer: Peer, message: Stale, frame: Frame) -> None:
        """Messages of a peer are gone there."""
        side = self.registry.find(message)
        if side is not None:
            self.mark_stale(side, peer.info.id, message.messages)

    def mark_stale(self, side: Side, sender: int, numbers: list[int]) -> None:
        with side.lock:
            side.mark_stale(sender, set(numbers))
            run = side.run
            is_in_vain = any(side.state.is_in_vain(sender, n) for n in numbers)
        if run is not None and is_in_vain:
            self.abort(side, run, consumed(self, side.label))

    def mark_dead(self, side: Side, number: int) -> None:
        """A message of ours will be answered in no pass."""
        with side.lock:
            side.state.mark_dead(number)
            outcome = part = None
            if side.run is not None:
                outcome = side.run.waiting.pop(number, None)
                part = side.run.answered(number)
        if outcome is not None:
            outcome.finish(NONE, None)
        self.run_soon(part)

    def on_done(self, peer: Peer, message: PassDone, frame: Frame) -> None:
        """Somebody whom we told of a pass is done with it."""
        side = self.registry.find(message)
        if side is None:
            return
        with side.lock:
            run, sender = side.run, peer.info.id
            pass_id = message.starter, message.number
            instructions = side.state.on_done(pass_id, sender)
            outcome = None
            if run is not None and run.pass_.id == pass_id:
                outcome = run.children.get(sender)
            self._settle(side)
        self._after_end(side, run, instructions)
        if outcome is not None:
            outcome.finish(None, None)

    def on_abort(self, peer: Peer, message: PassAbort, frame: Frame) -> None:
        """A pass failed on another worker."""
        side = self.registry.find(message)
        if side is None:
            return
        value, _ = decode_value(
            message, frame.head, frame.buffers, None, self.agent.serializer
        )
        pass_id = PassId(message.starter, message.number)
        self._fail(side, pass_id, value, self.agent.rebuild(value), peer.info.id)

    # ---------------------------------------------------------------------------- ends

    def end_part(self, side: Side, run: Run) -> None:
        """Our part of a pass succeeded."""
        with side.lock:
            instructions = side.state.local_end() if side.run is run else []
            if side.state.current is run.pass_:
                return  # others whom we told are not done
            self._settle(side)
        self._after_end(side, run, instructions)

    def _settle(self, side: Side) -> None:
        """Notes that a pass is over here, if it is; the caller holds the lock."""
        run = side.run
        if run is not None and side.state.current is not run.pass_:
            side.run = None
            side.shed_sends()

    def _after_end(
        self, side: Side, run: Run | None, instructions: list[Instruction]
    ) -> None:
        if run is not None and run is not side.run and run is not side.failed:
            self._drop_if_used_up(side, run)
        if instructions:
            self.telling.perform(side, run, instructions)

    def _drop_if_used_up(self, side: Side, run: Run) -> None:
        """A call's context is used up by a pass that does not retain it."""
        if side.is_implicit and not run.retain and not side.is_busy():
            self.registry.drop(side.name)
            side.forget_graph()

    def end_failed(self, side: Side, run: Run) -> None:
        """Our part of a failed pass has ended too: nobody looks for the error here."""
        with side.lock:
            if side.failed is run:
                side.failed = None
        run.forget()
        if side.holds_weakly:
            self._release_if_used_up(side, run)
        else:
            self._drop_if_used_up(side, run)

    def _release_if_used_up(self, side: Side, run: Run) -> None:
        """As `_drop_if_used_up`, for a call of ours whose pass failed.

        The callee may never have heard of the pass that was to use it up.
        """
        if side.is_implicit and not run.retain and not side.is_busy():
            with side.lock:
                known = set(side.state.known)
            self._drop_if_used_up(side, run)
            for rank in known:
                self.releases.tell_callee(rank, side.name)

    def describe(self, error: BaseException) -> Any:
        """What others are told of an error; kept instead of it, which keeps its frames."""
        return self.agent.describe(error)

    def is_broken(self, name: ContextName) -> bool:
        """Whether a context was dropped here before its end, because of a loss."""
        return self.registry.why_broken(name) is not None

    def refuse_if_broken(self, name: ContextName) -> None:
        """Raises the loss if a context is broken.

        Plain values instead of what would be recorded in it would lose gradients.
        """
        cause = self.registry.why_broken(name)
        if cause is not None:
            raise self.agent.rebuild(cause)

    def fail(self, side: Side, run: Run, error: BaseException) -> None:
        """Our part of a pass failed; everybody is told. Nothing if it is over already.

        Whoever calls this raises the error, or nobody does.
        """
        if side.run is run:
            here = BackwardFailed(f"a backward pass over {side.label} failed here")
            self._fail(side, run.pass_.id, self.describe(error), here)

    def abort(self, side: Side, run: Run, error: BaseException) -> None:
        """Ends a pass from outside; whoever waits in it raises the error."""
        self._fail(side, run.pass_.id, self.describe(error), error)

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
            recvs = [] if run is None else [(r.peer, r.number) for r in run.recvs]
            instructions = side.state.fail(pass_id, cause, sender, recvs)
            self._settle(side)
            is_here = run is not None and run.pass_.id == pass_id
            outcomes, part = self._break(run if is_here else None, error)
        del part  # and the graph with it, which may run any code
        self._after_end(side, run if is_here else None, instructions)
        for outcome in outcomes:
            outcome.finish(None, error)

    def _break(
        self, run: Run | None, error: BaseException
    ) -> tuple[list[Outcome], Part | None]:
        """Ends a run, if there is one; the caller holds the lock.

        Returns:
            What to finish with the error, and what will not be run.
        """
        if run is None:
            return [], None
        run.failure = run.failure or error
        part = run.take_part()
        if part is None and run.pass_.is_running:
            run.side.failed = run
        outcomes = [*run.waiting.values(), *run.children.values()]
        run.waiting.clear()
        return outcomes, part

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
                outcomes, part = self._break(run if is_over else None, error)
            del part  # as in `_fail`
            if is_over:
                self._after_end(side, run, instructions)
            for outcome in outcomes:
                outcome.finish(None, error)
            is_hit = side.state.broken is not None and not side.is_implicit
            is_mine = opener_of(side.name.key) == self.me
            if opener_of(side.name.key) == rank or (is_hit and not is_mine):
                self.releases.member_lost(side, peer, error)
        self.registry.forget_broken(rank, peer.incarnation)

    def counts(self) -> dict[str, Any]:
        """What there is; see `gradwire.autograd.get_debug_info`."""
        self.leftovers.work_off()
        return self.registry.counts()

    def close(self) -> None:
        """The agent ends: passes fail, contexts are dropped."""
        error = BackwardFailed(
            f"worker {self.agent.info.name!r} was shut down during a backward pass"
        )
        for side in self.registry.close():
            self.releases.end(side, error)
        self.leftovers.close()


def _check_goes_on(run: Run) -> None:
    """Raises if a pass has failed elsewhere, or its limit has come."""
    if run.failure is not None:
        raise run.failure
    if run.limit and time.monotonic() >= run.limit:
        raise BackwardTimeout(
            f"a backward pass over {run.side.label} reached its limit while it waited for "
            "another pass over the same DistributedDataParallel module on this worker"
        )
