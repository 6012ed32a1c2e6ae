"""What ``torch.distributed.autograd`` is while the drop-in is installed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

import gradwire.autograd
from gradwire.errors import GradwireError, NoActiveContext, RemoteError, UsageError
from gradwire.torch_compat import _core
from gradwire.torch_compat._errors import as_torch_error

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]

_MAX_RANK = 0xFFFF
_COUNTERS = 1 << 48


def is_available() -> bool:
    """Always true."""
    return True


class DistAutogradContext:
    """One worker's view of a context."""

    def __init__(self, context_id: int) -> None:
        self._id = context_id

    def _context_id(self) -> int:
        return self._id

    def _send_functions(self) -> dict[int, Any]:
        """Messages that have left in this context, in their order, as graph nodes."""
        return _core.inspect_context(self._id).sends

    def _recv_functions(self) -> dict[int, Any]:
        """Messages that have arrived in this context, in their order, as graph nodes."""
        return _core.inspect_context(self._id).recvs

    def _known_worker_ids(self) -> set[int]:
        """Ranks of the workers that this one has exchanged messages with."""
        return _core.inspect_context(self._id).peers


class context:
    """Joins all calls inside a ``with`` block into one graph.

    Example:
        >>> with context() as context_id:
        ...     loss = rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
        ...     backward(context_id, [loss])
    """

    def __enter__(self) -> int:
        """Opens a context; its id is what `backward` takes."""
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases the context on all workers."""
        _release_context(self.autograd_context._context_id())


def backward(
    context_id: int, roots: Sequence[Tensor], retain_graph: bool = False
) -> None:
    """Runs a backward pass over a context; gradients go to its dictionaries."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError(
            "backward(): incompatible function arguments. Expected the id of a context "
            f"and a list of tensors, found {type(context_id).__name__} and "
            f"{type(roots).__name__}"
        )
    try:
        with _profiled():
            gradwire.autograd.backward(context_id, roots, retain_graph)
    except Exception as error:
        raise as_torch_error(error, _place_of(error)) from error.__cause__


def _place_of(error: Exception) -> str:
    """Torch's words for where a backward function failed."""
    if isinstance(error, GradwireError) and not isinstance(error, RemoteError):
        return ""
    agent = _core.current_agent()
    worker = getattr(error, "worker", None) or agent.info.name
    return f"Error on Node {_core.find_worker(agent, worker).id}"


def _profiled() -> AbstractContextManager[Any]:
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.autograd.profiler.record_function(
            "torch::distributed::autograd::backward"
        )
    return nullcontext()


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Gradients of a context on this worker, by leaf."""
    return gradwire.autograd.get_gradients(context_id)


def _init(worker_id: int) -> None:
    """Checks the rank of a worker that is about to start."""
    if not 0 <= worker_id <= _MAX_RANK:
        raise UsageError(f"worker_id needs to be in the range 0 to {_MAX_RANK}")


def _new_context() -> DistAutogradContext:
    """Opens a context and makes it the current one of this thread."""
    if _core.current_context() is not None:
        raise UsageError(
            "Already have an autograd context id for this thread: contexts do not nest"
        )
    return DistAutogradContext(_core.open_context())


def _release_context(context_id: int) -> None:
    """Ends a context on all workers."""
    _core.release_context(context_id)


def _current_context() -> DistAutogradContext:
    """The context of this thread."""
    context_id = _core.current_context()
    if context_id is None:
        raise NoActiveContext(
            "Current thread doesn't have a valid autograd context. Please wrap your code "
            "using: `with torch.distributed.autograd.context() as context_id`"
        )
    return _retrieve_context(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """A context that this worker takes part in, by id."""
    _core.inspect_context(context_id)
    return DistAutogradContext(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raises if this worker takes no part in such a context."""
    _core.inspect_context(context_id)


def _get_max_id() -> int:
    """The largest id that contexts of this worker can have."""
    return (_core.current_agent().info.id + 1) * _COUNTERS - 1


def _get_debug_info() -> dict[str, int]:
    """Counts of contexts and passes on this worker."""
    counts = gradwire.autograd.get_debug_info()
    return {
        "num_current_backward_passes": counts["passes"],
        "num_autograd_contexts": counts["contexts"],
    }
