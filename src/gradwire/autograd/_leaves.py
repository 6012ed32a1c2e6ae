"""The part of a worker that has sent nothing but leaves: no graph, so no engine.

A parameter server hands out parameters, and gets gradients for them. What comes back for
a leaf is its gradient: there is nothing to run. For all that is not that simple (hooks,
wrappers, a leaf that was sent twice, gradients of another shape) the engine is asked,
which knows what to do, or what to say.

Mostly all gradients come in one message, with the begin of the pass. Then the pass is over
here at once, and nothing is made that would last from its begin to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.autograd._averaged import wrappers_among
from gradwire.autograd._engine import Destination, accumulate
from gradwire.autograd._passes import NONE, WAIT, ContextState, PassId

if TYPE_CHECKING:
    from gradwire.autograd._context import Side, Unrecorded
    from gradwire.autograd._exchange import Exchange
    from gradwire.autograd._messages import Gradients
    from gradwire.rpc.extension import Peer

__all__ = ["are_one_by_one", "gradients_of_leaves", "may_skip_engine", "take_at_once"]

_STRIDED = torch.strided


def may_skip_engine(destination: int, retain: bool, create_graph: bool) -> bool:
    """Whether a pass leaves a worker alone that has sent nothing but leaves.

    Into ``.grad`` there may be hooks, which are the engine's business, and a graph that is
    retained, or made of the gradients, needs nodes.
    """
    is_kept = destination == Destination.INTO_DICTIONARY
    return is_kept and not retain and not create_graph


def take_at_once(
    exchange: Exchange,
    side: Side,
    peer: Peer,
    message: Gradients,
    values: Sequence[Tensor],
) -> bool:
    """Takes our part of a pass that begins with the gradients of all that we have sent.

    The short way: it comes to the same as the part that `Exchange` makes of it.

    Args:
        exchange: This worker.
        side: The context.
        peer: Who tells us of the pass.
        message: What it says.
        values: The gradients that have come.

    Returns:
        False if it is not that simple: nothing was done.
    """
    start = message.start
    if (
        start is None
        or peer.fate is not None
        or side.is_implicit
        or not may_skip_engine(*start[:3])
    ):
        return False
    pass_id, sender = PassId(message.starter, message.number), peer.info.id
    with side.lock:
        of_leaves = side.peek_leaves() if side.run is None else None
        if not of_leaves or len(of_leaves) != len(message.answers):
            return False
        found = _match(of_leaves, message.answers, values)
        if found is None:
            return False
        gradients = side.gradients.copy()
        try:
            accumulate(
                gradients,
                found,
                create_graph=False,
                are_apart=are_one_by_one(of_leaves),
            )
        except Exception:  # it fails once more on the long way, which tells of it
            return False
        if not side.state.begin_and_end(pass_id, sender):
            return False
        side.take_chain(retain=False)
        side.gradients = gradients
    exchange.telling.done(sender, side.name, pass_id)
    return True


def gradients_of_leaves(
    state: ContextState, sends: Sequence[Unrecorded]
) -> list[tuple[Tensor, Tensor | None]] | None:
    """The gradients of leaves that were sent, in the current pass; None: ask the engine.

    Args:
        state: The context; the caller holds the lock of its side.
        sends: The messages, all of them answered.
    """
    answers: list[tuple[int, tuple[bool, ...]]] = []
    gradients: list[Tensor] = []
    for message, _ in sends:
        answer = state.see_answer(message.event)
        if answer is WAIT:  # the pass has failed meanwhile: the engine is told so
            return None
        present: tuple[bool, ...] = ()
        if answer is not NONE:
            present = answer.present
            gradients += answer.gradients
        answers.append((message.event, present))
    return _match(sends, answers, gradients)


def are_one_by_one(sends: Iterable[Unrecorded]) -> bool:
    """Whether each leaf was sent in a message of its own.

    Gradients of several messages never arrive in the same memory.
    """
    return all([len(leaving) == 1 for _, leaving in sends])


def _match(
    sends: Sequence[Unrecorded],
    answers: Sequence[tuple[int, tuple[bool, ...]]],
    gradients: Iterable[Tensor],
) -> list[tuple[Tensor, Tensor | None]] | None:
    """The leaves of messages with their gradients; None: ask the engine.

    Args:
        sends: The messages.
        answers: Those to them, in the same order; see `Gradients`.
        gradients: What these bring.
    """
    found: list[tuple[Tensor, Tensor | None]] = []
    leaves: list[Tensor] = []
    following = iter(gradients)
    for (message, leaving), (number, present) in zip(sends, answers, strict=True):
        if number != message.event:
            return None
        if present and (len(present) != len(leaving) or False in present):
            return None
        for leaf, _ in leaving:
            leaves.append(leaf)
            if present:
                gradient = next(following)
                if not _is_simple(leaf, gradient):
                    return None
                found.append((leaf, gradient))
    # Also those that got none: others average with us all the same.
    if len(set(map(id, leaves))) < len(leaves) or wrappers_among(leaves):
        return None
    return found


def _is_simple(leaf: Tensor, gradient: Tensor) -> bool:
    return (
        leaf._backward_hooks is None
        and leaf.grad_fn is None
        and leaf.requires_grad
        and type(gradient) is Tensor  # who sends may have made a mistake
        and gradient.shape == leaf.shape
        and gradient.dtype is leaf.dtype
        and gradient.layout is leaf.layout is _STRIDED
        and ((gradient.is_cpu and leaf.is_cpu) or gradient.device == leaf.device)
    )
