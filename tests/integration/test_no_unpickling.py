"""Nothing is unpickled that comes from somebody who has not proven himself."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

import functions
import probes
from gradwire import rpc
from gradwire._config import RpcBackendOptions
from gradwire.errors import (
    ConnectError,
    ConnectTimeout,
    GradwireError,
    RemoteProtocolError,
)
from gradwire.rpc import _handshake_records
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake_records import HEADER, Kind
from gradwire.rpc._host import identify_host
from gradwire.rpc._records import WorkerRecord, encode_record
from gradwire.wire import Call, encode
from strangers import LIMIT_S, SECRET, initiator, read_to_end, stranger

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="uses Unix sockets in the abstract namespace"
)


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)


# ------------------------------------------------------- no unpickling before the proof


class Bomb:
    """Sets an event of the process that unpickles it."""

    def __reduce__(self) -> Any:
        return functions.set_event, ("bomb",)


_unpickled: list[str] = []
_victim: Agent | None = None


def start_victim() -> WorkerRecord:
    """Starts an agent in a worker process, with a canary on every unpickling."""

    def watch(event: str, args: tuple[object, ...]) -> None:
        # The harness unpickles too, on the main thread.
        if event == "pickle.find_class" and (
            threading.current_thread() is not threading.main_thread()
        ):
            _unpickled.append(f"{args[0]}.{args[1]}")

    sys.addaudithook(watch)
    global _victim
    options = RpcBackendOptions(
        secret=SECRET, allow_plain_tcp=True, bind_address="127.0.0.1"
    )
    _victim = Agent("victim", 0, 3, options)
    record = _victim.start()
    absent = [
        msgspec.structs.replace(record, name=f"w{rank}", rank=rank, incarnation=rank)
        for rank in (1, 2)
    ]
    _victim.network.set_members([record, *absent])
    return record


def stop_victim() -> list[str]:
    assert _victim is not None
    return _victim.close()


def look_at_canary() -> tuple[list[str], bool]:
    return list(_unpickled), functions.get_event("bomb").is_set()


def unpickle_on_a_thread(data: bytes) -> None:
    thread = threading.Thread(target=pickle.loads, args=(data,))
    thread.start()
    thread.join(LIMIT_S)


def count_strangers() -> int:
    assert _victim is not None
    return len(_victim.network._acceptor._strangers)


def frame_with_bomb() -> bytes:
    outgoing = encode(Call(1, 0.0, None, 2), (functions.echo, (Bomb(),), {}))
    assert not outgoing.buffers
    assert b"set_event" in outgoing.head
    return struct.pack("!IHBB", len(outgoing.head), 0, 0, 0x67) + outgoing.head


def hostile_beginnings(record: WorkerRecord) -> Iterator[list[bytes]]:
    """What strangers say, in turns; each turn but the first waits for an answer."""
    bomb = pickle.dumps(Bomb())
    frame = frame_with_bomb()
    yield [bomb]
    yield [frame]
    for kind in Kind:
        for body in (
            bomb,
            msgspec.msgpack.encode(bomb),
            msgspec.msgpack.encode([bomb]),
        ):
            yield [HEADER.pack(b"GRADWIRE", 1, kind, 0, len(body)) + body]
    hello = _handshake_records.Hello("w2", 2, 9, 0, 0, bytes(32), 0.0, [])
    fields = msgspec.to_builtins(hello, builtin_types=(bytes,))
    for at in range(len(fields)):
        for value in (bomb, msgspec.msgpack.Ext(1, bomb), bomb.decode("latin-1")):
            changed = [*fields[:at], value, *fields[at + 1 :]]
            body = msgspec.msgpack.encode(changed)
            yield [HEADER.pack(b"GRADWIRE", 1, Kind.HELLO, 0, len(body)) + body]
    good = initiator(record).start()
    yield [good + bomb]
    yield [good + frame]
    yield [good, bomb]
    yield [good, frame]
    for proof in (bomb, bytes(32)):
        body = msgspec.msgpack.encode([proof])
        false = HEADER.pack(b"GRADWIRE", 1, Kind.PROOF, 0, len(body)) + body
        yield [good, false]
        yield [good, false + frame]
    body = msgspec.msgpack.encode([])
    welcome = HEADER.pack(b"GRADWIRE", 1, Kind.WELCOME, 0, len(body)) + body
    yield [good, welcome + frame]


@pytest.mark.multiproc
def test_nothing_is_unpickled_before_the_handshake_is_complete(make_cluster):
    workers = make_cluster(1)
    record = workers.run(0, start_victim)
    tried = 0
    for scheme in ("unix", "tcp"):
        for turns in hostile_beginnings(record):
            with stranger(record, scheme) as sock, contextlib.suppress(OSError):
                for number, data in enumerate(turns):
                    if number:
                        assert sock.recv(1 << 16)
                    sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                read_to_end(sock)
            tried += 1
    probes.wait_until(
        lambda: workers.run(0, count_strangers) == 0, "all strangers are forgotten"
    )

    assert tried > 80
    assert workers.run(0, look_at_canary) == ([], False)

    # Both canaries can sing: the one on unpickling as such, and the bomb itself.
    workers.run(0, unpickle_on_a_thread, pickle.dumps(functions.echo))
    assert workers.run(0, look_at_canary) == (["functions.echo"], False)
    with stranger(record) as sock:
        handshake = initiator(record)
        sock.sendall(handshake.start())
        sock.sendall(handshake.receive(sock.recv(1 << 16)))
        handshake.receive(sock.recv(1 << 16))
        assert handshake.done
        sock.sendall(frame_with_bomb())
        probes.wait_until(
            lambda: workers.run(0, look_at_canary)[1], "the bomb goes off"
        )
    assert workers.run(0, stop_victim) == []


HOSTILE_VALUES = {
    "pickle": pickle.dumps(Bomb()),
    "garbage": b"\x00\xff\xfe garbage",
    "empty_object": b"{}",
    "deep": b"[" * 4000,
}


@pytest.mark.parametrize("value", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_hostile_value_in_the_store_is_refused(tmp_path, value):
    path = tmp_path / "store"
    store = dist.PrefixStore("gradwire", dist.FileStore(str(path), 2))
    store.set("worker/1", value)
    options = RpcBackendOptions(init_method=f"file://{path}", init_timeout=LIMIT_S)

    with pytest.raises(RemoteProtocolError, match="'worker/1', found"):
        rpc.init_rpc("w0", 0, 2, options)

    assert not functions.get_event("bomb").is_set()
    assert not rpc.is_initialized()


@pytest.mark.parametrize(
    "addresses",
    [
        {"tcp": "127.0.0.1:99999999999999999999"},
        {"tcp": "a" * 200 + ":80"},
        {"tcp": "no port"},
        {"unix": "x" * 200},
        {"pigeon": "roof"},
        {},
    ],
    ids=["port", "host", "no_port", "long", "unknown", "none"],
)
def test_hostile_address_in_the_store_leads_nowhere(tmp_path, addresses):
    path = tmp_path / "store"
    here = identify_host()
    record = WorkerRecord(
        "w1", 1, 5, 2, here.boot_id, here.network_namespace, addresses, True
    )
    store = dist.PrefixStore("gradwire", dist.FileStore(str(path), 2))
    store.set("worker/1", encode_record(record))
    options = RpcBackendOptions(
        init_method=f"file://{path}",
        init_timeout=0.5,
        secret=SECRET,
        allow_plain_tcp=True,
        bind_address="127.0.0.1",
    )

    with pytest.raises(GradwireError) as caught:
        rpc.init_rpc("w0", 0, 2, options)

    assert isinstance(caught.value, (ConnectTimeout, ConnectError))
    assert "w1" in str(caught.value)
