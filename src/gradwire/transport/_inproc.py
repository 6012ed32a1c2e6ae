"""Connections inside one process: a worker's calls to itself, and tests.

A connection is a pair of connected Unix (elsewhere: loopback) sockets, so everything
above and below behaves as it does between processes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque

from gradwire.errors import ConnectError
from gradwire.transport import _segments
from gradwire.transport._forks import keep_from_children
from gradwire.transport._sockets import SocketChannel
from gradwire.transport.base import Capabilities, Channel, Listener, Transport

__all__ = ["InprocTransport", "channel_pair"]

# Listeners of this process by address; guarded by the lock, used by any thread.
_listeners: dict[str, _InprocListener] = {}
_listeners_lock = threading.Lock()


def channel_pair() -> tuple[Channel, Channel]:
    """Two channels that are connected to each other."""
    first, second = (_InprocChannel(sock) for sock in socket.socketpair())
    return first, second


class _InprocChannel(SocketChannel):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(
            "inproc", sock, description="this process", shares_memory=_can_share(sock)
        )

    @property
    def peer_is_same_user(self) -> bool:
        return True  # it is this process


class _InprocListener(Listener):
    def __init__(self, address: str) -> None:
        self.address = address
        self._waiting: deque[Channel] = deque()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        keep_from_children(self._bell)
        keep_from_children(self._button)
        with _listeners_lock:
            if address in _listeners:
                self._bell.close()
                self._button.close()
                raise ConnectError(f"inproc address {address!r} is in use")
            _listeners[address] = self

    def fileno(self) -> int:
        return self._bell.fileno()

    def knock(self, channel: Channel) -> None:
        self._waiting.append(channel)
        self._button.send(b"!")

    def accept(self) -> Channel | None:
        try:
            self._bell.recv(1)
        except OSError:
            return None
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        with _listeners_lock:
            if _listeners.get(self.address) is self:
                del _listeners[self.address]
        self._bell.close()
        self._button.close()
        while self._waiting:
            self._waiting.popleft().close()


class InprocTransport(Transport):
    """See the module's text."""

    scheme = "inproc"
    capabilities = Capabilities(
        crosses_hosts=False,
        needs_secret=False,
        shared_memory=_segments.is_supported(),
    )

    def is_available(self) -> bool:
        return True

    def listen(self, host: str, port: int, label: str) -> Listener:
        # The process id is part of the address: nobody else's process can mean ours.
        return _InprocListener(f"{os.getpid()}/{label}")

    def connect(self, address: str, timeout_s: float) -> Channel:
        ours, theirs = channel_pair()
        with _listeners_lock:
            listener = _listeners.get(address)
            if listener is not None:
                listener.knock(theirs)
        if listener is None:
            ours.close()
            theirs.close()
            raise ConnectError(
                f"nobody listens on inproc address {address!r}"
            ) from ConnectionRefusedError()
        return ours


def _can_share(sock: socket.socket) -> bool:
    return hasattr(socket, "AF_UNIX") and sock.family == socket.AF_UNIX
