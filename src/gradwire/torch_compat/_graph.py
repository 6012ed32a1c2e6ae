"""The messages of a context as nodes of an autograd graph, as torch shows them.

Ours differ from torch's in two points, which are hidden here: leaves are behind a node
that makes an alias, and messages of a worker hang together by tokens, see
``gradwire.autograd._functions``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gradwire.autograd._functions import Recv, Send

__all__ = ["find_messages", "use_torch_names"]

_RECV = "torch::distributed::autograd::RecvRpcBackward"
_SEND = "torch::distributed::autograd::SendRpcBackward"


def use_torch_names() -> None:
    """Messages show up in profiles of backward passes under torch's names."""
    for function, name in ((Send, _SEND), (Recv, _RECV)):
        function._backward_cls.__name__ = name.rpartition(":")[2]


class NodeView:
    """A node of a graph, whose edges lead where torch's would.

    Equal to the node itself, and to other views of it.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    def name(self) -> str:
        """What torch calls such a node."""
        if _is_of(self._node, Recv):
            return _RECV
        if _is_of(self._node, Send):
            return _SEND
        name: str = self._node.name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[NodeView | None, int], ...]:
        """Where gradients go from here."""
        if _is_of(self._node, Recv):
            return ()
        edges = [_skip_alias(*edge) for edge in self._node.next_functions]
        return tuple(
            (None if node is None else NodeView(node), number) for node, number in edges
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, NodeView) else other)

    def __hash__(self) -> int:
        return hash(self._node)


def _skip_alias(node: Any, number: int) -> tuple[Any, int]:
    if node is not None and node.name() == "AliasBackward0":
        following, its_number = node.next_functions[0]
        if following is not None and following.name().endswith("AccumulateGrad"):
            return following, its_number
    return node, number


def _is_of(node: Any, function: type) -> bool:
    return type(node) is function._backward_cls  # type: ignore[attr-defined]


def find_messages(
    tail: Iterable[Tensor],
) -> tuple[dict[int, NodeView], dict[int, NodeView]]:
    """The sends and the recvs that a chain of messages consists of, by number."""
    sends: dict[int, Any] = {}
    recvs: dict[int, Any] = {}
    waiting = [token.grad_fn for token in tail]
    while waiting:
        node: Any = waiting.pop()
        if _is_of(node, Send):
            sends[node.message.event] = node
        elif _is_of(node, Recv) and node.message.event not in recvs:
            recvs[node.message.event] = node
            waiting.extend(following for following, _ in node.next_functions)
    return _in_order(sends), _in_order(recvs)


def _in_order(nodes: dict[int, Any]) -> dict[int, NodeView]:
    return {number: NodeView(nodes[number]) for number in sorted(nodes)}
