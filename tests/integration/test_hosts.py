"""Which transport two workers use depends on where they are.

Another host is another network namespace here, joined to the first by a virtual cable:
Unix sockets do not reach across it, and it can be cut.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cluster as harness
import functions
import namespaces
from certificates import Office
from gradwire import rpc
from gradwire.errors import ConnectError, HandshakeRefused, PeerLostError

LIMIT_S = 30.0
SECRET = "a secret of this test"

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces"),
]


class Cable(NamedTuple):
    """Two namespaces, and their ends of the cable between them."""

    left: str
    right: str
    left_address: str
    right_address: str


def ip(*arguments: str) -> None:
    run_tool("ip", *arguments)


def tc(*arguments: str) -> None:
    run_tool("tc", *arguments)


def run_tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("the command 'ip' (package iproute2) is missing")
    left, right = (f"gradwire{os.getpid()}{side}" for side in "lr")
    try:
        ip("netns", "add", left)
        ip("netns", "add", right)
        ip(
            *f"link add veth0 netns {left} type veth peer name veth0 netns {right}".split()
        )
        for namespace, address in ((left, "1"), (right, "2")):
            inside = ("-n", namespace)
            ip(*inside, "address", "add", f"10.213.7.{address}/24", "dev", "veth0")
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "link", "set", "veth0", "up")
            with contextlib.suppress(subprocess.CalledProcessError):  # no IPv6 here
                v6 = f"fd00:213:7::{address}/64"
                ip(*inside, "address", "add", v6, "dev", "veth0", "nodad")
        yield Cable(left, right, "10.213.7.1", "10.213.7.2")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr}")
    finally:
        for namespace in (left, right):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


# ------------------------------------------------------------------ worker processes


def serve(
    connection: Any, namespace: str, rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """Runs in a process of its own: joins, then does what the test asks."""
    signal.alarm(60)  # whatever happens, it does not stay
    namespaces.enter(namespace)
    torch.set_num_threads(1)
    try:
        rpc.init_rpc(f"w{rank}", rank, world_size, rpc.RpcBackendOptions(**options))
        connection.send((None, None))
        while True:
            function, args = pickle.loads(connection.recv())
            try:
                connection.send((function(*args), None))
            except Exception as error:
                connection.send((None, error))
    except EOFError:
        rpc.shutdown(graceful=False)
    except Exception as error:
        connection.send((None, RuntimeError(traceback.format_exception(error))))


class Worker:
    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=serve, args=(theirs, *args))
            self._process.start()

    def result(self) -> Any:
        assert self._connection.poll(LIMIT_S), "the worker does not answer"
        value, error = self._connection.recv()
        if error is not None:
            raise error
        return value

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._connection.send(pickle.dumps((function, args)))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def close(self) -> None:
        self._connection.close()
        self._process.join(LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(LIMIT_S)
        self._process.close()


@pytest.fixture
def start_workers() -> Iterator[Callable[..., list[Worker]]]:
    """Starts one worker in each of the namespaces, and ends them after the test."""
    harness.ensure_fork_server()
    started: list[Worker] = []

    def start(*namespaces: str, **options: Any) -> list[Worker]:
        options.setdefault("allow_plain_tcp", "tls" not in options)
        for rank, namespace in enumerate(namespaces):
            worker = Worker(namespace, rank, len(namespaces), options)
            started.append(worker)
        for worker in started:
            worker.result()
        return started

    yield start
    for worker in started:
        worker.close()


def call_all(world_size: int) -> dict[str, str]:
    """Calls every other worker; returns which transport was used to which of them."""
    own = rpc.get_worker_info().id
    others = [rank for rank in range(world_size) if rank != own]
    tensor = torch.arange(100_000)
    for rank in others:
        assert rpc.rpc_sync(rank, functions.add, (1, 2), timeout=LIMIT_S) == 3
        found = rpc.rpc_sync(rank, torch.add, (tensor, 1), timeout=LIMIT_S)
        assert torch.equal(found, tensor + 1)
    transports: dict[str, str] = rpc.get_debug_info()["transports"]
    return {f"w{rank}": transports[f"w{rank}"] for rank in others}


# ------------------------------------------------------------------------------ tests


def test_each_pair_uses_the_transport_that_reaches(cable, start_workers):
    place = f"tcp://{cable.left_address}:29531"

    workers = start_workers(
        cable.left, cable.left, cable.right, init_method=place, secret=SECRET
    )

    assert [worker.run(call_all, 3) for worker in workers] == [
        {"w1": "unix", "w2": "tcp"},
        {"w0": "unix", "w2": "tcp"},
        {"w0": "tcp", "w1": "tcp"},
    ]


def test_interface_is_advertised(cable, start_workers, tmp_path):
    workers = start_workers(
        cable.left,
        cable.right,
        init_method=f"file://{tmp_path}/store",
        interface="veth0",
        secret=SECRET,
    )

    assert workers[0].run(call_all, 2) == {"w1": "tcp"}
    assert workers[1].run(call_all, 2) == {"w0": "tcp"}


def test_ipv6_works_between_hosts(cable, start_workers):
    place = "tcp://[fd00:213:7::1]:29532"
    shown = subprocess.run(
        ["ip", "-n", cable.left, "-6", "address"],
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    )
    if b"fd00:213:7::1" not in shown.stdout:
        pytest.skip("this host has no IPv6")

    workers = start_workers(cable.left, cable.right, init_method=place, secret=SECRET)

    assert [worker.run(call_all, 2) for worker in workers] == [
        {"w1": "tcp"},
        {"w0": "tcp"},
    ]


# -------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


def test_hosts_with_certificates_use_tls(cable, start_workers, office):
    place = f"tcp://{cable.left_address}:29534"
    hosts = [cable.left_address, cable.right_address]

    workers = start_workers(
        cable.left,
        cable.left,
        cable.right,
        init_method=place,
        tls=office.options("w*", hosts=hosts),
    )

    assert [worker.run(call_all, 3) for worker in workers] == [
        {"w1": "unix", "w2": "tls"},
        {"w0": "unix", "w2": "tls"},
        {"w0": "tls", "w1": "tls"},
    ]


def test_worker_on_a_host_that_its_certificate_does_not_name_is_refused(
    cable, start_workers, office
):
    workers = start_workers(
        cable.left,
        cable.right,
        init_method=f"tcp://{cable.left_address}:29535",
        tls=office.options("w*", hosts=[cable.left_address]),
    )

    with pytest.raises(HandshakeRefused, match=r"'w1'.*reached as '10\.213\.7\.2'"):
        workers[0].run(call_all, 2)
    assert workers[1].run(call_all, 2) == {"w0": "tls"}


@pytest.mark.parametrize(
    "options",
    [{}, {"secret": SECRET, "allow_plain_tcp": False}],
    ids=["nothing", "secret_only"],
)
def test_hosts_without_a_common_transport_say_what_to_do(
    cable, start_workers, tmp_path, options
):
    workers = start_workers(
        cable.left, cable.right, init_method=f"file://{tmp_path}/store", **options
    )

    with pytest.raises(
        ConnectError,
        match=r"another host.*GRADWIRE_TLS_CA.*allow_plain_tcp=True.*GRADWIRE_SECRET",
    ):
        workers[0].run(call_all, 2)


def test_cut_network_is_noticed(cable, start_workers):
    place = f"tcp://{cable.left_address}:29533"
    workers = start_workers(
        cable.left,
        cable.left,
        cable.right,
        init_method=place,
        secret=SECRET,
        lost_after=1.0,
    )
    for worker in workers:
        worker.run(call_all, 3)
    workers[0].start(block_on, "w2")
    workers[1].run(rpc.rpc_sync, "w2", functions.wait_until_blocked, ("cut",))
    ip("-n", cable.right, "link", "set", "veth0", "down")
    try:
        with pytest.raises(PeerLostError, match=r"'w2'.*nothing was heard of it"):
            workers[0].result()

        assert workers[0].run(rpc.rpc_sync, "w1", functions.add, (1, 2)) == 3
    finally:
        ip("-n", cable.right, "link", "set", "veth0", "up")
        workers[2].run(functions.set_event, "cut")


def block_on(name: str) -> None:
    rpc.rpc_sync(name, functions.block_until_set, ("cut",), timeout=0)


def test_slow_link_is_no_silence(cable, start_workers):
    lost_after = 0.4
    workers = start_workers(
        cable.left,
        cable.right,
        init_method=f"tcp://{cable.left_address}:29534",
        secret=SECRET,
        lost_after=lost_after,
    )
    workers[0].run(call_all, 2)
    narrow = "qdisc replace dev veth0 root tbf rate 1mbit burst 3k limit 12k"
    try:
        tc("-n", cable.right, *narrow.split())
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"links cannot be made narrow here: {error}")
    try:
        # One frame, which takes longer than anybody may be silent.
        seconds = workers[0].run(time_numbers, "w1", 40_000)
    finally:
        tc("-n", cable.right, "qdisc", "delete", "dev", "veth0", "root")
    assert seconds > 3 * lost_after


def time_numbers(name: str, count: int) -> float:
    start = time.monotonic()
    found = rpc.rpc_sync(name, torch.arange, (count,), timeout=LIMIT_S)
    assert torch.equal(found, torch.arange(count))
    return time.monotonic() - start


def test_tcp_can_be_forced_on_one_host(make_cluster):
    workers = make_cluster(
        2, {"transports": ("tcp",), "bind_address": "127.0.0.1"}, secret=SECRET
    )

    assert workers.run(0, call_all, 2) == {"w1": "tcp"}
    assert workers.run(1, call_all, 2) == {"w0": "tcp"}


def test_one_host_uses_unix_unless_told_otherwise(make_cluster):
    workers = make_cluster(2, {"bind_address": "127.0.0.1"}, secret=SECRET)

    assert workers.run(0, call_all, 2) == {"w1": "unix"}


def test_order_of_the_option_is_the_preference(make_cluster):
    workers = make_cluster(
        2, {"transports": ("tcp", "unix"), "bind_address": "127.0.0.1"}, secret=SECRET
    )

    assert workers.run(0, call_all, 2) == {"w1": "tcp"}


def start_job(
    namespace: str, tls: rpc.TlsOptions, log: Path, *arguments: str
) -> subprocess.Popen[bytes]:
    program = Path(__file__).parents[2] / "examples" / "split_learning.py"
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", namespace),
                *(sys.executable, "-m", "gradwire", "run"),
                *("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29577"),
                *("--role", "labels=1", "--role", "hospital=2", *arguments),
                *(str(program), "--short"),
            ],
            env={
                **os.environ,
                "GRADWIRE_TLS_CA": str(tls.ca),
                "GRADWIRE_TLS_CERT": str(tls.certificate),
                "GRADWIRE_TLS_KEY": str(tls.key),
            },
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.timeout(150)
def test_launched_program_trains_between_hosts_by_tls(cable, tmp_path):
    tls = Office(tmp_path / "certificates").options()
    left, right = tmp_path / "left.log", tmp_path / "right.log"
    jobs = [
        start_job(cable.left, tls, left, "--node-rank=0", "--nproc-per-node=1"),
        start_job(cable.right, tls, right, "--node-rank=1", "--nproc-per-node=2"),
    ]
    try:
        for job in jobs:
            job.wait(4 * LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(left.read_text() + right.read_text())
    finally:
        for job in jobs:
            job.kill()
            job.wait()

    text = left.read_text()
    assert [job.returncode for job in jobs] == [0, 0], text + right.read_text()
    assert "every weight of all three networks is the same" in text
