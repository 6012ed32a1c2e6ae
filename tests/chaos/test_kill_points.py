"""A worker dies at one message of a training step, or of a shutdown.

Here are some of the points; `python -m tests.chaos --points` goes through all of them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import probes
from chaos import kill_points, training
from chaos.kill_points import Point, When
from chaos.sweep import NOTICED_S, Sweep
from cluster import WorkerDied, ensure_fork_server
from gradwire import rpc

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]


@pytest.mark.parametrize(
    ("victim", "points"),
    [
        (
            "stage0",
            [
                ("on receiving", 1),  # its request
                ("before sending", 2),  # asks the owner, as a new user of a reference
                ("before sending", 19),  # forward is over, backward begins
                ("after sending", 22),  # gradients are on their way
                ("on receiving", 18),
            ],
        ),
        (
            "stage1",
            [
                ("after sending", 4),
                ("on receiving", 7),
                ("on receiving", 14),
                ("before sending", 22),
            ],
        ),
        (
            "owner0",
            [
                ("before sending", 3),  # a value is fetched
                ("on receiving", 14),
                ("after sending", 18),
                ("before sending", 22),  # the optimizer's step
            ],
        ),
        (
            "trainer",
            [
                ("before sending", 2),
                ("after sending", 8),
                ("on receiving", 12),
            ],
        ),
    ],
)
def test_death_at_a_message_of_a_step_harms_nobody_else(
    victim: str, points: list[tuple[When, int]]
) -> None:
    ensure_fork_server()
    with Sweep() as sweep:
        for point in points:
            print(victim, *point)
            assert sweep.try_point(victim, Point(*point)), "nobody died"


# ------------------------------------------------------------------------------- init


def test_death_anywhere_in_init_disturbs_nobody(make_cluster, tmp_path: Path) -> None:
    """A worker that comes back dies again on its way in; the next one gets in."""
    cluster = make_cluster(3)
    cluster.kill(1)
    whole = cluster.begin_restart(1, kill_points.arm, Point("at call", 0), tmp_path)
    whole.result()
    num_calls = cluster.run(1, kill_points.count_calls)
    for part in (0.02, 0.4, 0.7, 0.97):
        cluster.kill(1)
        point = Point("at call", int(part * num_calls))
        print(point)
        dying = cluster.begin_restart(1, kill_points.arm, point, tmp_path / f"{part}")

        for rank in (0, 2):
            cluster.run(rank, training.call_everybody, ["w0", "w2"])
        with pytest.raises(WorkerDied):
            dying.result()
        cluster.wait_dead(1)
        cluster.restart(1)
        for rank in range(3):
            cluster.run(rank, training.call_everybody, ["w0", "w1", "w2"])


# ----------------------------------------------------------------- graceful shutdown


def shut_down() -> float:
    rpc.shutdown(timeout=20)
    return time.monotonic()


@pytest.mark.parametrize(
    ("victim", "when", "number"),
    [
        (0, "before sending", 1),
        (0, "after sending", 2),
        (0, "on receiving", 3),
        (2, "on receiving", 1),
        (2, "before sending", 1),
    ],
)
def test_shutdown_ends_although_somebody_dies_at_a_message_of_it(
    make_cluster, tmp_path: Path, victim: int, when: When, number: int
) -> None:
    cluster = make_cluster(3)
    note = tmp_path / "death"
    survivors = [rank for rank in range(3) if rank != victim]
    cluster.run(victim, kill_points.arm, Point(when, number), note)

    ends = {rank: cluster.start(rank, shut_down) for rank in range(3)}
    probes.wait_until(note.exists, "the victim is dead")
    cluster.wait_dead(victim)

    died = kill_points.read_moment(note)
    for rank in survivors:
        assert ends[rank].result() - died < NOTICED_S
