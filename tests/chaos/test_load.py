"""Small versions of the load tests; `python -m tests.chaos.load` runs them in full."""

from __future__ import annotations

import pytest

from chaos import loads

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_many_workers_call_and_go_back_without_an_error():
    print(loads.run_many_workers(8, 1.5))


def test_no_call_is_lost_or_made_twice():
    print(loads.run_many_calls(8_000))


@pytest.mark.parametrize("nbytes", [32 << 10, 1 << 20])
def test_stopped_reader_does_not_make_the_sender_grow(nbytes):
    print(loads.run_slow_reader(192, nbytes))
