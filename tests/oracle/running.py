"""Runs many programs on one group of workers; for tests and for the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from cluster import Cluster, ClusterError, Handle
from oracle.check import check
from oracle.generator import MAX_WORKERS, make_program
from oracle.programs import Program
from oracle.workers import prepare

LIMIT_S = 20.0


class ProgramFailed(AssertionError):
    """A program that failed, with what it is and how to run it again.

    Attributes:
        kind: What happened, without the numbers.
    """

    def __init__(self, cause: BaseException, program: Program) -> None:
        text = f"{type(cause).__name__}: {cause}"
        self.kind = re.sub(r"[^A-Za-z ]+", "", text)[:50]
        again = f"python -m tests.oracle --mode {program.mode} --seed {program.seed}"
        super().__init__(
            f"{text}\n{cause.__cause__ or ''}\n{program}\n"
            f"again: {again}\nsmaller: {again} --shrink"
        )


class Workers:
    """Five workers, of which each program uses some. Replaced after a failure."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._cluster = self._start()

    def _start(self) -> Cluster:
        cluster = Cluster(MAX_WORKERS)
        for rank in range(MAX_WORKERS):
            cluster.run(rank, prepare)
        return cluster

    def check(
        self, mode: str, seed: int, taken_out: Iterable[int] = ()
    ) -> dict[str, int]:
        """Runs a program; its driver is one worker or another.

        Raises:
            ProgramFailed: It did not come to what it comes to in one process.
        """
        started = self._start_check(mode, seed, frozenset(taken_out))
        return self._results([started])[0]

    def check_together(self, modes: str, seed: int) -> list[dict[str, int]]:
        """Runs programs at the same time, each with a driver of its own.

        Raises:
            ProgramFailed: One of them did not come to what it should; the first.
        """
        started = [
            self._start_check(mode, seed + driver)
            for driver, mode in enumerate(modes[:MAX_WORKERS])
        ]
        return self._results(started)

    def _start_check(
        self, mode: str, seed: int, taken_out: frozenset[int] = frozenset()
    ) -> tuple[Program, Handle]:
        program = make_program(mode, seed).without(set(taken_out))
        driver = seed % MAX_WORKERS
        return program, self._cluster.start(driver, check, mode, seed, taken_out)

    def _results(self, started: list[tuple[Program, Handle]]) -> list[dict[str, int]]:
        results: list[dict[str, int]] = []
        for program, handle in started:
            try:
                results.append(handle.result(self._limit_s))
            except Exception as error:
                self._replace()
                raise ProgramFailed(error, program) from None
        return results

    def _replace(self) -> None:
        with contextlib.suppress(ClusterError):
            self._cluster.close(graceful=False)
        self._cluster = self._start()

    def close(self) -> None:
        self._cluster.close()
