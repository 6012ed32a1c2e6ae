"""A short run of the fuzzer, with a fresh seed each time; README.md has the long one."""

from __future__ import annotations

import random
import sys

import pytest

from fuzz.corpus import make_messages
from fuzz.running import Finding, Report, Target, bounded_memory, check_error, run_block
from fuzz.targets import TARGETS
from gradwire.errors import RemoteProtocolError
from loopback import decode

NUM_BLOCKS = 3

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc and uses anonymous files"
)


@pytest.mark.parametrize("name", list(TARGETS))
def test_damaged_inputs_do_no_harm(name):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    target = TARGETS[name]()
    report = Report(name)
    try:
        with bounded_memory():
            for number in range(NUM_BLOCKS):
                run_block(target, seed, number, report)
    finally:
        target.close()

    print(report)
    assert report.findings == []
    # Neither all refused nor all let through: the damage is of the right size.
    assert len(report.outcomes) >= 2


class Careless(Target):
    """Goes wrong in a way of its own on every thousandth input."""

    name = "careless"
    errors = (RemoteProtocolError,)

    def __init__(self, problem: str) -> None:
        self._problem = problem
        self._count = 0
        self._kept: list[object] = []

    def make(self, choice: random.Random) -> bytes:
        return choice.randbytes(4)

    def feed(self, given: bytes) -> str:
        self._count += 1
        if self._count == 500:
            match self._problem:
                case "crash":
                    return str(dict[bytes, str]()[given])
                case "memory":
                    bytearray(100 << 20)[::4096] = bytes(25600)
                case "address space":
                    bytearray(4 << 30)
                case "descriptors":
                    self._kept.append(open("/dev/null", "rb"))  # noqa: SIM115
                case "log":
                    raise RemoteProtocolError("two\nlines")
        return "accepted"

    def close(self) -> None:
        for kept in self._kept:
            kept.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "problem", ["crash", "memory", "address space", "descriptors", "log"]
)
def test_fuzzer_notices(problem):
    target, report = Careless(problem), Report("careless")
    try:
        with bounded_memory():
            run_block(target, 1, 0, report)
    finally:
        target.close()

    assert len(report.findings) == 1


def test_inputs_are_sound_before_they_are_damaged():
    for outgoing in make_messages():
        decode(outgoing)
    for name in ("frames", "messages", "records", "safe"):
        target = TARGETS[name]()
        for whole in target.sound_inputs():
            target.feed(whole)
        target.close()


def test_blocks_can_be_repeated():
    for make in TARGETS.values():
        target = make()
        inputs = []
        for _ in range(2):
            choice = random.Random(5)
            inputs.append([repr(target.make(choice)) for _ in range(50)])
        target.close()
        assert inputs[0] == inputs[1]


def test_error_for_want_of_memory_is_a_finding():
    error = RemoteProtocolError("a buffer")
    error.__cause__ = MemoryError()
    with pytest.raises(Finding):
        check_error(error)
