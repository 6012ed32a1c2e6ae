"""How workers find each other, and how they part."""

from __future__ import annotations

import contextlib
import json
import logging
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

import api_functions as api
import functions
import leaks
from cluster import Cluster, WorkerTimeout
from gradwire import rpc
from gradwire.errors import (
    CallTimeout,
    ConnectError,
    ConnectTimeout,
    InvalidWorkerName,
    NotInitialized,
    PeerLostError,
    ShutdownTimeout,
    UnknownWorker,
    UsageError,
)
from gradwire.rpc._api import current_agent
from gradwire.rpc._link import Link
from gradwire.wire import Goodbye, kind_of

pytestmark = pytest.mark.multiproc

NUM_BARE = 3
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_PROCID")


# ----------------------------------------------------------------------- bare processes


@pytest.fixture(scope="module")
def _bare():
    with Cluster(NUM_BARE) as made:
        for handle in [made.start(rank, rpc.shutdown) for rank in range(NUM_BARE)]:
            handle.result()
        yield made


@pytest.fixture
def bare(_bare):
    """Three processes that are no workers; what a test makes of them is undone."""
    yield _bare
    for handle in [_bare.start(rank, leave_at_once) for rank in range(NUM_BARE)]:
        handle.result()


def leave_at_once():
    if rpc.is_initialized():
        rpc.shutdown(graceful=False)
    api.set_environment(dict.fromkeys((*STORE_VARIABLES, *SLURM_VARIABLES)))


@pytest.fixture
def file_url(tmp_path):
    return f"file://{tmp_path}/store"


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def tcp_url():
    return f"tcp://127.0.0.1:{find_port()}"


def join_without_calls(
    rank: int, world_size: int, url: str, name: str = "", **options: Any
) -> None:
    """Makes this process a worker; connections are opened by the first calls."""
    options = {"init_method": url, "init_timeout": 20.0, **options}
    rpc.init_rpc(
        name or f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(**options),
    )


def join(rank: int, world_size: int, url: str, name: str = "", **options: Any) -> str:
    """Makes this process a worker, and returns whom it can call then."""
    join_without_calls(rank, world_size, url, name, **options)
    return "".join(
        f"{rpc.rpc_sync(other, api.worker_name)} " for other in range(world_size)
    )


def join_all(bare, url, world_size=NUM_BARE, join=join, **options):
    """Makes a group of the first processes; what each of them returned."""
    handles = [
        bare.start(rank, join, rank, world_size, url, **options)
        for rank in range(world_size)
    ]
    return [handle.result() for handle in handles]


def leave_all(bare, world_size=NUM_BARE):
    for handle in [bare.start(rank, rpc.shutdown) for rank in range(world_size)]:
        handle.result()


# ------------------------------------------------------------------------------ meeting


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


# --------------------------------------------------------------------- many at one place


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


# ------------------------------------------------------------------------- wrong inits


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


def test_name_of_a_transport_instead_of_a_tuple_is_refused():
    name: Any = "unix"

    with pytest.raises(TypeError, match=r"write transports=\('unix',\)"):
        rpc.RpcBackendOptions(transports=name)


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


# ----------------------------------------------------------------------- graceful shutdown


@rpc.functions.async_execution
def block_far_away(route: list[str], name: str) -> rpc.Future[Any]:
    """Asynchronous calls along a route, at whose end a handler blocks."""
    if len(route) == 1:
        return rpc.rpc_async(route[0], functions.block_until_set, args=(name,))
    future = rpc.rpc_async(route[0], block_far_away, args=(route[1:], name))
    return future.then(lambda done: str(done.value()) + "!")


def call_and_leave(route, name):
    future = rpc.rpc_async(route[0], block_far_away, args=(route[1:], name))
    rpc.shutdown()
    return future.value()


_leaving: list[threading.Thread] = []


def start_to_leave(**kwargs):
    thread = threading.Thread(target=rpc.shutdown, kwargs=kwargs)
    thread.start()
    _leaving.append(thread)


def finish_to_leave():
    thread = _leaving.pop()
    thread.join(api.LIMIT_S)
    return not thread.is_alive()


def test_shutdown_waits_for_calls_of_all_workers(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_and_leave, ["w1", "w2", "w1", "w2"], "last")
    bare.run(2, functions.wait_until_blocked, "last")
    between = bare.start(1, rpc.shutdown)
    bare.run(2, start_to_leave)

    with pytest.raises(WorkerTimeout):
        caller.result(0.3)
    with pytest.raises(WorkerTimeout):
        between.result(0.05)
    bare.run(2, functions.set_event, "last")

    assert caller.result() == "last!!"
    between.result()
    assert bare.run(2, finish_to_leave)


def call_back_and_forth(to, depth):
    """A chain of calls that goes on while everybody is leaving already."""
    if depth == 0:
        return rpc.get_worker_info().name
    here = rpc.get_worker_info().name
    return rpc.rpc_sync(to, call_back_and_forth, args=(here, depth - 1))


