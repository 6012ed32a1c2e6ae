"""What the graph of a computation looks like on each worker, as plain data.

Every worker walks its own part, from the tensors that are given or from the messages of
the contexts that it is asked about, and says which messages left and arrived, and what
was computed between them. No value of a tensor is looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.autograd._api import current_exchange
from gradwire.autograd._context import ContextName, Side, active_context
from gradwire.autograd._exchange import Exchange
from gradwire.autograd._functions import Recv, Send
from gradwire.rpc import rpc_sync
from gradwire.rpc.extension import for_agents, serving_peer

__all__ = ["Block", "Event", "MessageId", "Part", "gather"]


class MessageId(NamedTuple):
    """A message: its context, who sent it, and its number there."""

    key: int
    incarnation: int
    sender: int
    number: int

    @property
    def context(self) -> ContextName:
        """The context."""
        return ContextName(self.key, self.incarnation)


class Block(NamedTuple):
    """What was computed locally for one message, or for the result.

    Attributes:
        operations: Kinds of operations, with their numbers.
        num_leaves: How many leaves, mostly parameters, it uses.
        num_values: How many numbers these have.
    """

    operations: tuple[tuple[str, int], ...] = ()
    num_leaves: int = 0
    num_values: int = 0


class Event(NamedTuple):
    """A message that left or arrived.

    Attributes:
        message: Which one.
        is_send: It left here.
        peer: The worker at its other end.
        function: The function that was called, if that is known here.
        tensors: Shape and type of each tensor that gets a gradient.
        block: What was computed for it, if it left.
        after: Numbers of events of this part that came before it.
    """

    message: MessageId
    is_send: bool
    peer: int
    function: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    block: Block
    after: tuple[int, ...]


class Part(NamedTuple):
    """The part of one worker; ``result`` is what leads from there to the roots."""

    worker: str
    events: tuple[Event, ...]
    result: Block | None = None


def gather(roots: Sequence[Tensor]) -> dict[int, Part]:
    """The parts of all workers whose work has led to some tensors of this one, by rank.

    Args:
        roots: Tensors of this worker, before any backward through them.
    """
    exchange = current_exchange()
    names: defaultdict[int, set[ContextName]] = defaultdict(set)
    parts: dict[int, Part] = {}
    waiting = [exchange.me]
    while waiting:
        rank = waiting.pop(0)
        if rank == exchange.me:
            part = _look(exchange, names[rank], roots)
        else:
            part = _ask(exchange, rank, names[rank])
        parts[rank] = part
        for event in part.events:
            for member in (rank, event.peer):
                if event.message.context not in names[member]:
                    names[member].add(event.message.context)
                    if member not in waiting:
                        waiting.append(member)
    return parts


def _ask(exchange: Exchange, rank: int, names: Iterable[ContextName]) -> Part:
    worker = exchange.agent.network.find(rank).info
    token = active_context.set(None)
    try:
        with torch.no_grad():
            answer = rpc_sync(worker, outline, ([tuple(name) for name in names],))
    finally:
        active_context.reset(token)
    events = [Event(*fields) for fields in answer]
    return Part(
        worker.name,
        tuple(
            event._replace(message=MessageId(*event.message), block=Block(*event.block))
            for event in events
        ),
    )


@for_agents
def outline(names: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """This worker's part in some contexts, for another worker.

    Where workers do not trust each other it is told only to those that have taken part in
    the context themselves.
    """
    exchange = current_exchange()
    peer = serving_peer.get() if exchange.agent.is_safe else None
    found = []
    for key, incarnation in names:
        side = exchange.registry.find(ContextName(key, incarnation))
        if side is None or (peer is not None and peer.info.id not in side.state.known):
            continue
        found.append(side.name)
    events = _look(exchange, found, ()).events
    return [
        tuple(
            event._replace(message=tuple(event.message), block=tuple(event.block))  # type: ignore[arg-type]
        )
        for event in events
    ]


# ------------------------------------------------------------------------- on a worker


def _look(
    exchange: Exchange, names: Iterable[ContextName], roots: Sequence[Tensor]
) -> Part:
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    for name in names:
        side = exchange.registry.find(name)
        if side is not None:
            starts += _tail_of(side)
    wires = _find_wires(starts)
    numbers = {node: number for number, node in enumerate(wires)}
    last: dict[ContextName, int] = {}
    counted: set[Any] = set()
    events = []
    for node, number in numbers.items():
        message = _message_of(exchange.me, node)
        before = [numbers[wire] for wire in _wires_behind(node)]
        if message.context in last:
            before.append(last[message.context])
        last[message.context] = number
        block = _block_of(node, counted) if _is_of(node, Send) else Block()
        events.append(
            Event(
                message,
                _is_of(node, Send),
                node.message.peer,
                getattr(node.message, "function", ""),
                _tensors_of(node),
                block,
                tuple(sorted(set(before))),
            )
        )
    result = None
    if roots:
        edges = [root.grad_fn for root in roots]
        result = _summarise((node for node in edges if node is not None), counted)
    return Part(exchange.agent.info.name, tuple(events), result)


def _tail_of(side: Side) -> list[Any]:
    with side.lock:
        return [token.grad_fn for token in side.peek_tail()]


def _find_wires(starts: Iterable[Any]) -> list[Any]:
    """All messages behind some nodes: in each context in their order."""
    wires: list[Any] = []
    seen: set[Any] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_of(node, Recv):
            wires.append(node)
            # What else is behind it is the end of the chain.
            waiting += [n for n, _ in node.next_functions if _is_wire(n)]
            continue
        if _is_of(node, Send):
            wires.append(node)
        waiting += [n for n, _ in node.next_functions if n is not None]
    # Calls are numbered by their caller, in the order in which they were made.
    return sorted(wires, key=lambda wire: (abs(wire.message.name.key), _event_of(wire)))


def _wires_behind(node: Any) -> list[Any]:
    """The messages that a message needs: directly, or by what was computed from them."""
    return [n for n in _walk([n for n, _ in node.next_functions]) if _is_wire(n)]


def _walk(starts: Iterable[Any]) -> Iterable[Any]:
    """Nodes behind some others, up to messages that arrived."""
    seen: set[Any] = set()
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not _is_wire(node):
            waiting += [n for n, _ in node.next_functions if n is not None]


def _block_of(send: Any, counted: set[Any]) -> Block:
    return _summarise((n for n, _ in send.next_functions if n is not None), counted)


def _summarise(starts: Iterable[Any], counted: set[Any]) -> Block:
    """Counts what lies behind some nodes; operations only if nobody has counted them."""
    operations: Counter[str] = Counter()
    num_leaves = num_values = 0
    for node in _walk(starts):
        if hasattr(node, "variable"):
            num_leaves += 1
            num_values += node.variable.numel()
        elif not (node in counted or _is_wire(node) or _leads_to_leaf(node)):
            counted.add(node)
            operations[node.name().partition("Backward")[0]] += 1
    return Block(tuple(operations.most_common()), num_leaves, num_values)


def _leads_to_leaf(node: Any) -> bool:
    """Whether a node only lends a leaf to others, as in ``linear`` and in sends."""
    if not node.name().startswith(("TBackward", "AliasBackward")):
        return False
    following, _ = node.next_functions[0]
    return hasattr(following, "variable")


def _tensors_of(node: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    if _is_of(node, Recv):
        metadata = node._input_metadata[:-1]  # without the token
    else:
        metadata = [n._input_metadata[i] for n, i in node.next_functions if n]
    return tuple(
        (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in metadata
    )


def _message_of(me: int, node: Any) -> MessageId:
    message = node.message
    key, incarnation = message.name
    if _is_of(node, Send):
        return MessageId(key, incarnation, me, message.event)
    return MessageId(key, incarnation, message.peer, message.number)


def _event_of(wire: Any) -> int:
    event: int = wire.message.event
    return event


def _is_wire(node: Any) -> bool:
    return _is_of(node, Send) or _is_of(node, Recv)


def _is_of(node: Any, function: type) -> bool:
    return type(node) is function._backward_cls  # type: ignore[attr-defined]
