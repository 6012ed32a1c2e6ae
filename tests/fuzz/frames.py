"""Streams of frames: the parser under every connection.

A stream is read in pieces through a small buffer, and some are read at once as well: both
must give the same frames and the same end.
"""

from __future__ import annotations

import array
import fcntl
import itertools
import os
import random
import socket
import struct
from typing import Any, NamedTuple

import torch

import mutations
from fuzz.corpus import make_messages, with_raw_buffers
from fuzz.running import Finding, Target
from gradwire.errors import GradwireError, RemoteProtocolError
from gradwire.transport import Limits
from gradwire.transport import _stream as stream
from gradwire.transport.base import Frame

LIMITS = Limits(
    max_head_bytes=64 << 10,
    max_frame_bytes=1 << 20,
    shared_memory_min_bytes=1 << 12,
    shared_memory_keep_bytes=1 << 16,
)
_SMALL_READ, _LARGE_READ = 200, 32 << 10
_SEGMENT_BYTES = 4096
_MARK = 0x67


class Piece(NamedTuple):
    """One frame, before it is damaged."""

    kind: int
    head: bytes
    table: tuple[tuple[int, int], ...] = ()
    bulk: bytes = b""


class Stream(NamedTuple):
    """An input: bytes, where they are cut, and what comes with them."""

    data: bytes
    cuts: tuple[int, ...]
    is_compared: bool  # read at once, too, to see the same
    shares_memory: bool
    descriptors: tuple[str, ...]


class Recording:
    """Stands where a socket does: gives recorded pieces, and then the end."""

    def __init__(self, given: Stream, cuts: tuple[int, ...], files: dict[str, int]):
        edges = sorted({0, len(given.data), *(c % (len(given.data) + 1) for c in cuts)})
        self._pieces = [given.data[a:b] for a, b in itertools.pairwise(edges)][::-1]
        self._descriptors = [os.dup(files[name]) for name in given.descriptors]

    def recv_into(self, target: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop()
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        if count < len(piece):
            self._pieces.append(piece[count:])
        return count

    def recvmsg_into(self, targets: Any, _size: int, _flags: int) -> Any:
        count = self.recv_into(targets[0])
        ancillary = []
        if self._descriptors:
            data = array.array("i", self._descriptors).tobytes()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)]
            self._descriptors = []
        return count, ancillary, 0, None

    def send(self, data: bytes) -> int:
        return len(data)

    def setblocking(self, _flag: bool) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def shutdown(self, _how: int) -> None:
        pass

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class Frames(Target):
    name = "frames"
    errors = (RemoteProtocolError,)

    def __init__(self) -> None:
        self._pieces = _make_corpus()
        self._whole = [serialise(piece) for piece in self._pieces]
        self._files = _make_files()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def make(self, choice: random.Random) -> Stream:
        pieces = choice.choices(self._pieces, k=choice.choice((1, 1, 2, 3, 5)))
        kind = choice.random()
        if kind < 0.2:
            return self._lend(choice)
        data = b"".join(
            _lie(piece, choice) if kind < 0.5 and choice.random() < 0.6 else whole
            for piece, whole in ((piece, serialise(piece)) for piece in pieces)
        )
        if kind > 0.4:
            data = mutations.mutate(data, choice, self._whole)
        shares = choice.random() < 0.3
        names = list(self._files)
        num = choice.choice((0, 0, 1, 1, 2, 3)) if shares else 0
        num = 70 if shares and choice.random() < 0.005 else num
        return Stream(
            data,
            tuple(int(choice.random() * 5000) for _ in range(choice.choice((0, 1, 3)))),
            choice.random() < 0.3,
            shares,
            tuple(choice.choice(names) for _ in range(num)),
        )

    def sound_inputs(self) -> list[Stream]:
        return [
            Stream(serialise(piece), (3, 9), True, False, ())
            for piece in self._pieces
            if piece.kind == 0 and all(segment == 0 for segment, _ in piece.table)
        ]

    def _lend(self, choice: random.Random) -> Stream:
        """Frames about one shared segment, each of them true or almost."""
        size = choice.choice((1, 100, _SEGMENT_BYTES, _SEGMENT_BYTES + 1, 1 << 20))
        steps = [
            (1, struct.pack("!QQ", 1, choice.choice((_SEGMENT_BYTES, size))), ()),
            (0, b"lent", ((1, size),)),
            (3, struct.pack("!Q", 1), ()),
            (2, struct.pack("!Q", 1), ()),
        ]
        chosen = steps[: choice.choice((1, 2, 2, 3))] + choice.choices(
            steps, k=choice.choice((0, 1, 2))
        )
        data = b"".join(serialise(Piece(*step)) for step in chosen)
        names = ("sealed", "sealed", choice.choice(list(self._files)))
        cuts = tuple(int(choice.random() * 200) for _ in range(3))
        return Stream(
            data,
            cuts,
            choice.random() < 0.5,
            True,
            names[choice.choice((0, 0, 2)) :],
        )

    def feed(self, given: Stream) -> str:
        frames, error = found = self._read(given, given.cuts, _SMALL_READ)
        if given.is_compared:
            whole = self._read(given, (), _LARGE_READ)
            if whole != found:
                raise Finding(f"read in pieces it is another stream: {whole}, {found}")
        if error is not None:
            raise error.original
        return f"{min(len(frames), 3)} frames"

    def _read(
        self, given: Stream, cuts: tuple[int, ...], read_bytes: int
    ) -> tuple[list[tuple[bytes, list[bytes]]], Failure | None]:
        recording = Recording(given, cuts, self._files)
        before = stream._READ_BYTES
        stream._READ_BYTES = read_bytes
        try:
            connection = stream.StreamConnection(
                "unix",
                recording,  # type: ignore[arg-type]
                LIMITS,
                shares_memory=given.shares_memory,
            )
        finally:
            stream._READ_BYTES = before
        frames: list[Frame] = []
        failure = None
        try:
            while connection.end is None:
                frames += connection.receive()
                _check_allocated(connection)
                if connection._borrowed._mapped and "sealed" not in given.descriptors:
                    raise Finding("memory was mapped that may shrink")
        except GradwireError as error:
            frames += connection._inbox
            failure = Failure(error)
        finally:
            connection.close()
        return [_contents(frame) for frame in frames], failure


