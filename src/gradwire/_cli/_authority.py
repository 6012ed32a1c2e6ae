"""A small certificate authority, for groups of workers that have none.

Uses the package ``cryptography``, which only this module needs. Keys are ECDSA on the
curve P-256, signatures use SHA-256.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire._certificate_names import WORKER_URI, check_pattern
from gradwire.errors import UsageError

__all__ = ["Authority", "Issued"]

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# Clocks of hosts differ a little; a fresh certificate must be valid on all of them.
_BACKDATED = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates of workers.

    Args:
        certificate: Its own certificate.
        key: Its private key.
    """

    def __init__(
        self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, days: int) -> Authority:
        """A new one, whose certificate is valid for so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "gradwire authority")]
        )
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            _begin(name, name, key, now - _BACKDATED, now + _days(days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(_identifier(key), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Authority:
        """One that was made before, from its two PEM texts.

        Raises:
            UsageError: They are no authority, do not belong together, or have expired.
        """
        try:
            loaded = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"the authority's certificate or key cannot be read: {error}"
            ) from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or (
            loaded.public_key() != private.public_key()
        ):
            raise UsageError(
                "the authority's key is not the one of its certificate: restore the pair, "
                "or begin in an empty folder"
            )
        if loaded.not_valid_after_utc <= datetime.datetime.now(datetime.timezone.utc):
            raise UsageError(
                f"the authority's certificate has expired on {loaded.not_valid_after_utc:%F}"
                ": begin in an empty folder, and give all workers new certificates"
            )
        return cls(loaded, private)

    @property
    def certificate_pem(self) -> bytes:
        """What every worker needs, to check the others."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """What nobody but the authority may ever see."""
        return _key_pem(self._key)

    def issue(
        self,
        workers: Sequence[str],
        hosts: Sequence[str] = (),
        *,
        days: float,
        start: datetime.datetime | None = None,
    ) -> Issued:
        """Makes a certificate.

        Args:
            workers: Names of the workers that it is for; ``*`` at the end of one stands
                for anything.
            hosts: Names or addresses of hosts where they run; none: anywhere.
            days: For how long it is valid, but never longer than the authority's own.
            start: From when on; None: from now.

        Raises:
            ValueError: A name is not one.
        """
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(WORKER_URI + check_pattern(worker))
            for worker in workers
        ]
        names += [_host_name(host) for host in hosts]
        key = ec.generate_private_key(ec.SECP256R1())
        label = ", ".join(workers) or "nobody"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label[:64])])
        if start is None:
            start = datetime.datetime.now(datetime.timezone.utc)
        end = min(start + _days(days), self._certificate.not_valid_after_utc)
        builder = (
            _begin(subject, self._certificate.subject, key, start - _BACKDATED, end)
            .add_extension(
                x509.BasicConstraints(ca=False, path_length=None), critical=True
            )
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(_identifier(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    self._key.public_key()
                ),
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(names), critical=False
            )
        signed = builder.sign(self._key, hashes.SHA256())
        return Issued(signed.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def _begin(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _days(number: float) -> datetime.timedelta:
    return datetime.timedelta(days=number)


def _identifier(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or _HOST.fullmatch(host) is None:
        raise ValueError(
            f"{host!r} is neither the name nor the address of a host; a name may begin "
            "with '*.'"
        )
    return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
