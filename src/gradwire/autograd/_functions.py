"""Wire operations as autograd nodes, threaded by a token.

    send(tensors):  token = Send(tensors);           tail.append(token)
    recv(tensors):  tensors, token = Recv(*tail);    tail = [token]

`Send` waits, in backward, for the gradient of what was sent; `Recv` puts the gradient of
what was received on the wire and returns at once. The token makes every recv run before
every send that was recorded earlier on the same worker, and that is why nobody waits in
a circle: see docs/autograd.md. What a token holds does not matter, nor is it ever given
a gradient: the engine runs nodes also for undefined ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.autograd._torch_private import call_backward_directly, executes

if TYPE_CHECKING:
    from gradwire.autograd._nodes import ReceivedMessage, SentMessage

__all__ = [
    "ANCHOR",
    "ANCHOR_NODE",
    "CHAIN_END",
    "WIRE_NODES",
    "apply_forget",
    "apply_recv",
    "apply_send",
    "apply_start",
    "is_into_grad",
    "token_of",
    "urgency_of_reply",
    "urgency_of_request",
    "will_execute",
]

# Torch's own declarations of these methods are loose.
# mypy: disable-error-code="override,no-untyped-call"


ANCHOR = torch.zeros((), requires_grad=True)
"""The leaf at the end of all chains: it makes the engine take every wire node for needed,
also those that lead to no leaf of interest. It never gets a gradient."""
CHAIN_END = ANCHOR.view_as(ANCHOR)
"""What a chain begins with, as a token. Not the leaf itself: see `_context._send`."""
ANCHOR_NODE: Any = CHAIN_END.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
"""The node behind that leaf."""


_TOKEN = torch.zeros(())

# Of the nodes that are ready, the engine takes the one with the highest number, which
# elsewhere counts the nodes that a thread has made. What others wait for goes first
# (after accumulators, which have the highest of all). What makes us wait comes last, for
# meanwhile there may be something else to do; and of that, replies before requests, since
# gradients of replies come from where the loss is, and let us ship others, for which the
# workers that we have asked wait. The latest is waited for first, as it is answered first.
_FIRST = 2**64 - 2
_FIRST_REPLY = 1000  # low: most threads have made more nodes than that


def urgency_of_request(event: int) -> int:
    """The engine's number for the send of a request, by its place in its context."""
    return min(event, _FIRST_REPLY - 1)


def urgency_of_reply(arrival: int) -> int:
    """The engine's number for the send of a reply.

    Args:
        arrival: The place of its request among those that arrived. The worker that has
            sent them waits for them in that order, and not in the order of the replies.
    """
    return _FIRST_REPLY + arrival


_make_token = _TOKEN.detach  # costs less than memory of its own, which nobody needs


class Send(torch.autograd.Function):
    """A message left. Backward: wait for the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, message: SentMessage, *tensors: Tensor) -> Tensor:
        """Returns the token."""
        ctx.materialize_grads = False
        ctx._set_sequence_nr(message.urgency)
        ctx.message = message
        return _make_token()

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        """Called by the engine when nothing recorded later needs this thread."""
        return None, *ctx.message.await_gradients()


class Recv(torch.autograd.Function):
    """A message arrived. Backward: ship the gradients of its tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        message: ReceivedMessage,
        tensors: Sequence[Tensor],
        keeps_token: bool,
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns the same tensor objects, which get this node, and a token.

        The tensors come in a list, not as inputs: what the unpickled arguments refer to
        are these very objects.
        """
        # A missing gradient travels as a mark, not as zeros.
        ctx.materialize_grads = False
        ctx._set_sequence_nr(_FIRST)
        ctx.message, ctx.num_tokens = message, len(tokens)
        token = _make_token()
        if keeps_token:
            ctx.save_for_backward(token)
        return *tensors, token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Called by the engine once per pass, with the complete sums."""
        ctx.message.ship(gradients[:-1])
        count: int = ctx.num_tokens
        return (None,) * (3 + count)


class Forget(torch.autograd.Function):
    """A leaf that does not require grad any more. Backward: as in torch, it gets none."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, token: Tensor) -> Tensor:
        """Returns what goes into a `Send` in its place."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None]:
        """Whatever comes ends here."""
        return None, None


def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`Function.apply` without its care for ``torch.func``, where no call can be made.

    On the way back the engine, too, comes straight to ``backward``: torch would look each
    time whether the class has a ``vjp``, or wants its gradients in a list.
    """
    call_backward_directly(function)
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def token_of(node: Any) -> Tensor | None:
    """The token of a `Recv` that keeps it; None if the graph was freed behind it.

    A node cannot hold its own output, which holds the node; but torch lets it save one,
    and gives it its history back on the way out.
    """
    try:
        token: Tensor = node.saved_tensors[0]
    except RuntimeError:
        return None
    return token


def is_into_grad() -> bool:
    """Whether the backward that runs here, at a recv, adds to ``.grad``.

    Then it executes all nodes, so also the one behind all chains. Not so for
    ``autograd.grad`` and ``inputs=``. What torch itself says of that is not about the
    innermost backward of this thread.
    """
    try:
        return executes(ANCHOR_NODE)
    except RuntimeError:
        return (
            False  # it is a part of a pass that takes a gradient there: see `_engine`
        )


def will_execute(node: Any) -> bool:
    """Whether the backward that runs here executes a recv, sooner or later.

    Torch also says so of a node at which it only takes a gradient, as for
    ``autograd.grad(loss, received)``. Then it executes none of those behind it.
    """
    if not executes(node):
        return False
    if is_into_grad():
        return True
    behind = [following for following, _ in node.next_functions]
    return any(node is not None and executes(node) for node in behind)


class Start(torch.autograd.Function):
    """The one root of the starter's part of a pass: it runs before everything else."""

    @staticmethod
    def forward(
        ctx: Any,
        on_start: Callable[[], None],
        seeds: Sequence[Tensor],
        num_tokens: int,
        *roots_and_tokens: Tensor,
    ) -> Tensor:
        """Returns what to call backward on."""
        ctx.on_start, ctx.seeds, ctx.num_tokens = on_start, seeds, num_tokens
        return _make_token()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients with which the pass begins."""
        ctx.on_start()
        return None, None, None, *ctx.seeds, *[None] * ctx.num_tokens


apply_forget = _apply_of(Forget)
apply_send = _apply_of(Send)
apply_recv = _apply_of(Recv)
apply_start = _apply_of(Start)

WIRE_NODES = frozenset(
    function._backward_cls for function in (Forget, Send, Recv, Start)
)
"""The classes of all nodes that are ours."""


def _note_hooks(node_class: Any, name: str) -> None:
    """Makes a node tell its message that a program has put a hook on it."""
    register = getattr(node_class, name)

    def note_and_register(node: Any, hook: Callable[..., Any]) -> Any:
        node.message.is_hooked = True
        return register(node, hook)

    setattr(node_class, name, note_and_register)


_note_hooks(Recv._backward_cls, "register_hook")
_note_hooks(Recv._backward_cls, "register_prehook")
