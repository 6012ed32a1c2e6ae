"""Workers that speak TLS: who gets in, what others on the way see, and that it works.

Most tests hold their agents in this process, as those in test_security.py do.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import functions
import probes
from certificates import Office, client_context
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire._config import RpcBackendOptions
from gradwire.errors import ConnectError, HandshakeRefused, PeerLostError, UsageError
from gradwire.rpc import TlsOptions, _connect
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake import AcceptorHandshake, PeerIdentity
from gradwire.rpc._records import WorkerRecord
from gradwire.transport._stream import StreamConnection
from gradwire.transport._tcp import format_address, parse_address
from strangers import (
    LIMIT_S,
    SECRET,
    Group,
    assert_works,
    initiator,
    read_to_end,
    refusal_in,
    stranger,
    wait_logged,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc and uses Unix sockets"
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    for name in ("SECRET", "SECRET_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"GRADWIRE_{name}", raising=False)


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Office:
    return Office(tmp_path_factory.mktemp("office"))


@pytest.fixture(scope="module")
def anybody(office) -> TlsOptions:
    """A certificate that is good for any name."""
    return office.options()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


# ------------------------------------------------------------------------------ it works


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_tls_needs_no_secret(group, anybody, address):
    options = {"tls": anybody, "transports": ("tls",), "bind_address": address}
    try:
        first, second, _ = group.couple(**options)
    except ConnectError:
        if address == "::1":
            pytest.skip("this host has no IPv6 loopback")
        raise

    assert_works(first, "w1")
    assert_works(second, "w0")

    assert first.debug_info()["transports"]["w1"] == "tls"
    assert second.debug_info()["transports"]["w0"] == "tls"


def test_tls_carries_large_tensors_both_ways(group, anybody):
    first, second, _ = group.couple(tls=anybody, transports=("tls",))
    tensor = torch.arange(2 * MIB, dtype=torch.int32)

    calls = [
        caller.call_async(to, torch.add, (tensor, number), timeout=LIMIT_S)
        for number in range(3)
        for caller, to in ((first, "w1"), (second, "w0"))
    ]

    for number, call in enumerate(calls):
        assert torch.equal(call.wait(), tensor + number // 2)


def test_workers_of_one_host_use_unix_sockets_all_the_same(group, anybody):
    first, _, record = group.couple(tls=anybody)

    assert_works(first, "w1")

    assert sorted(record.addresses) == ["tls", "unix"]
    assert first.debug_info()["transports"]["w1"] == "unix"


def test_certificates_are_found_by_the_environment(group, anybody, monkeypatch):
    monkeypatch.setenv("GRADWIRE_TLS_CA", str(anybody.ca))
    monkeypatch.setenv("GRADWIRE_TLS_CERT", str(anybody.certificate))
    monkeypatch.setenv("GRADWIRE_TLS_KEY", str(anybody.key))

    first, _, record = group.couple(transports=("tls",))

    assert_works(first, "w1")
    assert list(record.addresses) == ["tls"]


def test_secret_counts_on_top_of_tls(group, anybody):
    first, _, record = group.couple(tls=anybody, transports=("tls",), secret=SECRET)
    other, _ = group.add("w2", 2, tls=anybody, transports=("tls",), secret="wrong")
    other.network.set_members([record])

    assert_works(first, "w1")
    with pytest.raises(HandshakeRefused, match="wrong secret"):
        other.call("w0", max, (1, 2))


def test_connections_without_tls_are_what_they_were(group, anybody):
    """No lock, no call and no thread is added to them: their class is the same."""
    options = {"secret": SECRET, "world_size": 4}
    plain, _ = group.add("w0", 0, transports=("unix", "tcp"), **options)
    _, unix_record = group.add("w1", 1, transports=("unix",), **options)
    _, tcp_record = group.add("w2", 2, transports=("tcp",), **options)
    plain.network.set_members([unix_record, tcp_record])
    assert_works(plain, "w1")
    assert_works(plain, "w2")

    kinds = {
        name: type(plain.network.find(name).link.connection)  # type: ignore[union-attr]
        for name in ("w1", "w2")
    }

    assert kinds == {"w1": StreamConnection, "w2": StreamConnection}


# ------------------------------------------------------------------------ who gets in


@contextlib.contextmanager
def tls_stranger(
    record: WorkerRecord, context: ssl.SSLContext
) -> Iterator[ssl.SSLSocket]:
    """A client with an idea of TLS of its own, connected to an agent."""
    with stranger(record, "tls") as sock, context.wrap_socket(sock) as secured:
        yield secured


@pytest.fixture
def couple(group, anybody) -> tuple[Agent, Agent, WorkerRecord]:
    return group.couple(tls=anybody, transports=("tls",))


def test_certificate_lets_its_worker_in(couple, office):
    first, _, record = couple
    with tls_stranger(record, client_context(office.options("w2"))) as sock:
        handshake = initiator(record, None)
        handshake._objection_to = lambda name: None  # it trusts us blindly
        sock.sendall(handshake.start())
        sock.sendall(handshake.receive(sock.recv(1 << 16)))
        handshake.receive(sock.recv(1 << 16))

        assert handshake.done
    assert_works(first, "w1")


@pytest.mark.parametrize("which", ["other_name", "no_name"])
def test_worker_must_have_the_name_in_its_certificate(couple, office, caplog, which):
    first, _, record = couple
    options = office.options("w9") if which == "other_name" else office.nameless()
    with tls_stranger(record, client_context(options)) as sock:
        handshake = initiator(record, None)
        handshake._objection_to = lambda name: None
        sock.sendall(handshake.start())

        code, reason = refusal_in(read_to_end(sock))

    assert code == "certificate"
    assert "certificate" in reason
    wait_logged(caplog, "refused a connection from 127.0.0.1")
    assert "'w2'" in caplog.text
    assert_works(first, "w1")


def test_dialled_worker_must_have_the_name_in_its_certificate(couple, office):
    first, _, record = couple
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wrong = office.options("w9")
    context.load_cert_chain(wrong.certificate, wrong.key)
    told: list[bytes] = []

    def impersonate(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, context.wrap_socket(sock, server_side=True) as secured:
            handshake = AcceptorHandshake(
                PeerIdentity("w2", 2, 12345, 0.0),
                admit=lambda identity: None,
                secret=None,
                peer_is_same_user=True,
            )
            secured.sendall(handshake.receive(secured.recv(1 << 16)))
            told.append(secured.recv(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        thread = threading.Thread(target=impersonate, args=(listener,))
        thread.start()
        address = format_address(*listener.getsockname())
        impostor = msgspec.structs.replace(
            record, name="w2", rank=2, incarnation=12345, addresses={"tls": address}
        )
        first.network.set_members([impostor])

        with pytest.raises(HandshakeRefused, match=r"is for worker 'w9'") as caught:
            first.call("w2", max, (1, 2))
        thread.join(LIMIT_S)

    assert caught.value.code == "certificate"
    assert caught.value.worker == "w2"
    assert refusal_in(told[0])[0] == "certificate"
    assert_works(first, "w1")


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("authority", "its certificate is not accepted here"),
        ("expired", "certificate has expired"),
        ("none", "it presented no certificate"),
        ("version", r"does not speak TLS 1.3"),
    ],
)
def test_bad_certificate_is_refused_and_logged(
    couple, office, caplog, tmp_path, which, why
):
    first, _, record = couple
    context = {
        "authority": lambda: client_context(Office(tmp_path / "other").options()),
        "expired": lambda: client_context(office.expired()),
        "none": lambda: client_context(None),
        "version": lambda: client_context(
            office.options(), maximum_version=ssl.TLSVersion.TLSv1_2
        ),
    }[which]()

    with pytest.raises(OSError), tls_stranger(record, context) as sock:
        # In TLS 1.3 a client is done before its certificate has been looked at.
        sock.sendall(initiator(record, None).start())
        if sock.recv(1 << 16) == b"":
            raise ConnectionResetError

    wait_logged(caplog, "refused a connection from 127.0.0.1")
    assert why in caplog.text
    assert_works(first, "w1")


def test_worker_of_another_authority_gets_an_error_that_says_so(
    couple, group, tmp_path
):
    first, _, record = couple
    other, _ = group.add(
        "w2", 2, tls=Office(tmp_path / "other").options(), transports=("tls",)
    )
    other.network.set_members([record])

    with pytest.raises(HandshakeRefused, match=r"'w0'.*certificate is not acc") as why:
        other.call("w0", max, (1, 2))

    assert why.value.code == "certificate"
    assert why.value.worker == "w0"
    assert_works(first, "w1")


def test_worker_whose_certificate_is_refused_is_told(couple, group, office, tmp_path):
    first, _, record = couple
    strange = Office(tmp_path / "other")
    both = tmp_path / "both.pem"
    both.write_bytes(strange.ca.read_bytes() + office.ca.read_bytes())
    other, _ = group.add("w2", 2, tls=strange.options(ca=both), transports=("tls",))
    other.network.set_members([record])

    with pytest.raises(
        HandshakeRefused, match=r"'w0'.*does not accept the certificate of this worker"
    ):
        other.call("w0", max, (1, 2))
    assert_works(first, "w1")


@pytest.mark.parametrize(
    "data",
    [initiator, b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\xff\xff"],
    ids=["gradwire", "http", "zeros", "cut"],
)
def test_plain_client_at_the_tls_port_is_refused(couple, caplog, data):
    first, _, record = couple
    with stranger(record, "tls") as sock:
        sock.sendall(data(record).start() if callable(data) else data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        answer = read_to_end(sock)

    assert b"GRADWIRE" not in answer
    wait_logged(caplog, "refused a connection from 127.0.0.1")
    assert_works(first, "w1")


def test_silent_stranger_is_closed_in_time_and_holds_no_thread(group, anybody, caplog):
    first, _, record = group.couple(
        tls=anybody, transports=("tls",), connect_timeout=0.5, num_worker_threads=1
    )
    with contextlib.ExitStack() as stack:
        hello = client_hello()
        silent = [stack.enter_context(stranger(record, "tls")) for _ in range(20)]
        for number, sock in enumerate(silent):
            sock.sendall(hello[: number * len(hello) // 20])
        assert_works(first, "w1")
        for sock in silent:
            read_to_end(sock)

    assert caplog.text.count("no handshake within 0.5 s") == 20


def client_hello() -> bytes:
    """The first bytes that a client sends."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client_context(None).wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def test_too_many_strangers_are_refused(couple, caplog, monkeypatch):
    first, _, record = couple
    monkeypatch.setattr(_connect, "_MAX_STRANGERS", 8)
    assert_works(first, "w1")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(stranger(record, "tls"))
        strangers = first.network._acceptor._strangers
        probes.wait_until(lambda: len(strangers) == 8, "all are accepted")
        with stranger(record, "tls") as one_more:
            assert read_to_end(one_more) == b""
        assert_works(first, "w1")

    assert "8 handshakes are under way" in caplog.text


