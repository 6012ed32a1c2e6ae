"""What tests ask about a process from inside it, and how they wait for an answer.

Runs in workers as well as in the test process. Linux only, like the tests that use it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0
POLL_S = 0.005

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def wait_until(
    condition: Callable[[], object], what: str, limit_s: float = LIMIT_S
) -> None:
    """Polls until the condition holds; fails with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {limit_s} s: {what}")
        pass_time(POLL_S)


def pass_time(seconds: float) -> None:
    """Lets time go by, for tests whose subject is that it does."""
    threading.Event().wait(seconds)


def resident_bytes() -> int:
    """Physical memory of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def reset_peak() -> None:
    """Forgets the largest resident size so far; see `peak_bytes`."""
    gc.collect()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def peak_bytes() -> int:
    """The largest resident size since `reset_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say what the largest resident size was")


def count_segments() -> int:
    """How many shared-memory segments of gradwire this process has mapped."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return sum("memfd:gradwire" in line for line in file)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main_thread_is_in(file_name: str) -> bool:
    """Whether a function of such a file is on the main thread's stack."""
    frame: Any = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) == file_name:
            return True
        frame = frame.f_back
    return False
