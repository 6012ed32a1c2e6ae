"""The part of a worker that has sent nothing but leaves: no graph, so no engine.

A parameter server hands out parameters, and gets gradients for them. What comes back for
a leaf is its gradient: there is nothing to run. For all that is not that simple (hooks,
wrappers, a leaf that was sent twice, gradients of another shape) the engine is asked,
which knows what to do, or what to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.autograd._averaged import wrappers_among
from gradwire.autograd._engine import Destination
from gradwire.autograd._passes import NONE, WAIT, ContextState, PassKind

if TYPE_CHECKING:
    from gradwire.autograd._context import Unrecorded

__all__ = ["gradients_of_leaves", "may_skip_engine"]


def may_skip_engine(kind: PassKind) -> bool:
    """Whether a pass leaves a worker alone that has sent nothing but leaves.

    Into ``.grad`` there may be hooks, which are the engine's business, and a graph that is
    retained, or made of the gradients, needs nodes.
    """
    is_kept = kind.destination == Destination.INTO_DICTIONARY
    return is_kept and not kind.retain and not kind.create_graph


def gradients_of_leaves(
    state: ContextState, sends: Sequence[Unrecorded]
) -> list[tuple[Tensor, Tensor | None]] | None:
    """The gradients of leaves that were sent, in the current pass; None: ask the engine.

    Args:
        state: The context; the caller holds the lock of its side.
        sends: The messages, all of them answered.
    """
    found: list[tuple[Tensor, Tensor | None]] = []
    for message, leaving in sends:
        answer = state.see_answer(message.event)
        if answer is NONE:
            continue
        if answer is WAIT:  # the pass has failed meanwhile: the engine is told so
            return None
        if not len(answer.present) == len(answer.gradients) == len(leaving):
            return None
        for (leaf, _), gradient in zip(leaving, answer.gradients, strict=True):
            if not _is_simple(leaf, gradient):
                return None
            found.append((leaf, gradient))
    leaves = [leaf for leaf, _ in found]
    if len({id(leaf) for leaf in leaves}) < len(leaves):
        return None
    # Also those that got none: others average with us all the same.
    if wrappers_among([leaf for _, leaving in sends for leaf, _ in leaving]):
        return None
    return found


def _is_simple(leaf: Tensor, gradient: Tensor) -> bool:
    return (
        leaf._backward_hooks is None
        and leaf.grad_fn is None
        and leaf.requires_grad
        and gradient.shape == leaf.shape
        and gradient.dtype is leaf.dtype
        and gradient.layout is leaf.layout is torch.strided
        and ((gradient.is_cpu and leaf.is_cpu) or gradient.device == leaf.device)
    )
