"""Memory of a step that is needed again by the next one."""

from __future__ import annotations

import contextlib

import torch

__all__ = ["expect_large_blocks"]

# The largest that glibc takes into account is 32 MiB.
_LARGEST_BYTES = 31 << 20


def expect_large_blocks() -> None:
    """Lets the C library keep memory of up to two such blocks when it becomes free.

    A step makes activations and gradients, and its end frees them. The library would give
    these pages back to the system each time, to ask for them again, and each has to be
    cleared: in a pipeline of three workers that was a tenth of the time. But glibc learns:
    when a block is freed that it had got from the system for this purpose alone, it takes
    blocks of that size for short-lived, and keeps twice as much from then on. Here is
    such a block. It is never written to, so it costs nothing. Other libraries do not
    care, nor does this one if its limits are set (``MALLOC_TRIM_THRESHOLD_``).
    """
    with contextlib.suppress(RuntimeError):  # so little memory may be used
        torch.UntypedStorage(_LARGEST_BYTES)  # type: ignore[no-untyped-call]
