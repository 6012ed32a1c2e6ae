"""Nobody comes in who should not, and whoever tries does no harm.

Most tests hold their agents in this process: a stranger is then a plain socket, and what
the agent logs can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import operator
import os
import re
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster as harness
import probes
from gradwire import rpc
from gradwire._config import RpcBackendOptions
from gradwire.errors import (
    ConnectError,
    HandshakeRefused,
    LocalProtocolError,
    PeerLostError,
    UsageError,
)
from gradwire.rpc import _connect
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake_records import HEADER, Kind
from gradwire.rpc._records import WorkerRecord
from gradwire.transport import get_transport
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
CLONE_NEWUSER = 0x10000000
both_transports = pytest.mark.parametrize("scheme", ["unix", "tcp"])


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def find_listening_ports() -> list[int]:
    """TCP ports that this process listens on."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found = re.fullmatch(
                r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{entry}")
            )
            if found:
                inodes.add(found[1])
    ports = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


# -------------------------------------------------------------------- TCP and the secret


def test_worker_without_a_secret_listens_on_no_port(cluster):
    assert cluster.run(0, find_listening_ports) == []


def test_agent_without_a_secret_offers_unix_only(group):
    before = find_listening_ports()

    _, record = group.add("w0", 0)

    assert list(record.addresses) == ["unix"]
    assert find_listening_ports() == before


def test_agent_with_nothing_but_a_secret_offers_unix_only(group):
    before = find_listening_ports()

    _, record = group.add("w0", 0, secret=SECRET, allow_plain_tcp=False)

    assert list(record.addresses) == ["unix"]
    assert find_listening_ports() == before


def test_agent_with_a_secret_listens_on_the_port_that_it_offers(group):
    before = find_listening_ports()

    _, record = group.add("w0", 0, secret=SECRET)

    (port,) = set(find_listening_ports()) - set(before)
    assert record.addresses["tcp"] == f"127.0.0.1:{port}"


def test_tcp_without_a_secret_is_a_clear_error():
    options = RpcBackendOptions(transports=("tcp",))

    with pytest.raises(ConnectError, match=r"'tcp' needs a cluster secret.*GRADWIRE_S"):
        Agent("w0", 0, 1, options)


def test_init_with_tcp_and_without_a_secret_leaves_nothing_behind(tmp_path):
    place = f"file://{tmp_path}/store"
    options = RpcBackendOptions(transports=("tcp",), init_method=place)

    with pytest.raises(ConnectError, match="needs a cluster secret"):
        rpc.init_rpc("w0", 0, 1, options)

    assert not rpc.is_initialized()
    rpc.init_rpc("w0", 0, 1, RpcBackendOptions(init_method=place))
    rpc.shutdown()


def test_unknown_transport_is_a_clear_error():
    with pytest.raises(ValueError, match=r"unknown transport 'pigeon'.*inproc, tcp"):
        Agent("w0", 0, 1, RpcBackendOptions(transports=("pigeon",)))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_tcp_works_with_a_secret(group, address):
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    options = {"secret": SECRET, "transports": ("tcp",), "bind_address": address}
    try:
        first, second, _ = group.couple(**options)
    except ConnectError:
        if address == "::1":
            pytest.skip("this host has no IPv6 loopback")
        raise

    assert_works(first, "w1")
    assert_works(second, "w0")

    assert first.debug_info()["transports"]["w1"] == "tcp"
    assert second.debug_info()["transports"]["w0"] == "tcp"


def test_tcp_carries_large_tensors_both_ways(group):
    first, _, _ = group.couple(secret=SECRET, transports=("tcp",))
    tensor = torch.arange(1 << 20, dtype=torch.int32)

    result = first.call("w1", torch.add, (tensor, 1), timeout=LIMIT_S)

    assert torch.equal(result, tensor + 1)


def test_secret_is_read_from_the_environment(group, monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET)
    first, _, _ = group.couple(transports=("tcp",))

    assert_works(first, "w1")


def test_secret_is_read_from_a_file(group, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(path))
    first, _, _ = group.couple(transports=("tcp",))
    monkeypatch.delenv("GRADWIRE_SECRET_FILE")
    _, record = group.add("w2", 2, transports=("tcp",), secret=SECRET)

    first.network.set_members([record])

    assert_works(first, "w2")


def test_secret_is_in_no_text_of_the_options():
    assert SECRET not in repr(RpcBackendOptions(secret=SECRET))


# ---------------------------------------------------------------------- wrong strangers


