"""What a worker says to others about passes: instructions and gradients as messages.

The pure protocol in `_passes` returns instructions, `Telling` carries them out. Nothing
here waits, and nothing here decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.autograd._messages import (
    Dead,
    Gradient,
    GradientAndStart,
    Gradients,
    PassAbort,
    PassDone,
    PassStart,
    Stale,
)
from gradwire.autograd._passes import (
    NONE,
    Instruction,
    PassId,
    TellAbort,
    TellDead,
    TellDone,
    TellNone,
    TellStale,
    TellStart,
)
from gradwire.autograd._run import Answer
from gradwire.errors import GradwireError
from gradwire.wire import TRACKED, Outgoing, encode, encode_tensors

if TYPE_CHECKING:
    from gradwire.autograd._context import ContextName, Side
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._nodes import ReceivedMessage
    from gradwire.autograd._run import Held, Run

__all__ = ["Telling"]


class Telling:
    """What one worker tells others, and itself.

    Args:
        exchange: The worker.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._agent = exchange.agent
        self._me = exchange.me

    def perform(
        self, side: Side, run: Run | None, instructions: Sequence[Instruction]
    ) -> None:
        """Does what the protocol says, which mostly is nothing."""
        if not instructions:
            return
        start: Outgoing | None = None
        stale: dict[int, list[int]] = {}
        for instruction in instructions:
            if isinstance(instruction, TellStart):
                if run is None:
                    raise AssertionError("a pass begins that nobody runs")
                start = start or self._encode_start(run)
                # If it cannot be told, the pass cannot succeed.
                if (error := self.send(instruction.to, start)) is not None:
                    self._exchange.abort(side, run, error)
            elif isinstance(instruction, TellStale):
                stale.setdefault(instruction.to, []).append(instruction.message)
            elif instruction.to == self._me:
                self._tell_myself(side, instruction)
            else:
                self._tell(side.name, instruction)
        for to, numbers in stale.items():
            if to == self._me:
                self._exchange.mark_stale(side, to, numbers)
            else:
                self.send(to, encode(Stale(*side.name, numbers)))

    def _tell(self, name: ContextName, instruction: Instruction) -> None:
        to = instruction.to
        if isinstance(instruction, TellDone):
            self.done(to, name, instruction.pass_id)
        elif isinstance(instruction, TellAbort):
            self.abort(name, instruction.pass_id, to, instruction.cause)
        elif isinstance(instruction, TellDead):
            self.dead(to, name, instruction.message)
        elif isinstance(instruction, TellNone):
            _, pass_id, number, is_last = instruction
            self.send(to, encode(Gradient(*name, *pass_id, number, (), is_last)))

    def _tell_myself(self, side: Side, instruction: Instruction) -> None:
        exchange = self._exchange
        if isinstance(instruction, TellDead):
            exchange.mark_dead(side, instruction.message)
        elif isinstance(instruction, TellNone):
            to, pass_id, number, is_last = instruction
            exchange.run_soon(
                exchange.on_answer(side, pass_id, number, NONE, is_last, to)
            )

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

    def gradients(
        self, run: Run, to: int, number: int, answer: Answer, *, is_start: bool
    ) -> GradwireError | None:
        """Sends gradients back; enqueues, never blocks. Returns why not.

        Args:
            run: The pass.
            to: The worker whose message they answer.
            number: The message.
            answer: The gradients.
            is_start: That worker does not know of the pass yet: it is told with them.
        """
        name, pass_id, values = run.side.name, run.pass_.id, answer.gradients
        out: Gradient | GradientAndStart
        if is_start:
            out = GradientAndStart(
                *name,
                *pass_id,
                number,
                answer.present,
                not run.retain,
                answer.history,
                answer.after,
                run.destination,
                run.retain,
                run.create_graph,
                run.autocast,
            )
        else:
            out = Gradient(
                *name,
                *pass_id,
                number,
                answer.present,
                not run.retain,
                answer.history,
                answer.after,
            )
        if not values:
            return self.send(to, encode(out))
        serializer = self._agent.serializer
        if not run.create_graph:
            return self.send(to, encode(out, values, None, None, serializer))
        marked = {id(g) for g in answer.tracked}

        def flags(tensors: list[Tensor], _: set[int]) -> dict[int, int]:
            return {i: TRACKED if id(t) in marked else 0 for i, t in enumerate(tensors)}

        return self.send(to, encode(out, values, flags, None, serializer))

    def held(self, run: Run) -> None:
        """Tells what was held of a pass; whoever cannot be told of it makes it fail."""
        for to, held in run.take_held().items():
            if run.failure is not None:
                return  # who does not know of the pass has been told that it failed
            error = self._tell_held(run, to, held)
            if error is not None and held.is_start:
                self._exchange.abort(run.side, run, error)

    def _tell_held(self, run: Run, to: int, held: Held) -> GradwireError | None:
        if not held.answers:
            return self.send(to, self._encode_start(run))
        if len(held.answers) > 1:
            return self.send(to, self._encode_held(run, held))
        ((number, present),) = held.answers
        answer = Answer(present, tuple(held.gradients), [], -1, None)
        return self.gradients(run, to, number, answer, is_start=held.is_start)

    def _encode_held(self, run: Run, held: Held) -> Outgoing:
        out = _to_gradients(run, held.answers, is_start=held.is_start)
        if not held.gradients:
            return encode(out)
        return encode_tensors(out, tuple(held.gradients)) or encode(
            out, _apart(held.gradients), None, None, self._agent.serializer
        )

    def encode_begin(
        self,
        run: Run,
        messages: Sequence[ReceivedMessage],
        gradients: tuple[Tensor | None, ...],
    ) -> Outgoing | None:
        """The begin of a pass, with gradients for all tensors of some messages.

        None if one is missing, or is large or not ordinary, or if any share memory.
        """
        answers = [(m.number, (True,) * m.num_tensors) for m in messages]
        return encode_tensors(_to_gradients(run, answers, is_start=True), gradients)

    def done(self, to: int, name: ContextName, pass_id: PassId) -> None:
        """A pass is over here, and wherever we told of it."""
        self.send(to, encode(PassDone(*name, *pass_id)))

    def dead(self, to: int, name: ContextName, number: int) -> None:
        """A message of a worker was dropped here."""
        self.send(to, encode(Dead(*name, number)))

    def abort(self, name: ContextName, pass_id: PassId, to: int, cause: Any) -> None:
        """A pass failed."""
        message = PassAbort(*name, *pass_id)
        self.send(to, encode(message, cause, serializer=self._agent.serializer))

    def send(self, rank: int, outgoing: Outgoing) -> GradwireError | None:
        """Sends to a worker; returns why not. Whoever needs it is told by `peer_lost`."""
        try:
            self._agent.send(self._agent.network.find(rank), outgoing)
        except GradwireError as error:
            return error.with_traceback(None)  # it holds the frames of our callers
        return None


def _to_gradients(
    run: Run, answers: list[tuple[int, tuple[bool, ...]]], *, is_start: bool
) -> Gradients:
    key, incarnation = run.side.name
    starter, number = run.pass_.id
    start = None
    if is_start:
        start = run.destination, run.retain, run.create_graph, run.autocast
    return Gradients(key, incarnation, starter, number, answers, not run.retain, start)


def _apart(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of several messages, which must not share memory where they arrive.

    In one message they would; and torch may take each of them for a ``.grad`` as it is.
    """
    seen: set[int] = set()
    apart = []
    for gradient in gradients:
        place = gradient.untyped_storage().data_ptr()
        apart.append(gradient.clone() if place in seen else gradient)
        seen.add(place)
    return tuple(apart)
