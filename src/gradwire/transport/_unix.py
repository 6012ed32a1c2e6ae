"""Unix sockets between workers on one host, with shared memory for large tensors.

Addresses are in Linux's abstract namespace: it belongs to the network namespace, so an
address means the same to exactly those processes that can use it, and nothing is left
in a file system when a worker is killed.
"""

from __future__ import annotations

import socket
import sys

from gradwire.errors import ConnectError
from gradwire.transport import _segments
from gradwire.transport._sockets import SocketListener, connect_socket, wrap_socket
from gradwire.transport.base import Capabilities, Channel, Listener, Transport

__all__ = ["UnixTransport"]

_BUFFER_BYTES = 1 << 20


class UnixTransport(Transport):
    """See the module's text."""

    scheme = "unix"
    capabilities = Capabilities(
        crosses_hosts=False,
        needs_secret=False,
        shared_memory=_segments.is_supported(),
    )

    def is_available(self) -> bool:
        return sys.platform == "linux"

    def listen(self, host: str, port: int, label: str) -> Listener:
        sock = _new_socket()
        try:
            sock.bind(f"\0{label}")
            sock.listen(1024)
        except OSError as error:
            sock.close()
            raise ConnectError(
                f"cannot listen on the Unix socket @{label}: {error}"
            ) from error
        return SocketListener("unix", sock, label, shares_memory=True)

    def connect(self, address: str, timeout_s: float) -> Channel:
        sock = _new_socket()
        connect_socket(sock, f"\0{address}", timeout_s)
        return wrap_socket("unix", sock, address, shares_memory=True)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Room for a burst of small calls; the kernel caps it at what an ordinary user may.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return sock
