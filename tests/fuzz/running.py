"""Feeds a target with damaged inputs, and watches memory, time and descriptors.

Inputs come in blocks. What a block holds follows from the seed, the target and the
number of the block alone, so that one block can be repeated.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import resource
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import probes
from gradwire.errors import GradwireError

BLOCK = 1000
MAX_INPUT_S = 0.25  # of processor time: others may use the machine as well
HANG_S = 120.0
MAX_GROWTH_BYTES = 64 << 20
MAX_ADDRESS_SPACE_BYTES = 1 << 30  # beyond what the process has at the start
MAX_ERROR_LENGTH = 3000
MAX_FINDINGS = 20


class Finding(AssertionError):
    """A property does not hold."""


class Target(ABC):
    """Something that reads what others sent."""

    name: str
    errors: tuple[type[GradwireError], ...]
    """What it may raise."""

    @abstractmethod
    def make(self, choice: random.Random) -> Any:
        """A damaged input; now and then a sound one."""

    @abstractmethod
    def feed(self, given: Any) -> str:
        """Gives an input to the code under test; one word for what came of it.

        Raises:
            Finding: A property does not hold.
        """

    def sound_inputs(self) -> list[Any]:
        """Inputs without damage, which it must take."""
        return []

    def close(self) -> None:  # noqa: B027 - most have nothing to undo
        """Undoes what the constructor did to the process."""


@dataclass
class Report:
    """What came of the inputs for one target."""

    target: str
    num_inputs: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    peak_growth_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{n} {what}" for what, n in self.outcomes.most_common())
        return (
            f"{self.target}: {self.num_inputs} inputs, {len(self.findings)} findings, "
            f"{self.cpu_s:.0f} s of processor time, slowest input "
            f"{self.slowest_s * 1e3:.0f} ms, memory grew by at most "
            f"{self.peak_growth_bytes >> 10} KiB; {outcomes}"
        )


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Makes allocations fail that are far beyond what any input may need."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MAX_ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_block(target: Target, seed: int, number: int, report: Report) -> None:
    """Feeds one block of inputs and adds to the report."""
    # What there is already need not be looked through by the collector in the middle of an
    # input: in a process that has run other tests that alone takes a quarter of a second.
    gc.freeze()
    try:
        _run_block(target, seed, number, report)
    finally:
        gc.unfreeze()


def _run_block(target: Target, seed: int, number: int, report: Report) -> None:
    choice = random.Random(f"{seed}/{target.name}/{number}")
    descriptors = probes.count_descriptors()
    resident = _begin_to_measure()
    start = time.process_time()
    for index in range(BLOCK):
        given = target.make(choice)
        begin = _own_time_s()
        try:
            outcome = _feed(target, given)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "FINDING"
            report.findings.append(
                f"--seed {seed} --target {target.name} --block {number}, input {index}: "
                f"{given!r:.3000}\n{traceback.format_exc()}"
            )
        took_s = _own_time_s() - begin
        report.outcomes[outcome] += 1
        report.num_inputs += 1
        if took_s > report.slowest_s:
            report.slowest_s = took_s
            if took_s > MAX_INPUT_S:
                report.findings.append(
                    f"--seed {seed} --target {target.name} --block {number}, input "
                    f"{index} took {took_s:.2f} s: {given!r:.3000}"
                )
    report.cpu_s += time.process_time() - start
    growth = probes.peak_bytes() - resident
    report.peak_growth_bytes = max(report.peak_growth_bytes, growth)
    where = f"--seed {seed} --target {target.name} --block {number}"
    if growth > MAX_GROWTH_BYTES:
        report.findings.append(f"{where}: memory grew by {growth} bytes")
    if (left := probes.count_descriptors() - descriptors) > 0:
        report.findings.append(f"{where}: {left} descriptors were left open")


def _own_time_s() -> float:
    """Processor time without the kernel's, which may be slow to find pages of memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _begin_to_measure() -> int:
    """The resident size, from which on `probes.peak_bytes` counts; collects no garbage."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return probes.peak_bytes()


def _feed(target: Target, given: Any) -> str:
    try:
        return target.feed(given)
    except target.errors as error:
        check_error(error)
        return type(error).__name__


def check_error(error: BaseException) -> None:
    """An error that goes to a log: short, one line, and not for want of memory."""
    text = str(error)
    if len(text) > MAX_ERROR_LENGTH or not text.isprintable():
        raise Finding(f"not fit for a log: {text[:500]!r} ({len(text)} characters)")
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, MemoryError) or "allocate" in text:
            raise Finding(f"ran out of memory: {text[:500]!r}")
        cause = cause.__cause__ or cause.__context__


def run(
    targets: list[Target], seed: int, num_inputs: int, first: int = 0
) -> list[Report]:
    """Feeds all targets in turn, about the same number of inputs to each.

    A crash of the process itself shows a stack; the block is the one after the last that
    was told, or one of the hundred after it.
    """
    faulthandler.enable()
    reports = [Report(target.name) for target in targets]
    num_blocks = -(-num_inputs // (BLOCK * len(targets)))
    with bounded_memory():
        for number in range(first, first + num_blocks):
            for target, report in zip(targets, reports, strict=True):
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                told = len(report.findings)
                run_block(target, seed, number, report)
                for finding in report.findings[told:]:
                    print(f"FINDING {finding}", flush=True)
            if sum(len(report.findings) for report in reports) > MAX_FINDINGS:
                break
            if (number + 1) % 100 == 0:
                print(f"{time.strftime('%H:%M:%S')} block {number}")
                print(*reports, sep="\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return reports
