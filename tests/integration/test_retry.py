"""Steps that are run again because a worker was lost: exactly as if it had not been."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functions
import optim_functions
import probes
import retry_functions as fn
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.autograd.extension import find_context
from gradwire.errors import (
    ConnectError,
    NotRepeatable,
    PeerLostError,
    UsageError,
)
from gradwire.optim import DistributedOptimizer
from on_worker import on_worker
from optim_functions import assert_same

pytestmark = pytest.mark.multiproc

NUM_STEPS = 4
ADAM: dict[str, Any] = {"lr": 0.05}


def train(num_steps: int, attempts: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = DistributedOptimizer(torch.optim.Adam, fn.all_references(), **ADAM)
    losses = [
        autograd.retry(fn.step_of(number, optimizer), attempts, backoff=0.01)
        for number in range(num_steps)
    ]
    return losses, fn.parameters_now()


def count_what_stays() -> dict[str, int]:
    return optim_functions.what_stays()


def check_nothing_stays(cluster: Cluster, *ranks: int) -> None:
    for rank in ranks:
        probes.wait_until(
            lambda rank=rank: not cluster.run(rank, count_what_stays),  # type: ignore[misc]
            f"nothing is left on worker {rank}",
        )


# -------------------------------------------------------------------------- lost workers


@pytest.mark.chaos
def test_losses_are_those_of_an_undisturbed_run(make_cluster):
    """w1 dies in a forward; its successor in a backward; the one after that lives."""
    cluster = make_cluster(4)
    cluster.run(1, fn.arm, "forward", 2)
    training = cluster.start(0, train, NUM_STEPS)
    cluster.wait_dead(1)
    cluster.restart(1)
    # It may be called before it is armed: then it is the second time that counts.
    cluster.run(1, fn.arm, "backward", 1)
    cluster.wait_dead(1)
    cluster.restart(1)

    losses, parameters = training.result()

    expected = fn.expected_training(torch.optim.Adam, NUM_STEPS, **ADAM)
    assert losses == expected[0]
    assert_same(parameters, expected[1])
    check_nothing_stays(cluster, 0, 1, 2, 3)


def lose_and_wait_in_vain(attempts: int, timeout: float) -> list[BaseException]:
    """A worker that does not come back."""

    def step(ctx: autograd.Context) -> None:
        num_runs.append(1)
        fn.loss_of(0)

    num_runs: list[int] = []
    try:
        autograd.retry(step, attempts, backoff=0, timeout=timeout)
    except Exception as error:
        assert len(num_runs) == 1
        return [error, *map(RuntimeError, vars(error)["__notes__"])]
    raise AssertionError("it came back")


@pytest.mark.chaos
def test_worker_that_stays_away_is_named(make_cluster):
    cluster = make_cluster(4)
    cluster.kill(1)

    error, *notes = cluster.run(0, lose_and_wait_in_vain, 5, 0.3)

    assert isinstance(error, (PeerLostError, ConnectError))
    assert error.about == "w1"
    (note,) = map(str, notes)
    assert "'w1'" in note
    assert "1 of 5 attempts failed" in note
    check_nothing_stays(cluster, 0, 2, 3)


def step_without(kind: str) -> None:
    """A worker dies when the gradients are there, and before the optimizer asks for them."""
    optimizer = DistributedOptimizer(torch.optim.Adam, fn.all_references(), **ADAM)
    before = fn.parameters_now()
    with autograd.context() as ctx:
        ctx.backward(fn.loss_of(0))
        if kind == "killed":
            with pytest.raises(PeerLostError):
                rpc.rpc_sync(fn.BENDER, functions.kill_process)
            # It may be that the first owner has not noticed yet.
            probes.wait_until(lambda: _is_lost(fn.FIRST, fn.BENDER), "w2 has noticed")
            with pytest.raises(PeerLostError, match="'w1'"):
                optimizer.step(ctx)
            assert_same(fn.parameters_now()[:3], before[:3])
        else:
            optimizer.step(ctx)
            assert not torch.equal(fn.parameters_now()[0], before[0])


def _is_lost(at: str, name: str) -> bool:
    return rpc.rpc_sync(at, _sees_lost, args=(name,))


def _sees_lost(name: str) -> bool:
    try:
        rpc.rpc_sync(name, functions.echo, args=(1,))
    except PeerLostError:
        return True
    return False


@pytest.mark.chaos
def test_owner_whose_gradients_were_dropped_does_not_step_without_them(make_cluster):
    cluster = make_cluster(4)

    cluster.run(0, step_without, "nothing")
    cluster.run(0, step_without, "killed")
    cluster.wait_dead(1)


def run_async(attempts: int) -> tuple[list[float], int]:
    num_runs = 0

    async def step(ctx: autograd.Context) -> float:
        nonlocal num_runs
        num_runs += 1
        y = await rpc.rpc_async(fn.FIRST, fn.first_half, args=(fn.data_of(0)[0],))
        ctx.backward(y.sum())
        return y.sum().item()

    async def main() -> list[float]:
        return [await autograd.aretry(step, attempts, backoff=0.01) for _ in range(3)]

    return asyncio.run(main()), num_runs


@pytest.mark.chaos
def test_coroutines_are_run_again_too(make_cluster):
    cluster = make_cluster(3)
    expected, _ = cluster.run(0, run_async, 1)
    cluster.run(1, fn.arm, "backward", 2)
    training = cluster.start(0, run_async, 2)
    cluster.wait_dead(1)
    cluster.restart(1)

    found, num_runs = training.result()

    assert found == expected
    assert num_runs == 4


def give_up(through: str) -> list[str]:
    """Cancelled while it waits for w1, which stays away; whom it has recovered."""
    recovered: list[str] = []

    async def step(ctx: autograd.Context) -> None:
        await rpc.rpc_async(through, _call_bender)

    async def main() -> None:
        task = asyncio.create_task(
            autograd.aretry(
                step,
                backoff=0,
                timeout=probes.LIMIT_S,
                recover=lambda worker: recovered.append(worker.name),
            )
        )
        await asyncio.to_thread(probes.wait_until, _is_waiting, "it waits for w1")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < probes.LIMIT_S / 2
    return recovered


def _call_bender() -> None:
    rpc.rpc_sync(fn.BENDER, functions.echo, args=(1,))


def _is_waiting() -> bool:
    for frame in sys._current_frames().values():
        here: Any = frame
        while here is not None:
            code = here.f_code
            if (os.path.basename(code.co_filename), code.co_name) == (
                "_retry.py",
                "_wait",
            ):
                return True
            here = here.f_back
    return False


@pytest.mark.chaos
@pytest.mark.parametrize("through", ["w0", "w2"])
def test_nobody_is_awaited_any_more_if_it_is_cancelled(make_cluster, through):
    """w1 was lost by this worker, or by another one."""
    cluster = make_cluster(3)
    cluster.kill(1)

    assert cluster.run(0, give_up, through) == []


# ------------------------------------------------------------------- what is not repeated


@on_worker(0)
def test_other_errors_come_at_once():
    num_runs = 0

    def step(ctx: autograd.Context) -> None:
        nonlocal num_runs
        num_runs += 1
        rpc.rpc_sync("w1", functions.raise_value_error)

    with pytest.raises(ValueError, match="bad value"):
        autograd.retry(step)
    assert num_runs == 1


@on_worker(0)
def test_result_and_context_are_those_of_the_step():
    inside: list[Any] = []

    def step(ctx: autograd.Context) -> str:
        inside.append(ctx)
        assert ctx.gradients() == {}
        return "result"

    assert autograd.retry(step) == "result"
    assert autograd.retry(step) == "result"
    assert inside[0] != inside[1]


def plain_backward(ctx: autograd.Context, x: torch.Tensor) -> None:
    rpc.rpc_sync("w1", functions.echo, args=(x,)).sum().backward()


def nested_context(ctx: autograd.Context, x: torch.Tensor) -> None:
    with autograd.context(accumulate="grad"):
        pass


@pytest.mark.parametrize("into_grad", [plain_backward, nested_context])
@on_worker(0)
def test_gradients_cannot_go_to_grad(into_grad: Callable[..., None]):
    x = torch.ones(2, requires_grad=True)

    with pytest.raises(UsageError, match=r"taken back.*retry\(\)"):
        autograd.retry(lambda ctx: into_grad(ctx, x))

    assert x.grad is None


@on_worker(0)
def test_errors_that_count_can_be_chosen():
    num_runs = 0

    def step(ctx: autograd.Context) -> int:
        nonlocal num_runs
        num_runs += 1
        if num_runs < 3:
            raise TimeoutError
        return num_runs

    assert autograd.retry(step, backoff=0, errors=[TimeoutError]) == 3


@on_worker(0)
def test_lost_worker_after_a_step_is_not_run_again():
    def step(ctx: autograd.Context) -> None:
        attempt = find_context(ctx).attempt
        assert attempt is not None
        attempt.note_applied("a test")
        raise PeerLostError("w1 is gone", worker="w1")

    with pytest.raises(NotRepeatable, match="after a test"):
        autograd.retry(step)


def test_coroutine_function_is_refused_where_nobody_would_await_it():
    async def step(ctx: autograd.Context) -> None:
        raise AssertionError("it was run")

    with pytest.raises(UsageError, match="aretry"):
        autograd.retry(step)  # type: ignore[unused-coroutine]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": "2"}, ValueError),
        ({"recover": 3}, TypeError),
        ({"backoff": -1}, ValueError),
        ({"timeout": float("nan")}, ValueError),
        ({"errors": ["PeerLostError"]}, TypeError),
        ({"errors": [KeyboardInterrupt]}, TypeError),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=next(iter(options))):
        autograd.retry(lambda ctx: None, **options)
