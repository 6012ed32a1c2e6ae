"""The cluster secret is in no log, error, dump, process list, store or stream of bytes."""

from __future__ import annotations

import base64
import contextlib
import copy
import faulthandler
import hashlib
import io
import json
import logging
import operator
import os
import pickle
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

import functions
from gradwire import autograd, rpc
from gradwire._config import RpcBackendOptions
from gradwire.errors import GradwireError, HandshakeRefused
from gradwire.rpc._agent import Agent
from gradwire.rpc._records import WorkerRecord
from gradwire.transport._tcp import parse_address
from strangers import LIMIT_S, initiator, read_to_end, stranger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

# Odd characters, so that every way to quote it gives another text.
SECRET = "kept/ quiet+'\"\u00e9 4711"
WRONG = "another-secret 0815"


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)


def forms_of(secret: str) -> list[bytes]:
    """The secret as it may appear somewhere; a bare hash of it would be a leak too."""
    data = secret.encode()
    hashes = [hashlib.new(name, data) for name in ("md5", "sha1", "sha256", "sha512")]
    texts = [
        repr(secret)[1:-1],
        repr(data)[2:-1],
        json.dumps(secret)[1:-1],
        quote(secret),
        data.hex(),
        base64.b64encode(data).decode().rstrip("="),
        base64.urlsafe_b64encode(data).decode().rstrip("="),
        *(one.hexdigest() for one in hashes),
    ]
    return [
        data,
        secret.encode("utf-16-le"),
        *(one.digest() for one in hashes),
        *(text.encode() for text in texts),
    ]


def assert_hidden(found: dict[str, Any]) -> None:
    assert found
    for what, text in found.items():
        data = text if isinstance(text, bytes) else str(text).encode()
        for secret in (SECRET, WRONG):
            for form in forms_of(secret):
                assert form not in data, f"{form!r} is in {what}: {data[:3000]!r}"


def test_this_test_finds_secrets():
    for text in (f"say {SECRET!r}", SECRET.encode().hex(), json.dumps([SECRET])):
        with pytest.raises(AssertionError, match="is in text"):
            assert_hidden({"text": text})


# --------------------------------------------------------------------------- options


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode()], ids=["str", "bytes"])
def test_options_show_no_secret(secret):
    options = RpcBackendOptions(secret=secret)

    assert_hidden(
        {
            "repr": repr(options),
            "str": str(options),
            "format": f"{options}",
            "vars": repr(vars(options)),
            "secret": " ".join((repr(options.secret), str(options.secret))),
            "format of the secret": format(options.secret),
            "copy": repr(vars(copy.deepcopy(options))),
        }
    )


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode()], ids=["str", "bytes"])
def test_hidden_secret_is_what_it_was(secret):
    options = RpcBackendOptions(secret=secret)

    assert options.secret == secret
    assert isinstance(options.secret, type(secret))
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options).secret == secret


@pytest.mark.parametrize("secret", [4711, ["kept"], Path("kept")], ids=str)
def test_secret_of_another_type_is_refused_without_showing_it(secret):
    with pytest.raises(TypeError, match="must be a str or bytes") as caught:
        RpcBackendOptions(secret=secret)

    assert "4711" not in str(caught.value)
    assert "kept" not in str(caught.value)


# ------------------------------------------------------------- agents, and what they say


