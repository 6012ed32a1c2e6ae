"""What the tests of this layer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.rpc._pool import WorkerPool

CLOSE_S = 10.0


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Threads that run, and that have ended after the test."""
    made = WorkerPool("test", 2, lambda: None)
    made.start()
    yield made
    assert made.close(CLOSE_S) == []
