"""Letting others in: too many of them, or while the worker itself goes away."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import probes
from gradwire._config import RpcBackendOptions
from gradwire._ids import new_incarnation
from gradwire.rpc import _connect
from gradwire.rpc._connect import Acceptor
from gradwire.rpc._handshake import InitiatorHandshake, PeerIdentity
from gradwire.rpc._pool import WorkerPool
from gradwire.transport import Channel, Connection, Listener, get_transport
from gradwire.transport._inproc import channel_pair
from gradwire.transport._tcp import parse_address

LIMIT_S = 10.0
SECRET = b"a secret of the test"
MOMENT_S = 0.2
"""How long a step waits for another that must not come in between."""


@pytest.fixture
def listener() -> Listener:
    return get_transport("tcp").listen("127.0.0.1", 0, "test")


class Doorkeeper(Acceptor):
    """An acceptor, and what became of those whom it let in."""

    def __init__(self, pool: WorkerPool) -> None:
        identity = PeerIdentity("w0", 0, new_incarnation(), 0.0)
        self.connected: list[str] = []
        self.abandoned: list[str] = []
        super().__init__(
            pool,
            identify=lambda: identity,
            secret=SECRET,
            options=RpcBackendOptions(),
            admit=lambda _identity: None,
            on_connection=self._on_connected,
            on_abandoned=lambda identity: self.abandoned.append(identity.name),
        )

    def _on_connected(self, connection: Connection, identity: PeerIdentity) -> None:
        self.connected.append(identity.name)
        connection.close()


@pytest.fixture
def acceptor(pool: WorkerPool) -> Doorkeeper:
    return Doorkeeper(pool)


class Closing:
    """Closes an acceptor on a thread of its own, in the middle of something else."""

    def __init__(self, acceptor: Acceptor) -> None:
        self.errors: list[BaseException] = []
        self._acceptor = acceptor
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._acceptor.close()
        except BaseException as error:
            self.errors.append(error)

    def before(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, which gives the closing a moment to come first."""

        def late(*args: Any) -> Any:
            if self._thread.ident is None:
                self._thread.start()
                self._thread.join(MOMENT_S)
            return step(*args)

        return late

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def knock(listener: Listener) -> socket.socket:
    return socket.create_connection(parse_address(listener.address), LIMIT_S)


@pytest.mark.parametrize("step", ["watch", "add", "arm"])
def test_close_while_somebody_comes_in(
    acceptor, pool, listener, monkeypatch, caplog, step
):
    acceptor.listen(listener)
    closing = Closing(acceptor)
    owner = pool if step == "watch" else pool.poller
    monkeypatch.setattr(owner, step, closing.before(getattr(owner, step)))

    with knock(listener) as visitor:
        assert visitor.recv(1) == b""  # shown out
        closing.join()

    assert closing.errors == []
    assert pool.close(LIMIT_S) == []
    assert caplog.records == []


def test_who_comes_after_the_end_is_shown_out(acceptor, listener):
    with knock(listener) as visitor:
        acceptor.close()
        acceptor._accept_some(listener)

        assert visitor.recv(1) == b""
    listener.close()


# ------------------------------------------------------------------------------- crowds


class Crowd(Listener):
    """A listener at which somebody always knocks, and has gone when it is opened."""

    address = "crowd"

    def __init__(self) -> None:
        self._bell, self._button = socket.socketpair()
        self._button.send(b"!")

    def fileno(self) -> int:
        return self._bell.fileno()

    def accept(self) -> Channel | None:
        ours, theirs = channel_pair()
        theirs.close()
        return ours

    def close(self) -> None:
        self._bell.close()
        self._button.close()


@pytest.fixture
def crowd(acceptor: Acceptor) -> Iterator[Crowd]:
    made = Crowd()
    yield made
    made.accept = lambda: None  # type: ignore[method-assign]
    acceptor.close()


def test_others_have_their_turn_in_a_crowd(acceptor, pool, crowd):
    acceptor.listen(crowd)
    bell, button = socket.socketpair()
    heard = threading.Event()
    with bell, button:
        pool.watch(bell.fileno(), lambda _r, _w: heard.set())
        pool.poller.arm(bell.fileno(), True, False)
        button.send(b"!")

        was_heard = heard.wait(LIMIT_S)
        pool.unwatch(bell.fileno())

    assert was_heard


def test_crowd_does_not_fill_the_log(acceptor, crowd, caplog):
    start = time.monotonic()
    acceptor.listen(crowd)
    probes.wait_until(lambda: acceptor._refusals._num_hidden > 100, "a hundred came")
    num_lines = caplog.text.count("refused a connection")
    most_lines = _connect._MOST_LINES + time.monotonic() - start

    assert _connect._MOST_LINES <= num_lines <= most_lines
    crowd.accept = lambda: None
    acceptor._refusals._last -= 1.0  # a second later
    acceptor.keep_house(time.monotonic())
    assert "more connections, which are not shown" in caplog.text


def test_large_group_is_let_in_one_after_the_other(
    acceptor, listener, monkeypatch, caplog
):
    monkeypatch.setattr(_connect, "_MAX_STRANGERS", 4)
    monkeypatch.setattr(_connect, "_PATIENCE_S", LIMIT_S)
    names = [f"w{rank}" for rank in range(1, 21)]
    with contextlib.ExitStack() as stack:
        visitors = [stack.enter_context(knock(listener)) for _ in names]
        handshakes = [
            InitiatorHandshake(
                PeerIdentity(name, rank, new_incarnation(), 0.0),
                target_rank=0,
                secret=SECRET,
                peer_is_same_user=False,
            )
            for rank, name in enumerate(names, 1)
        ]
        for visitor, handshake in zip(visitors, handshakes, strict=True):
            visitor.sendall(handshake.start())
        acceptor.listen(listener)

        under_way = dict(zip(visitors, handshakes, strict=True))
        while under_way:
            ready, _, _ = select.select(list(under_way), [], [], LIMIT_S)
            assert ready, f"{len(under_way)} were not let in"
            for visitor in ready:
                handshake = under_way[visitor]
                visitor.sendall(handshake.receive(visitor.recv(1 << 16)))
                if handshake.done:
                    del under_way[visitor]
        acceptor.close()

    assert caplog.text == ""


# ---------------------------------------------------------------- those who were let in


def failing(*_: Any) -> Any:
    raise MemoryError("this step fails")


@pytest.mark.parametrize("step", ["upgrade", "write"])
def test_who_was_admitted_is_abandoned_if_a_step_fails(
    acceptor, listener, monkeypatch, caplog, step
):
    handshake = InitiatorHandshake(
        PeerIdentity("w1", 1, new_incarnation(), 0.0),
        target_rank=0,
        secret=SECRET,
        peer_is_same_user=False,
    )
    acceptor.listen(listener)
    with knock(listener) as visitor:
        visitor.sendall(handshake.start())
        proof = handshake.receive(visitor.recv(1 << 16))
        (stranger,) = acceptor._strangers.values()
        monkeypatch.setattr(stranger.channel, step, failing)
        visitor.sendall(proof)

        while visitor.recv(1 << 16):
            pass  # until it is shown out
        probes.wait_until(lambda: acceptor.abandoned == ["w1"], "it is abandoned")

    assert acceptor.connected == []
    assert acceptor._strangers == {}
    acceptor.close()
