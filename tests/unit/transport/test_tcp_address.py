"""Addresses of TCP workers, which come from others and may be anything."""

from __future__ import annotations

import pytest

from gradwire.errors import ConnectError
from gradwire.transport import get_transport
from gradwire.transport._tcp import format_address, parse_address


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("10.0.0.1", 80, "10.0.0.1:80"),
        ("::1", 65535, "[::1]:65535"),
        ("node-7.example", 1, "node-7.example:1"),
    ],
)
def test_address_survives_formatting(host, port, text):
    assert format_address(host, port) == text
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":80", "host:port", "host:-1", "host:8 0", "host:٣"],
)
def test_bad_address_is_a_connect_error(text):
    with pytest.raises(ConnectError):
        get_transport("tcp").connect(text, 0.5)


@pytest.mark.parametrize("port", [65536, 10**25])
def test_port_out_of_range_is_a_connect_error(port):
    with pytest.raises(ConnectError):
        get_transport("tcp").connect(f"127.0.0.1:{port}", 0.5)


# No resolver is asked for these.
@pytest.mark.parametrize("host", ["a" * 100, "a..b"])
def test_host_that_cannot_exist_is_a_connect_error(host):
    with pytest.raises(ConnectError):
        get_transport("tcp").connect(f"{host}:80", 0.5)


def test_listening_on_a_host_that_cannot_exist_is_a_connect_error():
    with pytest.raises(ConnectError):
        get_transport("tcp").listen("a" * 100, 0, "")


def test_listening_on_a_foreign_address_is_a_connect_error():
    with pytest.raises(ConnectError, match=r"192\.0\.2\.1.*RpcBackendOptions"):
        get_transport("tcp").listen("192.0.2.1", 0, "")
