"""Where the graph is cut: calls that are not recorded, and the warning about them.

Outside a context, what a reference refers to outlives the calls that made it and fetch
it, so these calls are not recorded. And as a drop-in for torch no call is.
"""

from __future__ import annotations

import sys
import warnings

from gradwire.rpc.extension import CUT_OUTSIDE_CONTEXT

__all__ = ["is_cut_outside_context", "records_without_context", "set_implicit", "warn"]

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


def warn(label: str, *, is_reference: bool = False) -> None:
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