class Witness:
    """Agents in this process that quarrel over secrets, and all that can be read of it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.log = io.StringIO()
        self._handler = logging.StreamHandler(self.log)
        self._agents: list[Agent] = []

    def __enter__(self) -> Witness:
        self._logger = logging.getLogger()
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self._handler)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for agent in self._agents:
            self.found[f"the close of {agent.info.name}"] = repr(agent.close())
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)
        self.found["the log"] = self.log.getvalue()

    def add(self, name: str, rank: int, secret: Any, **options: Any) -> Any:
        agent = Agent(
            name,
            rank,
            4,
            RpcBackendOptions(
                secret=secret,
                bind_address="127.0.0.1",
                connect_timeout=LIMIT_S,
                **{"transports": ("tcp",), **options},
            ),
        )
        record = agent.start()
        self._agents.append(agent)
        return agent, record

    def note_error(self, what: str, action: Callable[[], Any]) -> None:
        with pytest.raises(GradwireError) as caught:
            action()
        error = caught.value
        self.found[f"{what}: text"] = f"{error} {error!r} {vars(error)}"
        self.found[f"{what}: pickle"] = pickle.dumps(error)
        self.found[f"{what}: traceback"] = traceback_with_locals(error)

    def note_dumps(self) -> None:
        for agent in self._agents:
            info = agent.debug_info()
            self.found[f"debug info of {agent.info.name}"] = f"{info} {info!r}"
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            self.found["a dump of all stacks"] = file.read()
        self.found["local variables"] = "\n".join(
            repr(frame.f_locals) for frame in frames_of_gradwire()
        )


def traceback_with_locals(error: BaseException) -> str:
    """As some tools write it to logs; without the frames of this file."""
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    texts = []
    one: traceback.TracebackException | None = report
    while one is not None:
        for frame in one.stack:
            if os.path.basename(frame.filename) != os.path.basename(__file__):
                texts.append(f"{frame.name} {frame.locals}")
        one = one.__cause__ or one.__context__
    assert texts
    return "\n".join(texts)


def frames_of_gradwire() -> Iterator[Any]:
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if "gradwire" in inner.f_code.co_filename.split("src")[-1]:
                yield inner
            inner = inner.f_back


def give_secret(source: str, monkeypatch: Any, folder: Path) -> str | bytes | None:
    """Sets the secret in one of the ways that there are; returns the option."""
    if source == "str":
        return SECRET
    if source == "bytes":
        return SECRET.encode()
    if source == "environment":
        monkeypatch.setenv("GRADWIRE_SECRET", SECRET)
    else:
        path = folder / "file"
        path.write_text(SECRET + "\n", encoding="utf-8")
        monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(path))
    return None


@pytest.mark.parametrize("source", ["str", "bytes", "environment", "file"])
def test_no_path_of_the_handshake_shows_the_secret(source, monkeypatch, tmp_path):
    option = give_secret(source, monkeypatch, tmp_path)
    with Witness() as witness:
        first, record = witness.add("w0", 0, option)
        _second, second_record = witness.add("w1", 1, option)
        # One that has another secret, and one that has none at all.
        wrong, wrong_record = witness.add("w2", 2, WRONG)
        monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
        monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)
        none, _ = witness.add("w3", 3, None, transports=("unix",))
        witness.note_error(
            "no secret for TCP", lambda: witness.add("w4", 3, None, transports=("tcp",))
        )
        for agent in (first, wrong, none):
            agent.network.set_members([record, second_record, wrong_record])

        assert first.call("w1", operator.add, (1, 2), timeout=LIMIT_S) == 3
        add = (operator.add, (1, 2))
        witness.note_error("a wrong secret", lambda: wrong.call("w0", *add))
        witness.note_error("asked with a wrong one", lambda: first.call("w2", *add))
        witness.note_error("no secret", lambda: none.call("w0", *add))
        nobody = msgspec.structs.replace(
            record, name="w3", rank=3, addresses={"tcp": "127.0.0.1:1"}
        )
        first.network.set_members([nobody])
        witness.note_error("nobody there", lambda: first.call("w3", *add))
        for data in hostile_beginnings(record):
            with stranger(record, "tcp") as sock, contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                witness.found[f"the answer to {data[:20]!r}"] = read_to_end(sock)
        witness.note_dumps()

    assert "wrong secret" in witness.found["the log"]
    assert_hidden(witness.found)


def hostile_beginnings(record: WorkerRecord) -> Iterator[bytes]:
    hello = initiator(record, WRONG.encode()).start()
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield hello
    yield hello + hello
    yield hello[:8] + (99).to_bytes(2, "big") + hello[10:]
    yield hello[:12] + b"\xff\xff\xff\xff" + hello[16:]
    yield hello[:16] + bytes(len(hello) - 16)


def test_unreadable_secret_file_is_named_without_its_contents(monkeypatch, tmp_path):
    path = tmp_path / "nowhere"
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(path))

    with pytest.raises(GradwireError, match="cannot be read") as caught:
        Agent("w0", 0, 1, RpcBackendOptions())

    assert_hidden({"error": traceback_with_locals(caught.value)})


def test_secret_that_is_no_text_is_not_quoted_in_an_error(monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET + "\udcff")
    with Witness() as witness:
        _, record = witness.add("w0", 0, None)
        other, _ = witness.add("w1", 1, SECRET.encode() + b"\xff")
        other.network.set_members([record])

        assert other.call("w0", operator.add, (1, 2), timeout=LIMIT_S) == 3

    assert_hidden(witness.found)


# ------------------------------------------------------------------- bytes on the wire


class RecordingProxy:
    """Stands between two agents and keeps all bytes that pass."""

    def __init__(self, address: str) -> None:
        self._target = parse_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = bytearray()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._forward, args=pair)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.recorded += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for sock in self._sockets:
            sock.close()


def test_secret_does_not_travel():
    with Witness() as witness:
        first, _ = witness.add("w0", 0, SECRET)
        wrong, _ = witness.add("w2", 2, WRONG)
        _, record = witness.add("w1", 1, SECRET)
        proxy = RecordingProxy(record.addresses["tcp"])
        try:
            there = msgspec.structs.replace(record, addresses={"tcp": proxy.address})
            first.network.set_members([there])
            wrong.network.set_members([there])
            assert first.call("w1", operator.add, (1, 2), timeout=LIMIT_S) == 3
            with pytest.raises(ValueError, match="bad value"):
                first.call("w1", functions.raise_value_error)
            witness.note_error(
                "a wrong secret", lambda: wrong.call("w1", operator.add, (1, 2))
            )
        finally:
            witness.__exit__()
            witness._agents.clear()
            proxy.close()
        witness.found["the wire"] = bytes(proxy.recorded)

    assert proxy.recorded.count(b"GRADWIRE") >= 6  # both handshakes were seen
    assert_hidden(witness.found)


# ----------------------------------------------------------------------- real workers


_log = io.StringIO()


def log_everything() -> None:
    logger = logging.getLogger()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler(_log))


def what_a_worker_shows() -> dict[str, Any]:
    return {
        "log": _log.getvalue(),
        "rpc.get_debug_info": repr(rpc.get_debug_info()),
        "autograd.get_debug_info": repr(autograd.get_debug_info()),
        "command line": Path("/proc/self/cmdline").read_bytes(),
        "title": Path("/proc/self/comm").read_bytes(),
        "threads": repr([thread.name for thread in threading.enumerate()]),
        "maps": Path("/proc/self/maps").read_text(),
        "descriptors": repr(sorted(_links("/proc/self/fd"))),
    }


def _links(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{name}")


@pytest.mark.multiproc
def test_workers_show_no_secret(make_cluster, tmp_path):
    place = tmp_path / "store"
    workers = make_cluster(3, init_method=f"file://{place}", secret=SECRET)
    for rank in range(2):
        workers.run(rank, log_everything)
    found: dict[str, Any] = {}
    for rank in range(2):
        with pytest.raises(ValueError, match="bad value") as caught:
            workers.run(rank, call_and_fail, f"w{1 - rank}")
        found[f"an error of w{1 - rank}"] = pickle.dumps(caught.value)
        found[f"a traceback of w{1 - rank}"] = str(caught.value.__cause__)
    # A worker comes back, and has another secret.
    workers.kill(2)
    workers._options["secret"] = WRONG
    with pytest.raises(HandshakeRefused, match="wrong secret") as refused:
        workers.restart(2)
    workers.wait_dead(2)
    found["the error of a worker with another secret"] = pickle.dumps(refused.value)
    found["its traceback"] = str(refused.value.__cause__)
    for rank in range(2):
        shown = workers.run(rank, what_a_worker_shows)
        found |= {f"{what} of w{rank}": text for what, text in shown.items()}
        found[f"process {rank}"] = Path(
            f"/proc/{workers.pid(rank)}/cmdline"
        ).read_bytes()
    found["the stacks"] = workers.dump_stacks()
    found["the store"] = place.read_bytes()

    assert b"worker/0" in found["the store"]
    assert_hidden(found)


def call_and_fail(to: str) -> None:
    rpc.rpc_sync(to, functions.raise_value_error, timeout=LIMIT_S)
