"""Random programs: on workers they come to what they come to in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracle.programs import MODES
from oracle.running import Workers

pytestmark = pytest.mark.multiproc

FIRST_SEED = 100_000
PROGRAMS_PER_TEST = 18
TESTS_PER_MODE = 4
TOGETHER_PER_TEST = 5


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Workers that outlive the programs: each must leave them as they were."""
    workers = Workers()
    yield workers
    workers.close()


def first_seed(chunk: int) -> int:
    return FIRST_SEED + chunk * PROGRAMS_PER_TEST


@pytest.mark.parametrize("chunk", range(TESTS_PER_MODE))
@pytest.mark.parametrize("mode", list(MODES))
def test_random_programs_match_one_process(workers, mode, chunk):
    """A failure shows the program and how to repeat it."""
    first = first_seed(chunk)
    found = [
        workers.check(mode, seed) for seed in range(first, first + PROGRAMS_PER_TEST)
    ]

    # Programs in which all gradients are None would show nothing.
    assert sum(counts["exact"] + counts["close"] for counts in found) > 30
    assert sum(counts["hooks"] for counts in found) > 0


@pytest.mark.parametrize("chunk", range(2))
def test_random_programs_match_one_process_when_run_together(workers, chunk):
    """Five programs at a time, each driven by another worker."""
    for number in range(TOGETHER_PER_TEST):
        round_ = chunk * TOGETHER_PER_TEST + number
        modes = MODES[round_ % len(MODES) :] + MODES[: round_ % len(MODES)]
        workers.check_together(modes, 200_000 + round_ * len(MODES))
