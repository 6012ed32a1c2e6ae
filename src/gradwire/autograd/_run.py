"""A pass at work on this worker, and the answers that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch
from torch import Tensor

from gradwire.autograd._engine import Destination
from gradwire.autograd._passes import Pass
from gradwire.rpc.extension import Outcome

if TYPE_CHECKING:
    from gradwire.autograd._context import Received, Side
    from gradwire.autograd._nodes import ReceivedMessage

__all__ = ["MOST_HELD_BYTES", "Answer", "Held", "Part", "Run"]

MOST_HELD_BYTES = 1 << 16
"""Of gradients for one worker: more takes its time on the way, so it had better begin."""

Part: TypeAlias = Callable[[], None]
"""A worker's part of a pass, to be run."""


class Answer(msgspec.Struct, frozen=True):
    """The gradients of one message, with the history that they may have themselves."""

    present: tuple[bool, ...]
    gradients: tuple[Tensor, ...]
    tracked: list[Tensor]
    history: int
    after: tuple[int, int] | None


class Held(msgspec.Struct):
    """What can wait a little before it is told to one worker, so that all goes at once.

    Attributes:
        is_start: It does not know of the pass yet.
        answers: Numbers of messages, and which gradients there are, as in `Gradients`.
        gradients: These, one after the other.
        nbytes: Their size.
    """

    is_start: bool = False
    answers: list[tuple[int, tuple[bool, ...]]] = []
    gradients: list[Tensor] = []
    nbytes: int = 0


class Run(msgspec.Struct, eq=False):
    """A pass at work on this worker. Its side's lock guards it.

    Attributes:
        side: The context.
        pass_: The pass.
        recvs: What it answers.
        destination: Of the pass's kind; likewise the next two.
        retain: Likewise.
        create_graph: Likewise.
        children: Whom we told, and their ends.
        task: The engine's number for our part.
        thread: Where our part runs, if it begins with tokens only.
        autocast: See `gradwire.autograd._autocast`.
        limit: When the starter gives up, 0: never.
        failure: Why it failed.
        waiting: Sends that the engine waits in.
        part: Ours, while it has not begun.
        awaited: Sends whose answers it needs to begin.
        holds: Somebody sees to what is held.
        ends_with_leaves: Nobody computes from what we ship, and we wait for nobody.
    """

    side: Side
    pass_: Pass
    recvs: list[Received]
    destination: Destination
    retain: bool
    create_graph: bool
    children: dict[int, Outcome]
    task: int | None = None
    thread: int = 0
    autocast: list[tuple[str, str]] | None = None
    limit: float = 0.0
    failure: BaseException | None = None
    waiting: dict[int, Outcome] = {}
    part: Part | None = None
    awaited: set[int] = set()
    holds: bool = False
    ends_with_leaves: bool = False
    _held: dict[int, Held] = {}  # by worker

    def answered(self, event: int) -> Part | None:
        """A send is answered; returns our part if it can begin now."""
        if self.part is None:
            return None
        self.awaited.discard(event)
        return None if self.awaited else self.take_part()

    def take_part(self) -> Part | None:
        """Our part, if it has not begun: whoever takes it runs it, or drops it."""
        part, self.part = self.part, None
        return part

    def hold(self, peer: int, number: int, answer: Answer) -> bool:
        """Keeps gradients that can wait; False if they should go at once.

        Who waits has told all that was held; what comes later must not wait behind it.
        """
        # What is sparse has no size, and a stream may still write what is on a device.
        nbytes = 0
        for gradient in answer.gradients:
            if gradient.layout is not torch.strided or not gradient.is_cpu:
                return False
            nbytes += gradient.nbytes
        with self.side.lock:
            held = self._held.get(peer)
            before = 0 if held is None else held.nbytes
            if self.waiting or before + nbytes > MOST_HELD_BYTES:
                return False
            if held is None:
                held = self._held[peer] = Held()
            held.answers.append((number, answer.present))
            held.gradients += answer.gradients
            held.nbytes += nbytes
            return True

    def hold_all(
        self, messages: Sequence[ReceivedMessage], gradients: Sequence[Tensor | None]
    ) -> list[tuple[ReceivedMessage, Sequence[Tensor | None]]]:
        """As `hold`, for all messages of a part that waits for nobody.

        Args:
            messages: All that it answers.
            gradients: What has come for their tensors, one after the other; of which no
                graph is made.

        Returns:
            Messages and their gradients that should go at once.
        """
        at_once = []
        shipped = self.pass_.shipped
        first = 0
        with self.side.lock:
            all_held = self._held
            for message in messages:
                found = gradients[first : first + message.num_tensors]
                first += len(found)
                nbytes, values = 0, []
                for gradient in found:
                    if gradient is None:
                        continue
                    if gradient.layout is not torch.strided or not gradient.is_cpu:
                        nbytes = MOST_HELD_BYTES + 1
                        break
                    nbytes += gradient.nbytes
                    values.append(gradient)
                peer, number = message.peer, message.number
                held = all_held.get(peer)
                if (held.nbytes if held else 0) + nbytes > MOST_HELD_BYTES:
                    at_once.append((message, found))
                    continue
                if held is None:
                    held = all_held[peer] = Held()
                present: tuple[bool, ...] = ()
                if values:
                    present = (True,) * len(values)
                    if len(values) < len(found):
                        present = tuple([g is not None for g in found])
                    shipped.add((peer, number))
                held.answers.append((number, present))
                held.gradients += values
                held.nbytes += nbytes
        return at_once

    def ship_with_begin(self, messages: Sequence[ReceivedMessage]) -> bool:
        """Whether gradients may be sent now, with the begin of the pass.

        If so, they are noted as shipped, and nothing is held any more.

        Args:
            messages: What they are for: all that our part answers.
        """
        with self.side.lock:
            numbers = [(m.peer, m.number) for m in messages if not m.is_stale]
            if (
                len(numbers) < len(messages)
                or self._held.keys() != self.children.keys()  # it was told meanwhile
                or self.failure is not None
            ):
                return False
            self._held = {}
            self.pass_.shipped.update(numbers)
            return True

    def take_held(self) -> dict[int, Held]:
        """What was held, by worker: whoever takes it tells it."""
        if not self._held:
            return {}
        with self.side.lock:
            held, self._held = self._held, {}
            return held

    def hold_starts(self) -> bool:
        """Whether all workers may hear of the pass with the gradients for them.

        They have sent us leaves, and got nothing: they only wait for what we ship. (What
        they got is not known of a graph that is retained.) And there is nobody else: a
        worker that computes may fail, and the news of that must not be faster.
        """
        if self.retain:
            return False
        may_wait: set[int] = set()
        others = {*self.pass_.sends.values()}
        for peer, is_waiting in {(recv.peer, recv.may_wait) for recv in self.recvs}:
            (may_wait if is_waiting else others).add(peer)
        may_wait -= others
        if not may_wait or may_wait != self.children.keys():
            return False
        self._held = {peer: Held(is_start=True) for peer in may_wait}
        is_kept = self.destination is Destination.INTO_DICTIONARY
        self.ends_with_leaves = is_kept and not others
        return True

    def forget(self) -> None:
        """The pass failed, and our part has ended too: the error is raised, or told.

        The error's traceback knows this run; if the run also knew the error, both would
        live until the cyclic collector comes, and the graph with them.
        """
        self.failure = None
        self._held = {}
        self.children.clear()
        self.waiting.clear()
