"""Agents in the test process, and strangers that knock at them with plain sockets."""

from __future__ import annotations

import contextlib
import operator
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import probes
from gradwire._config import RpcBackendOptions
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake import InitiatorHandshake, PeerIdentity
from gradwire.rpc._handshake_records import HEADER, Kind
from gradwire.rpc._records import WorkerRecord
from gradwire.transport._tcp import parse_address

LIMIT_S = 20.0
SECRET = "a secret of this test"


class Group:
    """Agents of this process, closed after the test."""

    def __init__(self) -> None:
        self._agents: list[Agent] = []

    def add(
        self, name: str, rank: int, world_size: int = 3, **options: Any
    ) -> tuple[Agent, WorkerRecord]:
        options = {
            "bind_address": "127.0.0.1",
            "connect_timeout": LIMIT_S,
            "allow_plain_tcp": "tls" not in options,
            **options,
        }
        agent = Agent(name, rank, world_size, RpcBackendOptions(**options))
        record = agent.start()
        self._agents.append(agent)
        return agent, record

    def couple(self, **options: Any) -> tuple[Agent, Agent, WorkerRecord]:
        """Two agents that know each other, in a group of three; the first's record."""
        first, first_record = self.add("w0", 0, **options)
        second, second_record = self.add("w1", 1, **options)
        # Nobody has rank 2: that place is for strangers.
        absent = msgspec.structs.replace(
            second_record, name="w2", rank=2, incarnation=12345
        )
        for agent in (first, second):
            agent.network.set_members([first_record, second_record, absent])
        return first, second, first_record

    def close(self) -> None:
        for agent in self._agents:
            assert agent.close() == []


def wait_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    probes.wait_until(lambda: text in caplog.text, f"a log line with {text!r}")


def assert_works(caller: Agent, to: str) -> None:
    assert caller.call(to, operator.add, (1, 2), timeout=LIMIT_S) == 3


@contextlib.contextmanager
def stranger(record: WorkerRecord, scheme: str = "unix") -> Iterator[socket.socket]:
    """A plain socket that is connected to an agent."""
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: Any = "\0" + record.addresses["unix"]
    else:
        host, port = parse_address(record.addresses[scheme])
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = (host, port)
    with sock:
        sock.settimeout(LIMIT_S)
        sock.connect(address)
        yield sock


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def initiator(
    record: WorkerRecord,
    secret: bytes | None = SECRET.encode(),
    *,
    name: str = "w2",
    rank: int = 2,
) -> InitiatorHandshake:
    return InitiatorHandshake(
        PeerIdentity(name, rank, 777, time.monotonic()),
        target_rank=record.rank,
        secret=secret,
        peer_is_same_user=True,
    )


def refusal_in(data: bytes) -> tuple[str, str]:
    """Code and reason of a REFUSED record."""
    magic, _, kind, _, length = HEADER.unpack_from(data)
    assert (magic, kind) == (b"GRADWIRE", Kind.REFUSED)
    code, reason = msgspec.msgpack.decode(data[HEADER.size : HEADER.size + length])
    return code, reason
