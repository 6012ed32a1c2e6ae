"""Joining a group without a size, with agents of this process and a store in memory."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

import probes
from certificates import Office
from gradwire._config import RpcBackendOptions
from gradwire.errors import (
    ConnectTimeout,
    HandshakeRefused,
    PeerLostError,
    UsageError,
    VersionMismatch,
)
from gradwire.rpc import _connect, _handshake
from gradwire.rpc._agent import Agent
from gradwire.rpc._open_group import MAX_SIZE, OpenGroup, claim_rank
from gradwire.rpc._records import WorkerRecord, encode_record, parse_record
from gradwire.rpc._store import read_key
from strangers import assert_works, stranger

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="uses Unix sockets"),
]

LIMIT_S = 20.0
SECRET = "a secret of this test"
TCP = {"secret": SECRET, "transports": ("tcp",)}

Join = Callable[..., tuple[Agent, WorkerRecord]]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture(scope="module", autouse=True)
def tcp_store() -> dist.Store:
    """Made before the leak check looks: libuv keeps a pipe for the process's life."""
    return dist.TCPStore("127.0.0.1", 0, None, True)


@pytest.fixture
def groups() -> dict[Agent, OpenGroup]:
    """Those who have joined."""
    return {}


@pytest.fixture
def join(store: dist.Store, groups: dict[Agent, OpenGroup]) -> Iterator[Join]:
    """Joins the group, as ``init_rpc`` does; the agents are closed after the test."""
    agents: list[Agent] = []

    def join(
        name: str, store: dist.Store = store, **options: Any
    ) -> tuple[Agent, WorkerRecord]:
        options = {"bind_address": "127.0.0.1", "connect_timeout": LIMIT_S, **options}
        rank = claim_rank(store, name, None, LIMIT_S)
        agent = Agent(name, rank, MAX_SIZE, RpcBackendOptions(**options))
        record = agent.start()
        agents.append(agent)
        group = OpenGroup(store, record, agent.network, LIMIT_S, agent.run_soon)
        group.join()
        groups[agent] = group
        return agent, record

    yield join
    for agent in agents:
        assert agent.close() == []


def names(agent: Agent) -> list[str]:
    return [peer.info.name for peer in agent.network.peers() if peer.is_usable]


def entry(store: dist.Store, number: int) -> WorkerRecord | None:
    data = read_key(store, f"entry/{number}")
    return None if data is None else parse_record(data)


def leave_behind(store: dist.Store, record: WorkerRecord, address: str) -> None:
    """What a worker that died has left: its address may be another program's by now."""
    (scheme,) = record.addresses
    moved = msgspec.structs.replace(record, addresses={scheme: address})
    number = int(store.add("entries", 1))
    store.set(f"entry/{number}", encode_record(moved))


def dead_record(name: str = "dead", rank: int = 7) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        rank=rank,
        incarnation=12345,
        world_size=MAX_SIZE,
        boot_id="of another host",
        network_namespace="",
        addresses={"tcp": ""},
        serializer="pickle",
    )


