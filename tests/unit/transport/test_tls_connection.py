"""What differs from other transports: records, hidden bytes, and who may come in.

The suite of all transports has the rest.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import probes
from certificates import Office, client_context, tls_transport
from gradwire.errors import HandshakeRefused, RemoteProtocolError
from gradwire.rpc import TlsOptions
from gradwire.testing.transport_suite import (
    bytes_of,
    raw_buffer,
    wait_readable,
)
from gradwire.transport import Frame, Limits, Listener
from gradwire.transport._stream import CLOSED
from gradwire.transport._tcp import parse_address
from gradwire.transport._tls import TlsChannel, TlsConnection
from gradwire.transport._tls_socket import TlsSocket

LIMIT_S = 20.0
RECORD = 16 << 10


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


class Ends(NamedTuple):
    client: TlsConnection
    server: TlsConnection


def settle(client: Any, server: Any) -> None:
    """Lets both go on with their TLS handshake until it is complete."""
    deadline = time.monotonic() + LIMIT_S
    while not (client.is_secured and server.is_secured):
        assert client.read(1) is None
        assert server.read(1) is None
        assert time.monotonic() < deadline


def accept(listener: Listener) -> TlsChannel:
    assert wait_readable(listener)
    channel = listener.accept()
    assert isinstance(channel, TlsChannel)
    return channel


@pytest.fixture
def ends(office) -> Iterator[Ends]:
    transport = tls_transport(office.options())
    listener = transport.listen("127.0.0.1", 0, "")
    client: Any = transport.connect(listener.address, LIMIT_S)
    server = accept(listener)
    settle(client, server)
    made = Ends(*(channel.upgrade(Limits(), b"") for channel in (client, server)))  # type: ignore[arg-type]
    yield made
    for endpoint in (*made, listener):
        endpoint.close()


# --------------------------------------------------------------------- hidden bytes


def receive_as_told(receiver: TlsConnection, count: int) -> list[Frame]:
    """Reads only when the poller says so, as the agent does."""
    frames: list[Frame] = []
    while len(frames) < count:
        assert wait_readable(receiver, timeout_s=LIMIT_S), f"{len(frames)} frames came"
        frames += receiver.receive()
        assert not receiver._tls.has_more
    return frames


@pytest.mark.parametrize("size", [10, 1000, 5000, RECORD - 24, RECORD - 23, 20_000])
def test_no_byte_hides_from_the_poller(ends, size):
    """More frames than one read takes, whose ends lie anywhere in the records."""
    tensor = torch.arange(size, dtype=torch.uint8)
    count = 300
    for number in range(count):
        ends.client.send(b"%d" % number, [raw_buffer(tensor)], hold=True)
    frames: list[Frame] = []
    while len(frames) < count:
        ends.client.flush()
        frames += receive_as_told(ends.server, 1)

    assert [frame.head for frame in frames] == [b"%d" % n for n in range(count)]
    assert all(bytes_of(f.buffers[0]) == bytes(tensor.numpy()) for f in frames)


def test_many_small_frames_in_one_record_all_come(ends):
    payload = b"".join(bytes([0, 0, 0, 1, 0, 0, 0, 0x67, n % 256]) for n in range(1700))
    assert len(payload) < RECORD
    ends.client._queue.append(payload)  # one write, one record

    ends.client.flush()
    frames = receive_as_told(ends.server, 1700)

    assert [frame.head for frame in frames] == [bytes([n % 256]) for n in range(1700)]


def test_rest_of_a_record_is_read_when_there_were_many_frames(ends):
    """The last record does not fit the read buffer, and nothing comes after it."""
    count = 29_138
    payload = b"\0\0\0\1\0\0\0\x67x" * count
    ends.server._tls._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    ends.client._tls._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    ends.client._queue.append(payload[:100])  # ends inside of a frame
    ends.client.flush()
    frames = receive_as_told(ends.server, 100 // 9)
    ends.client._queue.append(payload[100:])
    probes.wait_until(ends.client.flush, "the sockets take all of it")

    frames += receive_as_told(ends.server, count - len(frames))

    assert len(frames) == count


def test_frames_behind_the_handshake_are_not_forgotten(office):
    transport = tls_transport(office.options())
    listener = transport.listen("127.0.0.1", 0, "")
    client: Any = transport.connect(listener.address, LIMIT_S)
    server = accept(listener)
    settle(client, server)
    client.write(b"proof" + bytes([0, 0, 0, 2, 0, 0, 0, 0x67]) + b"hi")
    assert wait_readable(server)

    assert server.read(5) == b"proof"
    connection = server.upgrade(Limits(), b"")

    assert not connection.is_drained
    assert connection.receive() == [Frame(b"hi", [])]
    for endpoint in (client, connection, listener):
        endpoint.close()


def test_peer_that_ends_tls_and_keeps_the_socket_is_over(ends):
    ends.client.send(b"last")
    # Its end of the stream comes as one more record, not as the end of the socket.
    with contextlib.suppress(ssl.SSLError):
        ends.client._tls._sock.unwrap()

    frames = receive_as_told(ends.server, 1)
    while ends.server.end is None:
        assert wait_readable(ends.server, timeout_s=LIMIT_S)
        assert ends.server.receive() == []

    assert [frame.head for frame in frames] == [b"last"]
    assert ends.server.end == CLOSED


def test_nothing_goes_out_in_the_clear_after_the_end(ends):
    """Python's TLS sockets turn into plain ones when TLS has ended."""
    ends.client._tls.shutdown(socket.SHUT_RDWR)

    with pytest.raises(OSError, match="closed"):
        ends.client._tls.send(b"secret")
    assert ends.client._tls.recv_into(memoryview(bytearray(10))) == 0


