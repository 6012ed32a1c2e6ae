"""What the autograd nodes know of their messages: the engine comes in through here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from gradwire.autograd._functions import urgency_of_reply, urgency_of_request
from gradwire.autograd._passes import NONE
from gradwire.autograd._plain import admit, changed, consumed, gone
from gradwire.autograd._torch_private import TaskWatch, current_task
from gradwire.errors import RemoteProtocolError

if TYPE_CHECKING:
    from gradwire.autograd._context import ContextName, Lease
    from gradwire.autograd._exchange import Exchange

__all__ = ["Mark", "ReceivedMessage", "SentMessage"]


class Mark(msgspec.Struct, eq=False, weakref=True):
    """Held by all nodes of a context on one worker: which context that is.

    It knows the side by name only, for a node that the program keeps must not keep the
    side alive. When the mark dies, so has the last node.
    """

    exchange: Exchange
    name: ContextName
    label: str  # what to call it in messages to people


class SentMessage(msgspec.Struct, eq=False):
    """What a `Send` node knows: a message of ours whose gradients are waited for.

    Attributes:
        mark: The context.
        event: Number of the message.
        peer: Where it went.
        num_tensors: How many gradients are waited for.
        reply_to: If it is a reply: the place of its request among those that arrived.
        is_changed: Its tensors were, before the node could be made.
    """

    mark: Mark
    event: int
    peer: int
    num_tensors: int
    reply_to: int | None = None
    is_changed: bool = False

    @property
    def name(self) -> ContextName:
        """The context."""
        return self.mark.name

    @property
    def urgency(self) -> int:
        """The engine's number for the node; see `gradwire.autograd._functions`."""
        if self.reply_to is None:
            return urgency_of_request(self.event)
        return urgency_of_reply(self.reply_to)

    def await_gradients(self) -> Sequence[Tensor | None]:
        """Called by the engine. Outside of a pass of ours nobody will answer."""
        exchange = self.mark.exchange
        side = exchange.registry.find(self.mark.name)
        run = exchange.run_here(side) if side is not None else None
        if side is None or run is None:
            return [None] * self.num_tensors
        answer = exchange.await_answer(side, run, self.event, self.peer)
        if answer is NONE:
            return [None] * self.num_tensors
        if len(answer.present) != self.num_tensors:
            raise RemoteProtocolError(
                f"{len(answer.present)} gradients arrived for {self.num_tensors} tensors"
            )
        if self.is_changed:
            raise changed(exchange, side.label)
        if answer.history >= 0:  # the gradients themselves arrive differentiably
            exchange.telling.perform(
                side,
                run,
                side.record_recv(
                    self.peer, answer.history, answer.after, answer.tracked
                ),
            )
        gradients = iter(answer.gradients)
        return [next(gradients) if there else None for there in answer.present]


class ReceivedMessage(msgspec.Struct, eq=False):
    """What a `Recv` node knows: a message of a peer that waits for its gradients.

    Attributes:
        mark: The context.
        event: Number of the recv.
        peer: Who sent the message.
        number: Number of the message there.
        num_tensors: How many tensors of it get gradients.
        is_stale: It came late: what it belongs to was consumed.
        function: What was called, for people.
        may_wait: Nobody computes from its gradients.
        is_request: It is no reply.
        made_in: The backward in which the call was made.
        lease: That of the call's context, if it is one by itself.
        is_hooked: A program has put a hook on the node.
        passed_over_in: The last backward that came to it without a gradient.
    """

    mark: Mark
    event: int
    peer: int
    number: int
    num_tensors: int
    is_stale: bool
    function: str
    may_wait: bool
    is_request: bool = False
    made_in: TaskWatch | None = None
    lease: Lease | None = None
    is_hooked: bool = False
    passed_over_in: int | None = None

    @property
    def name(self) -> ContextName:
        """The context."""
        return self.mark.name

    @property
    def label(self) -> str:
        """See `Mark`."""
        return self.mark.label

    def ship(self, gradients: Sequence[Tensor | None]) -> None:
        """Called by the engine, once per backward."""
        exchange = self.mark.exchange
        side = exchange.registry.find(self.mark.name)
        has_gradient = any([g is not None for g in gradients])
        if side is None:
            if has_gradient:
                raise gone(exchange, self.name, self)
            return
        if has_gradient and self.is_stale:
            raise consumed(exchange, self.label)
        run, instructions = admit(exchange, side, self, has_gradient)
        if run is None:
            self.passed_over_in = current_task()
            return
        try:
            exchange.ship(side, run, self, gradients, instructions)
        finally:
            if instructions:
                exchange.telling.perform(side, run, instructions)
