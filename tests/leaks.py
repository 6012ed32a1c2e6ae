"""What a test may leave behind, and a comparison of before and after.

Looks at the threads, child processes and open file descriptors of this process. Runs
around every test, so a look has to cost well under a millisecond. Linux only: elsewhere
descriptors and children are not looked at.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

GRACE_S = 3.0
POLL_S = 0.02

# Opened once by a library and kept for the life of the process; no test can help it.
_TOLERATED_PREFIXES = ("/dev/null", "/dev/urandom", "/dev/nvidia", "/proc/", "/sys/")
_TOLERATED_PARTS = ("/.hypothesis/", "/site-packages/", "/lib/python")


@dataclass(frozen=True)
class Snapshot:
    """Resources that this process held at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: dict[int, str]


def take_snapshot(
    *, ignored_fds: Iterable[int] = (), ignored_pids: Iterable[int] = ()
) -> Snapshot:
    """Looks at this process; the ignored ones count as not being there."""
    ignored_fds, ignored_pids = set(ignored_fds), set(ignored_pids)
    return Snapshot(
        threads=frozenset(threading.enumerate()),
        children=frozenset(_find_children() - ignored_pids),
        descriptors={
            fd: target
            for fd, target in _find_descriptors().items()
            if fd not in ignored_fds
        },
    )


def describe_leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that is there now and was not before."""
    lines = []
    for thread in after.threads - before.threads:
        # Foreign daemon threads are the business of whoever started them.
        if thread.name.startswith("gradwire") or not thread.daemon:
            kind = "daemon thread" if thread.daemon else "thread"
            lines.append(f"{kind} {thread.name!r}")
    for pid in after.children - before.children:
        lines.append(f"child process {pid}: {_describe_process(pid)}")
    # By target, not by number: a library may close and reopen the same file. Targets
    # such as an eventfd have no identity, so they are counted.
    surplus = Counter(after.descriptors.values())
    surplus.subtract(before.descriptors.values())
    for fd, target in after.descriptors.items():
        if surplus[target] > 0 and before.descriptors.get(fd) != target:
            surplus[target] -= 1
            lines.append(f"file descriptor {fd}: {target}")
    return sorted(lines)


def find_leaks(
    before: Snapshot, look: Callable[[], Snapshot], *, grace_s: float = GRACE_S
) -> list[str]:
    """What is still there after a short wait in which threads and processes may end."""
    leaks = describe_leaks(before, look())
    if not leaks:
        return []
    # A descriptor may hang on a reference cycle, such as a traceback: not a leak.
    gc.collect()
    deadline = time.monotonic() + grace_s
    while (leaks := describe_leaks(before, look())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return leaks


def _find_descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        listing = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return found
    for entry in listing:
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself, or closed meanwhile
        if not (
            target.startswith(_TOLERATED_PREFIXES)
            or any(part in target for part in _TOLERATED_PARTS)
        ):
            found[int(entry)] = target
    return found


def _find_children() -> set[int]:
    # Those of a fork server are no children of ours for the kernel.
    found = {child.pid for child in multiprocessing.active_children() if child.pid}
    try:
        tasks = os.listdir("/proc/self/task")
    except FileNotFoundError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as listing:
                found.update(int(pid) for pid in listing.read().split())
        except FileNotFoundError:
            continue  # the thread has ended, or the kernel does not keep the list
    return found


def _describe_process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().replace("\0", " ").strip()[:200] or "defunct"
    except OSError:
        return "gone meanwhile"
