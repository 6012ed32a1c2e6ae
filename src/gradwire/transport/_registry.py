"""Transports by name. Built-in ones are here; others join by entry point."""

from __future__ import annotations

import threading
from importlib import metadata

from gradwire.transport._inproc import InprocTransport
from gradwire.transport._tcp import TcpTransport
from gradwire.transport._tls import TlsTransport
from gradwire.transport._unix import UnixTransport
from gradwire.transport.base import Transport

__all__ = ["get_transport", "known_transports", "register_transport"]

ENTRY_POINTS = "gradwire.transports"

# Guards `_transports` and `_outsiders_loaded`; any thread may register or look up.
_lock = threading.Lock()
_transports: dict[str, Transport] = {
    t.scheme: t
    for t in (UnixTransport(), TcpTransport(), TlsTransport(), InprocTransport())
}
_outsiders_loaded = False


def register_transport(transport: Transport) -> None:
    """Adds a transport under its scheme.

    Raises:
        ValueError: The scheme is taken.
    """
    with _lock:
        _add(transport)


def get_transport(scheme: str) -> Transport:
    """The transport of that name.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    with _lock:
        if scheme not in _transports:
            _load_outsiders()
        if scheme not in _transports:
            raise ValueError(
                f"unknown transport {scheme!r}; known are {', '.join(sorted(_transports))}"
            )
        return _transports[scheme]


def known_transports() -> list[str]:
    """The names of all transports, sorted."""
    with _lock:
        _load_outsiders()
        return sorted(_transports)


def _add(transport: Transport) -> None:
    if transport.scheme in _transports:
        raise ValueError(f"transport {transport.scheme!r} is already registered")
    _transports[transport.scheme] = transport


def _load_outsiders() -> None:
    global _outsiders_loaded  # noqa: PLW0603
    if not _outsiders_loaded:
        _outsiders_loaded = True
        for entry_point in metadata.entry_points(group=ENTRY_POINTS):
            _add(entry_point.load()())
