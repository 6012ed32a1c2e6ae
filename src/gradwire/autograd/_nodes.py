"""What the autograd nodes know of their messages: the engine comes in through here.

They know their context by name, never the side itself: a node that the program keeps
must not keep the side alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gradwire.autograd._passes import NONE
from gradwire.autograd._plain import admit, changed, consumed, gone
from gradwire.autograd._torch_private import TaskWatch, current_task
from gradwire.errors import RemoteProtocolError

if TYPE_CHECKING:
    from gradwire.autograd._context import Lease, Side
    from gradwire.autograd._exchange import Exchange

__all__ = ["ReceivedMessage", "SentMessage"]


class SentMessage:
    """What a `Send` node knows: a message of ours whose gradients are waited for."""

    __slots__ = (
        "_count",
        "_exchange",
        "_mark",
        "event",
        "is_changed",
        "is_reply",
        "name",
        "peer",
        "urgency",
    )

    def __init__(
        self,
        exchange: Exchange,
        side: Side,
        event: int,
        peer: int,
        count: int,
        urgency: int,
        is_reply: bool,
    ) -> None:
        self._exchange = exchange
        self.name = side.name  # never the side itself: nodes must not keep it alive
        self._mark = side.mark
        self.event = event
        self.peer = peer
        self.urgency = urgency  # see `_functions`
        self.is_reply = is_reply
        self._count = count
        self.is_changed = False  # its tensors were, before the node could be made

    def await_gradients(self) -> Sequence[Tensor | None]:
        """Called by the engine. Outside of a pass of ours nobody will answer."""
        exchange = self._exchange
        side = exchange.registry.find(self.name)
        run = exchange.run_here(side) if side is not None else None
        if side is None or run is None:
            return [None] * self._count
        answer = exchange.await_answer(side, run, self.event, self.peer)
        if answer is NONE:
            return [None] * self._count
        if len(answer.present) != self._count:
            raise RemoteProtocolError(
                f"{len(answer.present)} gradients arrived for {self._count} tensors"
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


class ReceivedMessage:
    """What a `Recv` node knows: a message of a peer that waits for its gradients."""

    __slots__ = (
        "_exchange",
        "_mark",
        "event",
        "function",
        "is_hooked",
        "is_request",
        "is_stale",
        "label",
        "lease",
        "made_in",
        "may_wait",
        "name",
        "num_tensors",
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
        made_in: TaskWatch | None,
        is_stale: bool,
        function: str,
        may_wait: bool,
        num_tensors: int,
    ) -> None:
        self._exchange = exchange
        self.name = side.name
        self._mark = side.mark
        self.label = side.label
        self.event = event
        self.peer = peer
        self.number = number
        self.lease = lease
        self.is_request = is_request
        self.made_in = made_in  # the backward in which the call was made
        self.is_stale = is_stale  # it came late: what it belongs to was consumed
        self.function = function  # what was called, for people
        self.may_wait = may_wait  # nobody computes from its gradients
        self.num_tensors = num_tensors
        self.is_hooked = False  # a program has put a hook on the node
        self.passed_over_in: int | None = None

    def ship(self, gradients: Sequence[Tensor | None]) -> None:
        """Called by the engine, once per backward."""
        exchange = self._exchange
        side = exchange.registry.find(self.name)
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