@both_transports
@pytest.mark.parametrize("dials", ["stranger", "member"])
def test_wrong_secret_is_refused_on_both_sides(group, caplog, scheme, dials):
    first, second, record = group.couple(secret=SECRET, transports=(scheme,))
    other, other_record = group.add("w2", 2, secret="other", transports=(scheme,))
    other.network.set_members([record])
    first.network.set_members([other_record])

    caller, to = (other, "w0") if dials == "stranger" else (first, "w2")
    with pytest.raises(HandshakeRefused, match=r"wrong secret.*GRADWIRE_S") as caught:
        caller.call(to, operator.add, (1, 2))

    assert caught.value.code == "secret"
    assert caught.value.worker == to
    wait_logged(caplog, "refused a connection")
    assert "wrong secret" in caplog.text
    assert_works(first, "w1")
    assert_works(second, "w0")


def test_worker_without_the_secret_is_refused_on_both_sides(group, caplog):
    first, _, record = group.couple(secret=SECRET, transports=("unix",))
    other, _ = group.add("w2", 2)
    other.network.set_members([record])

    with pytest.raises(HandshakeRefused, match=r"this worker has none.*GRADWIRE_SEC"):
        other.call("w0", operator.add, (1, 2))

    wait_logged(caplog, "w2' has no cluster secret")
    assert_works(first, "w1")


def test_worker_with_a_secret_is_refused_by_one_without(group, caplog):
    first, _, record = group.couple()
    other, _ = group.add("w2", 2, secret=SECRET, transports=("unix",))
    other.network.set_members([record])

    with pytest.raises(HandshakeRefused, match=r"requires a cluster secret"):
        other.call("w0", operator.add, (1, 2))

    wait_logged(caplog, "refused a connection")
    assert_works(first, "w1")


@both_transports
def test_other_version_is_refused_and_told_why(group, caplog, scheme):
    first, _, record = group.couple(secret=SECRET)
    hello = bytearray(initiator(record).start())
    hello[8:10] = (99).to_bytes(2, "big")
    with stranger(record, scheme) as sock:
        sock.sendall(hello)

        code, reason = refusal_in(read_to_end(sock))

    assert code == "version"
    assert "version 99" in reason
    wait_logged(caplog, "speaks version 99")
    assert_works(first, "w1")


@both_transports
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        bytes.fromhex("160301020001000001fc0303") + bytes(100),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        bytes(5000),
        b"\xff",
    ],
    ids=["http", "tls", "ssh", "zeros", "byte"],
)
def test_garbage_is_refused_and_logged(group, caplog, scheme, data):
    first, _, record = group.couple(secret=SECRET)
    with stranger(record, scheme) as sock:
        sock.sendall(data)

        assert read_to_end(sock) == b""

    wait_logged(caplog, "is not a gradwire worker")
    assert_works(first, "w1")


@both_transports
def test_truncated_handshake_is_logged(group, caplog, scheme):
    first, _, record = group.couple(secret=SECRET)
    hello = initiator(record).start()
    cuts = [0, 1, 8, 10, 15, 16, 17, len(hello) - 1]
    for cut in cuts:
        with stranger(record, scheme) as sock:
            sock.sendall(hello[:cut])

    def refused() -> int:
        return caplog.text.count("closed the connection during the handshake")

    probes.wait_until(lambda: refused() == len(cuts), "one log line per stranger")
    assert_works(first, "w1")


def test_record_that_is_too_long_is_refused_from_its_header(group, caplog):
    first, _, record = group.couple(secret=SECRET)
    with stranger(record) as sock:
        sock.sendall(HEADER.pack(b"GRADWIRE", 1, Kind.HELLO, 0, 4097))

        code, reason = refusal_in(read_to_end(sock))

    assert code == "protocol"
    assert "4097 bytes" in reason
    assert_works(first, "w1")


@both_transports
@pytest.mark.parametrize("said", [b"", b"GRADWI"])
def test_silent_stranger_is_closed_in_time(group, caplog, scheme, said):
    first, second, record = group.couple(secret=SECRET, connect_timeout=0.3)
    with stranger(record, scheme) as sock:
        start = time.monotonic()
        sock.sendall(said)
        assert_works(second, "w0")

        assert read_to_end(sock) == b""
        waited = time.monotonic() - start

    assert 0.25 < waited < LIMIT_S
    wait_logged(caplog, "no handshake within 0.3 s")
    assert_works(first, "w1")


