"""Which transports a worker uses; what may go between hosts, and what may not."""

from __future__ import annotations

import ipaddress
import logging

from gradwire._config import RpcBackendOptions, find_tls, is_plain_tcp_allowed
from gradwire.errors import ConnectError, UsageError
from gradwire.transport import Transport, get_transport
from gradwire.transport._tls_credentials import (
    TlsCredentials,
    load_credentials,
    warn_if_exposed,
)

__all__ = [
    "REMEDY_BETWEEN_HOSTS",
    "find_credentials",
    "usable_transports",
    "warn_if_readable",
]

_log = logging.getLogger("gradwire.rpc")

REMEDY_BETWEEN_HOSTS = (
    "workers on different hosts need TLS: certificates, which 'gradwire certs' makes, by "
    "RpcBackendOptions(tls=TlsOptions(...)) or GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and "
    "GRADWIRE_TLS_KEY on each of them; or, where nobody else is on the network, plain TCP: "
    "RpcBackendOptions(allow_plain_tcp=True) and a cluster secret (GRADWIRE_SECRET) on "
    "each of them"
)


def find_credentials(
    options: RpcBackendOptions, name: str, *, quiet: bool = False
) -> TlsCredentials | None:
    """The certificate of the worker of this name; None if TLS is not configured.

    Args:
        options: See `RpcBackendOptions`.
        name: Name of the worker.
        quiet: Log no warning.

    Raises:
        UsageError: There is one, but other workers would not accept it.
    """
    tls = find_tls(options)
    if tls is None:
        return None
    credentials = load_credentials(tls)
    if not quiet:
        warn_if_exposed(tls)
    objection = credentials.names.objection_to_worker(name)
    if objection is not None:
        raise UsageError(
            f"worker {name!r} cannot use {str(tls.certificate)!r}: {objection}"
        )
    return credentials


def usable_transports(
    options: RpcBackendOptions,
    secret: bytes | None,
    credentials: TlsCredentials | None,
) -> dict[str, Transport]:
    """The transports that this worker can use, in order of preference.

    Raises:
        ConnectError: None can be used, or one that was asked for cannot.
        UsageError: One was asked for that would undo what another option promises.
    """
    schemes = options.transports or _default_schemes(options, credentials)
    usable = {}
    for scheme in schemes:
        transport = get_transport(scheme)
        needs = transport.capabilities
        if needs.crosses_hosts and not needs.encrypts and credentials is not None:
            raise UsageError(
                f"transports names {scheme!r}, which does not encrypt, although there are "
                "certificates for TLS: name 'tls' instead, or leave out the certificates"
            )
        if needs.needs_certificate:
            if credentials is None:
                raise ConnectError(
                    f"transport {scheme!r} needs certificates: 'gradwire certs' makes "
                    "them, RpcBackendOptions(tls=...) or GRADWIRE_TLS_CA, _CERT and _KEY "
                    "say where they are"
                )
            transport = transport.with_credentials(credentials)
        if needs.needs_secret and secret is None:
            if options.transports is not None:
                raise ConnectError(
                    f"transport {scheme!r} needs a cluster secret: set GRADWIRE_SECRET "
                    "or RpcBackendOptions(secret=...) to the same value on all workers"
                )
            continue
        if transport.is_available():
            usable[scheme] = transport
    if not usable:
        raise ConnectError(
            f"none of the transports {', '.join(schemes)} can be used here; without "
            f"Unix sockets, {REMEDY_BETWEEN_HOSTS}"
        )
    return usable


def _default_schemes(
    options: RpcBackendOptions, credentials: TlsCredentials | None
) -> tuple[str, ...]:
    if credentials is not None:
        return ("unix", "tls")
    return ("unix", "tcp") if is_plain_tcp_allowed(options) else ("unix",)


def warn_if_readable(transport: Transport, host: str) -> None:
    """Logs a warning if others may read what comes to a listener on this host."""
    if transport.capabilities.encrypts or _is_loopback(host):
        return
    _log.warning(
        "listening by plain %s on %s: whoever is on the network between the hosts can "
        "read and change all that is sent (allow_plain_tcp, transports); "
        "'gradwire certs' makes certificates for TLS",
        transport.scheme.upper(),
        host,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
