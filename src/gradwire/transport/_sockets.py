"""What the socket transports share: channels, listeners, and waiting for a connect."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import threading
from pathlib import Path

from gradwire.errors import ConnectError, ConnectTimeout
from gradwire.transport._forks import keep_from_children
from gradwire.transport._stream import (
    ANCILLARY_BYTES,
    CLOEXEC,
    StreamConnection,
    descriptors_in,
)
from gradwire.transport.base import Channel, Connection, Limits, Listener

_MAX_DESCRIPTORS = 16
_USER_MAP = Path("/proc/self/uid_map")
_OVERFLOW_USER = Path("/proc/sys/kernel/overflowuid")
_ALL_USERS = ["0", "0", "4294967295"]  # the map of a namespace that knows them all
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

__all__ = [
    "SocketChannel",
    "SocketListener",
    "connect_socket",
    "prepare_socket",
    "wrap_socket",
]


class SocketChannel(Channel):
    """The handshake's byte stream on a connected socket."""

    def __init__(
        self, scheme: str, sock: socket.socket, *, description: str, shares_memory: bool
    ) -> None:
        sock.setblocking(False)
        keep_from_children(sock)
        self._scheme = scheme
        self._sock = sock
        self._description = description
        self._shares_memory = shares_memory
        # Guards all below: who reads, and who closes meanwhile.
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self, limit: int) -> bytes | None:
        try:
            if not self._shares_memory:
                return self._sock.recv(limit)
            # The peer may have begun to send frames already, with descriptors; a plain
            # read would drop them.
            data, ancillary, _, _ = self._sock.recvmsg(limit, ANCILLARY_BYTES, CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""
        if ancillary and not self._keep(descriptors_in(ancillary)):
            self.close()  # no handshake comes with descriptors, few frames do
            return b""
        return data

    def _keep(self, descriptors: list[int]) -> bool:
        """Keeps descriptors for the connection; False if there are too many."""
        with self._lock:
            self._descriptors += descriptors
            return not self._closed and len(self._descriptors) <= _MAX_DESCRIPTORS

    def write(self, data: bytes) -> None:
        # A fresh socket takes the few hundred bytes of a record at once; one that does
        # not belongs to a peer that does not read, and is not worth waiting for.
        try:
            sent = self._sock.send(data)
        except OSError as error:
            raise ConnectError(f"writing the handshake failed: {error}") from error
        if sent != len(data):
            raise ConnectError("the peer does not read the handshake")

    @property
    def peer_is_same_user(self) -> bool:
        user = _peer_user(self._sock)
        return user is not None and user == _own_user() and not _may_be_anybody(user)

    @property
    def peer_description(self) -> str:
        return self._description

    def upgrade(self, limits: Limits, leftover: bytes) -> Connection:
        with self._lock:
            descriptors, self._descriptors = self._descriptors, []
        return StreamConnection(
            self._scheme,
            self._sock,
            limits,
            leftover,
            shares_memory=self._shares_memory,
            descriptors=descriptors,
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class SocketListener(Listener):
    """A listening socket."""

    def __init__(
        self, scheme: str, sock: socket.socket, address: str, *, shares_memory: bool
    ) -> None:
        sock.setblocking(False)
        keep_from_children(sock)
        self.address = address
        self._scheme = scheme
        self._sock = sock
        self._shares_memory = shares_memory

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Channel | None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None  # nobody there, or gone again
        except OSError as error:
            if self._sock.fileno() < 0 or error.errno not in _SHORTAGES:
                return None
            raise
        try:
            return self._make_channel(sock, address)
        except OSError:
            sock.close()
            return None

    def _make_channel(self, sock: socket.socket, address: object) -> Channel:
        return wrap_socket(self._scheme, sock, address, self._shares_memory)

    def close(self) -> None:
        self._sock.close()


def wrap_socket(
    scheme: str, sock: socket.socket, address: object, shares_memory: bool
) -> SocketChannel:
    """A channel on a connected socket, with the options that the transport wants."""
    description = prepare_socket(sock, address)
    return SocketChannel(
        scheme, sock, description=description, shares_memory=shares_memory
    )


def prepare_socket(sock: socket.socket, address: object) -> str:
    """Sets the options of a connected socket; returns who is at its other end."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
    return f"process {_peer_process(sock)}"


def connect_socket(sock: socket.socket, address: object, timeout_s: float) -> None:
    """Connects a socket within a limit; closes it and raises if that fails."""
    try:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect(address)  # type: ignore[arg-type]
    except TimeoutError as error:
        sock.close()
        raise ConnectTimeout("there was no answer in time") from error
    except OSError as error:
        sock.close()
        raise ConnectError(str(error)) from error
    except BaseException:
        sock.close()
        raise


def _may_be_anybody(user: int) -> bool:
    """Whether the kernel may show other users under this number, too.

    It does so for all whom our user namespace does not know, and shows them as the same
    one: a worker that runs as that very user cannot tell itself from strangers.
    """
    try:
        if user != int(_OVERFLOW_USER.read_text()):
            return False
        return _USER_MAP.read_text().split() != _ALL_USERS
    except (OSError, ValueError):
        return True


def _own_user() -> int | None:
    return os.geteuid() if hasattr(os, "geteuid") else None


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int] | None:
    """Process, user and group at the other end of a Unix socket, if the kernel tells."""
    if sys.platform != "linux" or sock.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def _peer_user(sock: socket.socket) -> int | None:
    credentials = _peer_credentials(sock)
    return credentials[1] if credentials else None


def _peer_process(sock: socket.socket) -> int | None:
    credentials = _peer_credentials(sock)
    return credentials[0] if credentials else None
