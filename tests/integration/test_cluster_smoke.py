"""The harness itself: values, errors, signals, limits."""

from __future__ import annotations

import os
import signal

import pytest

import functions
from cluster import Cluster, ClusterError, WorkerDied, WorkerTimeout
from worker_process import WorkerFailure

pytestmark = pytest.mark.multiproc


def double(value):
    return 2 * value


def test_run_returns_value(cluster):
    assert cluster.run(0, functions.add, 1, b=2) == 3


def test_run_uses_the_process_of_the_rank(cluster):
    pids = [cluster.run(rank, functions.get_pid) for rank in range(4)]

    assert pids == [cluster.pid(rank) for rank in range(4)]
    assert len({*pids, os.getpid()}) == 5


def test_run_finds_functions_of_test_modules(cluster):
    assert cluster.run(1, double, 4) == 8


def test_run_raises_what_the_function_raised(cluster):
    with pytest.raises(ValueError, match="no good") as caught:
        cluster.run(2, functions.raise_value_error, "no good")

    assert "in raise_value_error" in str(caught.value.__cause__)


def test_run_raises_text_of_unpicklable_error(cluster):
    with pytest.raises(WorkerFailure, match="Unpicklable: held"):
        cluster.run(2, functions.raise_unpicklable)


def test_run_raises_for_unpicklable_result(cluster):
    with pytest.raises(TypeError, match="pickle"):
        cluster.run(2, functions.return_unpicklable)


def test_start_runs_workers_at_the_same_time(cluster):
    handles = [cluster.start(rank, functions.echo, rank) for rank in range(4)]

    assert [handle.result() for handle in reversed(handles)] == [3, 2, 1, 0]


def test_cluster_is_made_anew_after_a_kill(_shared_cluster):
    broken = _shared_cluster.get()
    broken.kill(3)

    repaired = _shared_cluster.get()

    assert repaired is not broken
    assert repaired.run(3, functions.echo, "here") == "here"


def test_timeout_shows_stacks(make_cluster):
    cluster = make_cluster(1)
    cluster.start(0, functions.block_until_set, "never")

    with pytest.raises(WorkerTimeout, match="in block_until_set"):
        cluster.run(0, functions.echo, 1, timeout=0.2)

    cluster.kill(0)


def test_kill_ends_the_worker(make_cluster):
    cluster = make_cluster(2)
    handle = cluster.start(1, functions.block_until_set, "never")

    cluster.kill(1)

    with pytest.raises(WorkerDied, match=f"exit code {-signal.SIGKILL}"):
        handle.result()
    assert cluster.run(0, functions.echo, 1) == 1


def test_stop_and_cont_freeze_and_thaw(make_cluster):
    cluster = make_cluster(1)

    cluster.stop(0)
    handle = cluster.start(0, functions.echo, 1)
    with pytest.raises(WorkerTimeout, match="stopped"):
        handle.result(timeout=0.1)
    cluster.cont(0)

    assert handle.result() == 1


def test_restart_starts_a_new_process(make_cluster):
    cluster = make_cluster(2)
    old = cluster.pid(1)
    cluster.kill(1)

    cluster.restart(1)

    assert cluster.run(1, functions.get_pid) == cluster.pid(1) != old


def test_close_reports_a_worker_that_died_on_its_own():
    cluster = Cluster(2)
    with pytest.raises(WorkerDied, match="exit code 3"):
        cluster.run(1, functions.exit_process, 3)

    with pytest.raises(ClusterError, match="'w1': exit code 3"):
        cluster.close(graceful=False)


def test_init_failure_is_raised():
    with pytest.raises(TypeError, match="no_such_option"):
        Cluster(2, {"no_such_option": 1})
