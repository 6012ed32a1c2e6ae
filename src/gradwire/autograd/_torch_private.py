"""The private names of torch that this layer uses, checked once at import.

They tell what the engine is doing right now: which backward runs, of what kind, and
which nodes it will execute. Torch has no public names for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gradwire.wire import clean_thread_state, thread_state_is_clean

__all__ = [
    "NO_TASK",
    "TaskWatch",
    "any_autocast",
    "call_backward_directly",
    "current_task",
    "executes",
    "has_tangent",
    "is_anything_special",
    "keeps_graph",
    "queue_callback",
    "record",
    "run_engine",
]

T = TypeVar("T")


def _private(path: str) -> Any:
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise ImportError(
                f"gradwire needs torch.{path}, which torch {torch.__version__} does not "
                "have; install a version of torch that this gradwire supports"
            )
    return found


_engine = _private("autograd.Variable._execution_engine")

NO_TASK = -1
current_task: Callable[[], int] = _private("_C._current_graph_task_id")
"""Number of the backward that runs on this thread, `NO_TASK` if none does."""
executes: Callable[[Any], bool] = _private("_C._will_engine_execute_node")
"""Whether the backward that runs here executes a node, or takes a gradient at it."""
keeps_graph: Callable[[], bool] = _private(
    "_C._autograd._get_current_graph_task_keep_graph"
)
"""Whether the backward that runs here retains its graph."""
queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Runs something at the end of the backward that runs here, if it succeeds."""
run_engine: Callable[..., Any] = _engine.run_backward
"""What ``torch.autograd.backward`` and ``grad`` call when they have made up defaults."""
any_autocast: Callable[[], bool] = _private("_C._is_any_autocast_enabled")

_forward_ad = _private("autograd.forward_ad")
_private("autograd.forward_ad._current_level")
_private("autograd.Function._backward_cls.apply")
_private("autograd.Function._backward_cls._set_sequence_nr")
# What `set_materialize_grads` sets, which each message would call.
_private("autograd.Function._backward_cls.materialize_grads")

_top_saving_hooks: Callable[[bool], Any] = _private(
    "_C._autograd._top_saved_tensors_default_hooks"
)
_pop_saving_hooks: Callable[[], None] = _private(
    "_C._autograd._pop_saved_tensors_default_hooks"
)
_push_saving_hooks: Callable[[Any, Any], None] = _private(
    "_C._autograd._push_saved_tensors_default_hooks"
)


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether forward-mode differentiation is on for one of the tensors."""
    if _forward_ad._current_level < 0:
        return False
    return any(_forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def is_anything_special() -> bool:
    """Whether autocast or forward-mode differentiation is on."""
    return any_autocast() or _forward_ad._current_level >= 0


def call_backward_directly(function: type[torch.autograd.Function]) -> None:
    """Makes ``function.backward`` itself what the engine calls for a node."""
    node_class: Any = function._backward_cls
    node_class.apply = function.backward


class TaskWatch:
    """Tells whether the backward that was running when it was made is over."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False
        queue_callback(_TaskEnd(self))


class _TaskEnd:
    """Is called at the end of a backward that succeeds, and dropped in any case."""

    __slots__ = ("_watch",)

    def __init__(self, watch: TaskWatch) -> None:
        self._watch = watch

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        self._watch.is_over = True


def record(make: Callable[..., T], *args: Any) -> T:
    """Calls something that makes nodes, whatever the state of the thread.

    The thread that reads a message may be anybody's: inside ``no_grad``, a mode, or a
    checkpoint that counts what is saved.
    """
    if (
        torch.is_grad_enabled()
        and thread_state_is_clean()
        and _top_saving_hooks(False) is None
    ):
        return make(*args)
    with _clean_recording():
        return make(*args)


@contextmanager
def _clean_recording() -> Iterator[None]:
    hooks = []
    while (top := _top_saving_hooks(False)) is not None:
        hooks.append(top)
        _pop_saving_hooks()
    try:
        if thread_state_is_clean():
            with torch.enable_grad():
                yield
        else:
            with clean_thread_state(), torch.enable_grad():
                yield
    finally:
        for pack, unpack in reversed(hooks):
            _push_saving_hooks(pack, unpack)
