"""What torch keeps for a thread, kept for each of the coroutines that share one.

A coroutine that waits inside of ``torch.no_grad()`` has switched it on for its thread.
Whatever runs there meanwhile would compute without gradients, and two such blocks that
overlap would leave it so for good. So a coroutine gets its modes put on before each of its
steps, and taken off after it. Modes of other kinds (``with torch.device(...)``) stay the
thread's.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["Modes"]

_DEVICES = ("cpu", "cuda")

_Autocast: TypeAlias = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]
"""Whether casts of weights are kept; by device, whether and to which type it casts."""


class Modes:
    """Grad mode, inference mode and autocast of a coroutine, a context for its steps.

    It begins without inference mode, and with the autocast of where it is made.

    Args:
        is_grad_enabled: Whether it begins with gradients.
    """

    __slots__ = ("_autocast", "_autocast_outside", "_is_grad_enabled", "_pause")

    def __init__(self, *, is_grad_enabled: bool) -> None:
        self._is_grad_enabled = is_grad_enabled
        self._autocast = self._autocast_outside = _get_autocast()
        self._pause: torch.inference_mode | None = None

    def __enter__(self) -> None:
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None
        torch.set_grad_enabled(self._is_grad_enabled)
        self._autocast_outside = _get_autocast()
        if self._autocast != self._autocast_outside:
            _set_autocast(self._autocast)

    def __exit__(self, *error: object) -> None:
        self._autocast = _get_autocast()
        if self._autocast != self._autocast_outside:
            _set_autocast(self._autocast_outside)
            # Torch empties it where the outermost block ends, and only there. The weights
            # may have changed when this coroutine goes on.
            torch.clear_autocast_cache()
        self._is_grad_enabled = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            self._pause = torch.inference_mode(False)
            self._pause.__enter__()
        torch.set_grad_enabled(True)


def _get_autocast() -> _Autocast:
    return torch.is_autocast_cache_enabled(), tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _DEVICES
    )


def _set_autocast(autocast: _Autocast) -> None:
    keeps_casts, by_device = autocast
    torch.set_autocast_cache_enabled(keeps_casts)
    for device, (is_enabled, dtype) in zip(_DEVICES, by_device, strict=True):
        torch.set_autocast_enabled(device, is_enabled)
        torch.set_autocast_dtype(device, dtype)
