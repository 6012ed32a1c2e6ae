"""Runs tests of torch's suites, each in processes of its own, several at a time.

Torch starts a fresh interpreter for every rank of every test, which takes seconds to
import torch. Here ranks are forked from this process, which has imported torch, the
drop-in and the suites, and has neither threads nor sockets. Each runs what torch's own
rank processes run: ``MultiProcessTestCase._run``, with a file of its own to meet in.

Invariants:
1. A test passes only if every rank ends by itself, with exit code 0.
2. No test runs longer than its limit: a hang is a failure, and shows all stacks.
3. No rank outlives its test, nor this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.torch_suites.suites import Suite

__all__ = ["Result", "run_all"]

# A rank that fails leaves the others waiting; these are for their own errors.
GRACE_S = 3.0
STACKS_S = 0.5
ERROR_EXIT = 10  # of torch's MultiProcessTestCase
_SKIPS = range(72, 90)
_PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    test: str
    outcome: str  # "passed", "failed" or "skipped"
    took_s: float
    text: str = ""


@dataclass
class _Rank:
    process: Any
    pipe: Any
    log: Path
    error: str = ""


class _Running:
    """One test and its processes."""

    def __init__(self, test: str, suite: Suite, limit_s: float) -> None:
        self.test = test
        self.started = time.monotonic()
        self.deadline = self.started + limit_s
        self.limit_s = limit_s
        self.folder = Path(tempfile.mkdtemp(prefix="torch-suites-"))
        self.ranks = [self._fork(suite, rank) for rank in range(suite.world_size)]

    def _fork(self, suite: Suite, rank: int) -> _Rank:
        ours, theirs = _context.Pipe()
        log = self.folder / f"rank{rank}.log"
        method = self.test.partition(".")[2]
        process = _context.Process(
            target=_run_rank,
            args=(
                suite.cls,
                rank,
                method,
                str(self.folder / "store"),
                theirs,
                log,
                os.getpid(),
            ),
            daemon=False,
        )
        process.start()
        theirs.close()
        return _Rank(process, ours, log)

    def sentinels(self) -> list[Any]:
        return [
            rank.process.sentinel
            for rank in self.ranks
            if rank.process.exitcode is None
        ]

    def look(self) -> Result | None:
        """The result, if there is one by now."""
        codes = [rank.process.exitcode for rank in self.ranks]
        now = time.monotonic()
        if any(code not in (None, 0) for code in codes):
            self.deadline = min(self.deadline, now + GRACE_S)
        if None in codes and now < self.deadline:
            return None
        took = now - self.started
        if all(code == 0 for code in codes):
            return Result(self.test, "passed", took)
        if all(code in _SKIPS for code in codes):
            return Result(self.test, "skipped", took)
        return Result(self.test, "failed", took, self._explain(codes))

    def _explain(self, codes: list[int | None]) -> str:
        parts = []
        for number, rank in enumerate(self.ranks):
            if codes[number] in (None, 0):
                continue
            error = ""
            with contextlib.suppress(EOFError, OSError):
                if rank.pipe.poll():
                    error = str(rank.pipe.recv())
            parts.append(f"rank {number}, exit code {codes[number]}: {error.strip()}")
        if not parts:
            parts.append(f"not done within {self.limit_s:.0f} s")
        if None in codes:
            self._show_stacks()
        for number, rank in enumerate(self.ranks):
            log = rank.log.read_text(errors="replace") if rank.log.exists() else ""
            if log.strip():
                parts.append(f"--- output of rank {number}\n{log.strip()}")
        return "\n".join(parts)

    def _show_stacks(self) -> None:
        """Ranks that still run say in their logs where they are."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.process.exitcode is None:
                    os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            if rank.process.exitcode is None:
                rank.process.kill()
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_all(
    tests: list[str], suites: dict[str, Suite], at_once: int, limits: dict[str, float]
) -> Iterator[Result]:
    """Runs tests and gives their results as they come.

    Args:
        tests: As ``Suite.test``.
        suites: What they belong to.
        at_once: How many run side by side.
        limits: Seconds for each.
    """
    waiting = list(reversed(tests))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                test = waiting.pop()
                suite = suites[test.partition(".")[0]]
                running.append(_Running(test, suite, limits[test]))
            sentinels = [one for test in running for one in test.sentinels()]
            multiprocessing.connection.wait(sentinels, timeout=0.2)
            for one in list(running):
                if (result := one.look()) is not None:
                    running.remove(one)
                    one.close()
                    yield result
    finally:
        for one in running:
            one.close()


def _run_rank(
    cls: Any, rank: int, method: str, store: str, pipe: Any, log: Path, parent: int
) -> None:
    os.setpgid(0, 0)
    output = log.open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    _end_with_parent(parent)
    cls._run(rank, method, store, pipe)


def _end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the runner dies, however stuck it is.

    (A pipe to the runner would not tell: ranks that are forked later hold its other end.)
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
