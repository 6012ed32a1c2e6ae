"""One worker's part of a pass: one ordinary local backward.

Where the gradients of leaves go is the pass's destination:

    INTO_GRAD        ``.grad``, with all hooks, as ``loss.backward()``
    INTO_DICTIONARY  the context's dictionary; ``.grad`` stays as it is
    THROUGH          nowhere: they are only passed on, for ``torch.autograd.grad``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd._functions import Start
from gradwire.autograd._torch_private import recording

__all__ = ["Destination", "accumulate", "run_backward"]


class Destination(IntEnum):
    """Where gradients of leaves go."""

    INTO_GRAD = 0
    INTO_DICTIONARY = 1
    THROUGH = 2


def run_backward(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    destination: Destination,
    anchor: Tensor,
    on_start: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
) -> list[tuple[Any, Tensor | None]]:
    """Runs the backward of this worker.

    Args:
        roots: What to begin with: losses and tokens.
        seeds: Their gradients; None for tokens.
        destination: See above.
        anchor: The leaf at the end of the chain: it makes the engine take every wire
            node for needed, also those that lead to no leaf of interest.
        on_start: Called by the engine before any other node runs.
        retain_graph: As in torch.
        create_graph: As in torch.
        inputs: With ``THROUGH``: tensors whose gradients are wanted.

    Returns:
        Leaves or inputs, with their gradients; nothing for ``INTO_GRAD``.
    """
    with recording():
        start: Tensor = Start.apply(on_start, seeds, *roots)  # type: ignore[no-untyped-call]
    retain = retain_graph or create_graph
    if destination is Destination.INTO_GRAD:
        torch.autograd.backward(start, retain_graph=retain, create_graph=create_graph)
        return []
    wanted: list[Any] = list(inputs)
    if destination is Destination.INTO_DICTIONARY:
        wanted = [leaf for leaf in _leaves(start.grad_fn) if leaf is not anchor]
    _, *gradients = torch.autograd.grad(
        start,
        [anchor, *wanted],
        retain_graph=retain,
        create_graph=create_graph,
        allow_unused=True,
    )
    return list(zip(wanted, gradients, strict=True))


def _leaves(root: Any) -> list[Tensor]:
    """All leaves of the graph behind a node; torch walks it in C++, but tells no one."""
    seen = {root}
    stack = [root]
    pop, push, add = stack.pop, stack.append, seen.add
    while stack:
        for node, _ in pop().next_functions:
            if node is not None and node not in seen:
                add(node)
                push(node)
    return [node.variable for node in seen if hasattr(node, "variable")]


def accumulate(
    gradients: dict[Tensor, Tensor],
    new: Sequence[tuple[Tensor, Tensor | None]],
    *,
    create_graph: bool,
) -> None:
    """Adds gradients to a context's dictionary, as torch adds them to ``.grad``.

    A stored gradient shares its memory with nobody: torch may return one tensor as the
    gradient of two leaves, or keep it elsewhere.
    """
    taken: set[int] = set()
    with torch.set_grad_enabled(create_graph):
        for leaf, gradient in new:
            if gradient is None:
                continue
            before = gradients.get(leaf)
            if before is not None:
                # Dense + sparse is defined, sparse + dense is not.
                if before.is_sparse and not gradient.is_sparse:
                    before, gradient = gradient, before
                gradients[leaf] = before + gradient
            else:
                gradients[leaf] = (
                    gradient if create_graph else _own(gradient, leaf, taken)
                )


def _own(gradient: Tensor, leaf: Tensor, taken: set[int]) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.detach()
    memory = gradient.untyped_storage().data_ptr()
    is_shared = memory in taken
    taken.add(memory)
    if leaf.layout is torch.strided and leaf.is_contiguous():
        is_fit = gradient.is_contiguous()
    else:
        is_fit = gradient.stride() == leaf.stride()
    if is_fit and not is_shared:
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
