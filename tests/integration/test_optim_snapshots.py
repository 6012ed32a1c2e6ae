"""Owners that die and come back: the training goes on as if they had not, bit by bit.

Each test drives the training step by step, so that it knows in which step, and where in
it, a worker kills itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import optim_functions
import probes
import retry_functions as fn
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import (
    NotRepeatable,
    PeerLostError,
    RolledBack,
    SnapshotError,
    UsageError,
)
from gradwire.optim import DistributedOptimizer, ParametersOf, Snapshots
from gradwire.optim._keeping import Keeper
from gradwire.optim._local import LocalOptimizer
from on_worker import on_worker
from optim_functions import HERE, Model, assert_same

pytestmark = pytest.mark.multiproc

ADAM: dict[str, Any] = {"lr": 0.05, "amsgrad": True}
RING = {fn.FIRST: fn.SECOND, fn.SECOND: fn.FIRST}


# ------------------------------------------------------------------------ the program on w0


class Training:
    """What the trainer has, from one step to the next."""

    def __init__(self, snapshots: Snapshots, owners: int, scheduled: bool) -> None:
        sources = [
            ParametersOf(owner, fn.parameters, seed)
            for seed, owner in enumerate(fn.OWNERS[:owners])
        ]
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam, sources, snapshots=snapshots, **ADAM
        )
        self.scheduler = (
            lr_scheduler.ExponentialLR(self.optimizer, 0.9) if scheduled else None
        )

    def step(self, number: int) -> float:
        loss = autograd.retry(
            fn.step_of(number, self.optimizer),
            backoff=0.01,
            recover=self.optimizer.recover,
        )
        if self.scheduler is not None:
            self.scheduler.step()
        return loss


_training: list[Training] = []


def begin(snapshots: Snapshots, owners: int = 2, scheduled: bool = False) -> int:
    _training[:] = [Training(snapshots, owners, scheduled)]
    return _training[0].optimizer.committed_steps


def step(number: int) -> float:
    return _training[0].step(number)


def result() -> tuple[int, list[Tensor]]:
    return _training[0].optimizer.committed_steps, fn.parameters_now()


def save() -> Any:
    return _training[0].optimizer.state_dict()


def rates() -> tuple[float, list[float]]:
    """The learning rate that the trainer knows, and those that the owners have."""
    optimizer = _training[0].optimizer
    found = [share.rref.rpc_sync().hyperparameters() for share in optimizer._shares]
    return optimizer.param_groups[0]["lr"], [groups[0]["lr"] for groups in found]


def step_without_retry(number: int) -> None:
    with autograd.context() as ctx:
        fn.step_of(number, _training[0].optimizer)(ctx)


def add_what_is_there() -> None:
    with pytest.raises(ValueError, match="given twice"):
        _training[0].optimizer.add_param_group(
            {"params": [ParametersOf(fn.SECOND, fn.parameters, 1)]}
        )


def fail_to_make_safe_once() -> None:
    def fail(*_: object) -> None:
        del optimizer._make_safe
        raise OSError("no room")

    optimizer: Any = _training[0].optimizer
    optimizer._make_safe = fail


def recover() -> int:
    return _training[0].optimizer.recover()


def end() -> None:
    _training.clear()


def expected_training(num_steps: int, scheduled: bool = False) -> Any:
    return fn.expected_training(
        torch.optim.Adam, num_steps, gamma=0.9 if scheduled else 1.0, **ADAM
    )


def check_result(
    cluster: Cluster, losses: list[float], scheduled: bool = False
) -> None:
    expected = expected_training(len(losses), scheduled)
    assert losses == expected[0]
    num_steps, parameters = cluster.run(0, result)
    assert num_steps == len(losses)
    assert_same(parameters, expected[1])


def step_with_death(
    cluster: Cluster, number: int, rank: int, arm: Callable[..., None], *args: Any
) -> float:
    """A step in which a worker dies, and comes back."""
    cluster.run(rank, arm, *args)
    running = cluster.start(0, step, number)
    cluster.wait_dead(rank)
    cluster.restart(rank)
    loss: float = running.result()
    return loss


def restart_both(cluster: Cluster, *ranks: int) -> None:
    """Each waits for the other: their group is complete only with both."""
    for handle in [cluster.begin_restart(rank) for rank in ranks]:
        handle.result()


# ---------------------------------------------------------------------------------- deaths

# Where the second owner dies: in which class and method, and at its beginning or end.
DEATHS = {
    "when asked to prepare": (LocalOptimizer, "prepare", False),
    "before its snapshot": (Keeper, "save", False),
    "with a snapshot that nobody has heard of": (Keeper, "save", True),
    "when it has prepared": (LocalOptimizer, "prepare", True),
}
# Then the step was decided for; the next one notices.
LATE_DEATHS = {
    "when told to commit": (LocalOptimizer, "commit", False),
    "when it has committed": (LocalOptimizer, "commit", True),
}


def die_in(cls: type, method: str, afterwards: bool) -> None:
    fn.die_in(cls, method, afterwards=afterwards)


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["disk", "peer"])
def test_deaths_at_every_point_change_nothing(make_cluster, tmp_path, place):
    snapshots = Snapshots(tmp_path) if place == "disk" else Snapshots(peer=RING)
    cluster = make_cluster(4)
    cluster.run(0, begin, snapshots, 2, True)
    losses = [cluster.run(0, step, 0)]

    for death in DEATHS.values():
        losses.append(step_with_death(cluster, len(losses), 3, die_in, *death))
    for death in LATE_DEATHS.values():
        cluster.run(3, die_in, *death)
        losses.append(cluster.run(0, step, len(losses)))
        cluster.wait_dead(3)
        running = cluster.start(0, step, len(losses))
        cluster.restart(3)
        losses.append(running.result())
    losses.append(step_with_death(cluster, len(losses), 2, fn.arm, "forward"))
    losses.append(step_with_death(cluster, len(losses), 1, fn.arm, "backward"))
    losses.append(cluster.run(0, step, len(losses)))

    check_result(cluster, losses, scheduled=True)
    cluster.run(0, end)
    check_nothing_stays(cluster)


def check_nothing_stays(cluster: Cluster) -> None:
    for rank in range(4):
        probes.wait_until(
            lambda rank=rank: not cluster.run(rank, optim_functions.what_stays),  # type: ignore[misc]
            f"nothing is left on worker {rank}",
        )


@pytest.mark.chaos
def test_both_owners_may_be_lost_at_once_if_snapshots_are_on_disk(
    make_cluster, tmp_path
):
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(tmp_path))
    losses = [cluster.run(0, step, number) for number in range(2)]

    for rank in (2, 3):
        cluster.kill(rank)
    running = cluster.start(0, step, 2)
    restart_both(cluster, 2, 3)
    losses.append(running.result())

    check_result(cluster, losses)


@pytest.mark.chaos
def test_single_owner_that_dies_with_a_snapshot_makes_its_step_once(
    make_cluster, tmp_path
):
    """It has decided by itself; but nobody has heard of it, so it does not count."""
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(tmp_path), 1)
    losses = [cluster.run(0, step, 0)]

    death = (Keeper, "save", True)
    losses.append(step_with_death(cluster, 1, 2, die_in, *death))
    losses.append(cluster.run(0, step, 2))

    assert losses == fn.expected_training(torch.optim.Adam, 3, owners=1, **ADAM)[0]
    assert cluster.run(0, result)[0] == 3


@pytest.mark.chaos
def test_peer_that_kept_snapshots_is_given_new_ones(make_cluster):
    """First the peer is lost, which has no parameters; then the owner."""
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(peer=fn.BENDER))
    losses = [cluster.run(0, step, 0)]

    losses.append(step_with_death(cluster, 1, 1, fn.arm, "forward"))
    cluster.kill(3)
    running = cluster.start(0, step, 2)
    cluster.restart(3)
    losses.append(running.result())

    check_result(cluster, losses)


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["disk", "peer"])
def test_sparse_snapshots_take_all_owners_back(make_cluster, tmp_path, place):
    snapshots = (
        Snapshots(tmp_path, every=3)
        if place == "disk"
        else Snapshots(peer=RING, every=3)
    )
    cluster = make_cluster(4)
    cluster.run(0, begin, snapshots)
    losses = [cluster.run(0, step, number) for number in range(5)]

    cluster.run(3, fn.arm, "forward")
    running = cluster.start(0, step, 5)
    cluster.wait_dead(3)
    cluster.restart(3)
    with pytest.raises(RolledBack, match="2 steps were undone") as caught:
        running.result()

    assert caught.value.step == 3
    del losses[caught.value.step :]
    losses += [cluster.run(0, step, number) for number in range(3, 7)]
    check_result(cluster, losses)


@pytest.mark.chaos
def test_hyperparameters_go_back_with_the_steps(make_cluster):
    """Snapshots are made anew at once, for the one that is back has kept some."""
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(peer=RING, every=3), 2, True)
    for number in range(5):
        cluster.run(0, step, number)

    cluster.kill(3)
    running = cluster.start(0, step, 5)
    cluster.restart(3)
    with pytest.raises(RolledBack):
        running.result()

    known, had = cluster.run(0, rates)
    assert known == pytest.approx(0.05 * 0.9**2)
    assert had == [known, known]


@pytest.mark.chaos
def test_steps_that_were_undone_are_told_of_even_without_new_snapshots(make_cluster):
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(peer=RING, every=3))
    losses = [cluster.run(0, step, number) for number in range(5)]
    cluster.run(0, fail_to_make_safe_once)

    cluster.kill(3)
    running = cluster.start(0, step, 5)
    cluster.restart(3)
    with pytest.raises(RolledBack, match="2 steps were undone") as caught:
        running.result()

    assert "no room" in str(caught.value.__cause__)
    del losses[caught.value.step :]
    losses += [cluster.run(0, step, number) for number in range(3, 7)]
    check_result(cluster, losses)


@pytest.mark.chaos
def test_hyperparameters_that_were_only_asked_for_are_not_lost(make_cluster, tmp_path):
    """The state was saved between the scheduler and the next step."""
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(tmp_path), 2, True)
    losses = [cluster.run(0, step, 0)]
    state = cluster.run(0, save)

    cluster.kill(3)
    running = cluster.start(0, step, 1)
    cluster.restart(3)
    losses += [running.result(), cluster.run(0, step, 2)]

    assert state["param_groups"][0]["lr"] == pytest.approx(0.05 * 0.9)
    check_result(cluster, losses, scheduled=True)


@pytest.mark.chaos
def test_no_step_is_made_with_parameters_that_were_not_restored(make_cluster, tmp_path):
    directory = tmp_path / "snapshots"
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(directory))
    losses = [cluster.run(0, step, number) for number in range(2)]

    cluster.kill(3)
    cluster.restart(3)
    directory.rename(tmp_path / "away")
    with pytest.raises(SnapshotError, match="is not there"):
        cluster.run(0, step, 2)
    (tmp_path / "away").rename(directory)
    with pytest.raises(PeerLostError, match="w3"):
        cluster.run(0, step_without_retry, 2)
    losses += [cluster.run(0, step, number) for number in range(2, 4)]

    check_result(cluster, losses)


@pytest.mark.chaos
def test_group_that_was_refused_is_not_looked_for_later(make_cluster, tmp_path):
    cluster = make_cluster(4)
    cluster.run(0, begin, Snapshots(tmp_path))
    losses = [cluster.run(0, step, 0)]
    cluster.run(0, add_what_is_there)

    cluster.kill(3)
    running = cluster.start(0, step, 1)
    cluster.restart(3)
    losses.append(running.result())

    check_result(cluster, losses)


def lose_without_snapshots() -> None:
    optimizer = DistributedOptimizer(
        torch.optim.Adam, [ParametersOf(fn.SECOND, fn.parameters, 1)], lr=0.1
    )
    assert optimizer.recover() == 0
    with pytest.raises(PeerLostError):
        rpc.rpc_sync(fn.SECOND, os._exit, args=(0,))
    with pytest.raises(NotRepeatable, match="'w3' was lost with its parameters"):
        optimizer.recover()


@on_worker(0)
def test_without_snapshots_an_owner_that_is_ahead_is_named():
    rpc.rpc_sync("w1", fn.forget_layers)
    parameters = [ParametersOf("w1", fn.parameters, 0)]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    local = optimizer._shares[0].rref
    local.rpc_sync().step_alone((1, 1), None, {})  # and the trainer does not know it

    with pytest.raises(NotRepeatable, match=r"'w1' has made another step.*snapshots"):
        optimizer.recover()


@pytest.mark.chaos
def test_without_snapshots_a_lost_owner_is_lost(make_cluster):
    cluster = make_cluster(4)

    cluster.run(0, lose_without_snapshots)
    cluster.wait_dead(3)


# ---------------------------------------------------------------------- programs that resume


def test_another_program_can_go_on(make_cluster, tmp_path):
    losses = []
    for run in range(2):
        cluster = make_cluster(4)
        number = cluster.run(0, begin, Snapshots(tmp_path, resume=True))
        assert number == 3 * run
        losses += [cluster.run(0, step, number + n) for n in range(3)]
        if run:
            check_result(cluster, losses)
        cluster.run(0, end)
        cluster.close()


@on_worker(0)
def test_snapshots_are_not_overwritten_by_accident(tmp_path):
    make_small(Snapshots(tmp_path))

    with pytest.raises(SnapshotError, match=r"resume=True.*'w1': 0"):
        make_small(Snapshots(tmp_path))

    make_small(Snapshots(tmp_path, name="other"))
    assert make_small(Snapshots(tmp_path, resume=True)).committed_steps == 0


def make_small(snapshots: Snapshots, **options: Any) -> DistributedOptimizer:
    rpc.rpc_sync("w1", fn.forget_layers)
    source = ParametersOf("w1", fn.layer, 0)
    return DistributedOptimizer(
        torch.optim.SGD, [source], lr=0.1, snapshots=snapshots, **options
    )


@on_worker(0)
def test_graph_from_before_a_restored_state_is_noticed(tmp_path):
    make_small(Snapshots(tmp_path))
    x = fn.data_of(0)[0].requires_grad_()
    loss = rpc.rpc_sync("w1", fn.apply_layer, args=(0, x)).sum()

    DistributedOptimizer(
        torch.optim.SGD,
        [ParametersOf("w1", fn.layer, 0)],
        lr=0.1,
        snapshots=Snapshots(tmp_path, resume=True),
    )

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_worker(0)
def test_snapshots_of_other_parameters_are_refused(tmp_path):
    make_small(Snapshots(tmp_path))
    other = ParametersOf("w1", fn.parameters_but_one, 0)

    with pytest.raises(SnapshotError, match="is of other parameters: expected 2 in"):
        DistributedOptimizer(
            torch.optim.SGD, [other], lr=0.1, snapshots=Snapshots(tmp_path, resume=True)
        )
    with pytest.raises(
        SnapshotError, match=r"of class torch.*SGD.*of class torch.*Adam"
    ):
        DistributedOptimizer(
            torch.optim.Adam,
            [ParametersOf("w1", fn.layer, 0)],
            snapshots=Snapshots(tmp_path, resume=True),
        )


# --------------------------------------------------------------------- with other functions


def add_group_and_load(directory: Path) -> None:
    layers = [
        ParametersOf("w1", fn.parameters, 0),
        ParametersOf("w2", fn.parameters, 1),
    ]
    optimizer = DistributedOptimizer(
        torch.optim.Adam,
        [{"params": layers[0], "lr": 0.1}],
        snapshots=Snapshots(directory),
    )
    autograd.retry(lambda ctx: _step_of_two(ctx, optimizer, 0))
    optimizer.add_param_group({"params": [layers[1]], "lr": 0.2})
    autograd.retry(lambda ctx: _step_of_two(ctx, optimizer, 1))
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(state)
    _training[:] = [optimizer]  # type: ignore[list-item]


def step_after_restart() -> None:
    optimizer: Any = _training.pop()
    expected = [optim_functions.Layer(0), optim_functions.Layer(1)]
    reference = torch.optim.Adam([{"params": expected[0].parameters(), "lr": 0.1}])
    for number in range(3):
        if number == 1:
            reference.add_param_group({"params": expected[1].parameters(), "lr": 0.2})
        if number == 2:
            reference.param_groups[0]["lr"] = 0.3
            autograd.retry(
                lambda ctx: _step_of_two(ctx, optimizer, 2), recover=optimizer.recover
            )
        reference.zero_grad()
        x, target = fn.data_of(number)
        y = expected[1](expected[0](x))
        ((y - target) ** 2).sum().backward()
        reference.step()
    assert optimizer.committed_steps == 3
    assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])
    for seed, layer in enumerate(expected):
        found = rpc.rpc_sync(f"w{seed + 1}", fn.values, args=(seed,))
        assert_same(found, [p.detach() for p in layer.parameters()])


def _step_of_two(ctx: autograd.Context, optimizer: Any, number: int) -> None:
    x, target = fn.data_of(number)
    y = rpc.rpc_sync("w1", fn.apply_layer, args=(0, x))
    y = rpc.rpc_sync("w2", fn.apply_layer, args=(1, y))
    ctx.backward(((y - target) ** 2).sum())
    optimizer.step(ctx)


@pytest.mark.chaos
def test_groups_and_states_that_come_later_are_kept(make_cluster, tmp_path):
    cluster = make_cluster(3)
    cluster.run(0, add_group_and_load, tmp_path)
    restart_both(cluster, 1, 2)

    cluster.run(0, step_after_restart)


@on_worker(0)
def test_snapshot_that_cannot_be_written_undoes_the_step(tmp_path):
    rpc.rpc_sync("w2", fn.forget_layers)
    directory = tmp_path / "snapshots"
    optimizer = make_small(Snapshots(directory))
    optimizer.add_param_group({"params": ParametersOf("w2", fn.parameters, 1)})
    before = [rpc.rpc_sync(f"w{n + 1}", fn.values, args=(n,)) for n in range(2)]
    directory.rename(tmp_path / "away")
    directory.write_text("in the way")

    with pytest.raises(FileExistsError), autograd.context() as ctx:
        _step_of_two(ctx, optimizer, 0)
    after = [rpc.rpc_sync(f"w{n + 1}", fn.values, args=(n,)) for n in range(2)]
    assert_same(after, before)

    directory.unlink()
    with autograd.context() as ctx:
        _step_of_two(ctx, optimizer, 0)
    assert optimizer.committed_steps == 1


@on_worker(0)
def test_state_that_cannot_be_read_safely_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="tensors and plain values only"):
        make_small(Snapshots(tmp_path), differentiable=fn.Odd())


@on_worker(0)
def test_hyperparameter_that_cannot_be_read_safely_is_refused_later_too(tmp_path):
    optimizer = make_small(Snapshots(tmp_path))

    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(
                rpc.rpc_sync("w1", fn.apply_layer, (0, fn.data_of(0)[0])).sum()
            )
            optimizer.step(ctx)

    step()
    optimizer.param_groups[0]["lr"] = numpy.float64(0.1)
    with pytest.raises(SnapshotError, match="tensors and plain values only"):
        step()
    optimizer.param_groups[0]["lr"] = 0.1
    step()

    assert optimizer.committed_steps == 2


@on_worker(0)
def test_parameters_may_be_found_by_functions_without_snapshots():
    rpc.rpc_sync("w1", fn.forget_layers)
    expected = Model(HERE, 1)
    sources = [{"params": ParametersOf("w1", fn.parameters, 0), "lr": 0.1}]
    optimizer = DistributedOptimizer(torch.optim.SGD, sources)
    expected.train(expected.optimizer(torch.optim.SGD, lr=0.1), range(1))

    with autograd.context() as ctx:
        x, target = fn.data_of(0)
        y = rpc.rpc_sync("w1", fn.apply_layer, args=(0, x))
        ctx.backward(((y - target) ** 2).sum())
        optimizer.step(ctx)

    assert_same(rpc.rpc_sync("w1", fn.values, args=(0,)), expected.values())


# -------------------------------------------------------------------------------- bad input


@on_worker(0)
def test_bad_arguments_are_refused(tmp_path):
    source = ParametersOf("w1", fn.layer, 0)
    sgd = torch.optim.SGD
    with pytest.raises(UsageError, match=r"1 of 4 parameters.*ParametersOf"):
        mixed: list[Any] = [rpc.RRef(torch.ones(1, requires_grad=True)), source]
        DistributedOptimizer(sgd, mixed, snapshots=Snapshots(tmp_path))
    with pytest.raises(ValueError, match="cannot keep its own"):
        DistributedOptimizer(sgd, [source], snapshots=Snapshots(peer="w1"))
    with pytest.raises(ValueError, match="does not say who keeps those of worker 'w1'"):
        DistributedOptimizer(sgd, [source], snapshots=Snapshots(peer={"w2": "w1"}))
    with pytest.raises(TypeError, match="instance of Snapshots, found str"):
        DistributedOptimizer(sgd, [source], snapshots=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a function"):
        ParametersOf("w1", [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"str on worker 'w1' must return.*found str"):
        ParametersOf("w1", str, 12).refer()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"on worker 'w1' must return.*found NoneType"):
        ParametersOf("w1", fn.forget_layers).refer()  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"ones on worker 'w1' must return.*found Tensor"
    ):
        ParametersOf("w1", torch.ones, 2).refer()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "either a directory or a peer"),
        ({"directory": "d", "peer": "w1"}, ValueError, "either a directory or a peer"),
        ({"directory": 3}, TypeError, "PathLike"),
        ({"peer": 3}, TypeError, "name, or a dict"),
        ({"peer": "no name"}, ValueError, "name"),
        ({"directory": "d", "every": 0}, ValueError, "every"),
        ({"directory": "d", "every": 1.5}, ValueError, "every"),
        ({"directory": "d", "name": "a/b"}, ValueError, "letters"),
        ({"peer": "w1", "resume": True}, ValueError, "resume needs a directory"),
    ],
)
def test_bad_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Snapshots(**options)
