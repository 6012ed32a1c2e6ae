"""Runs many programs on one group of workers; for tests and for the command line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from cluster import Cluster, ClusterError
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
        try:
            counts: dict[str, int] = self._cluster.run(
                seed % MAX_WORKERS,
                check,
                mode,
                seed,
                frozenset(taken_out),
                timeout=self._limit_s,
            )
        except Exception as error:
            self._replace()
            program = make_program(mode, seed).without(set(taken_out))
            raise ProgramFailed(error, program) from None
        return counts

    def _replace(self) -> None:
        with contextlib.suppress(ClusterError):
            self._cluster.close(graceful=False)
        self._cluster = self._start()

    def close(self) -> None:
        self._cluster.close()
