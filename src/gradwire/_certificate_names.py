"""Which workers and hosts a certificate stands for; pure.

A certificate names workers by URIs among its subject alternative names:

    gradwire:worker:trainer0    the worker of this name
    gradwire:worker:trainer*    any worker whose name begins so
    gradwire:worker:*           any worker

One that names no worker is nobody here, whoever signed it: a company's authority also
signs for its web servers. Host names and addresses are the usual ones. If a certificate
has some, the worker must be reached by one of them; if it has none, it may be anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire._ids import check_worker_name

__all__ = ["WORKER_URI", "CertificateNames", "check_pattern", "names_in"]

WORKER_URI = "gradwire:worker:"


@dataclass(frozen=True)
class CertificateNames:
    """What one certificate says about its holder.

    Attributes:
        workers: Names of workers, each perhaps with a ``*`` at its end.
        hosts: Names of hosts, in lower case, each perhaps with ``*.`` at its begin.
        addresses: Addresses of hosts.
    """

    workers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def objection_to_worker(self, name: str) -> str | None:
        """Why the holder is not the worker of this name; None if it may be."""
        if any(_fits(name, pattern) for pattern in self.workers):
            return None
        if not self.workers:
            return (
                "its certificate names no worker at all: it needs a subject alternative "
                f"name such as URI:{WORKER_URI}{name} ('gradwire certs' makes such ones)"
            )
        return (
            f"its certificate is for worker {_listed(self.workers)}, not for {name!r}: "
            "give each worker the certificate that was made for its name"
        )

    def objection_to_host(self, host: str) -> str | None:
        """Why this is not a host of the holder; None if it is, or if none is named."""
        if not self.hosts and not self.addresses:
            return None
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            matches = any(_is_host(host.lower(), pattern) for pattern in self.hosts)
        else:
            matches = address in map(ipaddress.ip_address, self.addresses)
        if matches:
            return None
        return (
            f"its certificate is for host {_listed(self.hosts + self.addresses)}, but it "
            f"was reached as {host!r}: set RpcBackendOptions(advertise_address=...) of "
            "that worker to a name in its certificate, or make one with this host"
        )


def names_in(certificate: Mapping[str, Any] | None) -> CertificateNames:
    """The names in a certificate as ``SSLSocket.getpeercert`` returns it."""
    workers, hosts, addresses = [], [], []
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(WORKER_URI):
            workers.append(value[len(WORKER_URI) :])
        elif kind == "DNS":
            hosts.append(value.lower())
        elif kind == "IP Address":
            addresses.append(value.strip())
    return CertificateNames(tuple(workers), tuple(hosts), tuple(addresses))


def check_pattern(pattern: str) -> str:
    """Checks a name of a worker that may end with ``*``.

    Raises:
        InvalidWorkerName: No worker can have such a name.
    """
    start = pattern.removesuffix("*")
    if start or not pattern:
        check_worker_name(start)
    return pattern


def _fits(name: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern


def _is_host(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        label, dot, rest = host.partition(".")
        return bool(label and dot) and rest == pattern[2:]
    return host.rstrip(".") == pattern.rstrip(".")


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
