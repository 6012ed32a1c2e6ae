"""The part of a worker that has got nothing but leaves, and has sent nothing.

A trainer fetches parameters, computes, and sends gradients back. It waits for nobody, and
the gradients for a leaf lead to nothing more there: so the engine need not run our nodes.
It is asked for the gradients where they would begin, and these are sent all at once.

Mostly all of them go to one worker, in one message that is also the first that it hears
of the pass. Then nothing is held back: the message is made of what the engine returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.autograd._engine import run_up_to_recvs
from gradwire.autograd._plain import consumed
from gradwire.autograd._run import MOST_HELD_BYTES

if TYPE_CHECKING:
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._nodes import ReceivedMessage
    from gradwire.autograd._run import Run

__all__ = ["run_up_to_leaves"]


def run_up_to_leaves(
    exchange: Exchange, run: Run, roots: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[tuple[Any, Tensor | None]] | None:
    """Runs our part of a pass by which others get gradients of leaves, and no more.

    Returns:
        Leaves of ours, with their gradients. None if it is not so simple: nothing was run.
    """
    nodes: list[Any] = []
    messages: list[ReceivedMessage] = []
    for recv in run.recvs:
        node = recv.node()
        # One that came late has nobody to ship to: its node says so if it is reached.
        if node is None or (message := node.message).is_hooked or message.is_stale:
            return None
        nodes.append(node)
        messages.append(message)
    found = run_up_to_recvs(roots, seeds, nodes)
    if found is None:
        return None
    of_leaves, gradients = found
    if not _ship_with_begin(exchange, run, messages, gradients):
        _ship(exchange, run, messages, gradients)
    return of_leaves


def _ship_with_begin(
    exchange: Exchange,
    run: Run,
    messages: Sequence[ReceivedMessage],
    gradients: tuple[Tensor | None, ...],
) -> bool:
    """Ships all gradients to one worker, with the begin of the pass.

    The short way: it comes to the same as if they were held until our part ends.

    Returns:
        False if it is not that simple: nothing was done.
    """
    if len(run.children) > 1 or len(messages) == 1:  # one goes in another message
        return False
    outgoing = exchange.telling.encode_begin(run, messages, gradients)
    if (
        outgoing is None
        or len(outgoing.head) > MOST_HELD_BYTES
        or not run.ship_with_begin(messages)
    ):
        return False
    (to,) = run.children
    if (error := exchange.telling.send(to, outgoing)) is not None:
        exchange.abort(run.side, run, error)
    return True


def _ship(
    exchange: Exchange,
    run: Run,
    messages: Sequence[ReceivedMessage],
    gradients: Sequence[Tensor | None],
) -> None:
    if run.failure is not None:
        raise run.failure
    first = 0
    for message in messages:
        found = gradients[first : first + message.num_tensors]
        first += len(found)
        # Since the engine began.
        if message.is_stale and any([g is not None for g in found]):
            raise consumed(exchange, run.side.label)
    for message, values in run.hold_all(messages, gradients):
        exchange.ship(run.side, run, message, values, [])
    exchange.telling.held(run)
