"""Opening stores: where rank and world size come from, and what can go wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from gradwire._config import RpcBackendOptions
from gradwire.errors import ConnectError, ConnectTimeout, UsageError
from gradwire.rpc._rendezvous import open_store
from gradwire.rpc._store import StoreThread

pytestmark = pytest.mark.timeout(20)

LIMIT_S = 10.0
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(scope="module", autouse=True)
def _warm_libuv() -> None:
    # It keeps a pipe for the life of the process; not a leak of the first test.
    TCPStore("127.0.0.1", 0, None, True)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def options(url: str, limit_s: float = 5.0) -> RpcBackendOptions:
    return RpcBackendOptions(init_method=url, init_timeout=limit_s)


def test_tcp_store_is_up_before_the_others_come(free_port):
    url = f"tcp://127.0.0.1:{free_port}"
    server, rank, world_size = open_store(options(url), 0, 4)
    assert (rank, world_size) == (0, 4)
    client, rank, world_size = open_store(options(url), 3, 4)
    assert (rank, world_size) == (3, 4)
    server.set("key", "value")
    assert client.get("key") == b"value"


def test_env_store_takes_all_from_the_environment(free_port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    server, rank, world_size = open_store(options("env://"), None, None)
    assert (rank, world_size) == (0, 3)
    client, rank, world_size = open_store(options("env://"), 2, -1)
    assert (rank, world_size) == (2, 3)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_env_store_of_the_launcher_is_used(free_port, monkeypatch):
    # As under torchrun: the agent serves the store, and rank 0 is a client, too.
    agent, _, _ = open_store(options(f"tcp://127.0.0.1:{free_port}"), 0, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    store, _, _ = open_store(options("env://"), 0, 2)
    store.set("key", "value")
    assert agent.get("key") == b"value"


def test_file_store_opens(tmp_path: Path):
    url = f"file://{tmp_path}/store"
    first, _, _ = open_store(options(url), 0, 2)
    second, rank, world_size = open_store(
        options(url + "?rank=1&world_size=2"), -1, None
    )
    assert (rank, world_size) == (1, 2)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_client_waits_for_the_server(free_port):
    url = f"tcp://127.0.0.1:{free_port}"
    opened: list[object] = []
    waiting = threading.Thread(
        target=lambda: opened.append(open_store(options(url), 1, 2)[0])
    )
    waiting.start()
    server, _, _ = open_store(options(url), 0, 2)
    waiting.join(10)
    assert len(opened) == 1
    assert server is not None


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_missing_variable_is_named(missing, monkeypatch):
    for name, value in zip(VARIABLES, ("0", "2", "127.0.0.1", "1"), strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(UsageError, match=missing):
        open_store(options("env://"), None, None)


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "message"),
    [
        ("tcp://127.0.0.1:1", None, 2, "rank is missing: pass rank="),
        ("tcp://127.0.0.1:1", 0, None, "world_size is missing"),
        ("tcp://127.0.0.1", 0, 2, "tcp://host:port"),
        ("tcp://:1234", 0, 2, "tcp://host:port"),
        ("tcp://127.0.0.1:99999", 0, 2, "ort out of range"),
        ("tcp://127.0.0.1:1?rank=1", 0, 2, "rank is given twice"),
        ("tcp://127.0.0.1:1?rank=x", None, 2, "whole number, found 'x'"),
        ("tcp://127.0.0.1:1", 2, 2, "rank must be between 0 and world_size - 1 = 1"),
        ("tcp://127.0.0.1:1", 0, 0, "world_size must be between 1 and"),
        ("tcp://127.0.0.1:1", 0, 2**31, f"between 1 and {2**31 - 1}, found {2**31}"),
        ("file://relative/path", 0, 2, "three slashes"),
        ("file:///no/such/folder/store", 0, 2, "folder that exists"),
        ("carrier://pigeon", 0, 2, "unknown scheme"),
    ],
)
def test_bad_place_is_a_usage_error(url, rank, world_size, message):
    with pytest.raises(UsageError, match=message):
        open_store(options(url), rank, world_size)


def test_rank_of_another_type_is_refused():
    with pytest.raises(TypeError, match="rank must be an int"):
        open_store(options("tcp://127.0.0.1:1"), "0", 2)  # type: ignore[arg-type]


def test_port_in_use_is_named(taken_port):
    with pytest.raises(
        ConnectError, match=f"127.0.0.1:{taken_port}, the port is in use"
    ):
        open_store(options(f"tcp://127.0.0.1:{taken_port}"), 0, 2)


def test_nobody_there_names_the_address(free_port):
    with pytest.raises(
        ConnectTimeout, match=f"127.0.0.1:{free_port} .* is rank 0 started"
    ):
        open_store(options(f"tcp://127.0.0.1:{free_port}", 0.2), 1, 2)


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_silent_server_is_given_up_and_named(taken_port, monkeypatch, scheme):
    # Somebody listens there, but is no store; or it is one that was stopped.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    url = f"tcp://127.0.0.1:{taken_port}" if scheme == "tcp" else "env://"
    start = time.monotonic()

    with pytest.raises(ConnectTimeout, match=f"127.0.0.1:{taken_port} did not answer"):
        open_store(options(url, 0.5), 1, 2)

    assert time.monotonic() - start < LIMIT_S


def test_operation_that_hangs_is_given_up():
    release = threading.Event()
    with StoreThread() as thread:
        with pytest.raises(ConnectTimeout, match="did not answer within"):
            thread.call(release.wait, timeout_s=0.01)
        release.set()
        assert thread.call(lambda: 7, timeout_s=5.0) == 7


def test_error_of_an_operation_is_mapped():
    def fail() -> None:
        raise RuntimeError("Broken pipe\nframe #0: ...")

    with StoreThread() as thread:
        with pytest.raises(ConnectError, match="store failed: Broken pipe; is the"):
            thread.call(fail, timeout_s=5.0)
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0, timeout_s=5.0)
