"""Transports by name."""

from __future__ import annotations

import pytest

from gradwire.transport import (
    Transport,
    _registry,
    get_transport,
    known_transports,
    register_transport,
)
from gradwire.transport._inproc import InprocTransport


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(_registry, "_transports", dict(_registry._transports))
    monkeypatch.setattr(_registry, "_outsiders_loaded", False)


class PigeonTransport(InprocTransport):
    scheme = "pigeon"


class _EntryPoint:
    """As an installed package would declare it."""

    def load(self) -> type[Transport]:
        return PigeonTransport


def test_known_transports_are_sorted():
    assert known_transports() == ["inproc", "tcp", "tls", "unix"]


@pytest.mark.parametrize("scheme", ["inproc", "tcp", "tls", "unix"])
def test_transport_is_found_by_its_scheme(scheme):
    assert get_transport(scheme).scheme == scheme


def test_unknown_transport_lists_the_known_ones():
    with pytest.raises(ValueError, match="'pigeon'; known are inproc, tcp, tls, unix"):
        get_transport("pigeon")


def test_registered_transport_is_found():
    pigeon = PigeonTransport()

    register_transport(pigeon)

    assert get_transport("pigeon") is pigeon
    assert known_transports() == ["inproc", "pigeon", "tcp", "tls", "unix"]


def test_duplicate_transport_is_refused():
    before = get_transport("inproc")

    with pytest.raises(ValueError, match="'inproc' is already registered"):
        register_transport(InprocTransport())

    assert get_transport("inproc") is before


def test_transport_of_an_installed_package_is_found(monkeypatch):
    asked = []

    def entry_points(group: str) -> list[_EntryPoint]:
        asked.append(group)
        return [_EntryPoint()]

    monkeypatch.setattr(_registry.metadata, "entry_points", entry_points)

    assert isinstance(get_transport("pigeon"), PigeonTransport)
    assert "pigeon" in known_transports()
    assert asked == ["gradwire.transports"]
