"""One worker's part of a pass: one ordinary local backward.

Where the gradients of leaves go is the pass's destination:

    INTO_GRAD        ``.grad``, with all hooks, as ``loss.backward()``
    INTO_DICTIONARY  the context's dictionary; ``.grad`` stays as it is
    THROUGH          nowhere: they are only passed on, for ``torch.autograd.grad``
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradwire.autograd._averaged import set_aside, wrappers_among
from gradwire.autograd._functions import (
    ANCHOR,
    ANCHOR_NODE,
    WIRE_NODES,
    apply_start,
)
from gradwire.autograd._torch_private import record, run_engine

__all__ = [
    "Destination",
    "accumulate",
    "leaves_of",
    "run_backward",
    "run_up_to_recvs",
]


class Destination(IntEnum):
    """Where gradients of leaves go."""

    INTO_GRAD = 0
    INTO_DICTIONARY = 1
    THROUGH = 2


# The class of the nodes behind leaves, for which torch has no name.
_Accumulator: Any = type(ANCHOR_NODE)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SEED = torch.zeros(())  # the gradient of a token, which nobody looks at


def run_backward(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor],
    tail: Sequence[Tensor],
    destination: Destination,
    on_start: Callable[[], None],
    check: Callable[[], None],
    *,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
) -> list[tuple[Any, Tensor | None]]:
    """Runs the backward of this worker.

    Args:
        roots: Losses.
        seeds: Their gradients.
        tail: Tokens.
        destination: See above.
        on_start: Called by the engine before any code of the user's. Without losses the
            first node is one of ours, and it is not called.
        check: Called while it waits for another pass; raises to give up.
        retain_graph: As in torch.
        create_graph: As in torch.
        inputs: With ``THROUGH``: tensors whose gradients are wanted.

    Returns:
        Leaves or inputs, with their gradients; nothing for ``INTO_GRAD``.
    """
    begin = tuple(tail)
    if roots:
        begin = (record(apply_start, on_start, seeds, len(tail), *roots, *tail),)
    wanted = list(inputs)
    if destination is Destination.INTO_DICTIONARY:
        wanted = [leaf for leaf in leaves_of(begin) if leaf is not ANCHOR]
        if wrappers := wrappers_among(wanted):
            with set_aside(wanted, wrappers, check) as leaves:
                _run(begin, (), retain_graph, create_graph, is_into_grad=True)
                # Copies: wrappers may go on using the memory.
                return [(leaf, _copy(leaf.grad)) for leaf in leaves]
    is_into_grad = destination is Destination.INTO_GRAD
    gradients = _run(begin, wanted, retain_graph, create_graph, is_into_grad)
    return [] if is_into_grad else list(zip(wanted, gradients, strict=True))


def run_up_to_recvs(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], recvs: Sequence[Any]
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor | None, ...]] | None:
    """Runs the backward of a worker that has nothing to wait for, without our nodes.

    The engine takes the gradients where it would have come to a recv. Then it runs no
    code of ours, and all of them can be shipped at once.

    Args:
        roots: Losses.
        seeds: Their gradients.
        recvs: The nodes to stop at.

    Returns:
        Leaves with their gradients, and those of all tensors of the recvs, one recv after
        the other. None: there is more to it, and nothing was run.
    """
    ends = set(recvs)
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None, *nodes}
    for node in nodes:  # which grows meanwhile
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                if following not in ends:
                    nodes.append(following)
    kinds = set(map(type, nodes))
    if seen.isdisjoint(ends) or not kinds.isdisjoint(WIRE_NODES):
        return None
    wanted: list[Any] = [
        GradientEdge(node, output)
        for node in recvs
        for output in range(node.message.num_tensors)
    ]
    leaves: list[Tensor] = []
    if _Accumulator in kinds:
        leaves = [node.variable for node in nodes if type(node) is _Accumulator]
        if wrappers_among(leaves):
            return None
    try:
        gradients: tuple[Tensor | None, ...] = run_engine(
            tuple(roots),
            tuple(seeds),
            False,
            False,
            (*wanted, *leaves),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    except BaseException:
        _drain_engine()
        raise
    num = len(wanted)
    return list(zip(leaves, gradients[num:], strict=True)), gradients[:num]


def _run(
    begin: tuple[Tensor, ...],
    wanted: Sequence[Any],
    retain_graph: bool,
    create_graph: bool,
    is_into_grad: bool,
) -> Sequence[Tensor | None]:
    try:
        gradients: Sequence[Tensor | None] = run_engine(
            begin,
            (_SEED,) * len(begin),
            retain_graph or create_graph,
            create_graph,
            () if is_into_grad else (ANCHOR, *wanted),
            allow_unreachable=True,
            accumulate_grad=is_into_grad,
        )
    except BaseException:
        _drain_engine()
        raise
    return () if is_into_grad else gradients[1:]


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _drain_engine() -> None:
    """Makes the engine forget what a failed backward left in this thread's queue.

    It holds nodes, and by them graphs, until the next backward on the thread comes to
    them. So one runs whose only node is the last in the order of the queue: the first
    node that a thread ever makes.
    """
    made: list[Tensor] = []

    def make() -> None:
        with torch.enable_grad():
            made.append(torch.zeros((), requires_grad=True) * 1)

    thread = threading.Thread(target=make, name="gradwire-first-node")
    thread.start()
    thread.join()
    run_engine(
        tuple(made),
        (_SEED,),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def leaves_of(roots: Sequence[Tensor]) -> list[Tensor]:
    """All leaves of the graph behind some tensors; torch walks it too, but tells no one."""
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None, *nodes}
    for node in nodes:  # which grows meanwhile
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return [node.variable for node in nodes if type(node) is _Accumulator]


def accumulate(
    gradients: dict[Tensor, Tensor],
    new: Sequence[tuple[Tensor, Tensor | None]],
    *,
    create_graph: bool,
    are_apart: bool = False,
) -> None:
    """Adds gradients to a context's dictionary, as torch adds them to ``.grad``.

    A stored gradient shares its memory with nobody: torch may return one tensor as the
    gradient of two leaves, or keep it elsewhere.

    Args:
        gradients: The dictionary.
        new: Leaves, each of them once, and their gradients.
        create_graph: As in torch.
        are_apart: It is known that no two of them share memory.
    """
    # To look costs as much as the rest.
    is_any_shared = not are_apart and len(new) > 1
    shared = _shared_memory(new) if is_any_shared else frozenset()
    is_first = not gradients
    for leaf, gradient in new:
        if gradient is None:
            continue
        before = None if is_first else gradients.get(leaf)
        if before is not None:
            # Dense + sparse is defined, sparse + dense is not.
            is_swapped = before.is_sparse and not gradient.is_sparse
            pair = (gradient, before) if is_swapped else (before, gradient)
            with torch.set_grad_enabled(create_graph):
                gradients[leaf] = pair[0] + pair[1]
        elif create_graph:
            gradients[leaf] = gradient
        else:
            is_shared = bool(shared) and _memory_of(gradient) in shared
            gradients[leaf] = _own(gradient, leaf, is_shared)


def _shared_memory(new: Sequence[tuple[Tensor, Tensor | None]]) -> frozenset[int]:
    """Where gradients are that share memory with each other."""
    memory = [_memory_of(gradient) for _, gradient in new if gradient is not None]
    if len(set(memory)) == len(memory):
        return frozenset()
    return frozenset(place for place in memory if memory.count(place) > 1)


def _memory_of(gradient: Tensor) -> int:
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    elif gradient.layout in _COMPRESSED:
        gradient = gradient.values()
    elif gradient.layout is not torch.strided:
        return id(gradient)  # of mkldnn: nobody can look at its memory
    return gradient.untyped_storage().data_ptr()


def _own(gradient: Tensor, leaf: Tensor, is_shared: bool) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.detach()
        return gradient.clone() if is_shared else gradient
    if leaf.layout is not torch.strided:
        return gradient.detach().clone() if is_shared else gradient
    if leaf.is_contiguous():
        is_fit = gradient.is_contiguous()
    else:
        is_fit = gradient.stride() == leaf.stride()
    if is_fit and not is_shared:
        return gradient
    return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient.detach())
