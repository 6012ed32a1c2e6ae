"""TCP between hosts, IPv4 and IPv6."""

from __future__ import annotations

import socket

from gradwire.errors import ConnectError
from gradwire.transport._sockets import SocketListener, connect_socket, wrap_socket
from gradwire.transport.base import Capabilities, Channel, Listener, Transport

__all__ = [
    "TcpTransport",
    "format_address",
    "open_connection",
    "open_listener",
    "parse_address",
]


class TcpTransport(Transport):
    """Plain TCP: authenticated by the handshake, not encrypted."""

    scheme = "tcp"
    capabilities = Capabilities(
        crosses_hosts=True, needs_secret=True, shared_memory=False
    )

    def is_available(self) -> bool:
        return True

    def listen(self, host: str, port: int, label: str) -> Listener:
        sock, address = open_listener(host, port)
        return SocketListener("tcp", sock, address, shares_memory=False)

    def connect(self, address: str, timeout_s: float) -> Channel:
        sock, target = open_connection(address, timeout_s)
        return wrap_socket("tcp", sock, target, shares_memory=False)


def open_listener(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, and the address that it was bound to."""
    try:
        family, address = _resolve(host, port)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectError(f"cannot listen on {host!r}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConnectError(
            f"cannot listen on {format_address(host, port)}: {error}; choose another "
            "address or port in RpcBackendOptions"
        ) from error
    bound = sock.getsockname()
    return sock, format_address(bound[0], bound[1])


def open_connection(address: str, timeout_s: float) -> tuple[socket.socket, object]:
    """A socket that is connected to an address, and what the address resolved to."""
    host, port = parse_address(address)
    try:
        family, target = _resolve(host, port)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectError(f"cannot connect to {address}: {error}") from error
    connect_socket(sock, target, timeout_s)
    return sock, target


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """The reverse of `format_address`."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not separator or not host or not is_number or int(port) > 65535:
        raise ConnectError(
            f"expected an address such as 'host:port', found {address!r}"
        )
    return host, int(port)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, target = found[0]
    return family, target  # type: ignore[return-value]
