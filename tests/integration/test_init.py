"""How workers find each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import api_functions as api
import functions
import leaks
from bare_workers import (
    NUM_BARE,
    STORE_VARIABLES,
    find_port,
    join,
    join_all,
    leave_all,
)
from cluster import Cluster
from gradwire import rpc
from gradwire.errors import (
    ConnectError,
    ConnectTimeout,
    InvalidWorkerName,
    UnknownWorker,
    UsageError,
)

pytestmark = pytest.mark.multiproc


# -------------------------------------------------------------------------------- meeting


def test_workers_meet_in_a_file(bare, file_url):
    assert join_all(bare, file_url) == ["w0 w1 w2 "] * 3
    leave_all(bare)


def test_workers_meet_at_a_port(bare, tcp_url):
    assert join_all(bare, tcp_url) == ["w0 w1 w2 "] * 3
    leave_all(bare)


def test_rank_and_size_may_be_in_the_url(bare, file_url):
    handles = [
        bare.start(rank, join_by_url, f"{file_url}?rank={rank}&world_size=2")
        for rank in range(2)
    ]

    assert [handle.result() for handle in handles] == [0, 1]
    leave_all(bare, 2)


def join_by_url(url):
    options = rpc.RpcBackendOptions(init_method=url, init_timeout=20.0)
    rpc.init_rpc(f"by-url{os.getpid()}", rpc_backend_options=options)
    return rpc.get_worker_info().id


def join_by_environment(environment, name):
    api.set_environment(environment)
    rpc.init_rpc(name)
    info = rpc.get_worker_info()
    return info.id, [rpc.rpc_sync(other, api.worker_name) for other in range(2)]


def test_workers_meet_by_environment_variables(bare):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}

    handles = [
        bare.start(
            rank,
            join_by_environment,
            {**common, "RANK": str(rank), "WORLD_SIZE": "2"},
            f"env{rank}",
        )
        for rank in range(2)
    ]

    names = ["env0", "env1"]
    assert [handle.result() for handle in handles] == [(0, names), (1, names)]
    leave_all(bare, 2)


def test_workers_meet_by_variables_of_slurm(bare):
    port = find_port()
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }

    handles = [
        bare.start(
            rank,
            join_by_environment,
            {**common, "SLURM_PROCID": str(rank)},
            f"env{rank}",
        )
        for rank in range(2)
    ]

    names = ["env0", "env1"]
    assert [handle.result() for handle in handles] == [(0, names), (1, names)]
    leave_all(bare, 2)


@pytest.mark.parametrize("missing", STORE_VARIABLES)
def test_missing_environment_variable_is_named(bare, missing):
    environment: dict[str, str | None] = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    environment[missing] = None

    with pytest.raises(UsageError, match=missing):
        bare.run(0, join_by_environment, environment, "w0")


TORCHRUN_SCRIPT = """
import json, os, sys
import torch
from gradwire import rpc

class Greeting:
    def __init__(self, text):
        self.text = text

def greet(name, numbers):
    text = f"{rpc.get_worker_info().name} greets {name}, {int(numbers.sum())}"
    return Greeting(text)

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"trainer{rank}")
    other = (rank + 1) % int(os.environ["WORLD_SIZE"])
    greeting = rpc.rpc_sync(other, greet, args=(f"trainer{rank}", torch.arange(4)))
    rpc.shutdown()
    # One write for each, or lines of several workers mix.
    os.write(1, (greeting.text + "\\n").encode())
