"""How far it is to the other workers: latency, bandwidth, and their clocks."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from gradwire import rpc
from gradwire.errors import GradwireError

__all__ = ["Measurement", "measure"]

_NUM_CALLS = 200
_NUM_TRANSFERS = 4
_SMALL = 256  # floats: 1 KiB
_LARGE = 16 << 20  # floats: 64 MiB


class Measurement(NamedTuple):
    """The way to one worker."""

    worker: str
    transport: str
    latency_s: float
    bytes_per_s: float
    clock_skew_s: float
    problem: str = ""


def _echo(x: torch.Tensor) -> torch.Tensor:
    return x


def _take(x: torch.Tensor) -> int:
    return x.numel()


def _clock() -> float:
    return time.time()


def measure(worker: str, timeout: float = 30.0) -> Measurement:
    """Calls a worker often and with much, and says how long that took."""
    try:
        skew, transport = _skew(worker, timeout), _transport(worker)
        small = torch.zeros(_SMALL)
        times = []
        for _ in range(_NUM_CALLS):
            start = time.perf_counter()
            rpc.rpc_sync(worker, _echo, args=(small,), timeout=timeout)
            times.append(time.perf_counter() - start)
        large = torch.zeros(_LARGE)
        speeds = []
        for _ in range(_NUM_TRANSFERS):
            start = time.perf_counter()
            rpc.rpc_sync(worker, _take, args=(large,), timeout=timeout)
            speeds.append(large.nbytes / (time.perf_counter() - start))
    except GradwireError as error:
        return Measurement(worker, "", 0.0, 0.0, 0.0, str(error))
    # The first transfer faults in the memory that later ones use again.
    return Measurement(
        worker, transport, statistics.median(times), max(speeds[1:]), skew
    )


def _skew(worker: str, timeout: float) -> float:
    """How far the other clock is ahead; the shortest round trip tells best."""
    best = float("inf"), 0.0
    for _ in range(8):
        before = time.time()
        theirs = rpc.rpc_sync(worker, _clock, timeout=timeout)
        after = time.time()
        best = min(best, (after - before, theirs - (before + after) / 2))
    return best[1]


def _transport(worker: str) -> str:
    transports: dict[str, str] = rpc.get_debug_info()["transports"]
    return transports.get(worker, "?")
