"""Clipping by the norm of all gradients, wherever they are: two rounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.optim._gradients import check_context, find_gradients
from gradwire.optim._owners import ask_all, call_of
from gradwire.optim._references import check_references, values_of
from gradwire.rpc import RRef
from gradwire.rpc.extension import for_agents

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    context_id: int | None,
    params_rref: Iterable[RRef[Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients down so that the norm of all of them is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, for parameters of any workers: the norms of
    single gradients are fetched, and the factor is sent. To the last bit, if all
    gradients have one dtype; torch adds up those of each dtype together.

    Args:
        context_id: The context whose gradients are meant; None: ``.grad``.
        params_rref: References to parameters.
        max_norm: Limit for the norm.
        norm_type: Its order; may be ``inf``.
        error_if_nonfinite: Raise if the norm is infinite or not a number.

    Returns:
        The norm as it was before.

    Raises:
        UnknownContext: There is no such context.
        OwnersFailed: More than one owner failed; the error of the only one otherwise.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with context() as ctx:
        ...     ctx.backward((weight * torch.tensor([3.0, 4.0])).sum())
        ...     norm = clip_grad_norm_(ctx, [RRef(weight)], max_norm=1.0)
        ...     norm, ctx.gradients()[weight]
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    source = check_context(context_id)
    rrefs = check_references(list(params_rref))
    limit, order = float(max_norm), float(norm_type)
    by_owner: dict[str, list[int]] = {}
    for position, rref in enumerate(rrefs):
        by_owner.setdefault(rref.owner_name(), []).append(position)
    shares = {
        owner: [rrefs[position] for position in positions]
        for owner, positions in by_owner.items()
    }
    answers = ask_all(
        call_of(owner, measure, source, share, order) for owner, share in shares.items()
    )
    found: list[int] = []
    norms: list[Tensor] = []
    for positions, answer in zip(by_owner.values(), answers, strict=True):
        if answer is not None:
            places, values = answer
            found += [positions[place] for place in places]
            norms.append(values)
    if not norms:
        return torch.tensor(0.0)
    # In the order of the parameters: the last bits of a sum depend on it.
    in_order = torch.cat(norms)[torch.tensor(found).argsort()]
    total: Tensor = torch.linalg.vector_norm(in_order, order)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {order} of the gradients is {total.item()}, so they were "
            "not clipped; set error_if_nonfinite=False to scale them all the same"
        )
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    if factor.item() != 1.0:
        ask_all(
            call_of(owner, scale, source, share, factor)
            for owner, share in shares.items()
        )
    return total


# -------------------------------------------------------------- what runs on the owner


@for_agents
@torch.no_grad()
def measure(
    context_id: int | None, rrefs: list[RRef[Tensor]], order: float
) -> tuple[list[int], Tensor] | None:
    """Which of the parameters have gradients, and the norms of these."""
    gradients = find_gradients(context_id, values_of(rrefs))
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    norms = [
        torch.linalg.vector_norm(gradient, order).cpu()
        for gradient in gradients
        if gradient is not None
    ]
    return (places, torch.stack(norms)) if norms else None


@for_agents
@torch.no_grad()
def scale(context_id: int | None, rrefs: list[RRef[Tensor]], factor: Tensor) -> None:
    """Multiplies the gradients of parameters."""
    for gradient in find_gradients(context_id, values_of(rrefs)):
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
