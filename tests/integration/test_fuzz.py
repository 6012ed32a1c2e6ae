"""A live agent is fed thousands of damaged byte streams, and then works as before."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

import functions
import mutations
import probes
from fuzz.corpus import make_messages
from fuzz.messages import change_control
from fuzz.safe import make_safe_messages
from gradwire import rpc
from gradwire._config import RpcBackendOptions
from gradwire.errors import GradwireError
from gradwire.rpc import _pool
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake import InitiatorHandshake, PeerIdentity
from gradwire.rpc._records import WorkerRecord
from gradwire.transport._tcp import parse_address
from gradwire.wire import Call, Failure, Goodbye, Heartbeat, Outgoing, Reply, encode

LIMIT_S = 20.0
FUZZ_S = 3.0
NUM_STREAMS = 2500
SECRET = b"a secret of this test"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc and uses Unix sockets"
)


@rpc.export
def exported_add(a: Any, b: Any) -> Any:
    _added.append(type(a))
    return a + b


_added: list[type] = []


class Target:
    """An agent to be attacked, and a friend of its, both in this process."""

    def __init__(self, serializer: str = "pickle") -> None:
        self.serializer = serializer
        options = RpcBackendOptions(
            secret=SECRET,
            serializer=serializer,
            allow_plain_tcp=True,
            bind_address="127.0.0.1",
            num_worker_threads=2,
            max_head_bytes=1 << 20,
            max_frame_bytes=1 << 24,
        )
        self.agent = Agent("w0", 0, 3, options)
        self.friend = Agent("w1", 1, 3, options)
        self.record = self.agent.start()
        friend_record = self.friend.start()
        # Nobody has rank 2: that is who the attacker says it is.
        absent = msgspec.structs.replace(
            friend_record, name="w2", rank=2, incarnation=5
        )
        for agent in (self.agent, self.friend):
            agent.network.set_members([self.record, friend_record, absent])
        self.check()

    def check(self) -> None:
        """Correct calls work, in both directions, with and without tensors."""
        tensor = torch.arange(100_000)
        for caller, to in ((self.agent, "w1"), (self.friend, "w0")):
            assert caller.call(to, exported_add, (1, 2), timeout=LIMIT_S) == 3
            found = caller.call(to, exported_add, (tensor, 1), timeout=LIMIT_S)
            assert torch.equal(found, tensor + 1)

    def close(self) -> None:
        assert self.agent.close() == []
        assert self.friend.close() == []


@pytest.fixture
def target(monkeypatch, caplog) -> Iterator[Target]:
    # Refusals are warnings, thousands of them; an error would be ours.
    caplog.set_level(logging.ERROR, "gradwire.rpc")
    # Threads beyond those that stay shall leave before the end of the test.
    monkeypatch.setattr(_pool, "_IDLE_S", 0.1)
    target = Target()
    yield target
    target.close()


@pytest.fixture
def safe_target(monkeypatch, caplog) -> Iterator[Target]:
    caplog.set_level(logging.ERROR, "gradwire.rpc")
    monkeypatch.setattr(_pool, "_IDLE_S", 0.1)
    target = Target("safe")
    yield target
    target.close()


def make_frame(outgoing: Outgoing) -> bytes:
    """The frame of a message, all its buffers in the stream."""
    buffers = [ctypes.string_at(b.address, b.nbytes) for b in outgoing.buffers]
    table = b"".join(struct.pack("!QQ", 0, len(buffer)) for buffer in buffers)
    header = struct.pack("!IHBB", len(outgoing.head), len(buffers), 0, 0x67)
    return header + table + outgoing.head + b"".join(buffers)


def make_frames() -> list[bytes]:
    """One valid frame of each sort."""
    add = "functions.add"
    tensor = torch.arange(5000, dtype=torch.float32)
    small = torch.ones(2, 3, dtype=torch.bfloat16)
    messages: list[Outgoing] = [
        encode(Call(1, 0.0, add, 0), (1, 2)),
        encode(Call(2, 1e9, add, 0), (tensor, small)),
        encode(Call(3, 0.0, add, 1), ((1,), {"b": [small, {"x": (1, 2)}]})),
        encode(Call(4, 0.0, None, 2), (functions.echo, ("text", None, b"bytes"), {})),
        encode(Reply(1), {"value": [tensor, small]}),
        encode(Failure(2), ("an", "error")),
        encode(Heartbeat(time.monotonic())),
        encode(Goodbye("so long")),
    ]
    frames = [make_frame(message) for message in messages]
    for kind, numbers in ((1, (1, 1 << 16)), (2, (1,)), (3, (1, 2))):
        head = struct.pack(f"!{len(numbers)}Q", *numbers)
        frames.append(struct.pack("!IHBB", len(head), 0, kind, 0x67) + head)
    lent = struct.pack("!IHBBQQ", 2, 1, 0, 0x67, 1, 100) + b"hi"
    return [*frames, lent]


class Attacker:
    """Opens connections to the target and says damaged things."""

    def __init__(
        self,
        record: WorkerRecord,
        choice: random.Random,
        features: tuple[str, ...] = (),
    ) -> None:
        self.record = record
        self.choice = choice
        self.features = features
        self.frames = make_frames()
        self.outcomes: Counter[str] = Counter()

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        address: Any
        if self.choice.random() < 0.5:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address = "\0" + self.record.addresses["unix"]
        else:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            address = parse_address(self.record.addresses["tcp"])
        with sock:
            sock.settimeout(LIMIT_S)
            sock.connect(address)
            yield sock

    def new_handshake(self) -> InitiatorHandshake:
        identity = PeerIdentity(
            "w2",
            2,
            self.choice.randrange(1, 1 << 62),
            time.monotonic(),
            self.features,
        )
        return InitiatorHandshake(
            identity, target_rank=0, secret=SECRET, peer_is_same_user=True
        )

    def some_frames(self) -> bytes:
        return b"".join(self.choice.choices(self.frames, k=self.choice.randint(1, 5)))

    def finish(self, sock: socket.socket, data: bytes) -> None:
        """Says the last thing, perhaps in pieces, and waits until the target hangs up."""
        first = self.choice.choice([1, 50, len(data)])
        try:
            if sock.family == socket.AF_UNIX and self.choice.random() < 0.2:
                self.send_with_descriptors(sock, data[:first])
            else:
                sock.sendall(data[:first])
            sock.sendall(data[first:])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            raise  # the target neither reads nor hangs up
        except OSError:
            pass  # it has hung up already

    def send_with_descriptors(self, sock: socket.socket, data: bytes) -> None:
        fd = os.memfd_create("attacker")
        try:
            os.ftruncate(fd, self.choice.choice([0, 100, 1 << 16]))
            socket.send_fds(sock, [data], [fd] * self.choice.randint(1, 20))
        finally:
            os.close(fd)

    def damage_the_beginning(self) -> None:
        """From the first byte on."""
        data = mutations.mutate(self.new_handshake().start(), self.choice)
        with self.connect() as sock:
            self.finish(sock, data + self.some_frames())
        self.outcomes["damaged beginning"] += 1

    def damage_the_proof(self) -> None:
        """After a correct first record."""
        handshake = self.new_handshake()
        with self.connect() as sock:
            sock.sendall(handshake.start())
            proof = handshake.receive(sock.recv(1 << 16))
            damaged = mutations.mutate(proof, self.choice)
            self.finish(sock, damaged + self.some_frames())
        self.outcomes["damaged proof"] += 1

    def damage_the_frames(self) -> None:
        """After a complete, correct handshake."""
        handshake = self.new_handshake()
        with self.connect() as sock:
            sock.sendall(handshake.start())
            try:
                sock.sendall(handshake.receive(sock.recv(1 << 16)))
                handshake.receive(sock.recv(1 << 16))
            except GradwireError:
                self.outcomes["refused"] += 1  # our last life is not quite over
                return
            assert handshake.done
            self.finish(sock, mutations.mutate(self.some_frames(), self.choice))
        self.outcomes["damaged frames"] += 1

    def change_the_messages(self) -> None:
        """After a correct handshake: sound frames, whose messages are not."""
        handshake = self.new_handshake()
        with self.connect() as sock:
            sock.sendall(handshake.start())
            try:
                sock.sendall(handshake.receive(sock.recv(1 << 16)))
                handshake.receive(sock.recv(1 << 16))
            except GradwireError:
                self.outcomes["refused"] += 1  # our last life is not quite over
                return
            # One that no decoder takes would end the connection: few, then.
            for outgoing in self.choice.choices(self.messages, k=3):
                head = outgoing.head
                if self.choice.random() < 0.8:
                    head = change_control(head, self.choice)
                self.outcomes[f"kind {head[0]}"] += 1
                with contextlib.suppress(OSError):
                    sock.sendall(make_frame(Outgoing(head, outgoing.buffers, [])))
            self.finish(sock, b"")
        self.outcomes["changed messages"] += 1

    @functools.cached_property
    def messages(self) -> list[Outgoing]:
        return [*make_messages(), *make_safe_messages()]


def num_threads() -> int:
    return sum(t.name.startswith("gradwire-") for t in threading.enumerate())


def test_agent_survives_messages_of_a_peer_that_is_not_trusted(
    safe_target: Target, caplog
):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    features = safe_target.agent.network._identify().features
    attacker = Attacker(safe_target.record, random.Random(seed), features)
    deadline = time.monotonic() + FUZZ_S
    while time.monotonic() < deadline:
        attacker.change_the_messages()

    print(dict(attacker.outcomes))
    assert attacker.outcomes["changed messages"] > 50
    safe_target.check()
    errors = [r for r in caplog.records if r.name.startswith("gradwire")]
    assert [(r.getMessage(), r.exc_info) for r in errors] == []
    probes.wait_until(
        lambda: safe_target.agent.debug_info()["server_active_calls"] == 0,
        "no call of the attacker is left",
    )
    assert safe_target.agent.debug_info()["transports"].keys() == {"w0", "w1"}


@pytest.mark.parametrize(
    "attack",
    [
        Attacker.damage_the_beginning,
        Attacker.damage_the_proof,
        Attacker.damage_the_frames,
    ],
    ids=["beginning", "proof", "frames"],
)
def test_agent_survives_damaged_streams(
    target: Target, attack: Callable[[Attacker], None], caplog
):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    attacker = Attacker(target.record, random.Random(seed))
    descriptors = probes.count_descriptors()
    threads = num_threads()
    deadline = time.monotonic() + FUZZ_S

    for _ in range(NUM_STREAMS):
        attack(attacker)
        if time.monotonic() > deadline:
            break

    print(dict(attacker.outcomes))
    assert attacker.outcomes.total() - attacker.outcomes["refused"] > 100
    target.check()
    assert [r for r in caplog.records if r.name.startswith("gradwire")] == []
    probes.wait_until(
        lambda: probes.count_descriptors() <= descriptors, "all descriptors are closed"
    )
    # Two for each agent stay idle at most, beside its clock.
    probes.wait_until(
        lambda: num_threads() <= max(threads, 8), "threads have ended again"
    )
    probes.wait_until(
        lambda: target.agent.debug_info()["server_active_calls"] == 0,
        "no call of the attacker is left",
    )
    assert target.agent.debug_info()["transports"].keys() == {"w0", "w1"}
