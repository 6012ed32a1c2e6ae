"""A peer that knows the secret, and then does what it should not, in safe mode.

It is a plain socket that has gone through the handshake, so it can send any bytes. The
agents live in this process: what would be executed would be executed here.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import probes
import safe_functions as fn
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake import InitiatorHandshake, PeerIdentity
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._rref_parts import Deleted, References, encode_header
from gradwire.rpc._rref_table import RefId
from gradwire.wire import (
    PICKLE,
    Body,
    Call,
    Failure,
    Message,
    Reply,
    SafeSerializer,
    decode_control,
    decode_value,
    encode,
)
from strangers import LIMIT_S, SECRET, Group, stranger

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="uses Unix sockets in the abstract namespace"
)

SAFE = SafeSerializer()
CALLS = 4


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)


@pytest.fixture
def victims() -> Iterator[tuple[Agent, Agent, WorkerRecord]]:
    group = Group()
    yield group.couple(secret=SECRET, serializer="safe", max_peer_calls=CALLS)
    group.close()


class Intruder:
    """The malicious peer: rank 2, named w2."""

    def __init__(self, sock: socket.socket, record: WorkerRecord) -> None:
        self._sock = sock
        handshake = InitiatorHandshake(
            PeerIdentity("w2", 2, 777, time.monotonic(), ("safe",)),
            target_rank=record.rank,
            secret=SECRET.encode(),
            peer_is_same_user=True,
        )
        sock.sendall(handshake.start())
        while not handshake.done:
            answer = handshake.receive(sock.recv(1 << 16))
            if answer:
                sock.sendall(answer)
        self._data = handshake.leftover
        self._next = 0

    def send(self, head: bytes) -> None:
        self._sock.sendall(struct.pack("!IHBB", len(head), 0, 0, 0x67) + head)

    def call(self, target: str | None, value: Any, style: int = 0, **how: Any) -> int:
        self._next += 1
        call = Call(self._next, 0.0, target, style, how.pop("headers", None))
        self.send(encode(call, value, serializer=how.pop("serializer", SAFE)).head)
        return self._next

    def receive(self) -> Message:
        """The next message that is an answer."""
        while True:
            while len(self._data) < 8:
                self._data += self._read()
            size, _, _, _ = struct.unpack_from("!IHBB", self._data)
            while len(self._data) < 8 + size:
                self._data += self._read()
            head, self._data = self._data[8 : 8 + size], self._data[8 + size :]
            message, _ = decode_control(head)
            if isinstance(message, (Reply, Failure)):
                value, _ = decode_value(message, head, [], serializer=SAFE)
                message.body = value
                return message

    def _read(self) -> bytes:
        data = self._sock.recv(1 << 16)
        if not data:
            raise EOFError
        return data

    def refused(self, *args: Any, **kwargs: Any) -> str:
        """Calls; returns the class and the text of the error that must come."""
        number = self.call(*args, **kwargs)
        answer = self.receive()
        assert isinstance(answer, Failure), answer
        assert answer.id == number
        _, name, text, trace, data = answer.body  # type: ignore[misc]
        assert (trace, data) == ("", b"")
        return f"{name}: {text}"

    def is_cut_off(self) -> bool:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self.receive()
        return True


@pytest.fixture
def canary(tmp_path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "something was unpickled"
    assert not fn.touched.is_set(), "something was executed that is not exported"


@pytest.fixture
def intruder(victims) -> Iterator[Intruder]:
    first, second, record = victims
    with stranger(record) as sock:
        yield Intruder(sock, record)
    # Whatever it did: those who behave are served.
    for caller, to in ((second, "w0"), (first, "w1")):
        assert caller.call(to, fn.echo, ([1, "two"],), timeout=LIMIT_S) == [1, "two"]


def test_it_can_do_what_is_exported(intruder):
    intruder.call("safe_functions:echo", ([1, (2,)],))

    answer = intruder.receive()

    assert isinstance(answer, Reply)
    assert answer.body == [1, (2,)]


@pytest.mark.parametrize("target", [None, "safe_functions:echo", "os:system"])
@pytest.mark.parametrize("style", [0, 1, 2, 3, -1])
def test_pickles_are_refused(intruder, canary, target, style):
    bomb = fn.Bomb(str(canary))
    value: Any = {0: (bomb,), 1: ((bomb,), {})}.get(style, (fn.echo, (bomb,), {}))

    text = intruder.refused(target, value, style, serializer=PICKLE)

    assert "DecodeError" in text or "NotExported" in text


def test_pickles_in_all_other_places_are_refused(intruder, canary):
    data = pickle.dumps(fn.Bomb(str(canary)))
    echo = "safe_functions:echo"
    # As bytes they are just bytes.
    intruder.call(echo, (data,))
    assert intruder.receive().body == data  # type: ignore[attr-defined]
    assert "header" in intruder.refused(echo, ([1],), headers={"autograd": data})
    # That of references is read only if its message is dropped.
    intruder.refused("os:system", (), headers={"other": data})
    for form in (3, 4, 99):
        control = msgspec.msgpack.encode(Call(50, 0.0, echo, 0, None, Body(form)))
        fixed = struct.pack(">BBHII", 1, 0, 0, len(control), len(data))
        intruder.send(fixed + control + data)
        answer = intruder.receive()
        assert isinstance(answer, Failure)
        assert "DecodeError" in answer.body[1]  # type: ignore[index]


@pytest.mark.parametrize(
    "target",
    [
        "safe_functions:not_exported",
        "safe_functions:Hidden.method",
        "safe_functions:echo.__globals__",
        "os:system",
        "builtins:eval",
        "gradwire.rpc._api:init_rpc",
        "gradwire.wire._functions:find_global",
        "gradwire.rpc._rref:_value_of",
        "never.imported:thing",
        ":",
        "",
    ],
)
def test_names_that_are_not_exported_are_refused(intruder, canary, target):
    before = set(sys.modules)

    assert "NotExported" in intruder.refused(target, ("touch " + str(canary),))
    # Also if the result is to stay here, as the value of a reference.
    made = encode_header(References([], (RefId(2, 777, 1), RefId(2, 777, 2))))
    text = intruder.refused(target, (str(canary),), headers={"rref": made})
    assert "NotExported" in text
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "__reduce_ex__", "_private", "_hidden", "count"]
)
def test_attributes_of_values_are_refused(intruder, canary, victims, name):
    first, second, _ = victims
    made = second.call("w0", fn.refer, (1,), timeout=LIMIT_S)
    service = next(i for i in first.interceptors if i.name == "rref")
    owned = service.own(fn.Counter())  # type: ignore[attr-defined]
    service._owned[owned.id] = owned  # type: ignore[attr-defined]

    for args in ((), (1,), ("x",)):
        arguments: Any = (*owned.id, name, *args)
        text = intruder.refused("gradwire.rpc._rref:invoke", arguments)
        assert "NotExported" in text
    assert "only public methods" in text
    service._owned.clear()  # type: ignore[attr-defined]
    del made


def test_values_of_others_cannot_be_had_by_guessing(intruder, victims):
    _, second, _ = victims
    made = second.call("w0", fn.refer, (torch.ones(1),), timeout=LIMIT_S)
    rank, incarnation, number = made._ref.id

    fetch = "gradwire.rpc._rref:fetch"
    for guess in (0, 1, number - 1, number ^ 1):
        assert "OwnerLost" in intruder.refused(fetch, (rank, incarnation, guess))
    for wrong in ((), (1,), (rank, incarnation, "0"), (rank, incarnation, 0, 0)):
        assert "Error" in intruder.refused(fetch, wrong)
    assert made is not None


def test_references_of_others_cannot_be_deleted(intruder, victims):
    first, second, _ = victims
    made = second.call("w0", fn.refer, (7,), timeout=LIMIT_S)
    ref = made._ref

    intruder.send(encode(Deleted([(ref.id, ref.fork, False)])).head)
    intruder.send(encode(Deleted([(ref.id, ref.fork, True)])).head)
    intruder.call("safe_functions:worker_name", ())
    intruder.receive()

    assert first.debug_info()["forks"] == 1
    del made


@pytest.mark.parametrize("function", ["fetch", "invoke"])
def test_what_is_equal_to_an_id_is_none(intruder, victims, function):
    _, second, _ = victims
    made = second.call("w0", fn.refer, (torch.ones(1),), timeout=LIMIT_S)
    rank, incarnation, number = made._ref.id
    name = ("size",) if function == "invoke" else ()

    for rref in ((False, incarnation, number), (float(rank), incarnation, number)):
        assert (rank, incarnation, number) == rref
        text = intruder.refused(f"gradwire.rpc._rref:{function}", (*rref, *name))
        assert "three ints" in text
    del made


def test_calls_over_the_limit_are_refused_and_harm_nobody(intruder, victims):
    _, second, _ = victims
    fn.close_gate()
    for _ in range(CALLS):
        intruder.call("safe_functions:wait_for_gate", ())
    probes.wait_until(
        lambda: second.call("w0", fn.open_calls, ("w2",), timeout=LIMIT_S) == CALLS,
        "all of them wait",
    )

    for _ in range(50):
        assert "LimitExceeded" in intruder.refused("safe_functions:echo", (1,))
    assert second.call("w0", fn.echo, (1,), timeout=LIMIT_S) == 1

    fn.open_gate()
    for _ in range(CALLS):
        assert isinstance(intruder.receive(), Reply)
    fn.close_gate()


MALFORMED: dict[str, Any] = {
    "arguments": ("safe_functions:echo", 3, 0),
    "keywords": ("safe_functions:echo", ((), 3), 1),
    "no_keywords": ("safe_functions:echo", (1, 2, 3), 1),
    "names": ("safe_functions:echo", ((), {1: 2}), 1),
    "invoke": ("gradwire.rpc._rref:invoke", (("a", 1, 2), 3, 4, 5), 0),
    "backward": ("gradwire.rpc._rref:run_backward", (1, 2, 3), 0),
    "class": ("gradwire.nn._owner:create_module", (1, (), {}, "cpu"), 0),
    "optimizer": ("gradwire.optim._local:make_local_optimizer", ("x", [], [], 1, 2), 0),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_requests_are_answered_with_errors(intruder, canary, what):
    text = intruder.refused(*MALFORMED[what])

    assert "Error" in text or "NotExported" in text


def test_garbage_costs_it_the_connection(intruder):
    intruder.send(b"\x01\x00\x00\x00" + b"\xff" * 40)

    assert intruder.is_cut_off()
