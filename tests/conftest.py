"""Fixtures for all tests: the leak check and the worker processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported anywhere: test processes and workers share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import cluster as harness
import leaks
import safe_functions
from cluster import Cluster

SHARED_WORLD_SIZE = 4
SAFE_WORLD_SIZE = 3

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


class _SharedCluster:
    """The cluster that most tests share; replaced when a test has broken it."""

    def __init__(self) -> None:
        self.current: Cluster | None = None

    def get(self) -> Cluster:
        if self.current is not None and not self.current.is_healthy():
            # Whatever is wrong with it was for the test that broke it to report.
            with contextlib.suppress(harness.ClusterError):
                self.current.close(graceful=False)
            self.current = None
        if self.current is None:
            self.current = Cluster(SHARED_WORLD_SIZE)
        return self.current

    def close(self) -> None:
        if self.current is not None:
            self.current.close(graceful=self.current.is_healthy())


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[_SharedCluster]:
    shared = _SharedCluster()
    yield shared
    shared.close()


@pytest.fixture
def cluster(_shared_cluster: _SharedCluster) -> Cluster:
    """Four workers, w0 to w3, shared with other tests."""
    return _shared_cluster.get()


@pytest.fixture(scope="session")
def _shared_safe_cluster() -> Iterator[Cluster]:
    with Cluster(SAFE_WORLD_SIZE, {"serializer": "safe"}) as made:
        for rank in range(SAFE_WORLD_SIZE):
            made.run(rank, safe_functions.forbid_pickling)
        yield made


@pytest.fixture
def safe_cluster(_shared_safe_cluster: Cluster) -> Iterator[Cluster]:
    """Three workers in safe mode, shared with other tests, that cannot pickle anything.

    What they have not exported is never run, and they never even try to pickle.
    """
    yield _shared_safe_cluster
    for rank in range(SAFE_WORLD_SIZE):
        assert _shared_safe_cluster.run(rank, safe_functions.find_pickling) == []
        assert not _shared_safe_cluster.run(rank, safe_functions.was_touched)


@pytest.fixture
def make_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of the test's own, which are closed after it."""
    made: list[Cluster] = []

    def make(*args: Any, **kwargs: Any) -> Cluster:
        made.append(Cluster(*args, **kwargs))
        return made[-1]

    yield make
    # After a failure the workers may hang, and the test has said enough.
    failed = request.node.stash.get(_failed, False)
    problems = []
    for own in made:
        try:
            own.close(graceful=not failed and not own.disturbed)
        except harness.ClusterError as error:
            problems.append(str(error))
    if problems and not failed:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes or descriptors behind.

    What the shared cluster holds never counts, also if it is replaced meanwhile. Wider
    fixtures are set up before this one and closed after it, so what they hold does not
    count; other fixtures of the test are set up after it and do.
    """
    marker = request.node.get_closest_marker("leaks")
    if marker is not None:
        if not marker.args:
            pytest.fail("the marker 'leaks' needs a reason")
        yield
        return
    shared: _SharedCluster | None = None
    if "_shared_cluster" in request.fixturenames:
        shared = request.getfixturevalue("_shared_cluster")

    def look() -> leaks.Snapshot:
        ours = shared.current if shared is not None else None
        return leaks.take_snapshot(
            ignored_fds=harness.fork_server_fds | (ours.fds() if ours else set()),
            ignored_pids=harness.fork_server_pids | (ours.pids() if ours else set()),
        )

    before = look()
    yield
    if request.node.stash.get(_failed, False):
        return  # the traceback of the failure keeps things alive
    found = leaks.find_leaks(before, look)
    if found:
        lines = "\n  ".join(found)
        pytest.fail(f"{request.node.nodeid} left behind:\n  {lines}", pytrace=False)
