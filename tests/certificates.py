"""Certificates for tests, made as ``gradwire certs`` makes them."""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire._cli._authority import Authority
from gradwire.rpc import TlsOptions
from gradwire.transport import Transport, get_transport
from gradwire.transport._tls_credentials import load_credentials


class Office:
    """An authority, and a folder for what it signs."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        self.authority = authority or Authority.create(30)
        self._folder = folder
        self._num_made = 0
        folder.mkdir(exist_ok=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.certificate_pem)

    def options(
        self,
        *workers: str,
        hosts: Sequence[str] = (),
        days: float = 1.0,
        start: datetime.datetime | None = None,
        ca: Path | None = None,
    ) -> TlsOptions:
        """Files of a new certificate; for any worker, if none is named."""
        issued = self.authority.issue(workers or ["*"], hosts, days=days, start=start)
        self._num_made += 1
        stem = self._folder / f"worker{self._num_made}"
        certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        certificate.write_bytes(issued.certificate)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(key, os.O_CREAT | os.O_EXCL, 0o600))
        key.write_bytes(issued.key)
        return TlsOptions(ca=ca or self.ca, certificate=certificate, key=key)

    def expired(self, *workers: str) -> TlsOptions:
        long_ago = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(20)
        return self.options(*workers, start=long_ago)

    def nameless(self) -> TlsOptions:
        """A certificate that names no worker, as that of a web server."""
        options = self.options()
        issued = self.authority.issue([], ["127.0.0.1"], days=1.0)
        Path(options.certificate).write_bytes(issued.certificate)
        Path(options.key).write_bytes(issued.key)
        return options


def tls_transport(options: TlsOptions) -> Transport:
    return get_transport("tls").with_credentials(load_credentials(options))


def client_context(options: TlsOptions | None, **settings: Any) -> ssl.SSLContext:
    """A stranger's own idea of TLS, which checks nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in settings.items():
        setattr(context, name, value)
    if options is not None:
        context.load_cert_chain(options.certificate, options.key)
    return context