def test_descriptors_are_closed(couple, office):
    first, second, record = couple
    assert_works(first, "w1")
    before = probes.count_descriptors()

    for context in (client_context(None), client_context(office.options("w9"))):
        with contextlib.suppress(OSError), tls_stranger(record, context) as sock:
            sock.sendall(initiator(record, None).start())
            read_to_end(sock)

    probes.wait_until(
        lambda: probes.count_descriptors() <= before, "all descriptors are closed"
    )
    assert_works(second, "w0")


# ------------------------------------------------------------------------------ options


def test_bad_certificate_is_found_before_anybody_is_waited_for(office):
    options = RpcBackendOptions(
        tls=office.expired(), init_method="tcp://192.0.2.1:29500", init_timeout=50.0
    )
    start = time.monotonic()

    with pytest.raises(UsageError, match="has expired"):
        rpc.init_rpc("w0", 1, 2, options)

    assert time.monotonic() - start < 10.0
    assert not rpc.is_initialized()


def test_certificate_of_another_name_is_found_at_once(office):
    options = RpcBackendOptions(tls=office.options("w1"), init_method="tcp://x:1")

    with pytest.raises(UsageError, match="'w0' cannot use"):
        rpc.init_rpc("w0", 0, 1, options)


def test_plain_tcp_beyond_this_host_is_warned_about_once(group, caplog):
    _, record = group.add(
        "w0", 0, secret=SECRET, bind_address="0.0.0.0", advertise_address="127.0.0.1"
    )

    assert "tcp" in record.addresses
    assert caplog.text.count("listening by plain TCP on 0.0.0.0") == 1


