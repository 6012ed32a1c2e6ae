"""Letting others in while the worker itself goes away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradwire._config import RpcBackendOptions
from gradwire._ids import new_incarnation
from gradwire.rpc._connect import Acceptor
from gradwire.rpc._handshake import PeerIdentity
from gradwire.rpc._pool import WorkerPool
from gradwire.transport import Listener, get_transport
from gradwire.transport._tcp import parse_address

LIMIT_S = 10.0
MOMENT_S = 0.2
"""How long a step waits for another that must not come in between."""


@pytest.fixture
def listener() -> Listener:
    return get_transport("tcp").listen("127.0.0.1", 0, "test")


@pytest.fixture
def acceptor(pool: WorkerPool) -> Acceptor:
    identity = PeerIdentity("w0", 0, new_incarnation(), 0.0)
    return Acceptor(
        pool,
        identify=lambda: identity,
        secret=b"a secret of the test",
        options=RpcBackendOptions(),
        admit=lambda _identity: None,
        on_connection=lambda connection, _identity: connection.close(),
        on_abandoned=lambda _identity: None,
    )


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
        acceptor._accept_all(listener)

        assert visitor.recv(1) == b""
    listener.close()
