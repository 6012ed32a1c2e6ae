"""Which host this is, and under which address others reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gradwire._config import RpcBackendOptions
from gradwire._environment import find_variable
from gradwire.errors import ConnectError
from gradwire.rpc._records import WorkerRecord

__all__ = [
    "HostIdentity",
    "find_address",
    "identify_host",
    "num_cores",
    "rendezvous_host",
]


@dataclass(frozen=True)
class HostIdentity:
    """Tells whether two workers can meet without a network.

    Two workers are on one host if the same kernel has not been restarted between them
    and they are in the same network namespace: containers on one machine are not.
    """

    boot_id: str
    network_namespace: str

    def is_same(self, record: WorkerRecord) -> bool:
        """Whether the worker of this record is on this host."""
        return bool(self.boot_id) and (
            (self.boot_id, self.network_namespace)
            == (record.boot_id, record.network_namespace)
        )


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def identify_host() -> HostIdentity:
    """The identity of this host; empty where the platform does not tell."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return HostIdentity("", "")
    return HostIdentity(boot_id, namespace)


def rendezvous_host(options: RpcBackendOptions) -> str | None:
    """The host that serves the rendezvous store, None if it is no network service."""
    url = urlsplit(options.init_method)
    if url.scheme == "env":
        return find_variable("MASTER_ADDR", os.environ)
    return url.hostname


def find_address(options: RpcBackendOptions, rendezvous_host: str | None) -> str:
    """The address that other hosts should use for this worker.

    In this order: what the options say, the address of the interface that they name,
    the address from which the rendezvous host is reached, that of the host's own name,
    loopback.
    """
    if options.advertise_address is not None:
        return options.advertise_address
    if options.interface is not None:
        return _address_of_interface(options.interface)
    if options.bind_address not in (None, "", "0.0.0.0", "::"):
        return str(options.bind_address)
    return _address_towards(rendezvous_host) or _address_of_hostname() or "127.0.0.1"


def _address_towards(host: str | None) -> str | None:
    """Our end of a way to ``host``; connecting a datagram socket sends nothing."""
    if not host:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError:
        return None


def _address_of_hostname() -> str | None:
    try:
        return str(
            socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0][4][
                0
            ]
        )
    except OSError:
        return None


def _address_of_interface(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConnectError(
            f"there is no network interface {interface!r}; this host has {', '.join(names)}"
        )
    address = _ipv4_of(interface) or _ipv6_of(interface)
    if address is None:
        raise ConnectError(
            f"network interface {interface!r} has no usable address; set "
            "RpcBackendOptions(advertise_address=...)"
        )
    return address


def _ipv4_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl  # noqa: PLC0415 - not on every platform

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):  # global, or loopback
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None
