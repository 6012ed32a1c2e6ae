"""Short chaos runs with fixed seeds; `make chaos` makes long ones with fresh seeds."""

from __future__ import annotations

import time

import pytest

from chaos.driver import Run
from chaos.schedule import HARMLESS, HOST_KINDS, LOCAL_KINDS, Fault, draw_round
from cluster import ensure_fork_server
from namespaces import Hosts, NotPermitted

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.chaos,
    pytest.mark.slow,
    # A run that is disturbed by other work on the machine takes its time.
    pytest.mark.timeout(240),
]

RUN_S = 4.0
SEEDS = (11,)
HOST_SEEDS = ((21, False),)
NUM_STAGES = 3
NUM_OWNERS = 2


def play(seed: int, hosts: Hosts | None = None, *, tls: bool = False) -> Run:
    ensure_fork_server()
    with Run(
        seed,
        num_stages=NUM_STAGES,
        num_owners=NUM_OWNERS,
        hosts=hosts,
        tls=tls,
        show=print,
    ) as run:
        end = time.monotonic() + RUN_S
        while time.monotonic() < end:
            run.play(num_steps=20, num_faults=5)
    print(run.summary())
    return run


@pytest.mark.parametrize("seed", SEEDS)
def test_training_survives_faults_of_workers(seed):
    run = play(seed)

    assert run.num_faults and run.num_retries
    assert run.num_witnessed


@pytest.mark.parametrize(("seed", "tls"), HOST_SEEDS)
def test_training_survives_faults_of_hosts_and_networks(seed, tls):
    try:
        hosts = Hosts(Run.num_workers(NUM_STAGES, NUM_OWNERS))
    except NotPermitted as error:
        pytest.skip(str(error))
    try:
        run = play(seed, hosts, tls=tls)
    finally:
        hosts.close()

    assert run.num_faults and run.num_retries
    assert run.num_witnessed


def test_schedule_is_decided_by_the_seed_alone():
    def draw(seed: str, hosts: bool = False) -> list[Fault]:
        return draw_round(
            seed,
            100,
            40,
            200,
            victims=["a", "b"],
            others=["c"],
            lost_after_s=2.0,
            step_s=0.1,
            hosts=hosts,
        )

    assert draw("1/1") == draw("1/1")
    assert draw("1/1") != draw("1/2")
    for hosts, kinds in ((False, LOCAL_KINDS), (True, HOST_KINDS)):
        faults = draw("1/1", hosts)
        assert {fault.kind for fault in faults} == set(kinds)
        # Those that are not to be lost never suffer what would make them so.
        assert all(f.kind in HARMLESS for f in faults if f.worker == "c")
        assert all(100 <= fault.step < 140 for fault in faults)
