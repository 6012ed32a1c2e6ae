"""The functions that users call; thin."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from gradwire.autograd._context import Side, active_context
from gradwire.autograd._engine import Destination
from gradwire.autograd._exchange import Exchange
from gradwire.autograd._explicit import backward as run_pass
from gradwire.autograd._messages import opener_of
from gradwire.autograd._recorder import Recorder
from gradwire.errors import UsageError
from gradwire.rpc.extension import current_agent, serving_agent, shielded

__all__ = [
    "Context",
    "backward",
    "context",
    "current_exchange",
    "get_debug_info",
    "get_gradients",
    "grad",
    "is_available",
]


class Context(int):
    """An autograd context: its id, which is an int as in torch, and what to do with it.

    `context` makes them. Sent to another worker it arrives as the same context.

    Example:
        >>> with context() as ctx:
        ...     isinstance(ctx, int)
        True
    """

    def backward(
        self,
        roots: Tensor | Sequence[Tensor],
        retain_graph: bool = False,
        create_graph: bool = False,
        *,
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        timeout: float = 0,
    ) -> None:
        """See `gradwire.autograd.backward`."""
        backward(
            self,
            roots,
            retain_graph,
            create_graph,
            grad_tensors=grad_tensors,
            timeout=timeout,
        )

    def gradients(self) -> dict[Tensor, Tensor]:
        """See `gradwire.autograd.get_gradients`."""
        return get_gradients(self)

    def __repr__(self) -> str:
        return f"<autograd context {int(self)}, opened by rank {opener_of(self)}>"

    def __str__(self) -> str:
        return str(int(self))

    def __reduce__(self) -> Any:
        return Context, (int(self),)


class context:
    """Joins all calls that are made inside a ``with`` block into one graph.

    No context is needed for ``loss.backward()`` to work: see the documentation for what
    it adds. Leaving the block frees graphs and gradients on every worker.

    Args:
        accumulate: Where `backward` puts gradients: ``"dict"``: a dictionary of this
            context, see `get_gradients`; ``"grad"``: ``.grad`` of the leaves.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     loss = rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        ...     ctx.backward(loss)
        ...     ctx.gradients()[x], x.grad
        (tensor([3., 3.]), None)
    """

    def __init__(self, *, accumulate: Literal["dict", "grad"] = "dict") -> None:
        if accumulate not in ("dict", "grad"):
            raise ValueError(
                f'accumulate must be "dict" or "grad", found {accumulate!r}'
            )
        self._into_grad = accumulate == "grad"
        self._opened: tuple[Exchange, Side] | None = None

    def __enter__(self) -> Context:
        """Opens the context and makes it the current one."""
        if self._opened is not None:
            raise UsageError("this context is open already; call context() for another")
        exchange = current_exchange()
        if self._into_grad:
            check_repeatable(exchange, "context(accumulate='grad')")
        try:
            with shielded():  # what is open must be released
                side = exchange.registry.open(self._into_grad, active_context.get())
                self._opened = exchange, side
                active_context.set(side.name)
            context = Context(side.name.key)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return context

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases the context on every worker that took part in it."""
        try:
            self._release()
        except BaseException:  # a signal handler raised, perhaps before it was put off
            self._release()
            raise

    def _release(self) -> None:
        with shielded():
            if self._opened is None:
                return
            (exchange, side), self._opened = self._opened, None
            # Another one may be, if they are left in another order, or by another thread.
            if active_context.get() == side.name:
                outer = side.around
                active_context.set(
                    exchange.registry.innermost(outer) if outer else None
                )
            exchange.releases.release(side)


