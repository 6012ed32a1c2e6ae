"""A training step, in which a worker dies at a chosen message.

with Sweep() as sweep:
    while sweep.try_point("stage0", Point("before sending", number)):
        number += 1
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType

import probes
from chaos import kill_points, state, training
from chaos.kill_points import Point
from cluster import Cluster, ClusterError, WorkerDied

SEED = 5
NAMES = ["trainer", "witness", "owner0", "stage0", "stage1"]
STAGES = ["stage0", "stage1", "stage0", "stage1"]
"""The halves of the first layer, then the chain: both are in the middle of something."""
VICTIMS = ("trainer", "owner0", "stage0", "stage1")
NOTICED_S = 2.0
LIMIT_S = 20.0
SETTLE_S = 5.0


class Sweep:
    """Workers that are killed, one after the other, at one message after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-sweep-")
        self._path = Path(self._folder.name)
        self._num_points = 0
        self._num_trainings = 0
        self._start()

    def _start(self) -> None:
        options = {"shared_memory_min_bytes": 4096, "num_worker_threads": 4}
        self._cluster = Cluster(len(NAMES), options, names=NAMES)
        try:
            self._begin()
            for _ in range(3):
                self._step()
            for rank in range(len(NAMES)):
                self._cluster.run(rank, training.call_everybody, NAMES)
            self._baseline = {
                name: self._cluster.run(rank, state.take_state)
                for rank, name in enumerate(NAMES)
            }
        except BaseException:
            self.close()
            raise

    def start_anew(self) -> None:
        """With other workers, after a failure."""
        with contextlib.suppress(ClusterError):
            self._cluster.close(graceful=False)
        self._start()

    def _begin(self) -> None:
        """A new training: whoever dies may have taken the old one along."""
        self._reference = training.OneProcess(SEED)
        self._num_steps = 0
        self._num_trainings += 1
        folder = self._path / str(self._num_trainings)
        folder.mkdir()
        self._cluster.run(NAMES.index("owner0"), training.forget_layers)
        self._cluster.run(0, training.begin, SEED, ["owner0"], STAGES[:2], folder)

    def _step(self) -> None:
        """A step in which nothing happens to anybody."""
        step = self._num_steps
        loss, report = self._cluster.run(0, training.try_step, step, STAGES)
        assert not report.attempts[0].error, report.attempts[0].error
        self._accept(loss, report)

    def _accept(self, loss: float | None, report: training.Report) -> None:
        assert not report.unexpected, report.unexpected
        if loss is not None:
            self._num_steps += 1
            expected = self._reference.train_until(self._num_steps)[-1]
            assert loss == expected, f"step {self._num_steps - 1}: {loss}, {expected}"

    def try_point(self, victim: str, point: Point) -> bool:
        """Kills a worker there, and checks all others.

        Returns:
            False if a whole step has fewer such messages.
        """
        rank = NAMES.index(victim)
        self._num_points += 1
        note = self._path / f"death{self._num_points}"
        self._cluster.run(rank, kill_points.arm, point, note)
        step = self._cluster.start(0, training.try_step, self._num_steps, STAGES)
        report: training.Report | None = None
        with contextlib.suppress(WorkerDied):
            loss, report = step.result(LIMIT_S)
        # The last messages of a step, such as releases, come a little after its end.
        if not self._dies_soon(rank, note):
            assert report is not None and not report.attempts[0].error
            self._cluster.run(rank, kill_points.disarm)
            self._accept(loss, report)
            return False
        died = kill_points.read_moment(note)
        if report is not None:
            attempt = report.attempts[0]
            if attempt.error:
                assert f"'{victim}'" in attempt.error, attempt.error
                late = attempt.end - max(died, attempt.start)
                assert late < NOTICED_S, f"noticed after {late:.2f} s: {attempt.error}"
            self._accept(loss, report)
        self._check_survivors(victim)
        self._cluster.restart(rank)
        if victim in ("trainer", "owner0"):
            self._begin()
        self._step()
        return True

    def _dies_soon(self, rank: int, note: Path) -> bool:
        with contextlib.suppress(AssertionError):
            probes.wait_until(note.exists, "the victim is dead", 0.2)
        if not note.exists():
            return False
        self._cluster.wait_dead(rank)
        return True

    def _check_survivors(self, victim: str) -> None:
        """They hold nothing more than before, and no thread of theirs is busy."""
        found: dict[str, list[str]] = {
            name: ["not looked at"] for name in NAMES if name != victim
        }

        def are_clean() -> bool:
            for name in [name for name, lines in found.items() if lines]:
                after = self._cluster.run(NAMES.index(name), state.take_state)
                found[name] = state.compare(name, self._baseline[name], after)
            return not any(found.values())

        try:
            probes.wait_until(are_clean, "survivors hold nothing", SETTLE_S)
        except AssertionError:
            lines = "\n  ".join(line for lines in found.values() for line in lines)
            stacks = self._cluster.dump_stacks()
            raise AssertionError(
                f"after the death of {victim}:\n  {lines}\n{stacks}"
            ) from None

    # -------------------------------------------------------------------------- end

    def __enter__(self) -> Sweep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._cluster.close(graceful=False)
        finally:
            self._folder.cleanup()
