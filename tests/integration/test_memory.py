"""Long runs leave nothing behind: resident sizes, segments, threads, descriptors.

benchmarks/memory.py does the same with many more calls.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import functions
import probes
from gradwire import rpc

pytestmark = pytest.mark.multiproc

MIB = 1 << 20
NUM_FIRST, NUM_LARGE = 300, 1500
NUM_SMALL = 20_000
MOST_GROWTH = 1.05


# ------------------------------------------------------------------- run by workers


def call_with_tensors(to: str, number: int, nbytes: int) -> None:
    for i in range(number):
        sent = torch.full((nbytes,), i % 251, dtype=torch.uint8)
        received = rpc.rpc_sync(to, functions.echo, (sent,))
        assert received.numel() == nbytes
        assert received[0] == received[-1] == i % 251


def call_at_once(to: str, number: int, nbytes: int) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    futures = [rpc.rpc_async(to, functions.echo, (tensor,)) for _ in range(number)]
    for future in futures:
        assert future.wait().numel() == nbytes


def make_small_calls(to: str, number: int) -> None:
    for i in range(0, number, 50):
        futures = [rpc.rpc_async(to, functions.echo, (j,)) for j in range(40)]
        for j in range(10):
            assert rpc.rpc_sync(to, functions.add, (i, j)) == i + j
        assert [future.wait() for future in futures] == list(range(40))


def make_failing_calls(to: str, number: int) -> None:
    for _ in range(number):
        with pytest.raises(ValueError, match="bad value"):
            rpc.rpc_sync(to, functions.raise_value_error)


def take_stock() -> dict[str, Any]:
    info = rpc.get_debug_info()
    return {
        "resident": probes.resident_bytes(),
        "descriptors": probes.count_descriptors(),
        "threads": threading.active_count(),
        "pending": info["client_active_calls"] + info["server_active_calls"],
        "inflight_bytes": info["inflight_bytes"],
        "segments": probes.count_segments(),
    }


# ------------------------------------------------------------------------- the tests


def test_large_calls_leave_resident_sizes_where_they_were(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, call_with_tensors, "w1", NUM_FIRST, MIB)
    before = [cluster.run(rank, take_stock) for rank in (0, 1)]

    cluster.run(0, call_with_tensors, "w1", NUM_LARGE - NUM_FIRST, MIB)

    after = [cluster.run(rank, take_stock) for rank in (0, 1)]
    for early, late in zip(before, after, strict=True):
        assert late["resident"] <= early["resident"] * MOST_GROWTH


def test_segments_are_used_again(make_cluster):
    cluster = make_cluster(2)

    cluster.run(0, call_with_tensors, "w1", 200, MIB)

    # One each way would do; some are under way back while the next call is made.
    for rank in (0, 1):
        assert 0 < cluster.run(rank, take_stock)["segments"] <= 8


def test_segments_are_used_again_for_other_sizes(make_cluster):
    cluster = make_cluster(2)

    num_sizes = 60
    for i in range(num_sizes):
        cluster.run(0, call_with_tensors, "w1", 2, MIB + i * 8192)

    # A new segment for each size, in each direction, would be four times as many.
    for rank in (0, 1):
        assert cluster.run(rank, take_stock)["segments"] <= num_sizes / 2


def test_unused_segments_over_the_limit_are_freed(make_cluster):
    cluster = make_cluster(2, {"shared_memory_keep_bytes": 2 * MIB, "lost_after": 2.0})
    cluster.run(0, call_at_once, "w1", 20, MIB)

    def are_few() -> bool:
        cluster.run(0, call_with_tensors, "w1", 1, MIB)
        return all(cluster.run(rank, take_stock)["segments"] <= 8 for rank in (0, 1))

    probes.wait_until(are_few, "few segments are left")


def test_small_calls_leave_nothing_behind(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, make_small_calls, "w1", 2000)
    before = [cluster.run(rank, take_stock) for rank in (0, 1)]

    cluster.run(0, make_small_calls, "w1", NUM_SMALL)

    for rank, early in enumerate(before):
        late = cluster.run(rank, take_stock)
        assert late["pending"] == late["inflight_bytes"] == 0
        assert late["descriptors"] <= early["descriptors"]
        assert late["threads"] <= early["threads"] + 4  # the pool may vary a little
        assert late["resident"] <= early["resident"] * MOST_GROWTH


def test_failing_calls_leave_nothing_behind(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, make_failing_calls, "w1", 300)
    before = [cluster.run(rank, take_stock) for rank in (0, 1)]

    cluster.run(0, make_failing_calls, "w1", 1000)

    for rank, early in enumerate(before):
        late = cluster.run(rank, take_stock)
        assert late["pending"] == late["inflight_bytes"] == 0
        assert late["descriptors"] <= early["descriptors"]
        assert late["resident"] <= early["resident"] * MOST_GROWTH