def test_stranger_that_drips_gains_no_time(group, caplog):
    _, _, record = group.couple(secret=SECRET, connect_timeout=0.3)
    with stranger(record) as sock:
        start = time.monotonic()
        sock.settimeout(0.02)
        sock.sendall(HEADER.pack(b"GRADWIRE", 1, Kind.HELLO, 0, 4096))
        num_bytes = 0
        with contextlib.suppress(OSError):  # it closes while we write
            while num_bytes < 4095:
                num_bytes += sock.send(b"x")
                with contextlib.suppress(TimeoutError):
                    if sock.recv(100) == b"":
                        break
    waited = time.monotonic() - start

    assert waited < LIMIT_S
    assert 1 < num_bytes < 4095
    assert "no handshake within 0.3 s" in caplog.text


def test_too_many_strangers_are_refused(group, caplog):
    first, second, record = group.couple(secret=SECRET)
    assert_works(first, "w1")
    with contextlib.ExitStack() as stack:
        for _ in range(_connect._MAX_STRANGERS):
            stack.enter_context(stranger(record))
        strangers = first.network._acceptor._strangers
        probes.wait_until(
            lambda: len(strangers) == _connect._MAX_STRANGERS, "all are accepted"
        )
        with stranger(record) as one_more:
            assert read_to_end(one_more) == b""
        assert "256 handshakes are under way" in caplog.text
        assert_works(first, "w1")
        assert_works(second, "w0")

    probes.wait_until(lambda: not strangers, "all are forgotten")
    third, third_record = group.add("w2", 2, secret=SECRET)
    third.network.set_members([record, third_record])
    first.network.set_members([third_record])
    assert_works(third, "w0")


def test_descriptors_of_a_stranger_are_bounded(group):
    first, _, record = group.couple(secret=SECRET)
    start = HEADER.pack(b"GRADWIRE", 1, Kind.HELLO, 0, 4096)
    before = probes.count_descriptors()
    with stranger(record) as sock:
        sock.sendall(start)
        with contextlib.suppress(OSError):
            for _ in range(200):
                socket.send_fds(sock, [b"x"], [sock.fileno()] * 10)
        with contextlib.suppress(OSError):
            probes.wait_until(lambda: num_unread(sock) == 0, "all is read")
        grown = probes.count_descriptors() - before

    assert grown < 150
    probes.wait_until(
        lambda: probes.count_descriptors() <= before, "all descriptors are closed"
    )
    assert_works(first, "w1")


def num_unread(sock: socket.socket) -> int:
    """Bytes that the other end has not read yet; 0 if it has closed."""
    count = bytearray(4)
    fcntl.ioctl(sock, termios.TIOCOUTQ, count)
    return int(struct.unpack("i", count)[0])


# -------------------------------------------------------------------------- duplicates


@pytest.mark.parametrize(
    ("name", "rank"), [("w1", 1), ("impostor", 1), ("w1", 2)], ids=str
)
def test_second_worker_with_a_taken_name_or_rank_is_refused(group, caplog, name, rank):
    first, second, record = group.couple()
    assert_works(first, "w1")
    impostor, _ = group.add(name, rank)
    impostor.network.set_members([record])

    with pytest.raises(HandshakeRefused, match="is taken by worker") as why:
        impostor.call("w0", operator.add, (1, 2))

    assert why.value.code == "taken"
    wait_logged(caplog, "is taken by worker")
    assert_works(first, "w1")
    assert_works(second, "w0")


@pytest.mark.parametrize(("name", "rank"), [("w0", 2), ("w2", 0)])
def test_worker_with_our_own_name_or_rank_is_refused(group, caplog, name, rank):
    first, _, record = group.couple()
    with stranger(record) as sock:
        handshake = initiator(record, None, name=name, rank=rank)
        sock.sendall(handshake.start())
        sock.sendall(handshake.receive(sock.recv(1 << 16)))

        code, reason = refusal_in(read_to_end(sock))

    assert code == "taken"
    assert "'w0'" in reason
    wait_logged(caplog, "refused a connection")
    assert_works(first, "w1")


@pytest.mark.multiproc
def test_init_with_a_taken_rank_fails_and_the_group_goes_on(cluster):
    options = RpcBackendOptions(
        init_method=cluster._options["init_method"], init_timeout=LIMIT_S
    )

    with pytest.raises(UsageError, match=r"rank 1 is taken by worker 'w1'.*alive"):
        rpc.init_rpc("w1", 1, cluster.world_size, options)

    assert cluster.is_healthy()


# -------------------------------------------------------------------------- other users