@contextlib.contextmanager
def program(greeting: bytes) -> Iterator[str]:
    """A program that is no worker, and says something to whoever comes."""

    def greet() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                with sock:
                    sock.sendall(greeting)
                    while sock.recv(4096):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def deaf_address() -> Iterator[str]:
    """An address where connecting takes for ever: nobody takes others off the queue."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


# ------------------------------------------------------------------------ out of reach


def test_entry_of_a_worker_stays_if_there_is_no_transport_in_common(
    join, store, caplog
):
    first, record = join("a", secret=SECRET, transports=("unix",))

    second, _ = join("b", **TCP)

    assert entry(store, 1) == record
    assert "without worker a of its group" in caplog.text
    assert "no transport in common" in caplog.text
    with pytest.raises(PeerLostError, match="no transport in common"):
        second.call("a", max, (1, 2))
    third, _ = join("c", secret=SECRET, transports=("unix", "tcp"))
    assert names(third) == ["a", "b", "c"]
    assert_works(third, "a")
    assert names(first) == ["a", "c"]


def test_entry_of_a_worker_that_lets_nobody_in_stays(join, store, monkeypatch):
    monkeypatch.setattr(_connect, "_MAX_STRANGERS", 1)
    first, record = join("a")
    with stranger(record):
        probes.wait_until(lambda: first.network._acceptor._strangers, "a knock")

        second, _ = join("b")

        assert names(second) == ["b"]
        assert entry(store, 1) == record
    probes.wait_until(lambda: not first.network._acceptor._strangers, "its end")
    assert second.membership.wait_for("a", LIMIT_S, or_role=False).name == "a"
    third, _ = join("c")
    assert names(third) == ["a", "b", "c"]


def test_entry_of_a_worker_whose_network_is_cut_stays(join, store, caplog):
    with deaf_address() as address:
        leave_behind(store, dead_record(), address)

        agent, _ = join("b", **{**TCP, "connect_timeout": 0.3})

    assert entry(store, 1) is not None
    assert "no answer in time" in caplog.text
    lost = [p.info.name for p in agent.network.peers() if p.may_be_met_again]
    assert lost == ["dead"]


def test_entry_of_a_worker_where_nobody_listens_is_deleted(join, store):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    leave_behind(store, dead_record(), address)

    agent, _ = join("b", **TCP)

    assert names(agent) == ["b"]
    assert entry(store, 1) is None


def test_call_to_an_address_that_does_not_answer_is_a_timeout(join):
    agent, record = join("a", **{**TCP, "connect_timeout": 0.3})
    with deaf_address() as address:
        away = msgspec.structs.replace(
            record, name="b", rank=1, incarnation=1, addresses={"tcp": address}
        )
        agent.network.set_members([away])

        with pytest.raises(ConnectTimeout, match=r"'b' \(rank 1\) by tcp") as caught:
            agent.call("b", max, (1, 2))
    assert caught.value.about == "b"


# -------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\0\2"])
def test_program_at_the_address_of_a_dead_worker_keeps_nobody_out(
    join, store, caplog, greeting
):
    with program(greeting * 20) as address:
        leave_behind(store, dead_record(), address)

        agent, _ = join("b", **TCP)

    assert names(agent) == ["b"]
    assert "without worker dead" in caplog.text


def test_worker_of_another_authority_at_the_address_keeps_nobody_out(
    join, store, caplog, tmp_path: Path
):
    ours, others = Office(tmp_path / "ours"), Office(tmp_path / "others")
    _, record = join("x", dist.HashStore(), tls=others.options(), transports=("tls",))
    dead = msgspec.structs.replace(dead_record(), addresses={"tls": ""})
    leave_behind(store, dead, record.addresses["tls"])

    agent, _ = join("b", tls=ours.options(), transports=("tls",))

    assert names(agent) == ["b"]
    assert entry(store, 1) is not None
    assert "certificate" in caplog.text


def test_worker_that_comes_back_takes_a_stranger_for_nobody(join, caplog):
    agent, _ = join("b", **TCP)
    with program(b"SSH-2.0-OpenSSH_9.2\r\n" * 20) as address:
        dead = msgspec.structs.replace(dead_record(), addresses={"tcp": address})

        assert not agent.network.contact(dead)
        assert not agent.network.contact(dead)

    assert caplog.text.count("somebody else who answers") == 1


def test_other_secret_and_other_version_are_still_errors(join, monkeypatch):
    join("a", **TCP)
    with pytest.raises(HandshakeRefused, match="secret"):
        join("b", **{**TCP, "secret": "another secret"})

    def mismatch(*_: Any) -> Any:
        raise VersionMismatch("it speaks another version")

    monkeypatch.setattr(_handshake.InitiatorHandshake, "receive", mismatch)
    with pytest.raises(VersionMismatch):
        join("b", **TCP)


# -------------------------------------------------------------------------------- twins


class SlowStore:
    """Lets two look round before either has said that it is there."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._both = threading.Barrier(2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        if key == "entries" and amount:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._both.wait(0.5)
        return int(self._store.add(key, amount))


def test_of_two_workers_of_one_name_only_one_joins(join, store):
    outcomes: list[Agent | Exception] = []
    slow = SlowStore(store)

    def try_to_join() -> None:
        try:
            outcomes.append(join("same", slow)[0])
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=try_to_join) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    (winner,) = [o for o in outcomes if isinstance(o, Agent)]
    (error,) = [o for o in outcomes if isinstance(o, Exception)]
    assert isinstance(error, UsageError)
    # Each may have been allotted a rank before one of them became that of the name.
    rank = winner.info.id
    assert f"'same' of rank {rank} is in the group and alive" in str(error)
    found = entry(store, 1)
    assert found is not None
    assert found.incarnation == winner.network.incarnation
    assert_works(join("c")[0], "same")


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_place_of_a_worker_that_is_gone_is_free(
    join, groups, tmp_path: Path, tcp_store, kind
):
    store: dist.Store = tcp_store if kind == "tcp" else dist.HashStore()
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 1)

    leaver, _ = join("a", store)
    groups[leaver].leave()
    assert read_key(store, "life/0") == b""
    leaver.close()
    dies, _ = join("a", store)
    dies.close()

    agent, record = join("a", store)
    assert [entry(store, number) for number in (1, 2, 3)] == [None, None, record]
    assert names(agent) == ["a"]