def start_chain_and_leave(to):
    future = rpc.rpc_async(to, call_back_and_forth, args=("w0", 30))
    rpc.shutdown()
    return future.value()


def test_shutdown_waits_for_calls_that_begin_meanwhile(bare, file_url):
    join_all(bare, file_url)
    handles = [bare.start(0, start_chain_and_leave, "w1")]
    handles += [bare.start(rank, rpc.shutdown) for rank in (1, 2)]

    assert [handle.result() for handle in handles] == ["w1", None, None]


def words_of_a_long_wait():
    """What is logged, at the level that programs see without more ado."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    current_agent().departure._pause_s = 0.01
    logger = logging.getLogger("gradwire.rpc")
    logger.addHandler(handler)
    try:
        with pytest.raises(ShutdownTimeout):
            rpc.shutdown(timeout=1.0)
    finally:
        logger.removeHandler(handler)
    return said


def test_long_wait_in_a_shutdown_is_warned_about(bare, file_url):
    join_all(bare, file_url)

    said = bare.run(1, words_of_a_long_wait)

    assert "worker w1 still waits in a graceful shutdown" in said[0]


def shut_down_late(timeout):
    """The text of the error, and whether the worker is down all the same."""
    start = time.monotonic()
    with pytest.raises(ShutdownTimeout) as caught:
        rpc.shutdown(timeout=timeout)
    assert timeout <= time.monotonic() - start < timeout + 5
    assert not rpc.is_initialized()
    with pytest.raises(NotInitialized):
        rpc.rpc_sync("w0", functions.get_pid)
    assert api.list_threads() == []
    return str(caught.value)


def test_shutdown_with_a_limit_names_who_was_not_ready(bare, file_url):
    join_all(bare, file_url)
    leaving = bare.start(1, rpc.shutdown)

    text = bare.run(0, shut_down_late, 0.5)

    assert "worker 'w0' waited 0.5 s" in text
    assert "for 'w2' (rank 2)" in text
    bare.run(2, rpc.shutdown)
    leaving.result()


def test_shutdown_of_a_higher_rank_has_a_limit_too(bare, file_url):
    join_all(bare, file_url)

    assert "for 'w0' (rank 0)" in bare.run(1, shut_down_late, 0.3)


@pytest.mark.parametrize("rank", [0, 2])
def test_shutdown_has_a_limit_also_if_others_cannot_be_reached(make_cluster, rank):
    cluster = make_cluster(3)
    others = {0, 1, 2} - {rank}
    for other in others:
        cluster.stop(other)

    text = cluster.run(rank, shut_down_late, 0.5)

    # A member waits for the lowest rank, and that one for all.
    for other in others if rank == 0 else {0}:
        assert f"for 'w{other}' (rank {other})" in text


def call_and_shut_down_late(name):
    future = rpc.rpc_async("w1", functions.block_until_set, args=(name,))
    text = shut_down_late(0.3)
    with pytest.raises(NotInitialized):
        future.value()
    return text


def test_shutdown_with_a_limit_names_calls_in_flight(bare, file_url):
    join_all(bare, file_url, 2)

    try:
        text = bare.run(0, call_and_shut_down_late, "not ready")
    finally:
        bare.run(1, functions.set_event, "not ready")

    assert "functions:block_until_set on 'w1'" in text


def block_the_leaver(function, name):
    rpc.rpc_async("w0", function, args=(name,))


def shut_down_while_blocked(name):
    """How long that took; the handler goes on to its end."""
    functions.wait_until_blocked(name)
    start = time.monotonic()
    with pytest.raises(ShutdownTimeout, match="requests that it still serves"):
        rpc.shutdown(timeout=0.3)
    took_s = time.monotonic() - start
    functions.set_event(name)
    api.wait_until(lambda: api.list_threads() == [])
    return took_s


@pytest.mark.parametrize("function", [functions.block_until_set, api.block_the_loop])
def test_shutdown_with_a_limit_does_not_wait_long_for_handlers(
    bare, file_url, function
):
    join_all(bare, file_url, 2)
    name = f"blocks {function.__name__}"
    bare.run(1, block_the_leaver, function, name)

    assert bare.run(0, shut_down_while_blocked, name) < 2.5


def shut_down_within(limit):
    rpc.shutdown(timeout=limit)


@pytest.mark.parametrize("timeout", [-1, "5", None], ids=repr)
def test_shutdown_refuses_a_wrong_limit(bare, file_url, timeout):
    join_all(bare, file_url, 1)

    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        bare.run(0, shut_down_within, timeout)
    assert bare.run(0, rpc.is_initialized)


def shut_down_inside_a_handler():
    rpc.shutdown()


async def shut_down_inside_a_coroutine():
    rpc.shutdown()


@pytest.mark.parametrize(
    "function", [shut_down_inside_a_handler, shut_down_inside_a_coroutine]
)
def test_shutdown_inside_a_handler_is_refused(bare, file_url, function):
    join_all(bare, file_url, 2)

    with pytest.raises(UsageError, match=r"a handler of worker 'w1'.*graceful=False"):
        bare.run(0, api.call, "w1", function)
    leave_all(bare, 2)


# ------------------------------------------------------------------- shutdown all at once


def call_and_leave_at_once(name):
    future = rpc.rpc_async("w1", functions.block_until_set, args=(name,))
    blocked: list[BaseException] = []

    def call():
        try:
            rpc.rpc_sync("w1", functions.block_until_set, args=(name,))
        except NotInitialized as error:
            blocked.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    api.wait_until(lambda: rpc.get_debug_info()["client_active_calls"] == 2)
    rpc.shutdown(graceful=False)
    thread.join(api.LIMIT_S)
    assert len(blocked) == 1
    with pytest.raises(NotInitialized, match="shut down while the call was in flight"):
        future.wait()


def test_shutdown_at_once_fails_own_calls(bare, file_url):
    join_all(bare, file_url, 2)

    try:
        bare.run(0, call_and_leave_at_once, "abandoned")
    finally:
        bare.run(1, functions.set_event, "abandoned")


def has_left_nothing():
    api.wait_until(lambda: api.list_threads() == [])
    return not rpc.is_initialized()


def test_coroutine_may_shut_its_worker_down_at_once(bare, file_url):
    join_all(bare, file_url, 2)

    with pytest.raises(PeerLostError, match="it shut down"):
        bare.run(0, api.call, "w1", api.leave_at_once)

    assert bare.run(1, has_left_nothing)


def call_a_sleeper_and_leave_at_once():
    """How long it takes to leave while a connection is being opened."""
    with pytest.raises((CallTimeout, ConnectTimeout)):
        rpc.rpc_sync("w1", functions.get_pid, timeout=0.1)
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    took_s = time.monotonic() - start
    assert api.list_threads() == []
    return took_s


def test_shutdown_at_once_does_not_wait_for_connections(make_cluster):
    cluster = make_cluster(2, {"connect_timeout": 60.0})
    cluster.stop(1)

    assert cluster.run(0, call_a_sleeper_and_leave_at_once) < 4


def begin_to_close():
    # What `shutdown` does first; the handshakes that meet this moment are rare.
    current_agent().network.is_closing = True


def call_one_that_is_closing():
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(PeerLostError, match=r"'w1' \(rank 1\).*shutting down"):
            call("w1", functions.get_pid)
    with pytest.raises(PeerLostError, match="shutting down"):
        rpc.remote("w1", functions.get_pid).to_here()


def test_call_that_meets_a_closing_worker_says_that_it_is_lost(bare, file_url):
    join_all(bare, file_url, join=join_without_calls)
    bare.run(1, begin_to_close)

    bare.run(2, call_one_that_is_closing)


def call_one_that_leaves(name):
    with pytest.raises(PeerLostError, match=r"'w1' \(rank 1\) has left") as caught:
        rpc.rpc_sync("w1", functions.block_until_set, args=(name,))
    assert caught.value.worker == "w1"
    with pytest.raises(PeerLostError, match="'w1'"):
        rpc.rpc_sync("w1", functions.get_pid)


def test_shutdown_at_once_fails_the_calls_of_others(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_one_that_leaves, "left alone")
    bare.run(1, functions.wait_until_blocked, "left alone")

    bare.run(1, start_to_leave, graceful=False)
    try:
        caller.result(10)
    finally:
        bare.run(1, functions.set_event, "left alone")

    assert bare.run(1, finish_to_leave)
    assert bare.run(0, api.call, "w2", api.worker_name) == "w2"  # the others go on


def block_elsewhere(name):
    """A handler that waits for a call of its own."""
    return rpc.rpc_sync("w2", functions.block_until_set, args=(name,))


def call_one_that_leaves_while_it_calls(name):
    with pytest.raises(PeerLostError, match="'w1'"):
        rpc.rpc_sync("w1", block_elsewhere, args=(name,))


def leave_with_a_slow_goodbye():
    """Leaves, and lets handlers that fail thereby answer before anybody hears of it."""
    agent = current_agent()
    send = Link.send

    def send_slowly(self: Link, head: bytes, *args: Any, **kwargs: Any) -> Any:
        if head[0] == kind_of(Goodbye):
            limit = time.monotonic() + api.LIMIT_S
            while agent.num_active and time.monotonic() < limit:
                time.sleep(0.001)  # until the handler is over
        return send(self, head, *args, **kwargs)

    Link.send = send_slowly  # type: ignore[method-assign]
    try:
        rpc.shutdown(graceful=False)
    finally:
        Link.send = send  # type: ignore[method-assign]


def test_handler_whose_worker_leaves_did_not_fail(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_one_that_leaves_while_it_calls, "elsewhere")
    bare.run(2, functions.wait_until_blocked, "elsewhere")

    try:
        bare.run(1, leave_with_a_slow_goodbye)
        caller.result(10)
    finally:
        bare.run(2, functions.set_event, "elsewhere")


# ------------------------------------------------------------------------------- to look


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
