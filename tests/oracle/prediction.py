"""What a graph says beforehand about a backward pass, without running it.

*Exactness.* A sum of two numbers does not depend on their order, a sum of three does. A
gradient is the same to the last bit, in whichever order nodes run, if no tensor on the
way to it gets more than two contributions.

*Zeros for None.* A pass runs what is behind every message, also where no gradient comes.
A Function that materialises makes zeros there, so that leaves behind it get zeros, and
hooks see them, where a single process leaves both alone. `flow` follows gradients through
the graph of the single process, in which each transfer of a tensor is a node: with
``messages`` the way that passes do it, without them the way that one process does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from oracle.operations import MATERIALISING_NODE

Edge: TypeAlias = tuple[Any, int]
"""A node and the number of one of its inputs: where the gradient of a tensor goes."""


def edge_of(tensor: Tensor) -> Edge:
    node, number, *_ = get_gradient_edge(tensor)
    return node, number


# ---------------------------------------------------------------------------- exactness


class Exactness:
    """Which gradients of a pass do not depend on the order of additions."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        starts = [edge_of(root) for root in roots]
        order = _in_order([node for node, _ in starts])
        self._counts: dict[Edge, int] = {}
        for edge in starts:
            self._counts[edge] = self._counts.get(edge, 0) + 1
        for node in order:
            for edge in node.next_functions:
                self._counts[edge] = self._counts.get(edge, 0) + 1
        crowded = {node for (node, _), count in self._counts.items() if count > 2}
        # Nodes that get a gradient which is not exact.
        self._inexact: set[Any] = set()
        for node in order:
            if node in self._inexact or node in crowded:
                self._inexact.update(n for n, _ in node.next_functions)

    def count(self, tensor: Tensor) -> int:
        """How many contributions the gradient of a tensor has."""
        return self._counts.get(edge_of(tensor), 0)

    def holds_for(self, tensor: Tensor) -> bool:
        """Whether the gradient of a tensor is exact."""
        edge = edge_of(tensor)
        return edge[0] not in self._inexact and self._counts.get(edge, 0) <= 2


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """All nodes, each before those that it gives gradients to."""
    seen: set[Any] = set()
    done: list[Any] = []
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                done.append(node)
            elif node is not None and node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(n, False) for n, _ in node.next_functions]
    return done[::-1]


# ----------------------------------------------------------------------- zeros for None


@dataclass(eq=False)
class Transfer:
    """A message as the single process has it: tensors, and their copies.

    Attributes:
        call: Whose message it is.
        kind: What it brings.
        sources: Edges of what was sent.
        copies: Nodes of the copies.
        sent: When it left, counted in events of the sender.
        received: When it arrived, counted in events of the receiver.
    """

    call: int
    kind: Literal["arguments", "results"]
    sender: int
    receiver: int
    sources: list[Edge]
    copies: list[Any]
    sent: int
    received: int


@dataclass(frozen=True)
class Messages:
    """Which messages a pass meets, and in what way.

    Attributes:
        transfers: All of them.
        joined: They belong to one context, and the pass covers it; otherwise each call
            is a context of its own.
        plain_on: Worker whose part of the pass is a plain backward: there only what is
            reached runs.
    """

    transfers: Sequence[Transfer]
    joined: bool
    plain_on: int | None = None


def flow(roots: Iterable[Tensor], messages: Messages | None) -> set[Edge]:
    """The edges over which a gradient comes, be it of zeros."""
    return _Flow(messages).run([edge_of(root) for root in roots])


class _Flow:
    def __init__(self, messages: Messages | None) -> None:
        self._messages = messages
        transfers = messages.transfers if messages else ()
        self._of_copy = {copy: t for t in transfers for copy in t.copies}
        self._arguments = {t.call: t for t in transfers if t.kind == "arguments"}
        # All of these only grow, so that the order of steps does not matter.
        self._run: set[Any] = set()
        self._fed: set[Any] = set()
        self._defined: set[Edge] = set()
        self._answered: set[Transfer] = set()
        self._work: list[Any] = []

    def run(self, roots: list[Edge]) -> set[Edge]:
        messages = self._messages
        if messages is not None and messages.joined:
            for transfer in self._covered([node for node, _ in roots]):
                self._answer(transfer)
        for edge in roots:
            self._reach(edge, True)
        while self._work:
            self._visit(self._work.pop())
        return self._defined

    def _covered(self, nodes: list[Any]) -> list[Transfer]:
        """The messages of a context whose sends run."""
        assert self._messages is not None
        starter = self._messages.plain_on
        transfers = list(self._messages.transfers)
        if starter is None:
            return transfers
        last = -1
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            transfer = self._of_copy.get(node)
            if transfer is None:
                nodes += [n for n, _ in node.next_functions]
            else:
                last = max(last, transfer.received)
        if last < 0:
            return []  # no pass at all
        return [t for t in transfers if t.sender != starter or t.sent < last]

    def _reach(self, edge: Edge, is_defined: bool) -> None:
        node = edge[0]
        if node is None:
            return
        if node not in self._run or (is_defined and edge not in self._defined):
            self._run.add(node)
            if is_defined:
                self._defined.add(edge)
                self._fed.add(node)
            self._work.append(node)

    def _visit(self, node: Any) -> None:
        transfer = self._of_copy.get(node)
        if transfer is not None:
            self._visit_copy(transfer)
            return
        has_gradient = node in self._fed or node.name() == MATERIALISING_NODE
        for edge in node.next_functions:
            self._reach(edge, has_gradient)

    def _visit_copy(self, transfer: Transfer) -> None:
        assert self._messages is not None
        if self._messages.joined:
            if transfer in self._answered:
                self._answer(transfer)
            return
        if transfer.kind == "arguments":
            self._answer(transfer)
            return
        # The reply of a call that is a context of its own: with a gradient it starts a
        # pass over the call. The sends before it on this worker run in any case, which
        # are all of them if the worker has called itself.
        has_gradient = any((copy, 0) in self._defined for copy in transfer.copies)
        if has_gradient or transfer.sender == transfer.receiver:
            self._answer(transfer)
        arguments = self._arguments.get(transfer.call)
        if arguments is not None:
            self._answer(arguments)

    def _answer(self, transfer: Transfer) -> None:
        """The send of a message runs, with what has come for each of its tensors."""
        self._answered.add(transfer)
        for source, copy in zip(transfer.sources, transfer.copies, strict=True):
            self._reach(source, (copy, 0) in self._defined)
