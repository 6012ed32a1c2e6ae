"""A picture of a distributed graph, for people."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.autograd._outline import gather
from gradwire.autograd._picture import has_messages, render
from gradwire.errors import UsageError

__all__ = ["draw"]


def draw(roots: Tensor | Sequence[Tensor], *, title: str = "") -> str:
    """Draws the graph that has led to some tensors, on all workers, as an SVG picture.

    Workers are boxes, messages are arrows between them: forward with the shapes of their
    tensors, and back for the gradients. Time runs downwards. In each box is what was
    computed for a message: kinds of operations with their numbers, and how many leaves,
    mostly parameters, they used. The other workers are asked for their parts; no value of
    a tensor leaves them.

    Args:
        roots: The loss, or several tensors of this worker; before their backward, which
            frees the graph.
        title: What to write above the picture.

    Returns:
        The text of an SVG file.

    Raises:
        UsageError: There is no call in the graph.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> loss = rpc_sync("worker1", torch.exp, args=(x,)).sum()
        >>> draw(loss)  # to be written to a file
        '<svg ...
        >>> loss.backward()
    """
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"roots must be tensors, found {type(tensor).__name__} at {number}"
            )
    parts = gather(tensors)
    if not has_messages(parts):
        raise UsageError(
            "there is no call in the graph of these tensors, so there is nothing to draw. "
            "Was a backward run through it already? That frees the graph: draw it before"
        )
    return render(parts, title)
