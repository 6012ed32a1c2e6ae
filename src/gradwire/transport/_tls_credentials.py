"""A worker's certificate: read, checked, and made ready for both sides of TLS.

Everything that is wrong with the files is found here, when the worker starts, and not at
the first connection, where the other side would see it and we would not.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from typing import NoReturn

from gradwire._certificate_names import CertificateNames, names_in
from gradwire._config import TlsOptions
from gradwire.errors import UsageError

__all__ = ["TlsCredentials", "load_credentials", "warn_if_exposed"]

_log = logging.getLogger("gradwire.rpc")

_VERIFY_NOT_YET_VALID, _VERIFY_EXPIRED = 9, 10


@dataclass(frozen=True)
class TlsCredentials:
    """What a worker needs to speak TLS.

    Attributes:
        server: For connections that others open.
        client: For those that we open.
        names: What our own certificate says of us.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    names: CertificateNames


def load_credentials(options: TlsOptions) -> TlsCredentials:
    """Reads the files and checks that other workers will accept them.

    Raises:
        UsageError: A file is missing or is not what it should be, the key belongs to
            another certificate, the certificate has expired or is of another authority.
    """
    for name in ("ca", "certificate", "key"):
        _check_readable(name, getattr(options, name))
    server = _make_context(ssl.PROTOCOL_TLS_SERVER, options)
    server.num_tickets = 0  # nobody resumes, and nothing comes that no one asked for
    client = _make_context(ssl.PROTOCOL_TLS_CLIENT, options)
    return TlsCredentials(server, client, _rehearse(server, client, options))


def warn_if_exposed(options: TlsOptions) -> None:
    """Logs a warning if the private key is for everybody to read."""
    if stat.S_IMODE(os.stat(options.key).st_mode) & 0o007:
        _log.warning(
            "every user of this host can read or change the private key %s: chmod 600 it",
            os.fspath(options.key),
        )


def _check_readable(name: str, path: str | os.PathLike[str]) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise UsageError(
            f"the file for TLS option {name!r} cannot be read: {error}; 'gradwire certs' "
            "makes certificates, and RpcBackendOptions(tls=...) or GRADWIRE_TLS_CA, _CERT "
            "and _KEY say where they are"
        ) from error


def _make_context(protocol: int, options: TlsOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # Certificates name workers, and hosts only if they want to: `CertificateNames` knows.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # What is in the file is trusted, be it the root of all or one of its branches.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    ca, certificate = os.fspath(options.ca), os.fspath(options.certificate)
    key = os.fspath(options.key)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise UsageError(
            f"{ca!r} must hold certificates of authorities (TLS option 'ca'), found "
            f"something else: {error}"
        ) from error
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"the private key {key!r} does not belong to the certificate "
                f"{certificate!r} (TLS options 'key' and 'certificate')"
            ) from error
        raise UsageError(
            f"{certificate!r} must hold a certificate and {key!r} its private key, both "
            f"as PEM (TLS options 'certificate' and 'key'), found something else: {error}"
        ) from error
    return context


def _refuse_password() -> NoReturn:
    """Called for an encrypted key; without it, OpenSSL would ask at the terminal."""
    raise UsageError(
        "the private key of TLS option 'key' is encrypted, and nobody is there to type "
        "its password: store it without one, readable by its owner only"
    )


def _rehearse(
    server: ssl.SSLContext, client: ssl.SSLContext, options: TlsOptions
) -> CertificateNames:
    """Shakes hands with ourselves, as another worker with the same authority would.

    Returns:
        The names in our own certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for end in (ends[0], ends[1], ends[0], ends[1]):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    except ssl.SSLCertVerificationError as error:
        raise UsageError(_why_refused(error, options)) from error
    except ssl.SSLError as error:
        raise UsageError(
            f"the certificate {os.fspath(options.certificate)!r} cannot be used for TLS "
            f"1.3: {error}"
        ) from error
    return names_in(ends[0].getpeercert())


def _why_refused(error: ssl.SSLCertVerificationError, options: TlsOptions) -> str:
    certificate, ca = os.fspath(options.certificate), os.fspath(options.ca)
    if error.verify_code == _VERIFY_EXPIRED:
        return (
            f"the certificate {certificate!r}, or one of those that it rests on, has "
            "expired: 'gradwire certs' or your authority makes a new one"
        )
    if error.verify_code == _VERIFY_NOT_YET_VALID:
        return (
            f"the certificate {certificate!r}, or one of those that it rests on, is not "
            "valid yet: is the clock of this host right?"
        )
    return (
        f"the certificate {certificate!r} is not accepted by workers that trust {ca!r}: "
        f"{error.verify_message}; was it signed by another authority?"
    )
