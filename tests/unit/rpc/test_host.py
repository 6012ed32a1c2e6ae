"""Which host this is, and under which address others reach it."""

from __future__ import annotations

import socket

import pytest

from gradwire._config import RpcBackendOptions
from gradwire.errors import ConnectError
from gradwire.rpc import _host
from gradwire.rpc._host import (
    HostIdentity,
    find_address,
    identify_host,
    rendezvous_host,
)
from gradwire.rpc._records import WorkerRecord

linux = pytest.mark.skipif(
    not identify_host().boot_id, reason="this platform does not identify its host"
)


def make_record(boot_id: str, namespace: str) -> WorkerRecord:
    return WorkerRecord("w", 0, 1, 1, boot_id, namespace, {})


@linux
def test_host_is_the_same_each_time():
    assert identify_host() == identify_host()
    assert identify_host().network_namespace.isdecimal()


@pytest.mark.parametrize(
    ("boot_id", "namespace", "same"),
    [("b", "1", True), ("b", "2", False), ("c", "1", False), ("", "", False)],
)
def test_hosts_are_compared_by_boot_and_namespace(boot_id, namespace, same):
    assert HostIdentity("b", "1").is_same(make_record(boot_id, namespace)) is same


def test_hosts_without_identity_are_never_the_same():
    assert not HostIdentity("", "").is_same(make_record("", ""))


def test_advertised_address_goes_before_all():
    options = RpcBackendOptions(
        advertise_address="192.0.2.7", interface="nosuch0", bind_address="127.0.0.1"
    )

    assert find_address(options, "localhost") == "192.0.2.7"


@linux
def test_address_of_the_interface_is_taken():
    assert find_address(RpcBackendOptions(interface="lo"), None) == "127.0.0.1"


@linux
def test_interface_without_ipv4_gives_its_ipv6_address(monkeypatch):
    if not socket.has_ipv6 or _host._ipv6_of("lo") is None:
        pytest.skip("this host has no IPv6 loopback")
    monkeypatch.setattr(_host, "_ipv4_of", lambda interface: None)

    assert find_address(RpcBackendOptions(interface="lo"), None) == "::1"


def test_unknown_interface_lists_the_known_ones():
    with pytest.raises(ConnectError, match=r"no network interface 'nosuch0'.*lo"):
        find_address(RpcBackendOptions(interface="nosuch0"), None)


def test_bound_address_is_advertised():
    assert find_address(RpcBackendOptions(bind_address="127.0.0.5"), None) == (
        "127.0.0.5"
    )


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_wildcard_is_not_advertised(wildcard):
    options = RpcBackendOptions(bind_address=wildcard)

    assert find_address(options, "127.0.0.1") == "127.0.0.1"


def test_address_towards_the_rendezvous_host_is_found():
    assert find_address(RpcBackendOptions(), "127.0.0.1") == "127.0.0.1"


def test_some_address_is_always_found(monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    assert find_address(RpcBackendOptions(), "nowhere.invalid") == "127.0.0.1"


@pytest.mark.parametrize(
    ("init_method", "host"),
    [
        ("tcp://10.0.0.1:29500", "10.0.0.1"),
        ("tcp://[fd00::1]:29500", "fd00::1"),
        ("env://", "from-env"),
        ("file:///somewhere/store", None),
    ],
)
def test_rendezvous_host_follows_from_the_init_method(init_method, host, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "from-env")

    assert rendezvous_host(RpcBackendOptions(init_method=init_method)) == host
