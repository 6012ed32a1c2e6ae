"""TLS 1.3 between hosts, with certificates on both sides.

The TLS handshake happens inside of `TlsChannel.read` and blocks nobody. No byte of the
peer gets through before it is complete, and it is complete only when both sides have
shown certificates that the other one's authorities have signed. Whether the certificate
fits the name that the peer then gives itself, the gradwire handshake asks the channel.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import cast

from gradwire._certificate_names import CertificateNames, names_in
from gradwire.errors import ConnectError, GradwireError, HandshakeRefused
from gradwire.transport._forks import keep_from_children
from gradwire.transport._sockets import SocketListener, prepare_socket
from gradwire.transport._stream import CLOSED, StreamConnection
from gradwire.transport._tcp import open_connection, open_listener, parse_address
from gradwire.transport._tls_credentials import TlsCredentials
from gradwire.transport._tls_errors import CERTIFICATE, explain
from gradwire.transport._tls_socket import TlsSocket, say_goodbye
from gradwire.transport.base import (
    Capabilities,
    Channel,
    Connection,
    Frame,
    Limits,
    Listener,
    Transport,
)

__all__ = ["TlsChannel", "TlsConnection", "TlsTransport"]


class TlsTransport(Transport):
    """TCP inside of TLS.

    Args:
        credentials: What an agent proves itself with; None in the registry.
    """

    scheme = "tls"
    capabilities = Capabilities(
        crosses_hosts=True,
        needs_secret=False,
        shared_memory=False,
        needs_certificate=True,
        encrypts=True,
    )

    def __init__(self, credentials: TlsCredentials | None = None) -> None:
        self._credentials = credentials

    def with_credentials(self, credentials: TlsCredentials) -> Transport:
        return TlsTransport(credentials)

    def is_available(self) -> bool:
        return ssl.HAS_TLSv1_3

    def listen(self, host: str, port: int, label: str) -> Listener:
        context = self._need_credentials().server
        sock, address = open_listener(host, port)
        return _TlsListener(sock, address, context)

    def connect(self, address: str, timeout_s: float) -> Channel:
        context = self._need_credentials().client
        host, _ = parse_address(address)
        sock, target = open_connection(address, timeout_s)
        try:
            description = prepare_socket(sock, target)
            sock.setblocking(False)
            wrapped = context.wrap_socket(sock, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            raise ConnectError(str(error)) from error
        return TlsChannel(wrapped, description, host=host)

    def _need_credentials(self) -> TlsCredentials:
        if self._credentials is None:
            raise ConnectError(
                "transport 'tls' needs certificates: RpcBackendOptions(tls=...)"
            )
        return self._credentials


class _TlsListener(SocketListener):
    """A listening socket whose channels begin with a TLS handshake."""

    def __init__(
        self, sock: socket.socket, address: str, context: ssl.SSLContext
    ) -> None:
        super().__init__("tls", sock, address, shares_memory=False)
        self._context = context

    def _make_channel(self, sock: socket.socket, address: object) -> Channel:
        description = prepare_socket(sock, address)
        sock.setblocking(False)
        wrapped = self._context.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
        return TlsChannel(wrapped, description)


class TlsChannel(Channel):
    """The byte stream of the gradwire handshake, inside of TLS.

    Args:
        sock: A connected, non-blocking socket whose TLS handshake has not begun.
        description: Who is at the other end.
        host: How the other end was reached, if we have reached it.
    """

    demands_certificate = True

    def __init__(
        self, sock: ssl.SSLSocket, description: str, *, host: str | None = None
    ) -> None:
        keep_from_children(sock)
        self._sock = sock
        self._description = description
        self._host = host
        self._names: CertificateNames | None = None  # the peer's, once it is proven
        self._outgoing = b""  # what was written before that

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_secured(self) -> bool:
        """Whether the TLS handshake is complete."""
        return self._names is not None

    def objection_to(self, name: str) -> str | None:
        if self._names is None:
            raise AssertionError("the peer spoke before its certificate was checked")
        return self._names.objection_to_worker(name)

    def read(self, limit: int) -> bytes | None:
        self.wants_write = False
        try:
            self._secure()
            return self._sock.recv(limit)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return None
        except OSError as error:
            reason = self._explained(error)
            if reason is not None:
                raise reason from error
            return b""

    def write(self, data: bytes) -> None:
        self._outgoing += data
        try:
            self._secure()
            self._write_outgoing()
        except ssl.SSLWantReadError:
            pass  # it goes out when the TLS handshake is complete
        except ssl.SSLWantWriteError as error:
            if self._names is not None:
                raise ConnectError("the peer does not read the handshake") from error
            self.wants_write = True
        except OSError as error:
            raise self._explained(error) or ConnectError(
                f"writing the handshake failed: {error}"
            ) from error

    def _secure(self) -> None:
        """Goes on with the TLS handshake until it is complete, or raises."""
        if self._names is not None:
            return
        self._sock.do_handshake()
        names = names_in(self._sock.getpeercert())
        if self._host is not None:
            objection = names.objection_to_host(self._host)
            if objection is not None:
                raise HandshakeRefused(objection, code=CERTIFICATE)
        self._names = names
        self._write_outgoing()

    def _write_outgoing(self) -> None:
        while self._outgoing:
            self._outgoing = self._outgoing[self._sock.send(self._outgoing) :]

    def _explained(self, error: OSError) -> GradwireError | None:
        """What a failure means; None if all that is known is that the peer is gone.

        In TLS 1.3 a client is done before the server has looked at its certificate. So
        the first that it notices of a refusal may be that it cannot write any more; but
        the alert has come before that, and can still be read.
        """
        if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            try:
                self._sock.recv(1)
            except (ssl.SSLWantReadError, ssl.SSLEOFError):
                return None
            except ssl.SSLError as told:
                error = told
            except OSError:
                return None
        return explain(error) if isinstance(error, ssl.SSLError) else None

    @property
    def peer_is_same_user(self) -> bool:
        return False

    @property
    def peer_description(self) -> str:
        return self._description

    def upgrade(self, limits: Limits, leftover: bytes) -> Connection:
        while count := self._sock.pending():  # no poller would tell of these
            leftover += self._sock.recv(count)
        return TlsConnection(TlsSocket(self._sock), limits, leftover)

    def close(self) -> None:
        say_goodbye(self._sock)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()


class TlsConnection(StreamConnection):
    """Frames inside of TLS.

    Invariant: when `receive` returns, no byte is left inside of OpenSSL, so that the
    descriptor tells the truth about whether there is something to read.
    """

    def __init__(self, sock: TlsSocket, limits: Limits, leftover: bytes) -> None:
        # It has all methods of a socket that are used where no memory is shared.
        super().__init__("tls", cast(socket.socket, sock), limits, leftover)
        self._tls = sock

    def receive(self) -> list[Frame]:
        frames = super().receive()
        if not self.is_drained and self._tls.has_more:
            # It stopped because there were many frames. Only what is inside of OpenSSL,
            # a part of one record, is read on top.
            self._tls.only_buffered = True
            try:
                while self._tls.has_more:
                    frames += super().receive()
            finally:
                self._tls.only_buffered = False
        if self._tls.has_ended:
            # Not always seen by the poller: the peer may end TLS and keep the socket.
            self.end = self.end or self._write_failure or CLOSED
        return frames

    @property
    def num_queued(self) -> int:
        return len(self._queue) + self._tls.is_stuck

    def flush(self) -> bool:
        if self._tls.is_stuck and not self._tls.resume():
            return False
        return super().flush()
