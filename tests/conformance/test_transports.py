"""Every transport passes the one suite; those with shared memory, more."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from certificates import Office, tls_transport
from gradwire.errors import RemoteProtocolError
from gradwire.testing import TransportSuite
from gradwire.testing.transport_suite import (
    bytes_of,
    fill,
    raw_buffer,
    receive_frames,
    wait_readable,
)
from gradwire.transport import Connection, Frame, Limits, get_transport


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


class TestUnix(TransportSuite):
    def make_transport(self):
        return get_transport("unix")


class TestTcp(TransportSuite):
    listen_host = "127.0.0.1"

    def make_transport(self):
        return get_transport("tcp")


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")
class TestTcpIpv6(TransportSuite):
    listen_host = "::1"

    def make_transport(self):
        return get_transport("tcp")


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Office:
    return Office(tmp_path_factory.mktemp("certificates"))


class TestTls(TransportSuite):
    listen_host = "127.0.0.1"

    @pytest.fixture(autouse=True)
    def _use_certificate(self, office: Office) -> None:
        self.transport = tls_transport(office.options())

    def make_transport(self):
        return get_transport("tls")  # replaced by one with a certificate

    def settle(self, client, server):
        deadline = time.monotonic() + 10.0
        while not (client.is_secured and server.is_secured):
            assert client.read(1) is None
            assert server.read(1) is None
            assert time.monotonic() < deadline, "the TLS handshake does not end"


class TestInproc(TransportSuite):
    def make_transport(self):
        return get_transport("inproc")


# --------------------------------------------------------------------- shared memory

needs_memfd = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this platform has no memfd"
)
SMALL = Limits(shared_memory_min_bytes=1)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
DATA, OFFER, RETURN, DROP = range(4)


class _Ends(NamedTuple):
    sender: Connection
    receiver: Connection

    def move(self, count: int = 1) -> list[Frame]:
        return receive_frames(self.receiver, count, self.sender)

    def settle(self) -> None:
        """Lets the memory that the receiver no longer uses go back."""
        self.receiver.housekeeping(time.monotonic())
        assert wait_readable(self.sender)
        assert self.sender.receive() == []


@pytest.fixture(params=["unix", "inproc"])
def open_ends(request) -> Iterator[Callable[..., _Ends]]:
    """Makes two connected connections, closed after the test."""
    transport = get_transport(request.param)
    opened: list[Any] = []

    def make(limits: Limits = SMALL) -> _Ends:
        listener = transport.listen("", 0, f"gradwire-memory-{os.getpid()}")
        client = transport.connect(listener.address, 10.0)
        server = listener.accept()
        assert server is not None
        ends = _Ends(client.upgrade(limits, b""), server.upgrade(limits, b""))
        opened.extend([*ends, listener])
        return ends

    yield make
    for endpoint in opened:
        endpoint.close()


def _send(ends: _Ends, *tensors: torch.Tensor) -> None:
    ends.sender.send(b"", [raw_buffer(tensor) for tensor in tensors])


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return "memfd:gradwire" in line
    return False


@needs_memfd
class TestSharedMemory:
    def test_buffer_below_the_minimum_stays_in_the_stream(self, open_ends):
        ends = open_ends(Limits(shared_memory_min_bytes=1000))

        _send(ends, torch.zeros(999, dtype=torch.uint8))
        ends.move()

        assert ends.sender.counters()["segments"] == 0
        assert ends.sender.counters()["bytes_sent"] > 999

    def test_buffer_of_the_minimum_goes_through_memory(self, open_ends):
        ends = open_ends(Limits(shared_memory_min_bytes=1000))

        _send(ends, torch.zeros(1000, dtype=torch.uint8))
        frames = ends.move()

        assert ends.sender.counters()["segments"] == 1
        assert ends.receiver.counters()["segments_borrowed"] == 1
        assert ends.sender.counters()["bytes_sent"] < 999
        assert frames[0].buffers[0].nbytes() == 1000

    def test_segment_returns_when_its_tensor_dies(self, open_ends):
        ends = open_ends()
        _send(ends, torch.zeros(1000, dtype=torch.uint8))
        frames = ends.move()
        tensor = torch.empty(0, dtype=torch.uint8).set_(frames[0].buffers[0])
        del frames
        assert ends.sender.counters()["segments_free"] == 0

        del tensor
        ends.settle()

        assert ends.sender.counters()["segments_free"] == 1
        assert ends.receiver.counters()["segments_borrowed"] == 0

    def test_segment_is_not_returned_while_a_view_lives(self, open_ends):
        ends = open_ends()
        _send(ends, torch.arange(1000, dtype=torch.uint8))
        frames = ends.move()
        view = torch.empty(0, dtype=torch.uint8).set_(frames[0].buffers[0])[5:7]
        del frames
        ends.receiver.housekeeping(time.monotonic())

        assert ends.receiver.counters()["segments_borrowed"] == 1
        _send(ends, torch.zeros(1000, dtype=torch.uint8))
        ends.move()

        assert view.tolist() == [5, 6]
        assert ends.sender.counters()["segments"] == 2

    def test_segments_are_reused(self, open_ends):
        ends = open_ends()
        descriptors = _count_descriptors()

        for number in range(50):
            _send(ends, torch.full((100_000,), number, dtype=torch.uint8))
            frames = ends.move()
            assert bytes_of(frames[0].buffers[0]) == bytes([number]) * 100_000
            del frames
            ends.settle()

        assert ends.sender.counters()["segments"] == 1
        assert ends.receiver.counters()["segments_mapped"] == 1
        assert _count_descriptors() == descriptors

    def test_segments_of_similar_size_are_reused(self, open_ends):
        ends = open_ends()
        for size in (1 << 20, (1 << 20) - 5000):
            _send(ends, torch.zeros(size, dtype=torch.uint8))
            del [ends.move()][:]
            ends.settle()

        assert ends.sender.counters()["segments"] == 1

    def test_much_smaller_buffer_does_not_take_a_large_segment(self, open_ends):
        ends = open_ends()
        for size in (8 << 20, 1000):
            _send(ends, torch.zeros(size, dtype=torch.uint8))
            del [ends.move()][:]
            ends.settle()

        assert ends.sender.counters()["segments"] == 2

    def test_return_travels_with_the_next_frame(self, open_ends):
        ends = open_ends()
        _send(ends, torch.zeros(1000, dtype=torch.uint8))
        del [ends.move()][:]

        ends.receiver.send(b"answer")

        assert receive_frames(ends.sender, 1)[0].head == b"answer"
        assert ends.sender.counters()["segments_free"] == 1

    def test_no_descriptors_are_kept(self, open_ends):
        ends = open_ends()
        descriptors = _count_descriptors()
        sent = [torch.full((5000,), n, dtype=torch.uint8) for n in range(60)]

        for tensor in sent:
            _send(ends, tensor)
        frames = ends.move(60)

        assert ends.sender.counters()["segments"] == 60
        assert _count_descriptors() == descriptors
        assert [bytes_of(f.buffers[0])[0] for f in frames] == list(range(60))

    def test_frame_with_many_new_segments_arrives(self, open_ends):
        ends = open_ends()
        sent = [torch.full((5000,), n, dtype=torch.uint8) for n in range(100)]

        _send(ends, *sent)

        (frame,) = ends.move()
        assert [bytes_of(b)[0] for b in frame.buffers] == list(range(100))

    def test_tensor_survives_the_end_of_the_connection(self, open_ends):
        ends = open_ends()
        _send(ends, torch.full((200_000,), 7, dtype=torch.uint8))
        (frame,) = ends.move()
        tensor = torch.empty(0, dtype=torch.uint8).set_(frame.buffers[0])
        address = tensor.data_ptr()
        ends.sender.close()
        ends.receiver.close()
        del frame, ends

        tensor[0] = 8
        assert _is_mapped(address)
        assert tensor.sum() == 7 * 199_999 + 8

    def test_memory_is_unmapped_when_nobody_needs_it(self, open_ends):
        transport_ends = open_ends()
        _send(transport_ends, torch.full((200_000,), 7, dtype=torch.uint8))
        (frame,) = transport_ends.move()
        address = frame.buffers[0].data_ptr()
        assert _is_mapped(address)

        del frame
        transport_ends.settle()
        # Long unused: the sender drops it, and tells the receiver.
        transport_ends.sender.housekeeping(time.monotonic() + 3600.0)
        assert wait_readable(transport_ends.receiver)
        assert transport_ends.receiver.receive() == []

        assert transport_ends.sender.counters()["segment_bytes"] == 0
        assert transport_ends.receiver.counters()["segments_mapped"] == 0
        assert not _is_mapped(address)

    def test_free_segments_over_the_limit_are_dropped(self, open_ends):
        keep = 3 << 20
        ends = open_ends(
            Limits(shared_memory_min_bytes=1, shared_memory_keep_bytes=keep)
        )
        for number in range(6):
            _send(ends, torch.full((1 << 20,), number, dtype=torch.uint8))
        frames = ends.move(6)
        assert ends.sender.counters()["segment_bytes"] == 6 << 20

        frames.clear()
        ends.settle()
        ends.sender.housekeeping(time.monotonic())
        assert wait_readable(ends.receiver)
        assert ends.receiver.receive() == []

        assert ends.sender.counters()["segment_bytes"] == keep
        assert ends.receiver.counters()["segments_mapped"] == 3

    def test_lent_segments_are_not_dropped(self, open_ends):
        ends = open_ends(Limits(shared_memory_min_bytes=1, shared_memory_keep_bytes=0))
        _send(ends, torch.full((1000,), 5, dtype=torch.uint8))
        (frame,) = ends.move()

        ends.sender.housekeeping(time.monotonic() + 3600.0)

        assert ends.sender.counters()["segments"] == 1
        assert bytes_of(frame.buffers[0]) == b"\5" * 1000

    def test_stream_serves_if_there_is_no_memory(self, open_ends, monkeypatch):
        def fail(*args: object) -> int:
            raise OSError(errno.EMFILE, "no descriptors left")

        monkeypatch.setattr(os, "memfd_create", fail)
        ends = open_ends()
        tensor = torch.arange(200_000, dtype=torch.int32)

        _send(ends, tensor)

        (frame,) = ends.move()
        assert bytes_of(frame.buffers[0]) == bytes(tensor.numpy())
        assert ends.sender.counters()["segments"] == 0

    def test_stream_serves_if_memory_cannot_be_sized(self, open_ends, monkeypatch):
        def fail(*args: object) -> None:
            raise OSError(errno.ENOSPC, "no memory left")

        monkeypatch.setattr(os, "ftruncate", fail)
        ends = open_ends()
        descriptors = _count_descriptors()

        _send(ends, torch.full((200_000,), 3, dtype=torch.uint8))

        (frame,) = ends.move()
        assert bytes_of(frame.buffers[0]) == b"\3" * 200_000
        assert _count_descriptors() == descriptors

    def test_descriptor_that_was_not_sent_is_closed_with_the_connection(
        self, open_ends
    ):
        ends = open_ends(Limits(shared_memory_min_bytes=1 << 20))
        descriptors = _count_descriptors()
        fill(ends.sender, torch.zeros((1 << 20) - 1, dtype=torch.uint8))
        _send(ends, torch.zeros(1 << 20, dtype=torch.uint8))
        assert _count_descriptors() == descriptors + 1

        ends.sender.close()

        # The sender's socket is closed too.
        assert _count_descriptors() == descriptors - 1


class _Liar:
    """A peer that talks to a real connection by hand, over a Unix socket."""

    def __init__(self) -> None:
        self.listener = get_transport("unix").listen("", 0, f"gradwire-liar-{id(self)}")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("\0" + self.listener.address)
        channel = self.listener.accept()
        assert channel is not None
        self.victim = channel.upgrade(SMALL, b"")

    def close(self) -> None:
        self.sock.close()
        self.victim.close()
        self.listener.close()

    def say(self, kind: int, *numbers: int, fds: tuple[int, ...] = ()) -> None:
        head = struct.pack(f"!{len(numbers)}Q", *numbers)
        data = struct.pack("!IHBB", len(head), 0, kind, 0x67) + head
        socket.send_fds(self.sock, [data], list(fds))

    def lend(self, number: int, nbytes: int) -> None:
        table = struct.pack("!IHBBQQ", 0, 1, DATA, 0x67, number, nbytes)
        self.sock.sendall(table)

    def offer(self, number: int, size: int, *, seals: int = SEALS) -> None:
        fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            self.say(OFFER, number, size, fds=(fd,))
        finally:
            os.close(fd)


@pytest.fixture
def liar() -> Iterator[_Liar]:
    liar = _Liar()
    yield liar
    liar.close()


@needs_memfd
class TestLyingPeer:
    def refuses(self, liar: _Liar, text: str) -> None:
        with pytest.raises(RemoteProtocolError, match=text):
            receive_frames(liar.victim, 1)

    def test_honest_segment_is_accepted(self, liar):
        liar.offer(1, 4096)
        liar.lend(1, 4096)

        (frame,) = receive_frames(liar.victim, 1)

        assert bytes_of(frame.buffers[0]) == bytes(4096)

    def test_segment_larger_than_its_file_is_refused(self, liar):
        liar.offer(1, 4097)
        self.refuses(liar, "offered segment 1 of 4097 bytes, but its file has 4096")

    def test_segment_of_no_size_is_refused(self, liar):
        liar.offer(1, 0)
        self.refuses(liar, "offered segment 1 of 0 bytes")

    def test_segment_of_absurd_size_is_refused(self, liar):
        liar.offer(1, 2**64 - 1)
        self.refuses(liar, "offered segment 1")

    def test_segment_that_may_shrink_is_refused(self, liar):
        liar.offer(1, 4096, seals=fcntl.F_SEAL_GROW)
        self.refuses(liar, "seals 0x4")

    def test_segment_that_cannot_be_written_is_refused(self, liar):
        liar.offer(1, 4096, seals=SEALS | fcntl.F_SEAL_WRITE)
        self.refuses(liar, "cannot be mapped")

    def test_file_is_no_segment(self, liar, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            liar.say(OFFER, 1, 4096, fds=(file.fileno(),))
        self.refuses(liar, "segment 1")

    def test_socket_is_no_segment(self, liar):
        liar.say(OFFER, 1, 4096, fds=(liar.sock.fileno(),))
        self.refuses(liar, "segment 1")

    def test_offer_without_descriptor_is_refused(self, liar):
        liar.say(OFFER, 1, 4096)
        self.refuses(liar, "without descriptor")

    def test_segment_offered_twice_is_refused(self, liar):
        liar.offer(1, 4096)
        liar.offer(1, 4096)
        self.refuses(liar, "offered segment 1 twice")

    def test_segment_never_offered_is_refused(self, liar):
        liar.lend(9, 100)
        self.refuses(liar, "segment 9, which it never offered")

    def test_loan_larger_than_the_segment_is_refused(self, liar):
        liar.offer(1, 4096)
        liar.lend(1, 4097)
        self.refuses(liar, "used 4097 bytes of segment 1")

    def test_loan_of_nothing_is_refused(self, liar):
        liar.offer(1, 4096)
        liar.lend(1, 0)
        self.refuses(liar, "used 0 bytes of segment 1")

    def test_segment_lent_twice_is_refused(self, liar):
        liar.offer(1, 4096)
        liar.lend(1, 100)
        kept = receive_frames(liar.victim, 1)
        liar.lend(1, 100)
        self.refuses(liar, "segment 1 while it is lent")
        del kept

    def test_segment_lent_twice_in_one_frame_is_refused(self, liar):
        liar.offer(1, 4096)
        table = struct.pack("!IHBBQQQQ", 0, 2, DATA, 0x67, 1, 10, 1, 10)
        liar.sock.sendall(table)
        self.refuses(liar, "segment 1 while it is lent")

    def test_dropping_a_lent_segment_is_refused(self, liar):
        liar.offer(1, 4096)
        liar.lend(1, 100)
        kept = receive_frames(liar.victim, 1)
        liar.say(DROP, 1)
        self.refuses(liar, "dropped segment 1 out of turn")
        assert bytes_of(kept[0].buffers[0]) == bytes(100)

    def test_dropping_an_unknown_segment_is_refused(self, liar):
        liar.say(DROP, 5)
        self.refuses(liar, "dropped segment 5 out of turn")

    def test_returning_an_unknown_segment_is_refused(self, liar):
        liar.say(RETURN, 5)
        self.refuses(liar, "returned shared-memory segment 5")

    def test_returning_a_segment_twice_is_refused(self, liar):
        tensor = torch.zeros(100, dtype=torch.uint8)
        liar.victim.send(b"", [raw_buffer(tensor)])
        liar.say(RETURN, 1, 1)
        self.refuses(liar, "returned shared-memory segment 1")

    def test_odd_list_of_segments_is_refused(self, liar):
        liar.sock.sendall(struct.pack("!IHBB", 5, 0, RETURN, 0x67) + b"12345")
        self.refuses(liar, "malformed shared-memory frame")

    def test_flood_of_descriptors_is_refused(self, liar):
        header = struct.pack("!IHBB", 1000, 0, DATA, 0x67)
        liar.sock.sendall(header)
        for _ in range(20):
            socket.send_fds(liar.sock, [b"x"], [liar.sock.fileno()] * 10)
        self.refuses(liar, "descriptors that no frame announces")

    def test_descriptors_nobody_asked_for_are_closed(self, liar):
        descriptors = _count_descriptors()
        header = struct.pack("!IHBB", 2, 0, DATA, 0x67)
        socket.send_fds(liar.sock, [header + b"hi"], [liar.sock.fileno()] * 10)
        assert receive_frames(liar.victim, 1)[0].head == b"hi"

        liar.victim.close()

        assert _count_descriptors() < descriptors


def test_tcp_refuses_segments():
    transport = get_transport("tcp")
    listener = transport.listen("127.0.0.1", 0, "")
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        assert wait_readable(listener)
        channel = listener.accept()
        assert channel is not None
        victim = channel.upgrade(SMALL, b"")
        sock.sendall(struct.pack("!IHBBQ", 8, 0, RETURN, 0x67, 1))

        with pytest.raises(RemoteProtocolError, match="shared-memory"):
            receive_frames(victim, 1)
        victim.close()
    listener.close()
