"""DistributedDataParallel on two trainers, with calls to a parameter server in the loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import api_functions as api
import autograd_features as features
from autograd_features import BARE, DICT, GRAD, INTO_GRAD, MODES, numbers
from cluster import Cluster

pytestmark = pytest.mark.multiproc

SERVER = 2
NUM_STEPS = 3


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Workers w0 and w1 are a process group, w2 is the server."""
    path = tmp_path_factory.mktemp("group") / "store"
    with Cluster(3) as made:
        joins = [
            made.start(rank, features.join_group, str(path), rank, 2)
            for rank in range(2)
        ]
        for join in joins:
            join.result()
        yield made
        for leave in [made.start(rank, features.leave_group) for rank in range(2)]:
            leave.result()


@pytest.fixture(autouse=True)
def _fresh(trainers):
    yield
    for rank in range(3):
        trainers.run(rank, features.reset)
        api.wait_until(partial(trainers.run, rank, features.is_idle))


def run_both(trainers, function, *args):
    """Runs a function on both trainers at the same time; the results by rank."""
    calls = [trainers.start(rank, function, *args) for rank in range(2)]
    return [running.result() for running in calls]


def run_with_ranks(trainers, function, *args):
    calls = [trainers.start(rank, function, rank, *args) for rank in range(2)]
    return [running.result() for running in calls]


# ----------------------------------------------------------------------------- into .grad


@pytest.mark.parametrize("calls_inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("mode", MODES)
def test_averaged_gradients_are_exact(trainers, mode, calls_inside):
    found = run_with_ranks(trainers, features.train, mode, NUM_STEPS, calls_inside, {})
    served = trainers.run(SERVER, features.report, None).gradients
    expected, expected_served = features.train_in_one_process(
        NUM_STEPS, calls_inside, True
    )
    for gradients in found:
        for step in range(NUM_STEPS):
            features.assert_same(gradients[step], expected[step], f"step {step}")
    if mode == DICT:
        return
    # Both trainers add to these, in any order.
    assert served.keys() == expected_served.keys() == {"server", "server 2"}
    for name, gradient in expected_served.items():
        features.assert_same(served[name], gradient, name, exact=False)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("mode", [BARE, DICT, GRAD])
def test_options_of_data_parallel(trainers, mode, options):
    found = run_with_ranks(trainers, features.train, mode, NUM_STEPS, False, options)
    uses_all = not options.get("find_unused_parameters", False)
    expected, _ = features.train_in_one_process(NUM_STEPS, False, uses_all)
    for gradients in found:
        for step in range(NUM_STEPS):
            features.assert_same(gradients[step], expected[step], f"step {step}")


@pytest.mark.parametrize("mode", INTO_GRAD)
def test_gradients_accumulated_without_averaging_first(trainers, mode):
    found = run_with_ranks(trainers, features.accumulate_in_two_steps, mode)
    expected = features.accumulate_in_one_process()
    for gradients in found:
        features.assert_same(gradients, expected, "gradients")


# ----------------------------------------------------------------- into the dictionary


def test_dictionary_pass_over_a_replica_is_averaged(trainers):
    run_both(trainers, features.make_replica, "replica")
    running = [
        trainers.start(rank, features.dictionary_pass_over_replica, "replica", rank)
        for rank in range(2)
    ]
    found = [pass_.result() for pass_ in running]
    expected = []
    for rank in range(2):
        module = features.make_linear("replica", 3, 2)
        x = torch.tanh(numbers(f"data {rank}", 4, 3) @ numbers("server", 3, 3))
        module(x).pow(2).sum().backward()
        expected.append([p.grad / 2 for p in module.parameters() if p.grad is not None])
    averages = [a + b for a, b in zip(*expected, strict=True)]
    for rank in range(2):
        features.assert_same(found[rank], averages, f"gradients of w{rank}")


def test_dictionary_pass_of_another_worker_over_replicas(trainers):
    run_both(trainers, features.make_replica, "replica")
    found = trainers.run(SERVER, features.pass_from_elsewhere, "replica", ["w0", "w1"])
    expected = []
    for rank in range(2):
        module = features.make_linear("replica", 3, 2)
        module(numbers("x", 4, 3) * (1 + rank)).sum().backward()
        expected.append([p.grad / 2 for p in module.parameters() if p.grad is not None])
    averages = [a + b for a, b in zip(*expected, strict=True)]
    for rank in range(2):
        features.assert_same(found[rank], averages, f"gradients on w{rank}")


def test_dictionary_pass_beside_a_replica(trainers):
    run_both(trainers, features.make_replica, "replica")
    found = run_both(trainers, features.dictionary_pass_beside_replica, "replica")
    for gradient in found:
        features.assert_same(gradient, numbers("x", 3).cos(), "x")


def test_dictionary_pass_over_a_module_that_was_a_replica(trainers):
    run_both(trainers, features.make_replica, "replica")
    results = run_both(
        trainers, features.dictionary_pass_over_former_replica, "replica"
    )
    for gradient, expected in results:
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-10)


def test_replica_made_before_init_rpc_is_recognised(make_cluster, tmp_path):
    averaged, is_whole = make_cluster(1).run(
        0, features.wrap_before_init, str(tmp_path)
    )
    assert averaged
    assert is_whole
