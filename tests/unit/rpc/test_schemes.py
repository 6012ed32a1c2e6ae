"""Which transports a worker uses."""

from __future__ import annotations

import pytest

from certificates import Office
from gradwire._config import RpcBackendOptions
from gradwire.errors import ConnectError, UsageError
from gradwire.rpc._schemes import usable_transports, warn_if_readable
from gradwire.transport import get_transport
from gradwire.transport._tls_credentials import TlsCredentials, load_credentials

SECRET = b"secret"


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch):
    monkeypatch.delenv("GRADWIRE_ALLOW_PLAIN_TCP", raising=False)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory) -> TlsCredentials:
    return load_credentials(Office(tmp_path_factory.mktemp("office")).options())


@pytest.mark.parametrize(
    ("options", "secret", "expected"),
    [
        ({}, None, ["unix"]),
        ({}, SECRET, ["unix"]),
        ({"allow_plain_tcp": True}, None, ["unix"]),
        ({"allow_plain_tcp": True}, SECRET, ["unix", "tcp"]),
        ({"transports": ("tcp", "unix")}, SECRET, ["tcp", "unix"]),
        ({"transports": ("tcp",)}, SECRET, ["tcp"]),
    ],
)
def test_transports_without_certificates(options, secret, expected):
    found = usable_transports(RpcBackendOptions(**options), secret, None)

    assert list(found) == expected


def test_environment_may_allow_plain_tcp(monkeypatch):
    monkeypatch.setenv("GRADWIRE_ALLOW_PLAIN_TCP", "1")
    assert list(usable_transports(RpcBackendOptions(), SECRET, None)) == ["unix", "tcp"]

    monkeypatch.setenv("GRADWIRE_ALLOW_PLAIN_TCP", "0")
    assert list(usable_transports(RpcBackendOptions(), SECRET, None)) == ["unix"]

    monkeypatch.setenv("GRADWIRE_ALLOW_PLAIN_TCP", "please")
    with pytest.raises(UsageError, match="must be 0 or 1, found 'please'"):
        usable_transports(RpcBackendOptions(), SECRET, None)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["unix", "tls"]),
        ({"allow_plain_tcp": True}, ["unix", "tls"]),
        ({"transports": ("tls",)}, ["tls"]),
        ({"transports": ("unix",)}, ["unix"]),
    ],
)
def test_transports_with_certificates(credentials, options, secret, expected):
    found = usable_transports(RpcBackendOptions(**options), secret, credentials)

    assert list(found) == expected


def test_plain_tcp_beside_certificates_is_refused(credentials):
    options = RpcBackendOptions(transports=("tls", "tcp"))

    with pytest.raises(UsageError, match="'tcp', which does not encrypt"):
        usable_transports(options, SECRET, credentials)


def test_tls_without_certificates_is_refused():
    options = RpcBackendOptions(transports=("tls",))

    with pytest.raises(ConnectError, match=r"'tls' needs certificates.*gradwire certs"):
        usable_transports(options, SECRET, None)


def test_registered_transport_has_no_certificate():
    for use in (
        lambda: get_transport("tls").listen("127.0.0.1", 0, ""),
        lambda: get_transport("tls").connect("127.0.0.1:1", 1.0),
    ):
        with pytest.raises(ConnectError, match="needs certificates"):
            use()


@pytest.mark.parametrize(
    ("scheme", "host", "is_warned"),
    [
        ("tcp", "10.0.0.1", True),
        ("tcp", "0.0.0.0", True),
        ("tcp", "::", True),
        ("tcp", "node.example", True),
        ("tcp", "127.0.0.1", False),
        ("tcp", "::1", False),
        ("tcp", "localhost", False),
        ("tls", "10.0.0.1", False),
    ],
)
def test_plain_listener_is_warned_about(caplog, scheme, host, is_warned):
    warn_if_readable(get_transport(scheme), host)

    assert ("can read and change" in caplog.text) is is_warned
    assert len(caplog.records) == is_warned