def test_tls_is_not_warned_about(group, anybody, caplog):
    group.add(
        "w0", 0, tls=anybody, bind_address="0.0.0.0", advertise_address="127.0.0.1"
    )

    assert caplog.text == ""


def test_worker_with_tls_does_not_fall_back_to_plain_tcp(group, anybody):
    careful, _ = group.add("w0", 0, tls=anybody, secret=SECRET)
    _, record = group.add("w1", 1, secret=SECRET)
    elsewhere = msgspec.structs.replace(record, boot_id="of another host")
    careful.network.set_members([elsewhere])

    with pytest.raises(
        ConnectError, match=r"offers tcp, unix; this worker has unix, tl"
    ):
        careful.call("w1", max, (1, 2))


# --------------------------------------------------------------------------- on the way


class Eavesdropper:
    """A proxy on loopback that keeps all that passes."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname())
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._listener.settimeout(LIMIT_S)
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._target, LIMIT_S) as far:
            other = {near: far, far: near}
            while True:
                for sock in select.select([near, far], [], [], LIMIT_S)[0]:
                    try:
                        data = sock.recv(1 << 16)
                    except ConnectionError:
                        data = b""
                    if not data:
                        return
                    self.heard += data
                    other[sock].sendall(data)

    def close(self) -> None:
        self._thread.join(LIMIT_S)
        self._listener.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_eavesdropper_sees_nothing(office, scheme):
    """By TLS; the same ear hears everything by plain TCP, so it can hear."""
    group = Group()
    options: dict[str, Any] = {"transports": (scheme,)}
    options |= {"secret": SECRET} if scheme == "tcp" else {"tls": office.options()}
    first, _, _ = group.couple(**options)
    _, record = group.add("w2", 2, **options)
    ear = Eavesdropper(record.addresses[scheme])
    addresses = {scheme: ear.address}
    first.network.set_members([msgspec.structs.replace(record, addresses=addresses)])
    text = "a text that nobody else is to read"
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(7))

    result = first.call("w2", functions.echo, (tensor, text), timeout=LIMIT_S)
    transport = first.debug_info()["transports"]["w2"]
    group.close()
    ear.close()

    assert torch.equal(result[0][0], tensor)
    assert transport == scheme
    assert len(ear.heard) > 2 * tensor.nbytes
    raw = tensor.numpy().tobytes()
    known = {
        "function": b"functions:echo",
        "text": text.encode(),
        "tensor": raw[5000:5032],
        "end of tensor": raw[-32:],
        "magic": b"GRADWIRE",
        "name": b"w2",
    }
    heard = {what for what, data in known.items() if data in ear.heard}
    if scheme == "tcp":
        assert heard == set(known)
    else:
        # Two bytes come up by chance in as many random ones.
        assert heard <= {"name"}


def test_bytes_changed_on_the_way_end_the_connection(couple, group, anybody):
    first, _, _ = couple
    _, record = group.add("w2", 2, tls=anybody, transports=("tls",))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        address = format_address(*listener.getsockname())
        thread = threading.Thread(
            target=damage, args=(listener, record.addresses["tls"])
        )
        thread.start()
        first.network.set_members(
            [msgspec.structs.replace(record, addresses={"tls": address})]
        )
        tensor = torch.zeros(MIB)

        with pytest.raises(PeerLostError, match="'w2'"):
            first.call("w2", functions.echo, (tensor,), timeout=LIMIT_S)
        thread.join(LIMIT_S)
    assert_works(first, "w1")


def damage(listener: socket.socket, target: str) -> None:
    """Passes everything on, but turns a bit in the middle of a big tensor."""
    near, _ = listener.accept()
    num_passed = 0
    with near, socket.create_connection(parse_address(target), LIMIT_S) as far:
        other = {near: far, far: near}
        while True:
            for sock in select.select([near, far], [], [], LIMIT_S)[0]:
                try:
                    data = bytearray(sock.recv(1 << 16))
                except ConnectionError:
                    return
                if not data:
                    return
                if num_passed < MIB <= num_passed + len(data):
                    data[-1] ^= 1
                num_passed += len(data)
                with contextlib.suppress(OSError):
                    other[sock].sendall(data)


# ---------------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def tls_cluster(office):
    options = {
        "tls": office.options(hosts=["127.0.0.1"]),
        "transports": ("tls",),
        "advertise_address": "127.0.0.1",
    }
    with Cluster(2, options) as made:
        yield made


def make_many_calls(count: int) -> int:
    """Calls of all sizes, many at a time; returns how many results were right."""
    sizes = [1, 100, 5000, 16384, 70_000, 300_000]
    tensors = [torch.arange(size) for size in sizes]
    calls = [
        rpc.rpc_async("w1", torch.add, (tensors[n % len(sizes)], n))
        for n in range(count)
    ]
    results = [call.wait() for call in calls]
    return sum(
        torch.equal(result, tensors[n % len(sizes)] + n)
        for n, result in enumerate(results)
    )


def transport_to(name: str) -> str:
    transports: dict[str, str] = rpc.get_debug_info()["transports"]
    return transports[name]


@pytest.mark.multiproc
def test_many_calls_at_once_between_processes(tls_cluster):
    assert tls_cluster.run(0, make_many_calls, 300) == 300
    assert tls_cluster.run(0, transport_to, "w1") == "tls"


def train_a_step(remote: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = (
        torch.randn(300, 300, generator=generator, requires_grad=True) for _ in "ab"
    )
    if not remote:
        torch.mm(a, b).sin().sum().backward()
        return [a.grad, b.grad]  # type: ignore[list-item]
    with autograd.context() as context_id:
        product = rpc.rpc_sync("w1", torch.mm, (a, b))
        autograd.backward(context_id, [product.sin().sum()])
        gradients = autograd.get_gradients(context_id)
    return [gradients[a], gradients[b]]


@pytest.mark.multiproc
def test_gradients_are_those_of_one_process(tls_cluster):
    found = tls_cluster.run(0, train_a_step, True)

    for gradient, expected in zip(found, train_a_step(False), strict=True):
        assert torch.equal(gradient, expected)


def call_and_time(name: str) -> float:
    with pytest.raises(PeerLostError, match=name):
        rpc.rpc_sync(name, functions.block_until_set, ("never",), timeout=0)
    return time.monotonic()


@pytest.mark.multiproc
@pytest.mark.chaos
def test_killed_worker_is_noticed_at_once(make_cluster, office):
    cluster = make_cluster(
        2,
        {
            "tls": office.options(),
            "transports": ("tls",),
            "advertise_address": "127.0.0.1",
        },
    )
    handle = cluster.start(0, call_and_time, "w1")
    cluster.run(1, functions.wait_until_blocked, "never")
    killed = time.monotonic()

    cluster.kill(1)

    assert handle.result() - killed < 2.0
