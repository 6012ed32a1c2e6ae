"""One worker's side of one context: its chain of wire events and what belongs to it."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from gradwire.autograd._functions import (
    CHAIN_END,
    apply_forget,
    apply_recv,
    apply_send,
    token_of,
)
from gradwire.autograd._messages import (
    CONTEXT_KEEPS_GRAD,
    CallHeader,
    encode_header,
    is_implicit,
)
from gradwire.autograd._nodes import Mark, ReceivedMessage, SentMessage
from gradwire.autograd._passes import ContextState, PassId, TellNone
from gradwire.autograd._torch_private import TaskWatch, record
from gradwire.rpc.extension import Addition

if TYPE_CHECKING:
    from gradwire.autograd._attempts import Attempt
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._run import Run
    from gradwire.rpc.extension import Leftovers, Note

__all__ = [
    "ContextName",
    "Lease",
    "Leaving",
    "Received",
    "Side",
    "Unrecorded",
    "active_context",
    "current_handler",
    "is_of_leaves",
    "leaving",
    "make_nodes",
]

Leaving: TypeAlias = list[tuple[Tensor, Any]]
"""Tensors of a message, each with the node that it had when the message was encoded."""
Unrecorded: TypeAlias = tuple[SentMessage, Leaving]
"""A message that has left, or is about to, and whose node is not made yet."""


active_context: contextvars.ContextVar[ContextName | None] = contextvars.ContextVar(
    "gradwire_autograd_context", default=None
)
"""The explicit context around this code. It follows tasks, callbacks and handlers."""
current_handler: contextvars.ContextVar[object] = contextvars.ContextVar(
    "gradwire_autograd_handler", default=None
)
"""The call in an explicit context that this code serves, if any; it follows likewise."""


class ContextName(NamedTuple):
    """What a context is called on the wire; see `gradwire.autograd._messages`."""

    key: int
    incarnation: int


class Lease:
    """Held by the node of a call's reply: when that dies, so does the call's context.

    The end comes anywhere, also in a thread that holds a lock: so it only makes an entry
    in a queue.
    """

    __slots__ = ("_leftovers", "_name", "is_over")

    def __init__(self, leftovers: Leftovers, name: ContextName) -> None:
        self._leftovers = leftovers
        self._name = name
        self.is_over = False

    def __del__(self) -> None:
        if not self.is_over:
            self._leftovers.put(self._name)


class Received(msgspec.Struct, frozen=True, gc=False):
    """A recv of a chain: what it answers, and its node, if that still exists."""

    peer: int
    number: int
    node: weakref.ref[Any]
    may_wait: bool


def leaving(tensors: Iterable[Tensor]) -> Leaving:
    """Tensors as they leave; what becomes of them later is none of the message's."""
    return [(tensor, tensor.grad_fn) for tensor in tensors]