class Failure:
    """An error that equals others of the same sort."""

    def __init__(self, original: GradwireError) -> None:
        self.original = original

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Failure) and (
            type(self.original) is type(other.original)
            and str(self.original) == str(other.original)
        )

    def __hash__(self) -> int:
        return hash(type(self.original))

    def __repr__(self) -> str:
        return repr(self.original)


def _check_allocated(connection: stream.StreamConnection) -> None:
    bulk, long = connection._bulk, connection._long
    in_bulk = sum(s.nbytes() for s in bulk.storages) if bulk is not None else 0
    if in_bulk > LIMITS.max_frame_bytes:
        raise Finding(f"{in_bulk} bytes for the buffers of one frame")
    if long is not None:
        table_bytes = 16 * int.from_bytes(long[4:6], "big")
        if len(long) > 8 + table_bytes + LIMITS.max_head_bytes:
            raise Finding(f"{len(long)} bytes for the head of one frame")


def _contents(frame: Frame) -> tuple[bytes, list[bytes]]:
    total = len(frame.head) + sum(s.nbytes() for s in frame.buffers)
    if total > LIMITS.max_frame_bytes or len(frame.head) > LIMITS.max_head_bytes:
        raise Finding(f"a frame of {total} bytes with a head of {len(frame.head)}")
    return frame.head, [_bytes_of(storage) for storage in frame.buffers]


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    if not storage.nbytes():
        return b""
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes()


def serialise(piece: Piece) -> bytes:
    return _header(len(piece.head), len(piece.table), piece.kind) + _rest(piece)


def _header(head_bytes: int, num_buffers: int, kind: int, mark: int = _MARK) -> bytes:
    return struct.pack(
        "!IHBB", head_bytes % 2**32, num_buffers % 2**16, kind % 256, mark
    )


def _rest(piece: Piece) -> bytes:
    table = b"".join(struct.pack("!QQ", a % 2**64, b % 2**64) for a, b in piece.table)
    return table + piece.head + piece.bulk


def _lie(piece: Piece, choice: random.Random) -> bytes:
    """The frame with one of its numbers changed, and all else as it was."""
    number = choice.choice(mutations.EDGES)
    head_bytes, num_buffers, kind, mark = (
        len(piece.head),
        len(piece.table),
        piece.kind,
        _MARK,
    )
    match int(choice.random() * 7):
        case 0:
            head_bytes = choice.choice(
                (number, head_bytes + number, LIMITS.max_head_bytes + number % 3 - 1)
            )
        case 1:
            num_buffers = number
        case 2:
            kind = number
        case 3:
            mark = number % 256
        case 4 | 5 if piece.table:
            table = list(piece.table)
            at = choice.randrange(len(table))
            segment, nbytes = table[at]
            table[at] = choice.choice(
                (
                    (segment, number),
                    (number, nbytes),
                    (segment, LIMITS.max_frame_bytes + number % 5 - 2),
                    (1, choice.choice((_SEGMENT_BYTES, _SEGMENT_BYTES + 1, 1))),
                )
            )
            piece = piece._replace(table=tuple(table))
        case _:
            numbers = [
                choice.choice(mutations.EDGES) % 2**64 for _ in range(number % 5)
            ]
            head = struct.pack(f"!{len(numbers)}Q", *numbers)
            piece, kind = Piece(0, head), choice.choice((1, 2, 3))
            head_bytes, num_buffers = len(head), 0
    return _header(head_bytes, num_buffers, kind, mark) + _rest(piece)


def _make_corpus() -> list[Piece]:
    pieces = []
    for outgoing in make_messages():
        buffers = with_raw_buffers(outgoing)
        table = tuple((0, len(buffer)) for buffer in buffers)
        pieces.append(Piece(0, outgoing.head, table, b"".join(buffers)))
    for kind, numbers in (
        (1, (1, _SEGMENT_BYTES)),
        (1, (2, _SEGMENT_BYTES // 2)),
        (2, (1,)),
        (3, (1, 2)),
    ):
        pieces.append(Piece(kind, struct.pack(f"!{len(numbers)}Q", *numbers)))
    pieces.append(Piece(0, b"lent", ((1, 100),)))
    pieces.append(Piece(0, b"lent", ((1, 100), (0, 3), (2, 2000)), b"abc"))
    pieces.append(Piece(0, b""))
    pieces.append(Piece(0, bytes(300)))
    return pieces


def _make_files() -> dict[str, int]:
    """What may come with a stream: a sound segment, and others."""
    sealed = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, _SEGMENT_BYTES)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    unsealed = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, _SEGMENT_BYTES)
    return {
        "sealed": sealed,
        "unsealed": unsealed,
        "null": os.open("/dev/null", os.O_RDWR),
    }
