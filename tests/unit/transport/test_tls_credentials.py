"""Files of certificates: what is wrong with them is said when the worker starts."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Office
from gradwire._config import RpcBackendOptions, TlsOptions, find_tls
from gradwire.errors import UsageError
from gradwire.rpc._schemes import find_credentials
from gradwire.transport._tls_credentials import load_credentials


@pytest.fixture
def office(tmp_path) -> Office:
    return Office(tmp_path / "office")


@pytest.fixture(autouse=True)
def no_certificates_around(monkeypatch):
    for what in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"GRADWIRE_TLS_{what}", raising=False)


def test_good_files_are_loaded(office):
    options = office.options("w0", "trainer*", hosts=["127.0.0.1", "node.example"])

    credentials = load_credentials(options)

    assert credentials.names.workers == ("w0", "trainer*")
    assert credentials.names.hosts == ("node.example",)
    assert credentials.names.addresses == ("127.0.0.1",)


def test_contexts_demand_certificates_and_tls_1_3(office):
    credentials = load_credentials(office.options())

    for context in (credentials.server, credentials.client):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.maximum_version is ssl.TLSVersion.TLSv1_3
        assert len(context.get_ca_certs()) == 1  # not those of the system


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_missing_file_is_named(office, tmp_path, name):
    options = dataclasses.replace(office.options(), **{name: tmp_path / "nowhere"})

    with pytest.raises(UsageError, match=rf"'{name}'.*nowhere.*gradwire certs"):
        load_credentials(options)


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_file_of_something_else_is_named(office, tmp_path, name):
    path = tmp_path / "poem.txt"
    path.write_text("roses are red\n")
    options = dataclasses.replace(office.options(), **{name: path})

    with pytest.raises(UsageError, match=r"poem\.txt.*found something else"):
        load_credentials(options)


def test_key_of_another_certificate_is_refused(office):
    options = dataclasses.replace(office.options(), key=office.options().key)

    with pytest.raises(UsageError, match="does not belong to the certificate"):
        load_credentials(options)


def test_encrypted_key_is_refused_without_asking(office):
    options = office.options()
    path = Path(options.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"open sesame"),
        )
    )

    with pytest.raises(UsageError, match="is encrypted"):
        load_credentials(options)


def test_expired_certificate_is_refused(office):
    with pytest.raises(UsageError, match="has expired"):
        load_credentials(office.expired())


def test_certificate_of_the_future_is_refused(office):
    tomorrow = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(2)

    with pytest.raises(UsageError, match=r"not valid yet.*clock"):
        load_credentials(office.options(start=tomorrow))


def test_certificate_of_another_authority_is_refused(office, tmp_path):
    other = Office(tmp_path / "other")

    with pytest.raises(UsageError, match=r"not accepted.*another authority"):
        load_credentials(office.options(ca=other.ca))


def test_certificate_for_another_worker_is_refused(office):
    options = RpcBackendOptions(tls=office.options("w1"))

    with pytest.raises(UsageError, match=r"'w0' cannot use.*is for worker 'w1'"):
        find_credentials(options, "w0")
    assert find_credentials(options, "w1") is not None


def test_certificate_for_no_worker_is_refused(office):
    options = RpcBackendOptions(tls=office.nameless())

    with pytest.raises(UsageError, match="names no worker"):
        find_credentials(options, "w0")


@pytest.mark.parametrize(
    ("mode", "num_warnings"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o602, 1)]
)
def test_key_that_everybody_can_read_is_warned_about(
    office, caplog, mode, num_warnings
):
    options = office.options()
    os.chmod(options.key, mode)

    find_credentials(RpcBackendOptions(tls=options), "w0")

    assert caplog.text.count("chmod 600") == num_warnings
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_early_look_does_not_warn(office, caplog):
    options = office.options()
    os.chmod(options.key, 0o644)

    find_credentials(RpcBackendOptions(tls=options), "w0", quiet=True)

    assert caplog.text == ""


# ------------------------------------------------------------------------ environment


def test_no_certificates_at_all():
    assert find_tls(RpcBackendOptions()) is None
    assert find_credentials(RpcBackendOptions(), "w0") is None


def test_files_are_found_by_the_environment(monkeypatch):
    for what in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"GRADWIRE_TLS_{what}", f"/etc/{what}")

    found = find_tls(RpcBackendOptions())

    assert found == TlsOptions(ca="/etc/CA", certificate="/etc/CERT", key="/etc/KEY")


def test_options_come_before_the_environment(monkeypatch, office):
    monkeypatch.setenv("GRADWIRE_TLS_CA", "/etc/ca")
    options = office.options()

    assert find_tls(RpcBackendOptions(tls=options)) is options


def test_half_an_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("GRADWIRE_TLS_CERT", "/etc/cert")

    with pytest.raises(UsageError, match="missing: GRADWIRE_TLS_CA, GRADWIRE_TLS_KEY"):
        find_tls(RpcBackendOptions())


@pytest.mark.parametrize(("value", "kind"), [(5, TypeError), ("", ValueError)])
@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_path_must_be_one(name, value, kind):
    paths = {"ca": "a", "certificate": "b", "key": "c", name: value}

    with pytest.raises(kind, match=f"{name} must be the path of a file"):
        TlsOptions(**paths)


def test_options_refuse_what_is_not_for_tls():
    with pytest.raises(TypeError, match="tls must be a TlsOptions"):
        RpcBackendOptions(tls="ca.pem")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="allow_plain_tcp must be a bool"):
        RpcBackendOptions(allow_plain_tcp="yes")  # type: ignore[arg-type]
