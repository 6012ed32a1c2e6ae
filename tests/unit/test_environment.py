"""Where a worker finds its place when no launcher of torch has told it."""

from __future__ import annotations

import pytest

from gradwire._environment import find_variable, first_host

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "node[07-09],other1",
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("MASTER_ADDR", "node07"),
        ("MASTER_PORT", str(20_000 + 123456 % 20_000)),
    ],
)
def test_slurm_says_all(name, value):
    assert find_variable(name, SLURM) == value


def test_variables_of_torch_come_first():
    assert find_variable("RANK", {**SLURM, "RANK": "5"}) == "5"
    assert find_variable("MASTER_ADDR", {**SLURM, "MASTER_ADDR": "here"}) == "here"


def test_kubernetes_says_the_rank():
    job = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc"}

    assert find_variable("RANK", job) == "2"
    assert find_variable("MASTER_PORT", job) == "29500"


def test_nothing_is_made_up():
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert find_variable(name, {}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("host", "host"),
        ("a1,a2", "a1"),
        ("gpu[03-07,12],login", "gpu03"),
        ("gpu[3,7]", "gpu3"),
        ("rack1-[10-12]-x,b", "rack1-10-x"),
    ],
)
def test_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
