"""Workers that die, hang, fall asleep or come back, and what the others notice."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import functions
import probes
import worker_process
from chaos import kill_points
from chaos.kill_points import Point
from cluster import Cluster, Handle, WorkerDied
from gradwire import rpc
from gradwire.errors import (
    ConnectTimeout,
    HandshakeRefused,
    PeerLostError,
    UsageError,
)

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]

NOTICED_S = 1.0
"""The promise: on one host, all pending calls to a dead worker fail within this time."""

LOST_AFTER_S = 1.0
NUM_THREADS = 3
NUM_FUTURES = 5
FORGOTTEN = "nobody sets this"

kept: list[torch.Tensor] = []


# ------------------------------------------------------------------------- run by workers


@dataclass(frozen=True)
class Ending:
    """How one call ended, and when on the clock that all processes share."""

    kind: str
    error: BaseException
    at: float


_entered = 0
_entered_lock = threading.Lock()  # guards _entered; handlers on any thread


def block() -> str:
    """A handler that never ends by itself."""
    global _entered
    with _entered_lock:
        _entered += 1
    return functions.block_until_set(FORGOTTEN)


def count_entered() -> int:
    return _entered


def call(to: str, function: Callable[..., Any], *args: Any, timeout: float = 20) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def block_on(to: str) -> Any:
    return call(to, block)


def make_call_and_block(to: str) -> Any:
    """Lives in the worker that will die, and waits for another one."""
    return call(to, block)


def watch_calls_end(victim: str, other: str) -> list[Ending]:
    """Has calls of every kind in flight that need the victim, and waits for their ends."""
    endings: list[Ending] = []

    def note(kind: str, error: BaseException) -> None:
        endings.append(Ending(kind, error, time.monotonic()))

    def run(kind: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            note(kind, error)

    def end_callback(future: rpc.Future[Any]) -> None:
        run("callback", future.wait)

    through = [
        ("rpc_sync", lambda: call(victim, block)) for _ in range(NUM_THREADS)
    ] + [
        ("through another worker", lambda: call(other, block_on, victim)),
        ("to another worker", lambda: call(victim, make_call_and_block, other)),
        ("and back", lambda: call(victim, make_call_and_block, "w0")),
    ]
    threads = [threading.Thread(target=run, args=item) for item in through]
    for thread in threads:
        thread.start()
    futures = [rpc.rpc_async(victim, block, timeout=20) for _ in range(NUM_FUTURES)]
    callbacks = [
        rpc.rpc_async(victim, block, timeout=0).then(end_callback)
        for _ in range(NUM_FUTURES)
    ]
    for future in futures:
        run("rpc_async", future.wait)
    for callback in callbacks:
        callback.wait()
    for thread in threads:
        thread.join(30)
    return endings


NUM_WATCHED = NUM_THREADS + 3 + 2 * NUM_FUTURES
NUM_AT_VICTIM = NUM_WATCHED - 2  # two wait at the victim for other workers


def leave_without_shutdown() -> NoReturn:
    """Makes the main function of the worker return."""
    raise worker_process._Leave


def call_and_time(to: str) -> tuple[BaseException | None, float]:
    start = time.monotonic()
    try:
        call(to, functions.echo, 1)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def wait_for_end(to: str) -> tuple[PeerLostError, float]:
    """Blocks in a call until the peer is lost; the error and the time."""
    try:
        call(to, block, timeout=0)
    except PeerLostError as error:
        return error, time.monotonic()
    raise AssertionError("the call returned")


def init_again(rank: int, world_size: int, store: str, timeout: float) -> None:
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(
            init_method=store, init_timeout=timeout
        ),
    )


def shut_down(timeout: float = 20) -> None:
    rpc.shutdown(timeout=timeout)


def keep(*tensors: torch.Tensor) -> None:
    kept.extend(tensors)


def make_tensors(number: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(number)]


def send_tensors(to: str, number: int, nbytes: int) -> int:
    call(to, keep, *make_tensors(number, nbytes))
    return probes.count_segments()


def fetch_tensors(to: str, number: int, nbytes: int) -> int:
    keep(*call(to, make_tensors, number, nbytes))
    return probes.count_segments()


def check_tensors() -> list[int]:
    """The one value of each kept tensor."""
    values = []
    for tensor in kept:
        (value,) = tensor.unique().tolist()
        values.append(value)
    return values


def drop_tensors() -> int:
    kept.clear()
    return probes.count_segments()


# ------------------------------------------------------------------------------ the tests


def wait_until_pending(cluster: Cluster, rank: int, number: int) -> None:
    probes.wait_until(
        lambda: cluster.run(rank, count_entered) >= number,
        f"{number} handlers run on rank {rank}",
    )


def start_watching(cluster: Cluster) -> Handle:
    """Calls of all kinds need w1; returns when all of them are in flight."""
    watch = cluster.start(0, watch_calls_end, "w1", "w2")
    wait_until_pending(cluster, 1, NUM_AT_VICTIM)
    wait_until_pending(cluster, 2, 1)
    probes.wait_until(
        lambda: cluster.run(2, call, "w0", count_entered) == 1, "the call came back"
    )
    return watch


def release_handlers(cluster: Cluster) -> None:
    """Those of the survivors, and of the victim if it lives, would block for ever."""
    for rank in range(3):
        with contextlib.suppress(WorkerDied):
            cluster.run(rank, functions.set_event, FORGOTTEN)


def kill(cluster: Cluster) -> None:
    cluster.kill(1)


def exit_at_once(cluster: Cluster) -> None:
    cluster.start(1, functions.exit_process, 3)
    assert cluster.wait_dead(1) == 3


def end_main(cluster: Cluster) -> None:
    cluster.start(1, leave_without_shutdown)
    assert cluster.wait_dead(1) == 0


def cut(cluster: Cluster) -> None:
    cluster.run(1, worker_process.cut_connections)


@pytest.mark.parametrize("end", [kill, exit_at_once, end_main, cut])
def test_pending_calls_fail_within_a_second_of_the_end(make_cluster, end):
    cluster = make_cluster(3)
    watch = start_watching(cluster)

    start = time.monotonic()
    end(cluster)
    endings = watch.result()
    release_handlers(cluster)

    assert len(endings) == NUM_WATCHED
    late = [(e.kind, e.at - start) for e in endings if e.at - start > NOTICED_S]
    assert not late
    for ending in endings:
        assert isinstance(ending.error, PeerLostError), ending
        assert "worker 'w1' (rank 1)" in str(ending.error)


@pytest.mark.parametrize("end", [kill, cut])
def test_other_workers_go_on_after_a_loss(make_cluster, end):
    cluster = make_cluster(4)
    for rank in (0, 2, 3):
        cluster.run(rank, call, "w1", functions.echo, rank)

    end(cluster)

    for caller in (0, 2, 3):
        for callee in (0, 2, 3):
            assert cluster.run(caller, call, f"w{callee}", functions.echo, caller) == (
                caller
            )


def test_call_to_lost_worker_fails_at_once(make_cluster):
    cluster = make_cluster(2)
    watch = cluster.start(0, wait_for_end, "w1")
    wait_until_pending(cluster, 1, 1)
    cluster.kill(1)
    watch.result()

    error, took = cluster.run(0, call_and_time, "w1")

    assert isinstance(error, PeerLostError)
    assert error.worker == "w1"
    assert took < 0.5


def test_worker_that_was_never_called_is_found_dead(make_cluster):
    cluster = make_cluster(2)
    cluster.kill(1)

    error, took = cluster.run(0, call_and_time, "w1")

    # Whoever was never connected is no lost peer; either way the error names it.
    assert "'w1'" in str(error)
    assert took < NOTICED_S + 1


def test_loss_is_counted_and_leaves_no_calls_behind(make_cluster):
    cluster = make_cluster(3)
    watch = start_watching(cluster)
    cluster.kill(1)
    watch.result()
    release_handlers(cluster)

    def is_clean() -> bool:
        info = cluster.run(0, rpc.get_debug_info)
        return (info["client_active_calls"], info["inflight_bytes"]) == (0, 0) and (
            info["workers_lost"] == 1
        )

    probes.wait_until(is_clean, "no pending calls, one worker lost")


def test_interpreter_exit_without_shutdown_fails_pending_calls(make_cluster, tmp_path):
    store = f"file://{tmp_path}/store"
    cluster = make_cluster(2, init_method=store)
    cluster.kill(1)
    program = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from gradwire import rpc
        from tests.integration import test_faults as ours
        options = rpc.RpcBackendOptions(init_method={store!r})
        rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
        print("ready", flush=True)
        ours.probes.wait_until(lambda: ours.count_entered() == 1, "a call came")
        sys.exit(7)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            error, at = cluster.run(0, wait_for_end, "w1")
            assert process.wait(10) == 7
            # Only the connection's end can have told: the limit for silence is longer.
            assert "'w1'" in str(error)
            assert time.monotonic() - at < 10
        finally:
            process.kill()


# -------------------------------------------------------------------------------- silence


def test_stopped_worker_is_lost_after_the_limit(make_cluster):
    cluster = make_cluster(2, {"lost_after": LOST_AFTER_S})
    watch = cluster.start(0, wait_for_end, "w1")
    wait_until_pending(cluster, 1, 1)

    start = time.monotonic()
    cluster.stop(1)
    error, at = watch.result()

    assert error.worker == "w1"
    assert "nothing was heard of it" in str(error)
    # It was last heard of a heartbeat before it stopped, at the earliest.
    assert 0.7 * LOST_AFTER_S < at - start < 3 * LOST_AFTER_S + 1


def test_stopped_worker_does_not_disturb_the_others(make_cluster):
    cluster = make_cluster(3, {"lost_after": LOST_AFTER_S})
    watch = cluster.start(0, wait_for_end, "w1")
    wait_until_pending(cluster, 1, 1)
    cluster.run(2, call, "w1", functions.echo, 1)
    cluster.stop(1)

    assert cluster.run(2, call, "w0", functions.echo, 1, timeout=LOST_AFTER_S) == 1
    watch.result()
    assert cluster.run(2, call, "w0", functions.echo, 2) == 2
    assert cluster.run(0, call, "w2", functions.echo, 3) == 3


def test_short_stop_is_survived(make_cluster):
    cluster = make_cluster(2, {"lost_after": 4.0})
    assert cluster.run(0, call, "w1", functions.echo, 1) == 1
    cluster.stop(1)
    waiting = cluster.start(0, call, "w1", functions.echo, 2)

    probes.pass_time(1.0)
    cluster.cont(1)

    assert waiting.result() == 2
    assert cluster.run(1, call, "w0", functions.echo, 3) == 3
    assert cluster.run(0, rpc.get_debug_info)["workers_lost"] == 0


def test_silent_worker_is_kept_alive_by_heartbeats(make_cluster):
    cluster = make_cluster(2, {"lost_after": LOST_AFTER_S})
    blocked = cluster.start(0, call, "w1", functions.block_until_set, "later")
    cluster.run(1, functions.wait_until_blocked, "later")

    probes.pass_time(2.5 * LOST_AFTER_S)  # no call in either direction meanwhile
    cluster.run(1, functions.set_event, "later")

    assert blocked.result() == "later"


def test_sleeper_does_not_take_others_for_lost(make_cluster):
    cluster = make_cluster(2, {"lost_after": LOST_AFTER_S})
    blocked = cluster.start(0, call, "w1", functions.block_until_set, "later")
    cluster.run(1, functions.wait_until_blocked, "later")

    # All sleep, as on a laptop whose lid is closed: only then nobody is to blame.
    for rank in (0, 1):
        cluster.stop(rank)
    probes.pass_time(2.5 * LOST_AFTER_S)
    for rank in (0, 1):
        cluster.cont(rank)

    cluster.run(1, functions.set_event, "later")
    assert blocked.result() == "later"
    for rank in (0, 1):
        assert cluster.run(rank, rpc.get_debug_info)["workers_lost"] == 0


# ---------------------------------------------------------------------------- coming back


@pytest.mark.parametrize("rank", [0, 1])
def test_restarted_worker_works_in_both_directions(make_cluster, rank):
    cluster = make_cluster(3)
    name = f"w{rank}"
    others = [r for r in range(3) if r != rank]
    for other in others:
        cluster.run(other, call, name, functions.echo, 1)
    cluster.kill(rank)

    cluster.restart(rank)

    pid = cluster.pid(rank)
    for other in others:
        assert cluster.run(other, call, name, functions.get_pid) == pid
        assert cluster.run(rank, call, f"w{other}", functions.echo, 2) == 2


def test_worker_can_be_restarted_many_times(make_cluster):
    cluster = make_cluster(2)
    for _ in range(5):
        cluster.restart(1)
        assert cluster.run(0, call, "w1", functions.get_pid) == cluster.pid(1)


def test_restart_of_one_does_not_disturb_calls_of_others(make_cluster):
    cluster = make_cluster(3)
    blocked = cluster.start(0, call, "w2", functions.block_until_set, "later")
    cluster.run(2, functions.wait_until_blocked, "later")

    cluster.restart(1)
    cluster.run(1, call, "w2", functions.set_event, "later")

    assert blocked.result() == "later"


# ---------------------------------------------------------------------- beginning and end


@pytest.fixture
def blank_workers(make_cluster) -> Iterator[Callable[[int], list[Cluster]]]:
    """Makes processes that belong to no group yet; each is a cluster of one."""

    def make(number: int) -> list[Cluster]:
        clusters = [make_cluster(1) for _ in range(number)]
        for cluster in clusters:
            cluster.run(0, shut_down)
        return clusters

    yield make


def wait_until_posted(path: Path, rank: int) -> None:
    key = f"worker/{rank}".encode()
    probes.wait_until(
        lambda: path.exists() and key in path.read_bytes(), f"rank {rank} is posted"
    )


def test_worker_killed_during_init_is_named_by_the_others(blank_workers, tmp_path):
    first, victim, last = blank_workers(3)
    path = tmp_path / "store"
    start = first.start(0, init_again, 0, 3, f"file://{path}", 2.0)
    victim.start(0, init_again, 1, 3, f"file://{path}", 30.0)
    wait_until_posted(path, 1)
    victim.kill(0)

    with pytest.raises(ConnectTimeout, match=r"rank 1|'w1'"):
        last.run(0, init_again, 2, 3, f"file://{path}", 1.0)
    with pytest.raises(ConnectTimeout):
        start.result()


def test_worker_killed_during_init_can_be_replaced(blank_workers, tmp_path):
    first, victim, last, spare = blank_workers(4)
    path = tmp_path / "store"
    starts = [first.start(0, init_again, 0, 3, f"file://{path}", 20.0)]
    victim.start(0, init_again, 1, 3, f"file://{path}", 20.0)
    wait_until_posted(path, 1)
    victim.kill(0)

    starts.append(last.start(0, init_again, 2, 3, f"file://{path}", 20.0))
    starts.append(spare.start(0, init_again, 1, 3, f"file://{path}", 20.0))

    for start in starts:
        start.result()
    assert first.run(0, call, "w1", functions.get_pid) == spare.pid(0)
    ends = [one.start(0, shut_down) for one in (first, last, spare)]
    for end in ends:
        end.result()


@pytest.mark.parametrize("number", [20, 200, 350, 500])
def test_worker_that_dies_anywhere_in_the_first_init_can_be_replaced(
    blank_workers, tmp_path, number
):
    """All are on their way in; one dies at some call of a function of ours."""
    first, victim, last, spare = blank_workers(4)
    store = f"file://{tmp_path}/store"
    victim.run(0, kill_points.arm, Point("at call", number), tmp_path / "death")
    starts = [
        group.start(0, init_again, rank, 3, store, 20.0)
        for rank, group in ((0, first), (1, victim), (2, last))
    ]
    victim.wait_dead(0, timeout=10)

    starts[1] = spare.start(0, init_again, 1, 3, store, 20.0)

    for start in starts:
        start.result()
    for group in (first, last):
        assert group.run(0, call, "w1", functions.get_pid) == spare.pid(0)
    ends = [one.start(0, shut_down) for one in (first, last, spare)]
    for end in ends:
        end.result()


def test_second_worker_of_a_living_rank_is_refused(
    blank_workers, make_cluster, tmp_path
):
    store = f"file://{tmp_path}/store"
    cluster = make_cluster(2, init_method=store)
    (intruder,) = blank_workers(1)

    with pytest.raises(UsageError, match="taken by worker 'w1'"):
        intruder.run(0, init_again, 1, 2, store, 10.0)

    assert cluster.run(0, call, "w1", functions.get_pid) == cluster.pid(1)


def wait_until_leaving(cluster: Cluster, asker: int, rank: int) -> None:
    probes.wait_until(
        lambda: cluster.run(
            asker, call, f"w{rank}", probes.main_thread_is_in, "_shutdown.py"
        ),
        f"rank {rank} waits in its shutdown",
    )


def test_shutdown_ends_although_a_waiting_worker_is_killed(make_cluster):
    cluster = make_cluster(3)
    survivor = cluster.start(1, shut_down)
    cluster.start(2, shut_down)
    for rank in (1, 2):
        wait_until_leaving(cluster, 0, rank)

    cluster.kill(2)

    cluster.run(0, shut_down)
    survivor.result()


def test_shutdown_ends_although_a_working_worker_is_killed(make_cluster):
    cluster = make_cluster(3)
    waiting = [cluster.start(rank, shut_down) for rank in (0, 1)]
    for rank in (0, 1):
        wait_until_leaving(cluster, 2, rank)

    cluster.kill(2)

    for end in waiting:
        end.result()


def test_shutdown_ends_although_the_coordinator_is_killed(make_cluster):
    cluster = make_cluster(3)
    waiting = [cluster.start(rank, shut_down) for rank in (1, 2)]
    for rank in (1, 2):
        wait_until_leaving(cluster, 0, rank)

    cluster.kill(0)

    for end in waiting:
        end.result()


def test_shutdown_ends_although_the_coordinator_dies_in_it(make_cluster):
    cluster = make_cluster(4)
    cluster.start(0, shut_down)
    waiting = cluster.start(1, shut_down)
    for rank in (0, 1):
        wait_until_leaving(cluster, 2, rank)

    cluster.kill(0)

    ends = [cluster.start(rank, shut_down) for rank in (2, 3)]
    for end in (waiting, *ends):
        end.result()


# -------------------------------------------------------------------------- shared memory

LARGE = 4 << 20


def test_segments_that_a_dead_worker_held_are_freed(make_cluster):
    cluster = make_cluster(2)
    assert cluster.run(0, send_tensors, "w1", 6, LARGE) >= 6

    cluster.kill(1)

    probes.wait_until(
        lambda: cluster.run(0, probes.count_segments) == 0, "no segment is mapped"
    )
    info = cluster.run(0, rpc.get_debug_info)
    assert info.get("segments", 0) == info.get("segment_bytes", 0) == 0


def test_tensors_of_a_dead_worker_stay_valid_and_are_freed(make_cluster):
    cluster = make_cluster(2)
    assert cluster.run(0, fetch_tensors, "w1", 6, LARGE) >= 6

    cluster.kill(1)
    error, _ = cluster.run(0, call_and_time, "w1")
    assert isinstance(error, PeerLostError)

    assert cluster.run(0, check_tensors) == list(range(6))
    assert cluster.run(0, drop_tensors) == 0
    assert cluster.run(0, rpc.get_debug_info).get("segments_borrowed", 0) == 0


def test_deaths_in_the_middle_of_large_transfers_leave_nothing(make_cluster):
    cluster = make_cluster(2)
    before = cluster.run(0, probes.count_descriptors)
    for _ in range(3):
        sending = cluster.start(0, flood_with_tensors, "w1")
        probes.wait_until(
            lambda: cluster.run(1, rpc.get_debug_info)["calls_served"] > 3,
            "transfers are under way",
        )
        cluster.kill(1)
        assert isinstance(sending.result(), PeerLostError)
        cluster.restart(1)
        cluster.run(0, call, "w1", functions.echo, 1)

    assert cluster.run(0, probes.count_segments) == 0
    assert cluster.run(0, probes.count_descriptors) <= before + 2


def flood_with_tensors(to: str) -> PeerLostError:
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    try:
        while True:
            call(to, functions.echo, tensor)
    except PeerLostError as error:
        return error


def test_worker_killed_by_a_handler_names_itself_in_the_error(make_cluster):
    cluster = make_cluster(2)

    with pytest.raises(PeerLostError, match="'w1'"):
        cluster.run(0, call, "w1", functions.kill_process)

    assert cluster.wait_dead(1) == -signal.SIGKILL


# -------------------------------------------------------------------- no descriptors left


_held: list[int] = []


def use_up_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    with contextlib.suppress(OSError):
        while True:
            _held.append(os.dup(0))


def free_descriptors() -> None:
    while _held:
        os.close(_held.pop())


def test_connections_are_accepted_again_when_there_are_descriptors(make_cluster):
    cluster = make_cluster(3, {"connect_timeout": 20.0})
    assert cluster.run(0, call, "w1", functions.add, 1, 2) == 3
    cluster.run(1, use_up_descriptors)

    late = cluster.start(2, call, "w1", functions.add, 1, 2)
    assert cluster.run(0, call, "w1", functions.add, 3, 4) == 7
    cluster.run(1, free_descriptors)

    assert late.result() == 3
    cluster.disturbed = True


def test_tensor_for_which_no_descriptor_is_left_ends_the_connection_and_says_why(
    make_cluster,
):
    cluster = make_cluster(2)
    tensor = torch.ones(1 << 20)
    assert cluster.run(0, call, "w1", functions.add, 1, 2) == 3
    cluster.run(1, use_up_descriptors)
    assert cluster.run(0, call, "w1", functions.add, 1, 2) == 3

    with pytest.raises(PeerLostError, match="no file descriptor was left") as caught:
        cluster.run(0, call, "w1", torch.numel, tensor)
    assert "ulimit -n" in str(caught.value)
    assert "protocol" not in str(caught.value)
    cluster.run(1, free_descriptors)

    assert cluster.run(0, rpc.wait_for_worker, "w1", 20).name == "w1"
    assert cluster.run(0, call, "w1", torch.numel, tensor) == 1 << 20
    cluster.disturbed = True


def test_worker_with_another_secret_does_not_take_a_living_rank(
    blank_workers, make_cluster, tmp_path
):
    store = f"file://{tmp_path}/store"
    cluster = make_cluster(2, init_method=store, secret="one")
    (intruder,) = blank_workers(1)

    with pytest.raises(HandshakeRefused, match="secret"):
        intruder.run(0, init_with_secret, 1, 2, store, "another")

    assert cluster.run(0, call, "w1", functions.add, 1, 2) == 3


def init_with_secret(rank: int, world_size: int, store: str, secret: str) -> None:
    options = rpc.RpcBackendOptions(init_method=store, init_timeout=10.0, secret=secret)
    rpc.init_rpc(f"w{rank}", rank, world_size, options)
