"""The part of a worker that has got nothing but leaves, and has sent nothing.

A trainer fetches parameters, computes, and sends gradients back. It waits for nobody, and
the gradients for a leaf lead to nothing more there: so the engine need not run our nodes.
It is asked for the gradients where they would begin, and these are sent all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.autograd._engine import run_up_to_recvs
from gradwire.autograd._plain import consumed

if TYPE_CHECKING:
    from gradwire.autograd._exchange import Exchange
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
    for recv in run.recvs:
        node = recv.node()
        # One that came late has nobody to ship to: its node says so if it is reached.
        if node is None or (message := node.message).is_hooked or message.is_stale:
            return None
        nodes.append(node)
    found = run_up_to_recvs(roots, seeds, nodes)
    if found is None:
        return None
    gradients, received = found
    if run.failure is not None:
        raise run.failure
    for node in received:
        if node.message.is_stale:  # since the engine began
            raise consumed(exchange, run.side.label)
    for message, values in run.hold_all(nodes, received):
        exchange.ship(run.side, run, message, values, [])
    return gradients
