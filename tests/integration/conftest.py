"""Fixtures for tests of how workers find each other, and part."""

from __future__ import annotations

import pytest

from bare_workers import NUM_BARE, find_port, leave_at_once
from cluster import Cluster
from gradwire import rpc


@pytest.fixture(scope="module")
def _bare():
    with Cluster(NUM_BARE) as made:
        for handle in [made.start(rank, rpc.shutdown) for rank in range(NUM_BARE)]:
            handle.result()
        yield made


@pytest.fixture
def bare(_bare):
    """Three processes that are no workers; what a test makes of them is undone."""
    yield _bare
    for handle in [_bare.start(rank, leave_at_once) for rank in range(NUM_BARE)]:
        handle.result()


@pytest.fixture
def file_url(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def tcp_url():
    return f"tcp://127.0.0.1:{find_port()}"