class WantsToWrite:
    """Stands for a TLS socket whose peer wants new keys and does not read."""

    def __init__(self) -> None:
        self.takes_bytes = False

    def fileno(self) -> int:
        return -1

    def pending(self) -> int:
        return 0

    def recv_into(self, buffer: object, nbytes: int) -> int:
        if not self.takes_bytes:
            raise ssl.SSLWantWriteError
        raise ssl.SSLWantReadError

    def do_handshake(self) -> None:
        if not self.takes_bytes:
            raise ssl.SSLWantWriteError


def test_read_that_has_to_write_asks_for_it():
    stub = WantsToWrite()
    connection = TlsConnection(TlsSocket(stub), Limits(), b"")  # type: ignore[arg-type]

    assert connection.receive() == []
    assert connection.num_queued == 1  # so that the link polls for writing
    assert connection.flush() is False

    stub.takes_bytes = True
    assert connection.flush() is True
    assert connection.num_queued == 0
    assert connection.receive() == []
    assert connection.end is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_peer_may_ask_for_new_keys(office):
    """An update of the keys in the middle of the stream, both ways."""
    options = office.options()
    listener = tls_transport(options).listen("127.0.0.1", 0, "")
    files = ["-CAfile", options.ca, "-cert", options.certificate, "-key", options.key]
    with subprocess.Popen(
        ["openssl", "s_client", "-connect", listener.address, *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        server = accept(listener)
        probes.wait_until(lambda: is_secured(server), "the TLS handshake is complete")
        server.write(b"before ")
        peer.stdin.write(b"K\n")  # new keys, of both sides
        peer.stdin.flush()
        while b"KEYUPDATE" not in peer.stdout.readline():  # else it reads both as one
            assert peer.poll() is None
        peer.stdin.write(b"a frame would come here\n")
        peer.stdin.flush()
        data = b""
        while not data.endswith(b"\n"):
            assert wait_readable(server, timeout_s=LIMIT_S)
            data += server.read(RECORD) or b""
        server.write(b"after\n")
        peer.stdin.close()
        shown = peer.stdout.read()
    server.close()
    listener.close()

    assert data == b"a frame would come here\n"
    assert b"after" in shown


def is_secured(channel: TlsChannel) -> bool:
    assert channel.read(1) is None
    return channel.is_secured


# --------------------------------------------------------------------- who may come in


def shake_hands(
    server: TlsOptions, client: TlsOptions
) -> tuple[Exception | None, Exception | None]:
    """What each side, the server first, has against the other one."""
    listener = tls_transport(server).listen("127.0.0.1", 0, "")
    ends: list[Any] = [tls_transport(client).connect(listener.address, LIMIT_S)]
    ends.insert(0, accept(listener))
    found: list[Exception | None] = [None, None]
    deadline = time.monotonic() + LIMIT_S
    while not all(e or end.is_secured for e, end in zip(found, ends, strict=True)):
        assert time.monotonic() < deadline
        for number, end in enumerate(ends):
            if found[number] is None:
                try:
                    if end.read(1) == b"":
                        found[number] = EOFError()
                except Exception as error:
                    found[number] = error
                    end.close()
    if found[0] is not None and found[1] is None:
        # In TLS 1.3 the client is ready before the server has seen its certificate.
        assert wait_readable(ends[1])
        try:
            assert ends[1].read(1) == b""
        except Exception as error:
            found[1] = error
    for endpoint in (*ends, listener):
        endpoint.close()
    return found[0], found[1]


def test_both_sides_are_secured(office):
    assert shake_hands(office.options(), office.options()) == (None, None)


def test_client_of_another_authority_is_refused(office, tmp_path):
    stranger = Office(tmp_path / "other").options()
    context = client_context(stranger)
    assert_refused(office, context, r"its certificate is not accepted here.*issuer")


def test_client_with_an_expired_certificate_is_refused(office):
    context = client_context(office.expired())
    assert_refused(office, context, r"its certificate is not accepted here.*expired")


def test_client_without_a_certificate_is_refused(office):
    assert_refused(office, client_context(None), "it presented no certificate")


def test_client_of_tls_1_2_is_refused(office):
    context = client_context(office.options(), maximum_version=ssl.TLSVersion.TLSv1_2)
    assert_refused(
        office,
        context,
        r"does not speak TLS 1\.3.*UNSUPPORTED_PROTOCOL",
        RemoteProtocolError,
    )


def assert_refused(
    office: Office,
    context: ssl.SSLContext,
    match: str,
    kind: type[Exception] = HandshakeRefused,
) -> None:
    """A client with its own idea of TLS comes; the server must raise."""
    listener = tls_transport(office.options()).listen("127.0.0.1", 0, "")
    raw = socket.create_connection(parse_address(listener.address), LIMIT_S)
    server = accept(listener)
    raw.setblocking(False)
    with context.wrap_socket(raw, do_handshake_on_connect=False) as client:
        deadline = time.monotonic() + LIMIT_S
        with pytest.raises(kind, match=match):
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    client.do_handshake()
                assert server.read(1) is None
        assert not server.is_secured
    server.close()
    listener.close()


@pytest.mark.parametrize(
    "data",
    [b"GRADWIRE\0\1" + bytes(40), b"GET / HTTP/1.1\r\n\r\n", bytes(100)],
    ids=["gradwire", "http", "zeros"],
)
def test_client_without_tls_is_refused(office, data):
    listener = tls_transport(office.options()).listen("127.0.0.1", 0, "")
    with socket.create_connection(parse_address(listener.address), LIMIT_S) as client:
        server = accept(listener)
        client.sendall(data)
        assert wait_readable(server)
        with pytest.raises(RemoteProtocolError, match=r"does not speak TLS 1\.3"):
            server.read(100)
        server.close()
    listener.close()


def test_server_of_another_authority_is_refused(office, tmp_path):
    other = Office(tmp_path / "other")

    server, client = shake_hands(other.options(), office.options())

    assert isinstance(client, HandshakeRefused)
    assert client.code == "certificate"
    assert "its certificate is not accepted here" in str(client)
    assert isinstance(server, HandshakeRefused)  # told by an alert
    assert "does not accept the certificate of this worker" in str(server)


def test_client_is_told_that_its_certificate_is_refused(office, tmp_path):
    both = tmp_path / "both.pem"
    other = Office(tmp_path / "other")
    both.write_bytes(other.ca.read_bytes() + office.ca.read_bytes())

    server, client = shake_hands(office.options(), other.options(ca=both))

    assert isinstance(server, HandshakeRefused)
    assert "its certificate is not accepted here" in str(server)
    assert isinstance(client, HandshakeRefused)
    assert "does not accept the certificate of this worker" in str(client)


@pytest.mark.parametrize(
    ("hosts", "is_accepted"),
    [([], True), (["127.0.0.1"], True), (["10.0.0.1"], False), (["a.example"], False)],
)
def test_host_must_be_one_of_those_in_the_certificate(office, hosts, is_accepted):
    _, client = shake_hands(office.options(hosts=hosts), office.options())

    assert (client is None) is is_accepted
    if not is_accepted:
        assert isinstance(client, HandshakeRefused)
        assert "it was reached as '127.0.0.1'" in str(client)


def test_channel_knows_which_names_the_certificate_allows(office):
    transport = tls_transport(office.options("w0"))
    listener = transport.listen("127.0.0.1", 0, "")
    other = tls_transport(office.options("w1", "trainer*"))
    client: Any = other.connect(listener.address, LIMIT_S)
    server = accept(listener)
    settle(client, server)

    assert client.objection_to("w0") is None
    assert "not for 'w1'" in (client.objection_to("w1") or "")
    assert server.objection_to("trainer5") is None
    assert "not for 'w0'" in (server.objection_to("w0") or "")
    for endpoint in (client, server, listener):
        endpoint.close()