def backward(
    context_id: int,
    roots: Tensor | Sequence[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
    *,
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    timeout: float = 0,
) -> None:
    """Runs a backward pass over a whole context, on all workers that took part in it.

    Without ``retain_graph`` the whole context is consumed, also what the roots do not
    reach: another forward may follow, but not another backward over the same graph.

    Args:
        context_id: What `context` gave, or its id.
        roots: Scalars on this worker, or tensors of any shape with ``grad_tensors``.
        retain_graph: Keep the graph for another pass.
        create_graph: Gradients can be differentiated themselves.
        grad_tensors: Gradients of the roots; None for a scalar.
        timeout: Limit for the pass in seconds; 0: as long as all its workers live.

    Raises:
        UnknownContext: This worker has not taken part in such a context.
        GraphConsumed: An earlier pass has used up the graph.
        BackwardTimeout: The limit came first.
        Exception: What a backward function raised, on whichever worker, with that
            worker's name and traceback.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     loss = rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        ...     backward(ctx, [loss])
        ...     get_gradients(ctx)[x]
        tensor([3., 3.])
    """
    exchange = current_exchange()
    side = exchange.registry.get(_id_of(context_id))
    tensors, seeds = _check_roots(roots, grad_tensors, "roots", "grad_tensors")
    if grad_tensors is not None:
        # One may become the gradient of a leaf, and that is not to share its memory.
        seeds = [seed.clone() for seed in seeds]
    destination = (
        Destination.INTO_GRAD if side.into_grad else Destination.INTO_DICTIONARY
    )
    run_pass(
        exchange,
        side,
        tensors,
        seeds,
        destination,
        retain=retain_graph,
        create_graph=create_graph,
        timeout_s=_check_timeout(timeout),
    )


def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    *,
    materialize_grads: bool = False,
    timeout: float = 0,
) -> tuple[Tensor | None, ...]:
    """Gradients of outputs with respect to inputs, both on this worker.

    As ``torch.autograd.grad``, through the calls of a context. Neither the context's
    dictionary nor any ``.grad`` changes, on no worker.

    Args:
        context_id: What `context` gave, or its id.
        outputs: Scalars, or tensors of any shape with ``grad_outputs``.
        inputs: Tensors on this worker that the outputs depend on.
        grad_outputs: Gradients of the outputs; None for a scalar.
        retain_graph: Keep the graph for another pass; by default as ``create_graph``.
        create_graph: The result can be differentiated itself.
        allow_unused: An input that the outputs do not depend on is no error: its
            gradient is None. By default as ``materialize_grads``.
        materialize_grads: Zeros instead of None.
        timeout: See `backward`.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     loss = rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        ...     grad(ctx, loss, x)
        (tensor([3., 3.]),)
    """
    exchange = current_exchange()
    side = exchange.registry.get(_id_of(context_id))
    tensors, seeds = _check_roots(outputs, grad_outputs, "outputs", "grad_outputs")
    if not isinstance(inputs, (Tensor, Iterable)):
        raise TypeError(f"inputs must be tensors, found {type(inputs).__name__}")
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not wanted:
        raise ValueError("grad needs at least one input")
    for number, tensor in enumerate(wanted):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"inputs must be tensors, found {type(tensor).__name__} at {number}"
            )
        if not tensor.requires_grad:
            raise UsageError(f"input {number} does not require grad")
    found = run_pass(
        exchange,
        side,
        tensors,
        seeds,
        Destination.THROUGH,
        retain=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
        inputs=wanted,
        timeout_s=_check_timeout(timeout),
    )
    gradients = [gradient for _, gradient in found]
    if materialize_grads:
        gradients = [
            torch.zeros_like(t, requires_grad=create_graph) if g is None else g
            for t, g in zip(wanted, gradients, strict=True)
        ]
    elif not allow_unused and any(g is None for g in gradients):
        number = next(i for i, g in enumerate(gradients) if g is None)
        raise UsageError(
            f"input {number} was not used in the graph; set allow_unused=True if that is "
            "what you want"
        )
    return tuple(gradients)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that passes of a context have collected on this worker.

    Args:
        context_id: What `context` gave, or its id.

    Returns:
        Gradients by leaf; the keys are the very tensors that the forward used.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     ctx.backward(rpc_sync("worker1", torch.mul, args=(x, 3)).sum())
        ...     get_gradients(ctx)[x]
        tensor([3., 3.])
    """
    side = current_exchange().registry.get(_id_of(context_id))
    with side.lock:
        return dict(side.gradients)


def get_debug_info() -> dict[str, Any]:
    """Counts of what there is on this worker; all are zero when nothing is going on.

    ``contexts``, ``sends``, ``recvs``, ``passes``; and, as
    ``released_contexts_kept_alive``, contexts that are over but whose graph is still
    held by a tensor that the program keeps.

    Example:
        >>> with context() as ctx:
        ...     get_debug_info()["contexts"]
        1
    """
    return current_exchange().counts()


def is_available() -> bool:
    """Always true; for code that was written for torch.

    Example:
        >>> is_available()
        True
    """
    return True


def current_exchange() -> Exchange:
    """That of the agent that serves the current handler, or of the process."""
    agent = serving_agent.get() or current_agent()
    recorder = agent.layers.get(Recorder)
    if recorder is None:
        raise UsageError(
            "gradwire.autograd was imported after init_rpc(); import it before"
        )
    exchange: Exchange = recorder.exchange
    return exchange


def check_repeatable(exchange: Exchange, what: str) -> None:
    """Raises if a step around this code may be run again: ``.grad`` cannot be undone."""
    name = active_context.get()
    side = None if name is None else exchange.registry.find(name)
    if side is not None and side.attempt is not None:
        raise UsageError(
            f"{what} works on .grad, and what is there cannot be taken back if the step "
            "has to be run again. Inside of retry() use its context: ctx.backward(loss), "
            "optimizer.step(ctx)"
        )


def _id_of(context_id: int) -> int:
    if type(context_id) is Context:
        return context_id
    if type(context_id) is bool or not hasattr(context_id, "__index__"):
        raise TypeError(
            "expected a context, which `with gradwire.autograd.context() as ctx` gives, or "
            f"its id, an int; found {type(context_id).__name__}. Without a context call "
            "loss.backward()"
        )
    return operator.index(context_id)


def _check_timeout(timeout: float) -> float:
    if type(timeout) is bool or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a number of seconds, not {type(timeout).__name__}"
        )
    if not timeout >= 0:  # written so that it also refuses NaN
        raise ValueError(f"timeout must be at least 0 seconds, found {timeout!r}")
    return timeout


def _check_roots(
    roots: Tensor | Sequence[Tensor],
    seeds: Tensor | Sequence[Tensor | None] | None,
    what: str,
    what_seeds: str,
) -> tuple[list[Tensor], list[Tensor]]:
    if not isinstance(roots, (Tensor, list, tuple, Iterable)):  # abstract costs most
        raise TypeError(f"{what} must be tensors, found {type(roots).__name__}")
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    if not tensors:
        raise UsageError(
            f"No tensors provided for gradient computation: {what} is empty"
        )
    given: list[Tensor | None] = [None] * len(tensors)
    if seeds is not None:
        if not isinstance(seeds, (Tensor, Iterable)):
            raise TypeError(
                f"{what_seeds} must be tensors, found {type(seeds).__name__}"
            )
        given = [seeds] if isinstance(seeds, Tensor) else list(seeds)
        if len(given) != len(tensors):
            raise ValueError(
                f"{what_seeds} has {len(given)} entries for {len(tensors)} {what}"
            )
    checked: list[Tensor] = []
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{what} must be tensors, found {type(tensor).__name__} at {number}"
            )
        checked.append(_check_root(tensor, given[number], number, what, what_seeds))
    return tensors, checked


def _check_root(
    tensor: Tensor, seed: Tensor | None, number: int, what: str, what_seeds: str
) -> Tensor:
    if (
        seed is None
        and tensor.grad_fn is not None
        and tensor.numel() == 1
        and not tensor.is_complex()
    ):
        return torch.ones_like(tensor)  # another one for each pass: see `backward`
    name = f"entry {number} of {what}"
    if not tensor.requires_grad:
        raise UsageError(
            f"requires_grad not set on root: {name} has no graph; was it made under "
            "no_grad, or detached?"
        )
    if seed is None:
        if tensor.is_complex():
            raise UsageError(
                f"{name} is complex: a gradient of 1 is made up for real scalars only. "
                f"Take a real loss, or pass {what_seeds}="
            )
        if tensor.numel() != 1:
            raise UsageError(
                f"{name}, of shape {tuple(tensor.shape)}, is not a scalar, all roots need "
                f"to be scalar, or be given gradients with {what_seeds}="
            )
    elif not isinstance(seed, Tensor):
        raise TypeError(
            f"{what_seeds} must be tensors, found {type(seed).__name__} at {number}"
        )
    elif seed.is_complex() != tensor.is_complex():
        raise ValueError(
            f"{name} has the dtype {tensor.dtype}, its entry of {what_seeds} {seed.dtype}: "
            "both must be complex, or none"
        )
    elif seed.shape != tensor.shape:
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, its entry of {what_seeds} "
            f"{tuple(seed.shape)}"
        )
    if seed is None or tensor.grad_fn is None:
        raise UsageError(
            f"{name} does not have a valid gradient function: it is a leaf, so there is "
            "nothing to differentiate"
        )
    return seed