def act_as_other_user(
    connection: Any, record: WorkerRecord, secret: bytes | None
) -> None:
    """Runs in a process of its own: tries the agent's socket as another user."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    handshake = initiator(record, secret)
    answer = b""
    # The agent may close before we have said anything.
    with stranger(record) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(handshake.start())
        answer = sock.recv(1 << 16)
        if answer and secret:
            sock.sendall(handshake.receive(answer))
            handshake.receive(sock.recv(1 << 16))
    connection.send((answer[:8], handshake.done))


@contextlib.contextmanager
def process_of(function: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Runs a function in a process of its own; what it says comes by the pipe."""
    harness.ensure_fork_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args))
    with ours, theirs:
        process.start()
        try:
            assert ours.poll(2 * LIMIT_S)  # the server may have to import torch first
            yield ours
        finally:
            process.join(LIMIT_S)
            process.close()


def run_as_other_user(record: WorkerRecord, secret: bytes | None) -> Any:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with process_of(act_as_other_user, record, secret) as pipe:
        return pipe.recv()


def test_other_user_is_refused_without_a_secret(group, caplog):
    first, _, record = group.couple()

    answer, done = run_as_other_user(record, None)

    assert (answer, done) == (b"", False)
    assert "not of the same user" in caplog.text
    assert_works(first, "w1")


def test_other_user_with_the_secret_is_let_in(group):
    _, _, record = group.couple(secret=SECRET)

    answer, done = run_as_other_user(record, SECRET.encode())

    assert (answer, done) == (b"GRADWIRE", True)


def listen_as_nobody(connection: Any, apart: bool) -> None:
    """Runs in a process of its own: as the user that stands for all unknown ones.

    If ``apart``, in a user namespace that knows no other; then everybody looks the same.
    """
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    if apart:
        user = os.geteuid()
        if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
            connection.send("")
            return
        Path("/proc/self/uid_map").write_text(f"{nobody} {user} 1")
    else:
        os.setuid(nobody)
    assert os.geteuid() == nobody
    listener = get_transport("unix").listen("", 0, f"gradwire-test-{os.getpid()}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not apart:
        sock.connect(f"\0{listener.address}")
    connection.send(listener.address)
    select.select([listener], [], [], LIMIT_S)
    channel = listener.accept()
    connection.send(channel is not None and channel.peer_is_same_user)


def test_user_who_may_be_anybody_is_not_vouched_for():
    with process_of(listen_as_nobody, True) as pipe:
        address = pipe.recv()
        if not address:
            pytest.skip("user namespaces are not allowed here")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(f"\0{address}")
            assert pipe.poll(LIMIT_S)
            assert pipe.recv() is False


def test_user_nobody_is_vouched_for_where_all_users_are_known():
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        pytest.skip("these tests run in a user namespace themselves")
    with process_of(listen_as_nobody, False) as pipe:
        pipe.recv()
        assert pipe.poll(LIMIT_S)
        assert pipe.recv() is True


# ---------------------------------------------------------------- after the handshake


def test_message_over_our_limit_is_refused_here(group):
    first, _, _ = group.couple(max_head_bytes=100_000)

    with pytest.raises(LocalProtocolError, match="max_head_bytes"):
        first.call("w1", len, (b"x" * 200_000,))

    assert_works(first, "w1")


def test_message_over_the_peers_limit_ends_that_connection_only(group, caplog):
    careful, second, record = group.couple(max_head_bytes=100_000)
    generous, generous_record = group.add("w2", 2)
    careful.network.set_members([generous_record])
    generous.network.set_members([record])

    with pytest.raises(PeerLostError, match="'w0'"):
        generous.call("w0", len, (b"x" * 200_000,))

    wait_logged(caplog, "lost worker w2")
    assert "max_head_bytes" in caplog.text
    assert_works(careful, "w1")
    assert_works(second, "w0")


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        struct.pack("!IHBB", 3, 0, 0, 0x67) + b"abc",
        struct.pack("!IHBB", 0, 0, 0, 0x67),
        struct.pack("!IHBBQQ", 0, 1, 0, 0x67, 0, 1 << 60),
    ],
    ids=["garbage", "no_message", "empty", "huge"],
)
def test_garbage_after_the_handshake_ends_that_connection_only(group, caplog, data):
    first, second, record = group.couple(secret=SECRET)
    with stranger(record) as sock:
        handshake = initiator(record)
        sock.sendall(handshake.start())
        sock.sendall(handshake.receive(sock.recv(1 << 16)))
        handshake.receive(sock.recv(1 << 16))
        sock.sendall(data)

        read_to_end(sock)

    wait_logged(caplog, "lost worker w2 (rank 2): it broke the protocol")
    assert_works(first, "w1")
    assert_works(second, "w0")