class Side:
    """One worker's side of one context.

    Args:
        exchange: The worker.
        name: The context.
        label: What to call it in messages to people.
        holds_weakly: A call's context on the caller: it lives as long as the graph that
            the program holds, so nothing here may keep a recv alive.
        into_grad: The context's gradients go to ``.grad``.
    """

    # What most contexts never change.
    is_released = False
    around: tuple[ContextName, ...] = ()  # it was opened in; innermost first
    brought_by: int | None = None  # the peer that it is charged to
    is_serving = False  # a call's context on the callee, while it is run
    # Likewise, but guarded by the lock.
    run: Run | None = None
    failed: Run | None = None  # a pass that is over, but not for the engine
    attempt: Attempt | None = None  # of a step that is run again if it must be
    num_sends = 0
    num_requests = 0  # that arrived

    def __init__(
        self,
        exchange: Exchange,
        name: ContextName,
        label: str,
        *,
        holds_weakly: bool = False,
        into_grad: bool = True,
    ) -> None:
        self.name = name
        self.label = label
        self.is_implicit = is_implicit(name.key)
        self.holds_weakly = holds_weakly
        self.into_grad = into_grad
        self.mark = Mark(exchange, name, label)
        # Guards all below, and gives events their order: callers, readers, passes.
        self.lock = threading.Lock()
        self.state = ContextState(exchange.me, exchange.describe)
        self._tail: list[Tensor] = [CHAIN_END]
        self._unrecorded: list[Unrecorded] = []
        # Replies of nothing but leaves, as a parameter server gives them. Their gradients
        # are what will come for them, so they get nodes only if the engine must run.
        self._of_leaves: list[Unrecorded] = []
        self.recvs: list[Received] = []
        self.gradients: dict[Tensor, Tensor] = {}
        self.calls: dict[Note, object] = {}  # of ours, in flight, and who makes them
        # What calls say that are sent here without a history: see `introduce`.
        self._introduction: tuple[tuple[int, int] | None, bool, Addition] | None = None

    # ---------------------------------------------------------------------- recording

    def describe_call(self, peer: int, header: CallHeader) -> None:
        """A call of this context is about to leave: enters in its header which that is."""
        header.key, header.incarnation = self.name
        if self.into_grad:
            header.flags |= CONTEXT_KEEPS_GRAD
        with self.lock:
            state = self.state
            state.meet(peer)
            header.after = state.begun
            header.consumed = state.consumed_by

    def introduce(self, peer: int) -> Addition:
        """As `describe_call`, for one without a history: that says no more than this.

        From one call to the next it is the same, until a pass begins.
        """
        state, introduction = self.state, self._introduction
        # Without the lock: what changes right now might as well change a moment later. What
        # was consumed there changes only with the pass.
        if introduction is not None and peer in state.known:
            after, is_into_grad, addition = introduction
            if after is state.begun and is_into_grad is self.into_grad:
                return addition
        header = CallHeader(0)
        self.describe_call(peer, header)
        addition = Addition(encode_header(header))
        self._introduction = header.after, bool(header.flags), addition
        return addition

    def record_send(self, peer: int, tensors: Leaving) -> tuple[int, PassId | None]:
        """A message leaves; returns its number, and the last pass that had begun."""
        number = self.announce_send(peer, tensors)
        self.finish_sends()
        return number

    def announce_send(
        self, peer: int, tensors: Leaving, reply_to: int | None = None
    ) -> tuple[int, PassId | None]:
        """As `record_send`, but leaves the node to `finish_sends`, or to who needs it.

        Args:
            peer: Where it goes.
            tensors: What goes.
            reply_to: If it is a reply: the place of its request among those that arrived.
        """
        with self.lock:
            self.state.meet(peer)
            event = self.state.record_send(peer)
            message = SentMessage(self.mark, event, peer, len(tensors), reply_to)
            self._unrecorded.append((message, tensors))
            self.num_sends += 1
            return event, self.state.begun

    def hand_out(
        self, peer: int, leaf: Tensor, after: tuple[int, int] | None, consumed: int
    ) -> tuple[int, PassId | None] | None:
        """A leaf leaves, as the reply to a request that has just come.

        What `join` and `announce_send` do, at once, if its node need not be made.

        Args:
            peer: Who asked for it.
            leaf: A tensor that requires grad and was computed from nothing.
            after: See `join`.
            consumed: See `join`.

        Returns:
            As `announce_send`; None if it needs a node: nothing was done.
        """
        with self.lock:
            if self.recvs:
                return None
            state = self.state
            if after is not None or peer not in state.known:
                self.join(peer, after, consumed)
            event = state.record_send(peer)
            message = SentMessage(self.mark, event, peer, 1, self.num_requests)
            self._of_leaves.append((message, [(leaf, None)]))
            self.num_requests += 1
            self.num_sends += 1
            return event, state.begun

    def finish_sends(self) -> None:
        """Makes the nodes of messages that were announced."""
        with self.lock:
            self._make_sends()

    def _make_sends(self) -> None:
        unrecorded, self._unrecorded = self._unrecorded, []
        for message, leaving in unrecorded:
            is_reply = message.reply_to is not None
            if is_reply and not self.recvs and is_of_leaves(leaving):
                self._of_leaves.append((message, leaving))
            else:
                self._tail.append(record(_make_node, message, leaving))

    def _make_sends_of_leaves(self) -> None:
        of_leaves, self._of_leaves = self._of_leaves, []
        self._tail += make_nodes(of_leaves)

    def join(
        self, peer: int, after: tuple[int, int] | None, consumed: int = -1
    ) -> None:
        """A message of this context came; the caller holds the lock."""
        self.state.meet(peer)
        if after is not None:
            self.state.join(peer, PassId(*after), consumed)

    def record_recv(
        self,
        peer: int,
        number: int,
        after: tuple[int, int] | None,
        tensors: list[Tensor],
        *,
        lease: Lease | None = None,
        is_request: bool = False,
        made_in: TaskWatch | None = None,
        function: str = "",
        may_wait: bool = False,
        is_clean: bool = False,
    ) -> list[TellNone]:
        """A message arrived: gives its tensors their history. Returns what to answer."""
        with self.lock:
            state = self.state
            since = None
            if after is not None:
                since = PassId(*after)
                self.join(peer, after)
            elif peer not in state.known:
                self.join(peer, None)
            event, is_stale, answers = state.record_recv(peer, number, since)
            message = ReceivedMessage(
                self.mark,
                event,
                peer,
                number,
                len(tensors),
                is_stale,
                function,
                may_wait,
                is_request,
                made_in,
                lease,
            )
            # Of leaves, and nothing was sent before: then it has nobody to come before.
            is_apart = may_wait and not self.num_sends and not self.holds_weakly
            tail = (CHAIN_END,) if is_apart else self._live_tail()
            if is_clean and not self.holds_weakly and torch.is_grad_enabled():
                # As `record` does: nothing is saved, so that who saves does not matter.
                token = apply_recv(message, tensors, False, *tail)[-1]
            else:
                token = record(apply_recv, message, tensors, self.holds_weakly, *tail)[
                    -1
                ]
            node = weakref.ref(token.grad_fn)
            if is_apart:
                self._tail.append(token)
            else:
                self._tail = [CHAIN_END] if self.holds_weakly else [token]
            self.recvs.append(Received(peer, number, node, may_wait))
            return answers

    def _live_tail(self) -> list[Tensor]:
        """The tail, and the recvs that it does not hold because only the program may."""
        if self._unrecorded:
            self._make_sends()
        if self._of_leaves:
            self._make_sends_of_leaves()
        if not self.holds_weakly:
            return self._tail
        tokens = [token_of(node) for node in self.live_recvs()]
        return [*self._tail, *(token for token in tokens if token is not None)]

    def mark_stale(self, peer: int, numbers: set[int]) -> None:
        """Messages of a peer are gone there; the caller holds the lock."""
        running = [] if self.run is None else self.run.recvs
        for recv in (*self.recvs, *running):
            if recv.peer == peer and recv.number in numbers:
                node = recv.node()
                if node is not None:
                    node.message.is_stale = True

    def live_recvs(self) -> list[Any]:
        """The nodes of the recvs of the present chain, as far as they still exist."""
        return [node for recv in self.recvs if (node := recv.node()) is not None]

    # ------------------------------------------------------------------------- passes

    def peek_tail(self) -> list[Tensor]:
        """The tokens that a pass would begin with; the caller holds the lock."""
        tail = self._live_tail()
        return tail[1:] if tail[0] is CHAIN_END else tail[:]  # it is nowhere else

    def peek_leaves(self) -> list[Unrecorded] | None:
        """All that a pass would begin with, if that is replies of nothing but leaves.

        The caller holds the lock.
        """
        self._make_sends()
        if self.recvs or len(self._tail) > 1 or self._tail[0] is not CHAIN_END:
            return None
        return self._of_leaves

    def unanswered(self, tail: list[Tensor], of_leaves: list[Unrecorded]) -> set[int]:
        """The sends whose answers a part that ships nothing should wait for.

        None if there are recvs: others wait for what it ships, so it begins at once. The
        caller holds the lock.
        """
        if self.recvs:
            return set()
        events = [token.grad_fn.message.event for token in tail]  # type: ignore[union-attr]
        events += [message.event for message, _ in of_leaves]
        return {event for event in events if not self.state.is_answered(event)}

    def take_chain(self, retain: bool) -> list[Received]:
        """The recvs of a pass that begins; the caller holds the lock."""
        if retain:
            return list(self.recvs)
        if self._unrecorded:
            self._make_sends()
        recvs = self.recvs
        self._tail, self.recvs, self.num_sends = [CHAIN_END], [], 0
        self._of_leaves = []
        return recvs

    def shed_sends(self) -> None:
        """A pass is over; the caller holds the lock.

        What it recorded on a side that holds weakly is kept by the recvs that came after
        it. A send that no recv came after can be reached by nobody.
        """
        if self.holds_weakly and not self.calls:
            self._tail = [CHAIN_END]

    def is_busy(self) -> bool:
        """Whether the call that this context belongs to is still under way."""
        return self.is_serving or bool(self.calls)

    def forget_graph(self) -> None:
        """Drops all that keeps graphs alive."""
        with self.lock:
            # Taken out first: what dies with a graph may run any code.
            doomed = self._tail, self._unrecorded, self._of_leaves, self.recvs
            doomed_gradients = self.gradients
            self._tail, self._unrecorded, self._of_leaves = [CHAIN_END], [], []
            self.recvs, self.gradients = [], {}
            self.calls.clear()
        del doomed, doomed_gradients


def is_of_leaves(leaving: Leaving) -> bool:
    """Whether the tensors of a message have no history but themselves."""
    return all([node is None for _, node in leaving])


def make_nodes(unrecorded: list[Unrecorded]) -> list[Tensor]:
    """Makes the nodes of messages that have left; returns their tokens."""
    return [record(_make_node, message, leaving) for message, leaving in unrecorded]


_alias = torch.ops.aten.alias.default


def _make_node(message: SentMessage, leaving: Leaving) -> Tensor:
    tensors = [
        tensor if tensor.requires_grad else apply_forget(tensor, CHAIN_END)
        for tensor, node in leaving
        if tensor.grad_fn is node
    ]
    if len(tensors) < len(leaving):
        # Changed in place by now: what left cannot be reached any more. A gradient for
        # it must not go to what is there now.
        message.is_changed = True
        tensors = [CHAIN_END] * len(leaving)
    # Torch finds the accumulator of a leaf under a lock for which another thread may
    # hold up the interpreter: an operation of torch's own lets go of that, our node
    # does not. So no leaf goes to the node directly.
    inputs = [
        _alias(t) if t.is_leaf and t.layout is torch.strided else t for t in tensors
    ]
    token: Tensor = apply_send(message, *inputs)
    return token