"""


@pytest.mark.slow
def test_torchrun_starts_workers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Logs of the launcher would go to the system's folder and stay there.
    command += ["--nproc-per-node", "3", "--log-dir", str(tmp_path / "logs")]

    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"},
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        "trainer0 greets trainer2, 6",
        "trainer1 greets trainer0, 6",
        "trainer2 greets trainer1, 6",
    ]


# ---------------------------------------------------------------------- many at one place


def call_everybody(world_size):
    return [rpc.rpc_sync(rank, api.worker_name) for rank in range(world_size)]


@pytest.mark.slow
def test_32_workers_start_and_call_each_other():
    count = 32

    with Cluster(count) as cluster:
        handles = [cluster.start(rank, call_everybody, count) for rank in range(count)]
        results = [handle.result() for handle in handles]

    assert results == [[f"w{rank}" for rank in range(count)]] * count


# ------------------------------------------------------------------------ init that fails


def test_missing_worker_is_named(bare, file_url):
    handles = [
        bare.start(rank, join, rank, NUM_BARE, file_url, init_timeout=1.0)
        for rank in (0, 2)
    ]

    for handle in handles:
        with pytest.raises(
            ConnectTimeout, match=r"1 of 3 workers: rank 1 has not join"
        ):
            handle.result()


def test_missing_workers_are_all_named(bare, file_url):
    with pytest.raises(ConnectTimeout, match=r"4 of 5 workers: ranks 0, 2, 3, 4 have"):
        bare.run(0, join, 1, 5, file_url, init_timeout=0.5)


def test_missing_store_is_named(bare, tcp_url):
    address = tcp_url.removeprefix("tcp://")

    with pytest.raises(
        ConnectTimeout, match=f"nobody served .* at {address} within 0.5 s"
    ):
        bare.run(0, join, 1, 2, tcp_url, init_timeout=0.51234)


def test_init_has_a_limit_also_if_others_cannot_be_reached(bare, make_cluster):
    cluster = make_cluster(NUM_BARE)
    cluster.kill(2)
    for rank in (0, 1):
        cluster.stop(rank)
    url = cluster._options["init_method"]
    start = time.monotonic()

    with pytest.raises(ConnectTimeout) as caught:
        bare.run(0, join, 2, NUM_BARE, url, init_timeout=1.0)

    assert time.monotonic() - start < 6
    assert "waited 1.0 s for 2 of 3 workers: rank 0 ('w0') left" in str(caught.value)
    assert "rank 1 ('w1') left a record, but nobody answers" in str(caught.value)


def fail_to_join(*args: Any, kind: type[Exception], **options: Any) -> list[str]:
    """What an init that fails leaves behind in this process."""
    # Libraries open things once and for all: not in the time that is looked at.
    with contextlib.suppress(kind):
        join(*args, **options)
    before = leaks.take_snapshot()
    with pytest.raises(kind):
        join(*args, **options)
    assert not rpc.is_initialized()
    return [*leaks.find_leaks(before, leaks.take_snapshot), *api.list_threads()]


@pytest.mark.parametrize("url", ["file_url", "tcp_url"])
@pytest.mark.parametrize("rank", [0, 1])
def test_failed_init_leaves_nothing_behind(bare, request, url, rank):
    place = request.getfixturevalue(url)

    left = bare.run(
        0, fail_to_join, rank, 2, place, kind=ConnectTimeout, init_timeout=0.3
    )

    assert left == []


TCP = {"secret": "s", "allow_plain_tcp": True}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"transports": ("tcp",)}, ConnectError),  # without a secret
        ({"interface": "no-such-interface", **TCP}, ConnectError),
        ({"bind_address": "192.0.2.1", **TCP}, ConnectError),
    ],
    ids=["no secret", "no interface", "no address"],
)
def test_init_that_cannot_listen_leaves_nothing_behind(bare, file_url, options, kind):
    assert bare.run(0, fail_to_join, 0, 1, file_url, kind=kind, **options) == []


def test_init_can_be_called_again_after_a_failure(bare, file_url):
    with pytest.raises(ConnectTimeout):
        bare.run(0, join, 0, 2, file_url, init_timeout=0.3)

    assert join_all(bare, file_url, 2) == ["w0 w1 "] * 2
    leave_all(bare, 2)


def test_port_of_a_failed_init_is_free_again(bare, tcp_url):
    with pytest.raises(ConnectTimeout):
        bare.run(0, join, 0, 2, tcp_url, init_timeout=0.3)

    assert join_all(bare, tcp_url, 2) == ["w0 w1 "] * 2
    leave_all(bare, 2)


def test_port_in_use_is_named(bare):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConnectError, match=f"{port}, the port is in use"):
            bare.run(0, join, 0, 2, f"tcp://127.0.0.1:{port}", init_timeout=2.0)


def press_again(unraisable):
    """Python drops an interrupt that comes while it runs the callback of a weak reference.

    Threads that have ended have such callbacks. Whoever pressed Ctrl-C presses it again.
    """
    assert issubclass(unraisable.exc_type, KeyboardInterrupt)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def join_until_interrupted(url, rank=0):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = press_again
    try:
        if url.startswith("file:"):
            Path(url.removeprefix("file://")).with_suffix(".begins").touch()
        join(rank, 2, url)
    except KeyboardInterrupt:
        return [rpc.is_initialized(), *api.list_threads()]
    finally:
        sys.unraisablehook = sys.__unraisablehook__
        signal.signal(signal.SIGINT, before)
    return ["it joined"]


@pytest.mark.parametrize("moment", ["begins", "waits"])
def test_init_ends_on_ctrl_c(bare, file_url, moment):
    store = Path(file_url.removeprefix("file://"))
    handle = bare.start(0, join_until_interrupted, file_url)
    if moment == "begins":
        api.wait_until(store.with_suffix(".begins").exists)
    else:  # it has told the others about itself
        api.wait_until(lambda: store.exists() and b"worker/0" in store.read_bytes())

    os.kill(bare.pid(0), signal.SIGINT)

    assert handle.result(10) == [False]
    assert join_all(bare, file_url, 2) == ["w0 w1 "] * 2
    leave_all(bare, 2)


def test_init_ends_on_ctrl_c_when_the_store_is_silent(make_cluster):
    process = make_cluster(1)
    process.run(0, rpc.shutdown)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(api.LIMIT_S)
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        handle = process.start(0, join_until_interrupted, url, 1)
        silent.accept()[0].close()  # a look whether anybody is there
        with silent.accept()[0] as store:
            assert store.recv(1)  # it has said something, and waits for the answer

            os.kill(process.pid(0), signal.SIGINT)

            assert handle.result(api.LIMIT_S)[0] is False
    process.kill(0)  # torch goes on trying until its limit


# ---------------------------------------------------------------------------- wrong inits


@pytest.mark.parametrize(
    "name", ["", "a b", "ümlaut", "a/b", "x" * 128, "a\n"], ids=ascii
)
def test_invalid_name_is_refused(name):
    with pytest.raises(InvalidWorkerName) as caught:
        rpc.init_rpc(name, rank=0, world_size=1)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-5, 2), (0, 0)])
def test_rank_outside_the_group_is_refused(file_url, rank, world_size):
    options = rpc.RpcBackendOptions(init_method=file_url)

    with pytest.raises(UsageError, match=r"rank must be|world_size must be"):
        rpc.init_rpc("w", rank=rank, world_size=world_size, rpc_backend_options=options)


def test_options_of_another_class_are_refused():
    options: Any = {"rpc_timeout": 5}

    text = r"instance of gradwire\.rpc\.RpcBackendOptions, found one of builtins\.dict"
    with pytest.raises(TypeError, match=text):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize("option", ["init_timeout", "connect_timeout", "lost_after"])
def test_options_may_be_without_a_limit(bare, file_url, option):
    options = {"transports": ("tcp",), "secret": "for a test", option: float("inf")}

    assert join_all(bare, file_url, 2, **options) == ["w0 w1 "] * 2
    assert bare.run(0, rpc.rpc_sync, "w1", torch.ones, (1 << 20,)).shape == (1 << 20,)
    leave_all(bare, 2)


def test_name_of_a_transport_instead_of_a_tuple_is_refused():
    name: Any = "unix"

    with pytest.raises(TypeError, match=r"write transports=\('unix',\)"):
        rpc.RpcBackendOptions(transports=name)


@pytest.mark.parametrize(
    "option", ["transports", "bind_address", "advertise_address", "interface"]
)
def test_option_of_a_wrong_type_is_refused(option):
    options: dict[str, Any] = {option: 5}

    with pytest.raises(TypeError, match=f"{option} must be a"):
        rpc.RpcBackendOptions(**options)


def test_backend_of_torch_is_refused():
    backend: Any = "TENSORPIPE"

    with pytest.raises(TypeError, match="backend must be None"):
        rpc.init_rpc("w0", rank=0, world_size=1, backend=backend)


def test_duplicate_name_is_refused_on_both_sides(bare, file_url):
    handles = [
        bare.start(rank, join, rank, 2, file_url, "twin", init_timeout=10.0)
        for rank in range(2)
    ]

    for handle in handles:
        with pytest.raises(UsageError, match="'twin' is not unique: ranks 0 and 1"):
            handle.result()


def test_duplicate_rank_is_refused(bare, file_url):
    join_all(bare, file_url, 2)

    with pytest.raises(UsageError, match="rank 1 is taken by worker 'w1'"):
        bare.run(2, join, 1, 2, file_url, "late", init_timeout=10.0)

    assert bare.run(0, call_everybody, 2) == ["w0", "w1"]
    leave_all(bare, 2)


def test_different_world_sizes_are_refused(bare, file_url):
    handles = [
        bare.start(rank, join, rank, 2 + rank, file_url, init_timeout=10.0)
        for rank in range(2)
    ]

    for handle in handles:
        with pytest.raises(UsageError, match="same world_size"):
            handle.result()


def init_twice(url):
    join(0, 1, url)
    with pytest.raises(UsageError, match="already initialized"):
        join(0, 1, url + "2", "other")
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
    assert rpc.rpc_sync("w0", functions.add, args=(1, 2)) == 3


def test_second_init_is_refused_and_harmless(bare, file_url):
    bare.run(0, init_twice, file_url)


# ------------------------------------------------------------------------ again and again


def join_and_leave(rank, world_size, url, rounds):
    """Joins and leaves again and again; what is there in the end and was not before."""
    before = None
    for number in range(rounds):
        join(rank, world_size, url, f"w{rank}-{number}")
        rpc.shutdown()
        if number == 1:  # once everything has been imported and opened
            before = leaks.take_snapshot()
    assert before is not None
    return leaks.find_leaks(before, leaks.take_snapshot)


@pytest.mark.parametrize("url", ["file_url", "tcp_url"])
def test_init_and_shutdown_can_be_repeated(bare, request, url):
    place = request.getfixturevalue(url)
    handles = [
        bare.start(rank, join_and_leave, rank, NUM_BARE, place, 10)
        for rank in range(NUM_BARE)
    ]

    assert [handle.result() for handle in handles] == [[]] * NUM_BARE


# -------------------------------------------------------------------------------- to look


def test_worker_info_of_oneself_and_of_others(cluster):
    assert cluster.run(1, rpc.get_worker_info) == rpc.WorkerInfo("w1", 1)
    assert cluster.run(1, rpc.get_worker_info, "w3") == rpc.WorkerInfo("w3", 3)


def test_worker_info_of_a_stranger_is_an_error(cluster):
    with pytest.raises(UnknownWorker, match="'stranger'"):
        cluster.run(1, rpc.get_worker_info, "stranger")


def test_is_initialized_follows_init_and_shutdown(bare, file_url):
    assert not bare.run(0, rpc.is_initialized)
    join_all(bare, file_url, 1)
    assert bare.run(0, rpc.is_initialized)
    leave_all(bare, 1)
    assert not bare.run(0, rpc.is_initialized)


DEBUG_KEYS = {
    "awaited_values",
    "forks",
    "owner_rrefs",
    "pending_children",
    "pending_users",
    "user_rrefs",
    *["client_active_calls", "server_active_calls", "calls_started", "calls_served"],
    *["threads", "idle_threads", "connections", "inflight_bytes", "workers_lost"],
    *["transports", "bytes_sent", "bytes_received", "frames_sent", "frames_received"],
    *["queued_parts", "segments", "segments_free", "segment_bytes"],
    *["segments_mapped", "segments_borrowed"],
}


def test_debug_info_has_the_documented_keys(cluster):
    info = cluster.run(0, rpc.get_debug_info)

    assert set(info) == DEBUG_KEYS
    assert json.loads(json.dumps(info)) == info


def look_when_idle():
    api.wait_until(api.is_idle)
    return rpc.get_debug_info()


def test_debug_info_counts_nothing_when_idle(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, api.call, "w1", functions.echo, b"x" * 100_000)

    for rank in range(2):
        info = cluster.run(rank, look_when_idle)
        for key in ("client_active_calls", "server_active_calls", "inflight_bytes"):
            assert info[key] == 0
        assert info["workers_lost"] == info["queued_parts"] == 0
        assert set(info["transports"]) == {"w0", "w1"}
        assert info["transports"][f"w{1 - rank}"] == "unix"


def look_while_busy():
    with api.blocked_call("w1", "busy"):
        ours = rpc.get_debug_info()
        theirs = rpc.rpc_sync("w1", api.get_debug_info)
    return ours, theirs


def test_debug_info_counts_calls_in_flight(make_cluster):
    ours, theirs = make_cluster(2).run(0, look_while_busy)

    assert ours["client_active_calls"] == 1
    assert ours["inflight_bytes"] > 0
    assert theirs["server_active_calls"] == 2  # the one that blocks, and the look
    assert theirs["calls_served"] >= 1
