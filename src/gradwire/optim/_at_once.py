"""Steps of torch's SGD for all parameters of a group together.

Torch's own goes from parameter to parameter in Python, and takes several steps at each: for
the small parameters that many owners have, that is several times the arithmetic. Here each
operation is one call for all of them. For each parameter they are the same operations with
the same numbers, so every bit of the result is the same, but for those of a NaN. They are
made on the parameters themselves: stand-ins (see `gradwire.optim._local`) are for who looks
for ``.grad``.

Whatever is unusual is left to torch: other classes, hooks, a profiler that listens, numbers in
tensors, ``foreach`` and the like, a parameter without a gradient or with one that does not
fit, layouts and classes of tensors, shared memory where the order would matter, the first
step with momentum, which makes its buffers, and momentum of halves and complex numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from gradwire.optim._torch_private import Foreach, in_grad_mode, is_plain_sgd
from gradwire.wire import any_overlap

__all__ = ["step_at_once"]

_TENSOR, _NUMBER = frozenset((Tensor,)), frozenset((float, int))
_PARAMETER = frozenset((Tensor, torch.nn.Parameter))
_DENSE = frozenset((torch.strided,))
# Halves are multiplied by a number that was rounded to a half, if they are in a list, and
# NaNs in complex numbers come out with other signs.
_MULTIPLIED = frozenset((torch.float32, torch.float64))
_shape_of, _layout_of = attrgetter("shape"), attrgetter("layout")
_dtype_of = attrgetter("dtype")
_numbers_of = itemgetter("lr", "momentum", "dampening", "weight_decay")
_variants_of = itemgetter("foreach", "fused", "differentiable")


def step_at_once(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> bool:
    """Makes a step, if it is one of those described above; else does nothing.

    Args:
        optimizer: Has stand-ins of the parameters.
        parameters: What to change.
        gradients: Of each.

    Returns:
        Whether it was made.
    """
    if not is_plain_sgd(optimizer):
        return False
    updates: list[_Update] = []
    start = 0
    for group in optimizer.param_groups:
        end = start + len(group["params"])
        update = _plan(
            group, parameters[start:end], gradients[start:end], optimizer.state
        )
        if update is None:
            return False
        updates.append(update)
        start = end
    # For backwards that run meanwhile: graphs from before are no good from now on. The last
    # operation says so once more by itself.
    increment_version(parameters)
    in_grad_mode(False, _apply_all, updates)
    return True


class _Update(NamedTuple):
    """What a step does to one group; see `torch.optim.SGD`."""

    group: Mapping[str, Any]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    buffers: Sequence[Tensor] = ()
    """Of the momentum, if there is one."""

    def apply(self) -> None:
        """Changes the parameters and the buffers."""
        group, parameters, gradients, buffers = self
        lr, momentum, dampening, decay = _numbers_of(group)
        if group["maximize"]:
            gradients = Foreach.negated(gradients)
        if decay:
            gradients = Foreach.sums(gradients, parameters, alpha=decay)
        if buffers:
            Foreach.multiply(buffers, momentum)
            Foreach.add(buffers, gradients, alpha=1 - dampening)
            if group["nesterov"]:
                gradients = Foreach.sums(gradients, buffers, alpha=momentum)
            else:
                gradients = buffers
        Foreach.add(parameters, gradients, alpha=-lr)


def _apply_all(updates: Sequence[_Update]) -> None:
    for update in updates:
        update.apply()


def _plan(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Any],
    state: Mapping[Tensor, Any],
) -> _Update | None:
    """What to do to a group; None if that is for torch."""
    shapes = [*map(_shape_of, parameters)]
    if (
        any(_variants_of(group))
        or not _NUMBER.issuperset(map(type, _numbers_of(group)))
        or not parameters
        or not _PARAMETER.issuperset(map(type, parameters))
        or not _are_plain(gradients, shapes)
    ):
        return None
    is_one_operation = not (
        group["momentum"] or group["weight_decay"] or group["maximize"]
    )
    if is_one_operation:
        return _Update(group, parameters, gradients)
    # All first operations come before the second ones, which must not matter.
    buffers: list[Any] = []
    if group["momentum"]:
        buffers = [state.get(p, {}).get("momentum_buffer") for p in group["params"]]
        if not _are_plain(buffers, shapes):
            return None
        if not _MULTIPLIED.issuperset(map(_dtype_of, [*buffers, *gradients])):
            return None
    if _share_memory([*parameters, *buffers, *gradients]):
        return None
    return _Update(group, parameters, gradients, buffers)


def _are_plain(tensors: Sequence[Any], shapes: list[torch.Size]) -> bool:
    """Whether all are dense tensors, of these shapes: else they would be repeated."""
    return (
        _TENSOR.issuperset(map(type, tensors))
        and [*map(_shape_of, tensors)] == shapes
        and _DENSE.issuperset(map(_layout_of, tensors))
    )


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether any two may be in the same memory."""
    try:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return any_overlap([(s.data_ptr(), s.nbytes()) for s in storages])
    except RuntimeError:
        return True  # torch has tensors without memory
