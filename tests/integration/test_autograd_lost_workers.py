"""Workers that die or freeze in a backward pass, and what the others notice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import autograd_programs as programs
import functions
import probes
from autograd_functions import call, parameter
from cluster import Cluster, Handle
from gradwire import autograd
from gradwire.errors import (
    BackwardTimeout,
    PeerLostError,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]


NOTICED_S = 2.0
LOST_AFTER_S = 1.0


def make(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(4, {"lost_after": LOST_AFTER_S})


def watch_pass(mode: fn.Mode, worker: str) -> tuple[BaseException, float, float]:
    """A pass over w1 and w2 that a worker holds up; its error, and when it came."""

    def program() -> Tensor:
        if worker == "w2":
            return call(
                "w1",
                handlers.affine_relay,
                "w2",
                handlers.paused,
                parameter("x"),
                "gate",
            ).sum()
        y = call("w2", handlers.affine, parameter("x"))
        return call("w1", handlers.paused, y, "gate").sum()

    start = time.monotonic()
    error = fn.catch(Exception, fn.run, program, mode)
    return error, start, time.monotonic()


def start_held_up_pass(cluster: Cluster, mode: fn.Mode, worker: int) -> Handle:
    """Returns when the backward function of that worker runs."""
    watch = cluster.start(0, watch_pass, mode, f"w{worker}")
    cluster.run(worker, functions.wait_until_blocked, "gate")
    return watch


def check_others(cluster: Cluster, lost: int) -> None:
    """All others are out of the pass, hold nothing, and work together."""
    names = [f"w{rank}" for rank in range(4) if rank != lost]
    cluster.run(0, fn.use_workers, *names)
    cluster.run(0, fn.wait_until_released)
    cluster.run(0, fn.on_all_workers, fn.clear_grad)
    for mode in ("calls", "dictionary"):
        cluster.run(0, check_without, names[1:], mode)


def check_without(workers: list[str], mode: fn.Mode) -> None:
    def program() -> Tensor:
        y = call(
            workers[0],
            handlers.affine_relay,
            workers[1],
            handlers.linear,
            parameter("x"),
        )
        return y.sum()

    fn.check(program, mode)
    fn.on_all_workers(fn.clear_grad)


@pytest.mark.parametrize("mode", ["calls", "dictionary", "plain"])
def test_worker_that_is_killed_in_its_backward_is_named_soon(make_cluster, mode):
    """w2 is two hops away: w0 hears of it through w1."""
    cluster = make(make_cluster)
    watch = start_held_up_pass(cluster, mode, 2)

    killed = time.monotonic()
    cluster.kill(2)
    error, _, end = watch.result()

    assert isinstance(error, PeerLostError)
    assert "worker 'w2' (rank 2)" in str(error)
    assert end - killed < NOTICED_S
    check_others(cluster, 2)


@pytest.mark.parametrize("mode", ["calls", "dictionary"])
def test_worker_that_is_killed_between_two_others_is_named_soon(make_cluster, mode):
    """w1 dies while w2, behind it, holds the pass up; only w1 knows w2."""
    cluster = make(make_cluster)
    watch = start_held_up_pass(cluster, mode, 2)

    killed = time.monotonic()
    cluster.kill(1)
    error, _, end = watch.result()
    cluster.run(2, functions.set_event, "gate")

    assert isinstance(error, PeerLostError)
    assert "worker 'w1' (rank 1)" in str(error)
    assert end - killed < NOTICED_S
    check_others(cluster, 1)


@pytest.mark.parametrize("mode", ["calls", "dictionary", "plain"])
def test_others_leave_the_pass_of_a_worker_that_is_killed(make_cluster, mode):
    """The starter dies: nobody waits for it, and its contexts are dropped."""
    cluster = make(make_cluster)
    start_held_up_pass(cluster, mode, 1)

    cluster.kill(0)
    cluster.run(1, functions.set_event, "gate")

    cluster.run(1, fn.use_workers, "w1", "w2", "w3")
    cluster.run(1, fn.wait_until_released)
    cluster.run(1, fn.on_all_workers, fn.clear_grad)
    cluster.run(1, check_without, ["w2", "w3"], "dictionary")


def test_frozen_worker_is_named_when_the_limit_of_the_pass_comes(make_cluster):
    cluster = make_cluster(4)
    ctx = cluster.run(0, prepare_loss)
    cluster.stop(1)

    error, took = cluster.run(0, backward_with_limit, ctx, 0.3)

    assert isinstance(error, BackwardTimeout)
    assert "worker 'w1' (rank 1)" in str(error)
    assert took < NOTICED_S
    cluster.run(0, check_without, ["w2", "w3"], "dictionary")
    cluster.cont(1)
    cluster.run(0, close_context)
    cluster.run(0, fn.wait_until_released)
    cluster.run(0, check_without, ["w1", "w2"], "dictionary")


def prepare_loss() -> autograd.Context:
    ctx = fn.open_context()
    fn.keep("loss", fn.inside(programs.one_call))
    fn.use_workers("w0", "w2", "w3")
    return ctx


def prepare_nested_loss() -> autograd.Context:
    def program() -> Tensor:
        y = call("w1", handlers.affine_relay, "w2", handlers.linear, parameter("x"))
        return y.sum()

    ctx = fn.open_context()
    fn.keep("loss", fn.inside(program))
    return ctx


def backward_with_limit(
    ctx: autograd.Context, limit: float
) -> tuple[BaseException, float]:
    start = time.monotonic()
    error = fn.catch(Exception, ctx.backward, fn.take("loss"), timeout=limit)
    return error, time.monotonic() - start


def close_context() -> None:
    fn.use_workers(*fn.WORKERS)
    fn.close_contexts()


def test_frozen_worker_is_named_when_it_is_given_up(make_cluster):
    cluster = make(make_cluster)
    ctx = cluster.run(0, prepare_loss)
    cluster.stop(1)

    error, took = cluster.run(0, backward_with_limit, ctx, 0)

    assert isinstance(error, PeerLostError)
    assert "worker 'w1' (rank 1)" in str(error)
    assert took < LOST_AFTER_S + NOTICED_S
    cluster.run(0, check_without, ["w2", "w3"], "dictionary")


def test_context_that_has_lost_a_worker_refuses_passes(make_cluster):
    """Its part of the graph is gone; the error says why, at once."""
    cluster = make(make_cluster)
    ctx = cluster.run(0, prepare_loss)
    cluster.kill(1)
    cluster.run(0, wait_until_lost)

    error, took = cluster.run(0, backward_with_limit, ctx, 0)

    assert isinstance(error, PeerLostError)
    assert "'w1'" in str(error)
    assert took < 0.5


def wait_until_lost(worker: str = "w1") -> None:
    def is_lost() -> bool:
        try:
            fn.outside(call, worker, functions.echo, 1)
        except Exception:
            return True
        return False

    probes.wait_until(is_lost, f"{worker} is lost")


def test_pass_over_a_worker_that_was_lost_by_another_one_is_refused(make_cluster):
    """Whoever called it has dropped the context, and must not begin it anew."""
    cluster = make(make_cluster)
    ctx = cluster.run(0, prepare_nested_loss)
    cluster.kill(2)
    cluster.run(1, wait_until_lost, "w2")

    error, took = cluster.run(0, backward_with_limit, ctx, 0)

    assert isinstance(error, PeerLostError)
    assert "'w2'" in str(error)
    assert took < 0.5
    cluster.run(0, fn.use_workers, "w0", "w1", "w3")
    cluster.run(0, fn.close_contexts)
    check_others(cluster, 2)
