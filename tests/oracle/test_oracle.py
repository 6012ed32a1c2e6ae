"""Random programs: on workers they come to what they come to in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracle.programs import MODES
from oracle.running import Workers

_FIRST_SEED = 100_000
_PROGRAMS_PER_TEST = 16
_TESTS_PER_MODE = 4


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Workers that outlive the programs: each must leave them as they were."""
    workers = Workers()
    yield workers
    workers.close()


@pytest.mark.leaks("the workers serve all tests of this file")
@pytest.mark.parametrize("chunk", range(_TESTS_PER_MODE))
@pytest.mark.parametrize("mode", list(MODES))
def test_random_programs_match_one_process(workers, mode, chunk):
    """320 programs in all; a failure prints the program and how to repeat it."""
    first = _FIRST_SEED + chunk * _PROGRAMS_PER_TEST
    for seed in range(first, first + _PROGRAMS_PER_TEST):
        workers.check(mode, seed)
