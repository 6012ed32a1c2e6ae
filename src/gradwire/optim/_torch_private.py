"""Steps of optimizers without the weight that torch puts on each of them.

Torch wraps ``step`` of every class of optimizers, so that its profiler shows it and hooks
are called. The label goes through the dispatcher twice, which for few small parameters
costs more than the step itself; the profiler has a cheaper one. Inside of that, those of
its own classes have another wrapper, which sets the grad mode, and does more for its
compiler, which is not here. All private names that this takes are here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

__all__ = [
    "Foreach",
    "in_grad_mode",
    "is_plain_sgd",
    "run_step",
    "shown_to_profiler",
]

P = ParamSpec("P")
T = TypeVar("T")

_Label: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
_hooks_of_all: tuple[Any, ...] = tuple(
    getattr(sys.modules[Optimizer.__module__], f"_global_optimizer_{when}_hooks", None)
    for when in ("pre", "post")
)
_with_grad_mode: Any = getattr(
    sys.modules[Optimizer.__module__], "_use_grad_for_differentiable", None
)
_set_grad_mode: Any = getattr(torch._C, "_set_grad_enabled", None)
# What the label itself asks first.
_is_profiled: Any = getattr(torch.autograd, "_profiler_enabled", None)
_has_private_names = (
    _Label is not None
    and None not in _hooks_of_all
    and _with_grad_mode is not None
    and _set_grad_mode is not None
    and _is_profiled is not None
    and hasattr(Optimizer, "profile_hook_step")
)
# All functions that a decorator wraps have the code of its wrapper in common. What else
# it marks them with, other wrappers around them take over.
_hook_code = _grad_mode_code = None
if _has_private_names:
    _hook_code = getattr(Optimizer.profile_hook_step(lambda *_: None), "__code__", None)
    _grad_mode_code = _with_grad_mode(lambda: None).__code__

# What a program, or a gradient scaler, gives to one optimizer.
_unusual = frozenset(("step", "grad_scale", "found_inf"))
_sgd_step = inspect.unwrap(torch.optim.SGD.step)
_sgd_code = getattr(_sgd_step, "__code__", None)
if getattr(_sgd_step, "__module__", "") != torch.optim.SGD.__module__:
    _sgd_code = None  # a program has put another one in its place


class Foreach:
    """Operations on lists of tensors, each of which is changed or made by itself."""

    # What torch says of their types leaves half of the arguments out.
    add: Any = staticmethod(torch._foreach_add_)
    multiply: Any = staticmethod(torch._foreach_mul_)
    negated: Any = staticmethod(torch._foreach_neg)
    sums: Any = staticmethod(torch._foreach_add)


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether a step is what torch's SGD does, and nobody else is to know of it."""
    return (
        type(optimizer) is torch.optim.SGD
        and _is_sgds_own(type(optimizer).step)
        and _unusual.isdisjoint(vars(optimizer))
        and not optimizer.defaults["differentiable"]
        and not _has_hooks(optimizer)
        and not _is_profiled()
    )


@functools.lru_cache(maxsize=1)  # there is one, unless somebody replaces it
def _is_sgds_own(step: Any) -> bool:
    """Whether torch's wrappers, and no others, are around what SGD does."""
    return (
        _has_private_names
        and getattr(step, "__code__", None) is _hook_code
        and getattr(step.__wrapped__, "__code__", None) is _grad_mode_code
        and step.__wrapped__.__wrapped__.__code__ is _sgd_code
    )


def run_step(optimizer: Optimizer, *args: Any) -> Any:
    """``optimizer.step(*args)``."""
    step: Any = type(optimizer).step
    if (
        not _has_private_names
        or getattr(step, "__code__", None) is not _hook_code
        or "step" in vars(optimizer)
        or _has_hooks(optimizer)
    ):
        return optimizer.step(*args)
    if not _is_profiled():
        return _run(step.__wrapped__, optimizer, args)
    with _Label(_label_of(type(optimizer).__name__)):
        return _run(step.__wrapped__, optimizer, args)


def _run(step: Any, optimizer: Optimizer, args: tuple[Any, ...]) -> Any:
    """``step(optimizer, *args)``, for a step that torch may have wrapped once more."""
    if getattr(step, "__code__", None) is not _grad_mode_code:
        return step(optimizer, *args)
    is_enabled = optimizer.defaults["differentiable"]
    return in_grad_mode(is_enabled, step.__wrapped__, optimizer, *args)


def in_grad_mode(is_enabled: bool, function: Callable[..., T], *args: Any) -> T:
    """Calls a function while torch records what it does, or while it does not."""
    was_enabled = torch.is_grad_enabled()
    _set_grad_mode(is_enabled)
    try:
        return function(*args)
    finally:
        _set_grad_mode(was_enabled)


def shown_to_profiler(step: Callable[P, T]) -> Callable[P, T]:
    """Wraps ``step`` of a class of ours, so that torch need not do it."""
    if not _has_private_names:
        return step
    with_hooks: Callable[P, T] = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        optimizer: Any = args[0]
        if _has_hooks(optimizer):
            return with_hooks(*args, **kwargs)
        if not _is_profiled():
            return step(*args, **kwargs)
        with _Label(_label_of(type(optimizer).__name__)):
            return step(*args, **kwargs)

    wrapped.hooked = True  # type: ignore[attr-defined]
    return wrapped


def _has_hooks(optimizer: Any) -> bool:
    before, after = _hooks_of_all
    return bool(
        before
        or after
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )


@functools.lru_cache  # by name, so that no class is kept alive
def _label_of(class_name: str) -> str:
    return f"Optimizer.step#{class_name}.step"
