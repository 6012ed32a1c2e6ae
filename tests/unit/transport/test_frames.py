"""The stream protocol, byte by byte: literal frames, any fragmentation, any damage."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mutations
from gradwire.errors import RemoteProtocolError
from gradwire.testing.transport_suite import bytes_of, raw_buffer
from gradwire.transport import Frame, Limits, _stream
from gradwire.transport._stream import StreamConnection

MARK = 0x67
DEFAULTS = Limits()
DATA, OFFER, RETURN, DROP = range(4)


@contextmanager
def connected(
    limits: Limits = DEFAULTS, *, shares_memory: bool = False, leftover: bytes = b""
) -> Iterator[tuple[StreamConnection, socket.socket]]:
    """A connection, and the other end of its socket in our hands."""
    ours, theirs = socket.socketpair()
    connection = StreamConnection(
        "test", ours, limits, leftover, shares_memory=shares_memory
    )
    theirs.setblocking(False)
    try:
        yield connection, theirs
    finally:
        connection.close()
        theirs.close()


def receive_all(connection: StreamConnection) -> list[Frame]:
    frames = connection.receive()
    while not connection.is_drained:
        frames += connection.receive()
    return frames


def as_bytes(frames: list[Frame]) -> list[tuple[bytes, list[bytes]]]:
    return [(frame.head, [bytes_of(b) for b in frame.buffers]) for frame in frames]


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def encode(head: bytes, buffers: list[bytes]) -> bytes:
    """A frame, written down apart from the code under test."""
    table = b"".join(struct.pack("!QQ", 0, len(buffer)) for buffer in buffers)
    header = struct.pack("!IHBB", len(head), len(buffers), DATA, MARK)
    return header + table + head + b"".join(buffers)


# ---------------------------------------------------------------------- golden frames

GOLDEN = [
    pytest.param(b"", [], "00000000 0000 00 67", id="empty"),
    pytest.param(b"hi", [], "00000002 0000 00 67 6869", id="head"),
    pytest.param(
        b"hi",
        [b"\x01\x02\x03"],
        "00000002 0001 00 67 0000000000000000 0000000000000003 6869 010203",
        id="buffer",
    ),
    pytest.param(
        b"",
        [b"", b"\xff", b""],
        "00000000 0003 00 67"
        "0000000000000000 0000000000000000"
        "0000000000000000 0000000000000001"
        "0000000000000000 0000000000000000"
        "ff",
        id="empty_buffers",
    ),
]


@pytest.mark.parametrize(("head", "buffers", "golden"), GOLDEN)
def test_sent_frame_is_golden(head, buffers, golden):
    with connected() as (connection, wire):
        tensors = [tensor_of(buffer) for buffer in buffers]
        connection.send(head, [raw_buffer(tensor) for tensor in tensors])

        assert wire.recv(1000).hex() == golden.replace(" ", "")


@pytest.mark.parametrize(("head", "buffers", "golden"), GOLDEN)
def test_golden_frame_is_received(head, buffers, golden):
    with connected() as (connection, wire):
        wire.send(bytes.fromhex(golden))

        assert as_bytes(receive_all(connection)) == [(head, buffers)]


def test_shared_memory_frames_are_golden():
    with connected(
        Limits(shared_memory_min_bytes=1, shared_memory_keep_bytes=0),
        shares_memory=True,
    ) as (connection, wire):
        connection.send(b"hi", [raw_buffer(tensor_of(b"abc"))])
        # The read ends behind the bytes that carry the descriptor.
        offer, fds, _, _ = socket.recv_fds(wire, 1000, 10)
        size = os.fstat(fds[0]).st_size
        content = os.pread(fds[0], 3, 0)
        os.close(fds[0])
        data = wire.recv(1000)
        wire.send(bytes.fromhex("00000008 0000 02 67 0000000000000001"))
        connection.receive()
        connection.housekeeping(time.monotonic())
        drop = wire.recv(1000)

    assert len(fds) == 1
    assert size == 1 << 16
    assert content == b"abc"
    assert offer == bytes.fromhex(
        "00000010 0000 01 67 0000000000000001 0000000000010000"
    )
    assert data == bytes.fromhex(
        "00000002 0001 00 67 0000000000000001 0000000000000003 6869"
    )
    assert drop == bytes.fromhex("00000008 0000 03 67 0000000000000001")


def test_golden_segment_is_received_and_returned():
    fd = os.memfd_create("golden", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    os.pwrite(fd, b"abc", 0)
    fcntl = pytest.importorskip("fcntl")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with connected(shares_memory=True) as (connection, wire):
        offer = "00000010 0000 01 67 0000000000000005 0000000000010000"
        socket.send_fds(wire, [bytes.fromhex(offer)], [fd])
        os.close(fd)
        wire.send(
            bytes.fromhex("00000002 0001 00 67 0000000000000005 0000000000000003 6869")
        )
        frames = receive_all(connection)
        assert as_bytes(frames) == [(b"hi", [b"abc"])]

        frames.clear()
        connection.housekeeping(time.monotonic())

        assert wire.recv(1000) == bytes.fromhex("00000008 0000 02 67 0000000000000005")


# ----------------------------------------------------- descriptors that do not get through


def read_away(connection: StreamConnection, wire: socket.socket) -> None:
    """Reads all that was sent, as a peer that was stopped and goes on."""
    while True:
        try:
            fds = socket.recv_fds(wire, 1 << 16, 10)[1]
        except BlockingIOError:
            if connection.flush() and not connection.num_queued:
                return
            continue
        for fd in fds:
            os.close(fd)


def test_segments_that_the_peer_does_not_take_are_bounded():
    limits = Limits(shared_memory_min_bytes=1)
    with connected(limits, shares_memory=True) as (connection, wire):
        for _ in range(2):
            for _ in range(100):
                connection.send(b"", [raw_buffer(tensor_of(b"abc"))])
            bound = connection.counters()["segments"]
            read_away(connection, wire)

        assert connection.counters()["segments"] == bound == 2 * 64
        connection.send(b"", [raw_buffer(tensor_of(b"abc"))])
        assert connection.counters()["segments"] == bound + 1


class Reluctant(socket.socket):
    """A socket that passes some descriptors on, and has too many under way for others."""

    refused: set[int]
    num_offered = 0

    def sendmsg(self, buffers: Any, ancdata: Any = (), *args: Any) -> int:
        if ancdata:
            self.num_offered += 1
            if self.num_offered in self.refused:
                raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return super().sendmsg(buffers, ancdata, *args)


@pytest.mark.parametrize("refused", [{1}, {2}, {3}, {1, 2}, {2, 3}, {1, 2, 3}])
def test_tensor_whose_descriptor_is_refused_goes_through_the_stream(refused):
    buffers = [b"abc", b"defgh", b"", b"ij", b"klmnop", b"qrstuvw"]
    limits = Limits(shared_memory_min_bytes=4)
    ours, theirs = socket.socketpair()
    reluctant = Reluctant(fileno=ours.detach())
    reluctant.refused = refused
    first = StreamConnection("test", reluctant, limits, shares_memory=True)
    second = StreamConnection("test", theirs, limits, shares_memory=True)
    try:
        # So that what is sent begins with segments that are returned.
        second.send(b"", [raw_buffer(tensor_of(b"12345678"))])
        receive_all(first)

        for _ in range(2):
            first.send(b"hi", [raw_buffer(tensor_of(data)) for data in buffers])
            assert as_bytes(receive_all(second)) == [(b"hi", buffers)]
            second.housekeeping(time.monotonic())
            receive_all(first)

        num_shared = 2 * 3 - len(refused)
        assert first.counters()["segments"] == num_shared
        assert first.counters()["segments_free"] == num_shared
        assert second.counters()["segments_mapped"] == num_shared
    finally:
        first.close()
        second.close()


# -------------------------------------------------------------------- damaged frames


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("00000002 0000 00 66 6869", "no frame"),
        ("00000002 0000 04 67 6869", "no frame"),
        ("00000008 0001 02 67 0000000000000001", "no frame"),
        ("47455420 2f20 48 54", "no frame"),
        ("00001001 0000 00 67", "max_head_bytes"),
        ("00000000 0001 00 67 0000000000000000 0000000000010001", "max_frame_bytes"),
        ("00000000 0001 00 67 0000000000000000 ffffffffffffffff", "max_frame_bytes"),
        (
            "00000000 0002 00 67 0000000000000000 000000000000ffff"
            "0000000000000000 000000000000ffff",
            "max_frame_bytes",
        ),
        ("00000000 0001 00 67 0000000000000007 0000000000000001", "never offered"),
        ("00000008 0000 02 67 0000000000000001", "shared-memory"),
    ],
)
def test_broken_frame_is_refused(data, text):
    with connected(Limits(max_head_bytes=4096, max_frame_bytes=1 << 16)) as (
        connection,
        wire,
    ):
        wire.send(bytes.fromhex(data))

        with pytest.raises(RemoteProtocolError, match=text):
            receive_all(connection)


def test_receive_refuses_buffer_that_cannot_be_allocated():
    with connected(Limits(max_frame_bytes=1 << 62)) as (connection, wire):
        wire.send(struct.pack("!IHBBQQ", 0, 1, DATA, MARK, 0, 1 << 61))

        with pytest.raises(RemoteProtocolError):
            receive_all(connection)


# ------------------------------------------------------------------- any fragmentation

_SMALL_READ_BYTES = 64
frames_strategy = st.lists(
    st.tuples(
        st.binary(max_size=3 * _SMALL_READ_BYTES),
        st.lists(st.binary(max_size=2 * _SMALL_READ_BYTES), max_size=3),
    ),
    max_size=6,
)


def small_read_buffer() -> mock._patch[int]:
    """So that few bytes reach what many bytes reach otherwise."""
    return mock.patch.object(_stream, "_READ_BYTES", _SMALL_READ_BYTES)


@settings(max_examples=80, deadline=None)
@given(frames=frames_strategy, data=st.data())
def test_frames_survive_any_fragmentation(frames, data):
    stream = b"".join(encode(*frame) for frame in frames)
    leftover = data.draw(st.integers(0, len(stream)), "leftover")
    found = []
    with (
        small_read_buffer(),
        connected(leftover=stream[:leftover]) as (
            connection,
            wire,
        ),
    ):
        at = leftover
        found += receive_all(connection)
        while at < len(stream):
            size = data.draw(st.integers(1, len(stream) - at), "size")
            wire.send(stream[at : at + size])
            at += size
            found += receive_all(connection)
        wire.close()
        found += receive_all(connection)

        assert as_bytes(found) == frames
        assert connection.end is not None


@settings(max_examples=60, deadline=None)
@given(frames=frames_strategy, shares_memory=st.booleans())
def test_frames_are_sent_as_written_down(frames, shares_memory):
    with connected(shares_memory=shares_memory) as (connection, wire):
        for head, buffers in frames:
            tensors = [tensor_of(buffer) for buffer in buffers]
            connection.send(head, [raw_buffer(tensor) for tensor in tensors])

        stream = b"".join(encode(*frame) for frame in frames)
        assert (wire.recv(len(stream)) if stream else b"") == stream


# --------------------------------------------------------------------- random mutations


def _valid_stream(choice: random.Random) -> bytes:
    parts = []
    for _ in range(choice.randint(1, 6)):
        kind = choice.choice([DATA, DATA, DATA, RETURN, DROP, OFFER])
        if kind == DATA:
            buffers = [choice.randbytes(choice.randrange(90)) for _ in range(2)]
            head = choice.randbytes(choice.randrange(150))
            parts.append(encode(head, buffers[: choice.randrange(3)]))
        else:
            head = struct.pack("!Q", 1) * choice.randrange(3)
            parts.append(struct.pack("!IHBB", len(head), 0, kind, MARK) + head)
    return b"".join(parts)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_damaged_stream_is_refused_or_ends(shares_memory):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    limits = Limits(
        max_head_bytes=1 << 16, max_frame_bytes=1 << 20, shared_memory_min_bytes=1
    )
    outcomes = {"refused": 0, "ended": 0}
    with small_read_buffer():
        for _ in range(1500):
            data = mutations.mutate(_valid_stream(choice), choice)
            with connected(limits, shares_memory=shares_memory) as (connection, wire):
                if choice.random() < 0.5:
                    connection.send(b"", [raw_buffer(tensor_of(b"lent"))])
                wire.send(data)
                wire.close()
                try:
                    while connection.end is None:
                        connection.receive()
                    outcomes["ended"] += 1
                except RemoteProtocolError:
                    outcomes["refused"] += 1

    assert min(outcomes.values()) > 0, outcomes
