"""The private names of torch that the wire layer uses, checked once at import.

Torch has no public way to ask whether a thread is inside an inference mode, a dispatch
mode, a function mode or a transform of ``torch.func`` *and* to step out of all of them
for a while, and no public names for the types of its operators. All of that is here, so
that a torch that renames something fails in one place.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.pyfunctorch
import torch._ops
import torch.utils._python_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "OPERATOR_TYPES",
    "clean_thread_state",
    "set_compiler",
    "thread_state_is_clean",
]


def _private(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise ImportError(
            f"gradwire needs {owner.__name__}.{name}, which torch {torch.__version__} does "
            "not have; install a version of torch that this gradwire supports"
        )
    return found


_num_dispatch_modes: Callable[[], int] = _private(torch._C, "_len_torch_dispatch_stack")
_num_function_modes: Callable[[], int] = _private(torch._C, "_len_torch_function_stack")
_pop_function_mode: Callable[[], Any] = _private(torch._C, "_pop_torch_function_stack")
_push_function_mode: Callable[[Any], None] = _private(
    torch._C, "_push_on_torch_function_stack"
)
_without_dispatch_modes: Callable[[], Any] = _private(
    torch.utils._python_dispatch, "_disable_current_modes"
)
_transform_level: Callable[[], int | None] = _private(
    _private(torch._C, "_functorch"), "maybe_current_level"
)
_without_transforms: Callable[[], Any] = _private(
    torch._functorch.pyfunctorch, "temporarily_clear_interpreter_stack"
)
OPERATOR_TYPES: tuple[type, ...] = (
    _private(torch._ops, "OpOverload"),
    _private(torch._ops, "OpOverloadPacket"),
)
"""Types of the objects under ``torch.ops``, such as ``torch.ops.aten.add.Tensor``."""
_in_inference_mode = torch.is_inference_mode_enabled
set_compiler: Callable[[Any], Any] = _private(
    _private(_private(torch._C, "_dynamo"), "eval_frame"), "set_eval_frame"
)
"""Sets what looks at every Python frame of this thread that begins; returns what did."""


def thread_state_is_clean() -> bool:
    """Whether torch operations on this thread do just what they say.

    False inside ``torch.inference_mode()``, inside any dispatch mode (fake tensors,
    tracers), inside any function mode (``with torch.device(...)`` is one), and inside
    what ``torch.func`` transforms.
    """
    return not (
        _in_inference_mode()
        or _num_dispatch_modes()
        or _num_function_modes()
        or _transform_level() is not None
    )


@contextmanager
def clean_thread_state() -> Iterator[None]:
    """Steps out of inference mode, and of all modes and transforms, for a while.

    Gradients are not recorded inside. Everything is restored on the way out.
    """
    with ExitStack() as stack:
        modes = [_pop_function_mode() for _ in range(_num_function_modes())]
        stack.callback(_restore_function_modes, modes)
        if _num_dispatch_modes():
            # The manager of torch takes milliseconds to import its parts: only if needed.
            stack.enter_context(_without_dispatch_modes())
        if _transform_level() is not None:
            stack.enter_context(_without_transforms())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _restore_function_modes(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_function_mode(mode)
