"""Where the graph is cut: calls that are not recorded, and the warning about them.

Outside a context, what a reference refers to outlives the calls that made it and fetch
it, so these calls are not recorded. And as a drop-in for torch no call is.
"""

from __future__ import annotations

import functools
import sys
import warnings
from contextlib import AbstractContextManager

from torch import Tensor

from gradwire.autograd._autocast import apply_autocast
from gradwire.autograd._messages import (
    AS_LEAVES,
    CUT,
    NOT_RECORDED,
    CallHeader,
    ReplyHeader,
    encode_header,
)
from gradwire.rpc.extension import CUT_OUTSIDE_CONTEXT, Addition, Note, Scope

__all__ = [
    "CutNote",
    "CutScope",
    "cut",
    "cut_call",
    "cut_reply",
    "is_cut_outside_context",
    "records_without_context",
    "set_implicit",
]

_warned: set[str] = set()
_is_implicit = True


def set_implicit(is_implicit: bool) -> None:
    """Whether calls outside a context are recorded, as contexts of their own.

    If not, they are as in torch: tensors that require grad arrive as leaves.
    """
    global _is_implicit  # noqa: PLW0603
    _is_implicit = is_implicit


def records_without_context() -> bool:
    """See `set_implicit`."""
    return _is_implicit


def is_cut_outside_context(label: str) -> bool:
    """Whether a call is not recorded outside a context."""
    return not _is_implicit or label in CUT_OUTSIDE_CONTEXT


class CutNote(Note):
    """A call of ours that is not recorded."""

    __slots__ = ("_warns",)

    def __init__(self, addition: Addition, *, warns: bool) -> None:
        super().__init__(addition)
        self._warns = warns  # if the history of what comes back is cut

    def answered(self, label: str, header: bytes | None) -> None:
        """The answer came; a header says that something was cut there."""
        if header is not None and self._warns and self.call is not None:
            # By the caller's own thread, and so for its own place.
            self.call.notice = functools.partial(_warn, label)


def cut_call(
    label: str,
    tensors: list[Tensor],
    of_modules: set[int],
    autocast: list[tuple[str, str]] | None,
    *,
    is_reference: bool,
) -> CutNote:
    """What is added to a call that is not recorded, outside any context.

    Args:
        label: What is called.
        tensors: Those in the arguments.
        of_modules: Which of them belong to modules that are sent.
        autocast: As in `CallHeader`.
        is_reference: Whether the call makes a reference.
    """
    warns = _is_implicit
    if not tensors and autocast is None:
        return CutNote(_BARE_CUT if warns else _BARE_CUT_AS_LEAVES, warns=warns)
    if not warns:  # as in torch, which says nothing
        header = CallHeader(NOT_RECORDED | AS_LEAVES, autocast=autocast)
        return CutNote(Addition(encode_header(header)), warns=False)
    if any(
        t.requires_grad and not t.is_leaf and id(t) not in of_modules for t in tensors
    ):
        _warn(label, is_reference=is_reference)
        warns = False  # once is enough
    header = CallHeader(NOT_RECORDED, autocast=autocast)
    return CutNote(Addition(encode_header(header), cut(tensors)), warns=warns)


class CutScope(Scope):
    """A call that is served here and not recorded, outside any context."""

    __slots__ = ("_autocast", "_flags", "_label")

    def __init__(self, label: str, call: CallHeader) -> None:
        self._label = label
        self._flags = call.flags
        self._autocast = call.autocast

    def enter_handler(self) -> AbstractContextManager[None] | None:
        """See `Scope`."""
        return apply_autocast(self._autocast) if self._autocast else None

    def sending_reply(self, tensors: list[Tensor], of_modules: set[int]) -> Addition:
        """See `Scope`."""
        return cut_reply(tensors, self._label, self._flags)


def cut_reply(tensors: list[Tensor], label: str, flags: int) -> Addition:
    """What is added to the answer of a call that is not recorded.

    Args:
        tensors: Those in the result.
        label: What was called.
        flags: Those of the call.
    """
    changes = cut(tensors)
    is_lost = changes is not None and is_cut_outside_context(label)
    return Addition(
        _CUT_REPLY if is_lost else None, None if flags & AS_LEAVES else changes
    )


def cut(tensors: list[Tensor]) -> dict[int, int] | None:
    """Not recorded: what was computed arrives as a constant, leaves stay leaves."""
    return {
        index: 0
        for index, tensor in enumerate(tensors)
        if tensor.requires_grad and not tensor.is_leaf
    } or None


_BARE_CUT = Addition(encode_header(CallHeader(NOT_RECORDED)))
_BARE_CUT_AS_LEAVES = Addition(encode_header(CallHeader(NOT_RECORDED | AS_LEAVES)))
_CUT_REPLY = encode_header(ReplyHeader(CUT))


def _warn(label: str, *, is_reference: bool = False) -> None:
    """Says once for each place in the program that the graph was cut there."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if place in _warned:
        return
    _warned.add(place)
    is_reference = is_reference or label in CUT_OUTSIDE_CONTEXT
    what = "a reference" if is_reference else f"a call of {label}"
    warnings.warn(
        f"the autograd graph is cut: tensors with a history went through {what} outside "
        "any context, and no gradient will come back. Put the calls and the backward "
        "into one context: with gradwire.autograd.context() as ctx",
        stacklevel=level,
    )


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("gradwire", "threading", "contextlib")
