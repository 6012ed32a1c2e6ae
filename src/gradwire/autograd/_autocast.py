"""Autocast travels with a call and with a pass, as it would reach a local function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradwire.autograd._torch_private import any_autocast

__all__ = ["apply_autocast", "autocast_state"]

_DEVICES = ("cpu", "cuda")
_DTYPES = {
    str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def autocast_state() -> list[tuple[str, str]] | None:
    """Devices and dtypes of the autocast around this code; None if there is none."""
    if not any_autocast():
        return None
    return [
        (device, str(torch.get_autocast_dtype(device)))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    ] or None


@contextmanager
def apply_autocast(state: list[tuple[str, str]]) -> Iterator[None]:
    """A context with the autocast of another worker."""
    with ExitStack() as stack:
        for device, dtype in state:
            if device in _DEVICES and dtype in _DTYPES:
                stack.enter_context(torch.autocast(device, dtype=_DTYPES[dtype]))
        yield
