"""A pass at work on this worker, and the answers that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from gradwire.autograd._engine import Destination
from gradwire.autograd._passes import Pass
from gradwire.rpc.extension import Outcome

if TYPE_CHECKING:
    from gradwire.autograd._context import Received, Side
    from gradwire.autograd._nodes import ReceivedMessage

__all__ = ["Answer", "Held", "Part", "Run"]

_DESTINATIONS = tuple(Destination)
_MOST_HELD_BYTES = 1 << 16  # more takes its time on the way: it had better begin

Part: TypeAlias = Callable[[], None]
"""A worker's part of a pass, to be run."""


class Answer(msgspec.Struct, frozen=True):
    """The gradients of one message, with the history that they may have themselves."""

    present: tuple[bool, ...]
    gradients: tuple[Tensor, ...]
    tracked: list[Tensor]
    history: int
    after: tuple[int, int] | None


class Held:
    """What can wait a little before it is told to one worker, so that all goes at once.

    Attributes:
        is_start: It does not know of the pass yet.
        answers: Numbers of messages, and which gradients there are, as in `Gradients`.
        gradients: These, one after the other.
        nbytes: Their size.
    """

    __slots__ = ("answers", "gradients", "is_start", "nbytes")

    def __init__(self, *, is_start: bool = False) -> None:
        self.is_start = is_start
        self.answers: list[tuple[int, tuple[bool, ...]]] = []
        self.gradients: list[Tensor] = []
        self.nbytes = 0


class Run:
    """A pass at work on this worker. Its side's lock guards it."""

    __slots__ = (
        "_held",
        "autocast",
        "awaited",
        "children",
        "create_graph",
        "destination",
        "ends_with_leaves",
        "failure",
        "holds",
        "limit",
        "part",
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
        recvs: list[Received],
    ) -> None:
        self.side = side
        self.pass_ = pass_
        self.destination = _DESTINATIONS[pass_.kind.destination]
        self.retain = pass_.kind.retain
        self.create_graph = pass_.kind.create_graph
        self.recvs = recvs
        self.task: int | None = None  # the engine's number for our part
        self.thread = 0  # where our part runs, if it begins with tokens only
        self.autocast: list[tuple[str, str]] | None = None
        self.limit = 0.0  # when the starter gives up, 0: never
        self.failure: BaseException | None = None
        self.waiting: dict[int, Outcome] = {}  # sends that the engine waits in
        self.part: Part | None = None  # ours, while it has not begun
        self.awaited: set[int] = set()  # sends whose answers it needs to begin
        self.children = {rank: Outcome() for rank in pass_.told}
        self.holds = False  # somebody sees to what is held
        # Nobody computes from what we ship, and we wait for nobody.
        self.ends_with_leaves = False
        self._held: dict[int, Held] = {}  # by worker

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
            if self.waiting or before + nbytes > _MOST_HELD_BYTES:
                return False
            if held is None:
                held = self._held[peer] = Held()
            held.answers.append((number, answer.present))
            held.gradients += answer.gradients
            held.nbytes += nbytes
            return True

    def hold_all(
        self, nodes: Sequence[Any], received: Mapping[Any, Sequence[Tensor | None]]
    ) -> list[tuple[ReceivedMessage, Sequence[Tensor | None]]]:
        """As `hold`, for all messages of a part that waits for nobody.

        Args:
            nodes: Of their recvs.
            received: The gradients that have come to these, of which no graph is made.

        Returns:
            Messages and their gradients that should go at once.
        """
        at_once = []
        shipped = self.pass_.shipped
        with self.side.lock:
            all_held = self._held
            for node in nodes:
                message, gradients = node.message, received.get(node, ())
                nbytes, values = 0, []
                for gradient in gradients:
                    if gradient is None:
                        continue
                    if gradient.layout is not torch.strided or not gradient.is_cpu:
                        nbytes = _MOST_HELD_BYTES + 1
                        break
                    nbytes += gradient.nbytes
                    values.append(gradient)
                peer, number = message.peer, message.number
                held = all_held.get(peer)
                if (held.nbytes if held else 0) + nbytes > _MOST_HELD_BYTES:
                    at_once.append((message, gradients))
                    continue
                if held is None:
                    held = all_held[peer] = Held()
                present: tuple[bool, ...] = ()
                if values:
                    present = (True,) * len(values)
                    if len(values) < len(gradients):
                        present = tuple([g is not None for g in gradients])
                    shipped.add((peer, number))
                held.answers.append((number, present))
                held.gradients += values
                held.nbytes += nbytes
        return at_once

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
        for recv in self.recvs:
            (may_wait if recv.may_wait else others).add(recv.peer)
        may_wait -= others
        if not may_wait or may_wait != self.children.keys():
            return False
        self._held = {peer: Held(is_start=True) for peer in may_wait}
        self.ends_with_leaves = (
            not self.pass_.sends and self.destination is Destination.INTO_DICTIONARY
        )
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
