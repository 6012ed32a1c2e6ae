"""Breaks workers on purpose while they train, and checks that nothing else breaks.

The driver is a process of its own beside the workers. It talks to them through pipes and
signals only, so it works when the code under test does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import probes
import worker_process
from certificates import Office
from chaos import state, training
from chaos.schedule import HARMLESS, Fault, draw_round
from cluster import Cluster, Handle
from gradwire import rpc
from namespaces import INTERFACE, Hosts

LOST_AFTER_S = 2.0
CONNECT_S = 4.0
STEP_S = 0.06
"""How long a step takes, about; see `draw_round`."""
HANG_S = 2 * LOST_AFTER_S + CONNECT_S + 10.0
"""An attempt, or whatever else the trainer does, that takes longer hangs."""
NOTICED_S = 5.0
"""Limit for an error after a kill; 2 s on a machine that does nothing else."""
SETTLE_S = 8.0
WARM_UP_STEPS = 10
STEPS_PER_ROUND = 40
FAULTS_PER_ROUND = 8
POLL_S = 0.002
SECRET = "a secret of this run"


class ChaosError(AssertionError):
    """Something broke that was not broken on purpose; with the log of the run."""


@dataclass
class _Victim:
    """What the driver knows about one worker."""

    name: str
    rank: int
    status: str = "up"  # or: down, starting, stopped, cut, disturbed
    fault: Fault | None = None
    until: float = 0.0
    starting: Handle | None = None
    # When errors may name it: from the fault until it is back.
    troubles: list[tuple[float, float, str]] = field(default_factory=list)

    def begin_trouble(self, kind: str) -> None:
        if not self.troubles or self.troubles[-1][1] != _OPEN:
            self.troubles.append((time.monotonic(), _OPEN, kind))

    def end_trouble(self) -> None:
        if self.troubles and self.troubles[-1][1] == _OPEN:
            start, _, kind = self.troubles[-1]
            self.troubles[-1] = (start, time.monotonic(), kind)


_OPEN = float("inf")
_RETURNS = ("as a new process", "in the same process", "in the same life")


class Run:
    """One run: a cluster, a training, and what happens to them.

    Args:
        seed: Everything is drawn from it.
        num_stages: How many workers may be killed.
        num_owners: How many hold parameters.
        hosts: If given, each worker lives on one of these.
        tls: Whether they speak TLS to each other; for hosts.
        show: Gets each line of the log at once.

    Raises:
        ChaosError: The run has failed; so do `play` and `close`.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_stages: int = 3,
        num_owners: int = 2,
        hosts: Hosts | None = None,
        tls: bool = False,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.lines: list[str] = []
        self._show = show
        self._hosts = hosts
        self._start = time.monotonic()
        self._owners = [f"owner{index}" for index in range(num_owners)]
        self._stages = [f"stage{index}" for index in range(num_stages)]
        names = [training.TRAINER, training.WITNESS, *self._owners, *self._stages]
        self._victims = {name: _Victim(name, rank) for rank, name in enumerate(names)}
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-chaos-")
        path = Path(self._folder.name)
        self._progress = training.Progress(path / "progress")
        self._tls: dict[str, Any] = {}
        if tls:
            self._tls = {"tls": Office(path / "certificates").options()}
        self._reference = training.OneProcess(seed)
        self._losses: list[float] = []
        self._last_success = self._start  # when the last step began that was accepted
        self._num_rounds = 0
        self.num_faults = 0
        self.num_retries = 0
        self.num_witnessed = 0
        self.slowest_notice_s = 0.0
        self._pids: set[int] = set()
        self._log(
            f"seed {seed}: {', '.join(names)}"
            + (" on hosts" if hosts else "")
            + (", by TLS" if tls else "")
        )
        self._cluster = Cluster(
            len(names),
            self._options(),
            names=names,
            secret=SECRET if hosts else None,
            namespaces=hosts.names if hosts else None,
        )
        self._pids |= self._cluster.pids()
        try:
            self._run(0, training.begin, seed, self._owners, self._stages, path)
            self._train(WARM_UP_STEPS, [])
            for victim in self._victims.values():
                self._run(victim.rank, training.call_everybody, names)
            self._check_transport()
            self._baseline = {
                name: self._run(victim.rank, state.take_state)
                for name, victim in self._victims.items()
            }
        except BaseException:
            self._abandon()
            raise

    @staticmethod
    def num_workers(num_stages: int, num_owners: int) -> int:
        """How many workers, and hosts, there are in such a run."""
        return 2 + num_owners + num_stages

    def _options(self) -> dict[str, Any]:
        return {
            "lost_after": LOST_AFTER_S,
            "connect_timeout": CONNECT_S,
            "num_worker_threads": 4,
            "shared_memory_min_bytes": 4096,
            **({"interface": INTERFACE} if self._hosts else {}),
            **(self._tls or {"allow_plain_tcp": True}),
        }

    # ---------------------------------------------------------------------- the rounds

    def play(
        self,
        *,
        num_steps: int = STEPS_PER_ROUND,
        num_faults: int = FAULTS_PER_ROUND,
    ) -> None:
        """One round: some steps with some faults, then all checks."""
        first = len(self._losses)
        self._num_rounds += 1
        faults = draw_round(
            f"{self.seed}/{self._num_rounds}",
            first,
            num_steps,
            num_faults,
            victims=[*self._stages, *self._owners],
            others=[training.TRAINER, training.WITNESS],
            lost_after_s=LOST_AFTER_S,
            step_s=STEP_S,
            hosts=self._hosts is not None,
        )
        self._log(f"round {self._num_rounds}: steps {first} to {first + num_steps - 1}")
        for fault in faults:
            self._log(f"  planned: {fault}")
        try:
            self._train(num_steps, faults)
            self._check_transport()
            self._check_leaks()
        except BaseException as error:
            self._log(f"FAILED: {type(error).__name__}: {error}")
            self._abandon()
            raise

    def _train(self, num_steps: int, faults: list[Fault]) -> None:
        first = len(self._losses)
        handle = self._cluster.start(0, training.train, first, num_steps)
        self._progress.write(first, 0)
        waiting = list(faults)
        while not (handle.is_done() and self._all_are_up()):
            now = time.monotonic()
            step, attempt, since = self._progress.read()
            if now - since > HANG_S and not handle.is_done():
                raise ChaosError(
                    f"the trainer hangs since {now - since:.1f} s in step {step}, attempt "
                    f"{attempt}\n{self._cluster.dump_stacks()}"
                )
            while waiting and (
                waiting[0].step < step
                or (waiting[0].step == step and now >= since + waiting[0].delay_s)
                or handle.is_done()
            ):
                self._begin(waiting.pop(0), step, attempt)
            for victim in self._victims.values():
                self._go_on(victim, now)
            probes.pass_time(POLL_S)
        report: training.Report = handle.result(HANG_S)
        self._losses += report.losses
        self._check_report(report)

    def _all_are_up(self) -> bool:
        return all(victim.status == "up" for victim in self._victims.values())

    # ----------------------------------------------------------------------- faults

    def _begin(self, fault: Fault, step: int, attempt: int) -> None:
        victim = self._victims[fault.worker]
        at = f"in step {step}, attempt {attempt}"
        if victim.status not in ("up", "starting") or (
            victim.status == "starting" and fault.kind != "kill"
        ):
            self._log(f"{fault.kind} {victim.name}: left out, it is {victim.status}")
            return
        self.num_faults += 1
        victim.fault = fault
        victim.until = time.monotonic() + fault.lasts_s
        pid = self._cluster.pid(victim.rank)
        rank = victim.rank
        if fault.kind not in HARMLESS:
            victim.begin_trouble(fault.kind)
        if fault.kind in ("freeze", "disconnect", "cut"):
            self._run(rank, training.listen)
        self._log(f"{fault.kind} {victim.name} (pid {pid}, {victim.status}) {at}")
        if fault.kind == "kill":
            self._cluster.kill(rank)
            victim.status = "down"
        elif fault.kind in ("pause", "freeze"):
            self._cluster.stop(rank)
            victim.status = "stopped"
        elif fault.kind == "disconnect":
            self._run(rank, worker_process.cut_connections)
            victim.status = "cut"
        elif fault.kind in ("glitch", "cut"):
            assert self._hosts is not None
            self._hosts.cut(rank)
            victim.status = "cut"
        elif fault.kind in ("slow", "lossy"):
            assert self._hosts is not None
            self._log("  " + self._hosts.disturb(rank, fault.kind))
            victim.status = "disturbed"

    def _go_on(self, victim: _Victim, now: float) -> None:
        """Undoes what is due."""
        if victim.status == "starting":
            assert victim.starting is not None
            if victim.starting.is_done():
                victim.starting.result()
                self._is_back(victim)
            return
        if victim.status == "up" or now < victim.until:
            return
        fault = victim.fault
        assert fault is not None
        if fault.kind == "kill":
            self._restart(victim)
            return
        if fault.kind in ("pause", "freeze"):
            self._cluster.cont(victim.rank)
        elif fault.kind in ("glitch", "cut"):
            assert self._hosts is not None
            self._hosts.mend(victim.rank)
        elif fault.kind in ("slow", "lossy"):
            assert self._hosts is not None
            self._hosts.calm(victim.rank)
        if fault.kind in HARMLESS:
            self._is_back(victim)
            return
        told = self._run(victim.rank, training.why_lost, training.TRAINER)
        self._log(f"{victim.name} is back and has lost the trainer: {told or 'no'}")
        if not told or (fault.kind == "freeze" and "declared this worker" not in told):
            raise ChaosError(
                f"{victim.name} was lost ({fault.kind}) and is back, but was told of the "
                f"trainer: {told or 'nothing'}"
            )
        self._return(victim, random.Random(str(fault)).choice(_RETURNS))

    def _return(self, victim: _Victim, how: str) -> None:
        """A worker that was taken for lost comes back to the group."""
        if how == "as a new process":
            self._restart(victim)
            return
        self._log(f"{victim.name} comes back {how}")
        if how == "in the same process":
            victim.starting = self._cluster.start(victim.rank, worker_process.rejoin)
        else:
            victim.starting = self._cluster.start(
                victim.rank, training.meet_everybody, list(self._victims)
            )
        victim.status = "starting"

    def _restart(self, victim: _Victim) -> None:
        self._log(f"restart {victim.name}")
        victim.starting = self._cluster.begin_restart(victim.rank)
        victim.status = "starting"
        self._pids |= self._cluster.pids()

    def _is_back(self, victim: _Victim) -> None:
        self._log(f"{victim.name} is up")
        victim.status = "up"
        victim.starting = None
        victim.end_trouble()

    # ----------------------------------------------------------------------- checks

    def _check_report(self, report: training.Report) -> None:
        failed = [attempt for attempt in report.attempts if attempt.error]
        self.num_retries += len(failed)
        self.num_witnessed += report.num_witnessed
        for attempt in failed:
            at = attempt.end - self._start
            self._log(
                f"at {at:.3f} s attempt {attempt.step}.{attempt.number} had failed after "
                f"{attempt.end - attempt.start:.3f} s: {attempt.error.splitlines()[0]}"
            )
        if report.unexpected:
            raise ChaosError("; ".join(report.unexpected))
        for attempt in report.attempts:
            if attempt.error:
                self._check_blame(attempt)
            else:
                self._last_success = attempt.start
        self._check_notice(report.attempts)
        expected = self._reference.train_until(len(self._losses))
        for step, (ours, theirs) in enumerate(zip(self._losses, expected, strict=True)):
            if ours != theirs:
                raise ChaosError(
                    f"the loss of step {step} is {ours!r}; undisturbed it is {theirs!r}"
                )

    def _check_blame(self, attempt: training.Attempt) -> None:
        """An error names somebody who was in trouble then, or since all went well.

        What is gone with a worker is missed when it is used next.
        """
        for victim in self._victims.values():
            if f"'{victim.name}'" in attempt.error and any(
                start <= attempt.end and end >= self._last_success
                for start, end, _ in victim.troubles
            ):
                return
        raise ChaosError(
            f"attempt {attempt.step}.{attempt.number} failed, but its error names nobody "
            f"who was in trouble: {attempt.error}"
        )

    def _check_notice(self, attempts: list[training.Attempt]) -> None:
        """After a kill nobody waits for long, unless others were slow at the same time."""
        for attempt in attempts:
            troubles = [
                (start, kind)
                for victim in self._victims.values()
                for start, end, kind in victim.troubles
                if start <= attempt.end and end >= attempt.start
            ]
            if not attempt.error or any(kind != "kill" for _, kind in troubles):
                continue
            if not troubles:  # it has missed what was lost before it began
                continue
            since = max(attempt.start, min(start for start, _ in troubles))
            took = attempt.end - since
            self.slowest_notice_s = max(self.slowest_notice_s, took)
            if took > NOTICED_S:
                raise ChaosError(
                    f"attempt {attempt.step}.{attempt.number} ended {took:.1f} s after a "
                    f"kill: {attempt.error}"
                )

    def _check_leaks(self) -> None:
        found = {name: ["not looked at"] for name in self._victims}

        def is_clean() -> bool:
            for name in [name for name, lines in found.items() if lines]:
                after = self._run(self._victims[name].rank, state.take_state)
                found[name] = state.compare(name, self._baseline[name], after)
            return not any(found.values())

        try:
            probes.wait_until(is_clean, "nothing is left", SETTLE_S)
        except AssertionError:
            stacks = self._cluster.dump_stacks()
            for name in [name for name, lines in found.items() if lines]:
                rank = self._victims[name].rank
                found[name] += self._run(rank, state.describe_contexts)
            lines = "\n  ".join(line for lines in found.values() for line in lines)
            raise ChaosError(f"left behind:\n  {lines}\n{stacks}") from None

    def _check_transport(self) -> None:
        wanted = {"unix"} if not self._hosts else {"tls"} if self._tls else {"tcp"}
        for name, victim in self._victims.items():
            used = self._run(victim.rank, rpc.get_debug_info)["transports"]
            wrong = {to: how for to, how in used.items() if to != name} and {
                to: how for to, how in used.items() if to != name and how not in wanted
            }
            if wrong:
                raise ChaosError(f"{name} is connected by {wrong}, not by {wanted}")

    def _run(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._cluster.run(rank, function, *args, timeout=HANG_S)

    def _log(self, line: str) -> None:
        line = f"{time.monotonic() - self._start:9.3f} s  {line}"
        self.lines.append(line)
        if self._show is not None:
            self._show(line)

    # -------------------------------------------------------------------------- end

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def summary(self) -> str:
        return (
            f"seed {self.seed}: {self._num_rounds} rounds, {len(self._losses)} steps, "
            f"{self.num_faults} faults, {self.num_retries} attempts failed, "
            f"{self.num_witnessed} contexts of others went on, a kill was noticed within "
            f"{self.slowest_notice_s:.2f} s"
        )

    def close(self) -> None:
        """A graceful end of all workers, which must be possible."""
        try:
            self._cluster.close(graceful=True)
        finally:
            self._abandon()
        left = [pid for pid in self._pids if os.path.exists(f"/proc/{pid}")]
        if left:
            raise ChaosError(f"processes are left: {left}")

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._cluster.close(graceful=False)
        self._progress.close()
        self._folder.cleanup()
