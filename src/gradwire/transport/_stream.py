"""Frames over a stream socket: Unix, TCP and in-process pairs share this code.

Frame on the wire, big endian:

    u32 head bytes | u16 number of buffers | u8 kind | u8 mark
    per buffer:  u64 segment (0 = in the stream) | u64 bytes
    head
    buffers that are in the stream, one after the other

Kinds other than DATA are between the two connections only: they offer, return and drop
shared-memory segments.

A signal handler may raise at almost any point of the main thread, and a program may
catch that and go on. Bytes that the kernel took or gave must be counted all the same,
or the stream is lost. Note [counted calls]: Python looks for signals when a call
returns, so that in ``n = sock.send(data)`` the count can vanish; in ``(n,) =
map(sock.send, (data,))`` the system call happens while the result is unpacked, and the
count is stored before the next look. No call may follow until it is accounted for.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from gradwire.errors import ClosedError, LocalProtocolError, RemoteProtocolError
from gradwire.transport import _memory, _segments
from gradwire.transport._parts import Bulk, IncomingBulk, Offer, Tickets
from gradwire.transport.base import Connection, Frame, Limits, RawBuffer, Ticket

__all__ = ["CLOSED", "StreamConnection"]

CLOSED = "it closed the connection: its process has probably ended; see its output"
"""The end of a connection that the peer has closed without a word."""

_HEADER = struct.Struct("!IHBB")
_HEADER_BYTES = _HEADER.size
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_DESCRIPTOR = struct.Struct("!QQ")
_MARK = 0x67
_DATA, _OFFER, _RETURN, _DROP = range(4)
_MAX_BUFFERS = 0xFFFF

_get_ident = threading.get_ident
_READ_BYTES = 256 << 10
_FRAMES_PER_READ = 64
_PARTS_PER_WRITE = 64
_JOIN_BYTES = 8 << 10
_MAX_DESCRIPTORS = 16
ANCILLARY_BYTES = (
    socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4) if hasattr(socket, "CMSG_SPACE") else 0
)
# As plain numbers: those of the module are enums, which look up what each ``&`` makes.
CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
_NO_DESCRIPTORS = (
    "a tensor came in shared memory, and no file descriptor was left to take it with (too "
    "many files are open, see ulimit -n)"
)
_ANCILLARY_BYTES, _CLOEXEC = (ANCILLARY_BYTES,), (CLOEXEC,)  # for `map`


_Part = bytes | memoryview | Bulk | Offer


class StreamConnection(Connection):
    """Frames over one connected, non-blocking stream socket."""

    def __init__(
        self,
        scheme: str,
        sock: socket.socket,
        limits: Limits,
        leftover: bytes = b"",
        *,
        shares_memory: bool = False,
        descriptors: Sequence[int] = (),
    ) -> None:
        sock.setblocking(False)
        self.scheme = scheme
        self.is_drained = not leftover
        self.end: str | None = None
        self._write_failure: str | None = None
        self._sock = sock
        self._fileno = sock.fileno()
        self._limits = limits
        self._max_head_bytes = min(limits.max_head_bytes, limits.max_frame_bytes)
        self._closed = False

        # Writing. The queue may be extended by any thread; only the holder of the lock
        # takes from it. The lock also guards `_lent`.
        self._queue: deque[_Part] = deque()
        self._write_lock = threading.Lock()
        self.writer = 0
        self._written = 0  # of the queue's begin, not taken off yet
        # Larger frames are written in two parts: a copy of all of it would cost more. Not
        # by TLS, which cannot, and would make two records of them.
        self._most_joined = _JOIN_BYTES if hasattr(sock, "sendmsg") else sys.maxsize
        # Nothing has to be done before a write; see `send`.
        self._writes_directly = type(self).flush is StreamConnection.flush

        # Reading: touched by the one thread that reads at a time.
        self._buffer = bytearray(max(_READ_BYTES, len(leftover)))
        self._view = memoryview(self._buffer)
        self._capacity = len(self._buffer)
        self._buffer[: len(leftover)] = leftover
        self._start, self._stop = 0, len(leftover)
        self._long: memoryview | None = None  # a head that is larger than the buffer
        self._bulk: IncomingBulk | None = None  # buffers of the frame being read
        self._long_filled = 0
        self._descriptors: deque[int] = deque(descriptors)
        self._has_missed_some = False  # the kernel has dropped descriptors
        self._inbox: list[Frame] = []

        self._lent = _segments.LentSegments(limits.shared_memory_keep_bytes)
        self._borrowed = _segments.BorrowedSegments()
        self._shares_memory = (
            shares_memory and limits.shares_memory and _segments.is_supported()
        )
        # For `map`: a read into all of the buffer, as `_read` makes it.
        self._whole_read = (
            (sock.recvmsg_into, ((self._view,),), _ANCILLARY_BYTES, _CLOEXEC)
            if self._shares_memory
            else None
        )
        self._bytes_sent = self.bytes_received = 0
        self._frames_sent = self._frames_received = 0

    def fileno(self) -> int:
        return self._fileno

    # ------------------------------------------------------------------ sending

    def send(
        self, head: bytes, buffers: Sequence[RawBuffer] = (), *, hold: bool = False
    ) -> Ticket | None:
        size = len(head)
        if self._closed or size > self._max_head_bytes:
            self._refuse(size)
        if buffers:
            return self._send_with_buffers(head, buffers)
        self._frames_sent += 1
        header = _pack_header(size, 0, _DATA, _MARK)
        if self._borrowed.ended:
            header = self._returns() + header
        size += len(header)
        is_joined = size <= self._most_joined
        parts = (header + head,) if is_joined else (header, head)
        queue, lock = self._queue, self._write_lock
        # One call, here and below, so that parts of two frames never mix.
        if hold:
            queue.extend(parts)
            return None
        if queue or not (self._writes_directly and lock.acquire(False)):
            queue.extend(parts)
            self.flush()
            return None
        # As `flush` does, written out for what is alone and fits, as most of it does: that
        # is never in the queue, which gets the rest, and whatever went wrong.
        try:
            self.writer = _get_ident()
            if queue:  # another thread was faster
                queue.extend(parts)
            else:
                try:  # Note [counted calls]
                    (written,) = (
                        map(self._sock.send, parts)
                        if is_joined
                        else map(self._sock.sendmsg, (parts,))
                    )
                except OSError:  # also if it was closed meanwhile
                    written = 0
                if written == size:
                    self._bytes_sent += size
                else:  # before what others have left meanwhile
                    self._written = written
                    queue.extendleft(parts[::-1])
        finally:
            self.writer = 0
            lock.release()
        if queue:
            self.flush()
        return None

    def _refuse(self, head_bytes: int) -> NoReturn:
        if self._closed:
            raise ClosedError("the connection is closed")
        raise LocalProtocolError(
            f"the message has {head_bytes} bytes beside its tensors, the limit is "
            f"{self._max_head_bytes} (options max_head_bytes, max_frame_bytes)"
        )

    def _send_with_buffers(
        self, head: bytes, buffers: Sequence[RawBuffer]
    ) -> Ticket | None:
        total = len(head) + sum(b[1] for b in buffers)
        if total > self._limits.max_frame_bytes or len(buffers) > _MAX_BUFFERS:
            raise LocalProtocolError(
                f"the message has {total} bytes in {len(buffers)} buffers, the limits are "
                f"{self._limits.max_frame_bytes} bytes (option max_frame_bytes) and "
                f"{_MAX_BUFFERS} buffers"
            )
        self._frames_sent += 1
        parts: list[_Part] = []
        table = [_pack_header(len(head), len(buffers), _DATA, _MARK)]
        bulks: list[Bulk] = []
        # The collector may run a finaliser in the middle of a write, and that may send:
        # then it must not wait, neither for the lock nor for the write to be over.
        is_in_write = self.writer == _get_ident()
        copies: list[bytes] = []
        for buffer in buffers:
            address, nbytes, _ = buffer
            segment = 0
            if is_in_write:
                copies.append(_memory.read(address, nbytes))
            else:
                segment = self._fill_segment(address, nbytes, parts)
            table.append(_DESCRIPTOR.pack(segment, nbytes))
            if not segment and nbytes and not is_in_write:
                bulks.append(Bulk(buffer, self._write_lock))
        table.append(head)
        if self._borrowed.ended:
            table.insert(0, self._returns())
        parts.append(b"".join([*table, *copies]))
        parts.extend(bulks)
        # One call, so that parts of two frames never mix.
        self._queue.extend(parts)
        self.flush()
        return Tickets(bulks) if bulks else None

    def _fill_segment(self, address: int, nbytes: int, parts: list[_Part]) -> int:
        """Copies memory into a segment; 0 if it has to go through the stream."""
        if not self._shares_memory or nbytes < self._limits.shared_memory_min_bytes:
            return 0
        with self._writing():
            taken = self._lent.take(nbytes)
            if taken is None and not parts and self._is_all_read():
                self._lent.note_seen()
                taken = self._lent.take(nbytes)
        if taken is None:
            return 0
        number, mapping, descriptor = taken
        if descriptor is not None:
            offer = _DESCRIPTOR.pack(number, mapping.size)
            data = _pack_header(len(offer), 0, _OFFER, _MARK) + offer
            parts.append(Offer(data, descriptor, number, mapping))
        _memory.copy(mapping.address, address, nbytes)
        return number

    def _is_all_read(self) -> bool:
        """Whether the peer has taken all that was sent, and so all descriptors."""
        return not self._queue and _segments.is_all_read(self._fileno)

    def _returns(self) -> bytes:
        """A frame that gives segments back to the peer."""
        return _numbers_frame(_RETURN, self._borrowed.take_returns())

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def flush(self) -> bool:
        queue, lock = self._queue, self._write_lock
        while queue:
            if not lock.acquire(False):
                return True  # its holder looks at the queue again after releasing it
            try:
                self.writer = _get_ident()
                if self._closed:
                    self._abandon()
                    return True
                if not self._write_queue():
                    return False
            finally:
                self.writer = 0
                lock.release()
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the write lock; `flush` does the same, written out."""
        with self._write_lock:
            self.writer = _get_ident()
            try:
                yield
            finally:
                self.writer = 0

    def _write_queue(self) -> bool:
        """Writes from the queue until it is empty or the socket is full."""
        queue = self._queue
        if self._written:
            self._forward()  # the last write was interrupted before it was accounted for
        try:
            while queue:
                if len(queue) > 1:
                    self._join_small()
                first = queue[0]
                if type(first) is bytes and len(queue) == 1:
                    size = len(first)
                    # Note [counted calls]
                    (self._written,) = map(self._sock.send, (first,))
                    if self._written == size:
                        self._written = 0
                        del queue[0]
                        self._bytes_sent += size
                        continue
                else:
                    (self._written,) = self._next_write()
                self._forward()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS and type(queue[0]) is Offer:
                self._stream_instead(queue[0])
                return True  # whoever flushes finds that there is more
            self._abandon()
            # The reader wakes up, reads what the peer has said before (perhaps why it
            # closed), finds the end, and reports it.
            failure = f"writing failed: {error.strerror or error}"
            self._write_failure = self._write_failure or failure
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        return True

    def _join_small(self) -> None:
        """Makes one part of the small ones at the queue's begin: each costs a little."""
        queue = self._queue
        small = []
        # By index: other threads append meanwhile, which an iterator does not survive.
        for index in range(min(len(queue), _PARTS_PER_WRITE)):
            part = queue[index]
            if type(part) is not bytes or len(part) > _JOIN_BYTES:
                break
            small.append(part)
        if len(small) > 1:
            joined = b"".join(small)
            for _ in small:
                queue.popleft()
            queue.appendleft(joined)

    def _next_write(self) -> Iterable[int]:
        """One system call, made when the result is iterated, for the queue's begin."""
        first = self._queue[0]
        if type(first) is Offer and first.descriptor is not None:
            fds = array.array("i", [first.descriptor])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            return map(self._sock.sendmsg, ([first.view],), (ancillary,))
        batch: list[bytes | memoryview] = []
        for index in range(min(len(self._queue), _PARTS_PER_WRITE)):
            part = self._queue[index]
            if type(part) is Offer and part.descriptor is not None:
                break
            batch.append(part if isinstance(part, (bytes, memoryview)) else part.view)
        if len(batch) == 1 or not hasattr(self._sock, "sendmsg"):
            return map(self._sock.send, batch[:1])
        return map(self._sock.sendmsg, (batch,))

    def _stream_instead(self, offer: Offer) -> None:
        """Has a tensor go through the stream, as its segment cannot be passed on now.

        The kernel passes no more descriptors of this user until others were taken, perhaps
        by processes that are stopped. The offer is the queue's begin; the frame is behind
        it, and behind other offers for the same frame.
        """
        queue = self._queue
        at = start = 0
        while type(queue[at]) is Offer:
            at += 1
        data = queue[at]
        if not isinstance(data, bytes):
            raise AssertionError("a frame begins with bytes")
        head_bytes, _, kind, _ = _unpack_header(data, 0)
        if kind != _DATA:  # segments that are returned; the frame follows
            start = _HEADER_BYTES + head_bytes
        entry, place = start + _HEADER_BYTES, at
        segment, nbytes = _DESCRIPTOR.unpack_from(data, entry)
        while segment != offer.number:
            place += not segment and nbytes > 0
            entry += _DESCRIPTOR.size
            segment, nbytes = _DESCRIPTOR.unpack_from(data, entry)
        behind = entry + _DESCRIPTOR.size
        changed = data[:entry] + _DESCRIPTOR.pack(0, nbytes) + data[behind:]
        mapping = offer.mapping
        bulk = Bulk((mapping.address, nbytes, mapping), self._write_lock)
        # No call may come before the last of these: see `_take_frame`.
        queue[at] = changed
        del queue[0]
        queue.insert(place, bulk)
        offer.finish()
        self._lent.withdraw(offer.number)

    def _forward(self) -> None:
        """Takes the bytes that were written off the queue.

        May be interrupted and called again at any point: what is left of the count and
        the queue always change together, with no call in between.
        """
        queue = self._queue
        while self._written:
            part = queue[0]
            plain = isinstance(part, (bytes, memoryview))
            view = memoryview(part) if plain else part.view  # type: ignore[arg-type, union-attr]
            size = len(view)
            if self._written < size:
                self._bytes_sent += self._written
                if plain:
                    queue[0] = view[self._written :]
                else:
                    part.view = view[self._written :]  # type: ignore[union-attr]
                self._written = 0
                if not plain:
                    part.begin()  # type: ignore[union-attr]
                return
            del queue[0]
            self._written -= size
            self._bytes_sent += size
            if not plain:
                part.finish()  # type: ignore[union-attr]

    def _abandon(self) -> None:
        """Drops what cannot be written any more and wakes those who wait for it.

        The caller holds the write lock.
        """
        while self._queue:
            part = self._queue.popleft()
            if not isinstance(part, (bytes, memoryview)):
                part.finish()

    # ---------------------------------------------------------------- receiving

    def receive(self) -> list[Frame]:
        self.is_drained = False
        if (
            self._stop
            or self._inbox
            or self._bulk is not None
            or self._long is not None
        ):
            return self._receive_rest()
        # Nothing is left of earlier reads. Mostly one whole frame comes, without buffers:
        # it is returned at once. Whatever else was read is left to be parsed.
        view, whole_read = self._view, self._whole_read
        if whole_read is None:
            count = self._read(view)
        else:  # as `_read` does, written out for the case that nothing special happens
            try:
                ((count, ancillary, flags, _),) = map(*whole_read)
                self._stop = count
                if ancillary or not count or flags & _TRUNCATED:
                    self._note_what_came(count, ancillary, flags)
            except OSError as error:
                self._note_failed_read(error)
                count = 0
            self.bytes_received += count
        if count < self._capacity and not self._descriptors:
            self.is_drained = True
            head_bytes = count - _HEADER_BYTES
            is_whole = _unpack_header(view) == (head_bytes, 0, _DATA, _MARK)
            if is_whole and head_bytes <= self._max_head_bytes:
                frame = Frame(view[_HEADER_BYTES:count].tobytes(), [])
                # No call behind this: see `_take_frame`.
                self._stop = 0
                self._frames_received += 1
                return [frame]
        return self._receive_rest()

    def _receive_rest(self) -> list[Frame]:
        """Parses what was read, and reads on until nothing more comes."""
        while True:
            self._parse_small()
            if (
                self._start < self._stop
                or self._bulk is not None
                or self._long is not None
            ):
                while self._parse():
                    pass
            if self.is_drained or len(self._inbox) >= _FRAMES_PER_READ:
                break
            target = self._target()
            num_descriptors = len(self._descriptors)
            # The kernel ends a read behind bytes that carry descriptors, so only a
            # short read without them shows that nothing is left.
            if (
                self._read(target) < len(target)
                and len(self._descriptors) == num_descriptors
            ):
                self.is_drained = True
        if self._start == self._stop:
            self._start = self._stop = 0
        frames, self._inbox = self._inbox, []
        self._frames_received += len(frames)
        return frames

    def _target(self) -> memoryview:
        """Where the next bytes belong."""
        if self._bulk is not None and self._start == self._stop:
            return self._bulk.target()
        if self._long is not None:
            return self._long[self._long_filled :]
        if self._stop == self._capacity:
            # Full, with the begin of a frame at the end: move it to the front.
            rest = self._stop - self._start
            self._buffer[:rest] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, rest
        return self._view[self._stop :]

    def _read(self, target: memoryview) -> int:
        """Bytes read into the target; 0 if there are none now, or at the end."""
        ancillary: list[tuple[int, int, bytes]] = []
        flags = 0
        try:
            if self._shares_memory:  # Note [counted calls]
                ((count, ancillary, flags, _),) = map(
                    self._sock.recvmsg_into, ((target,),), _ANCILLARY_BYTES, _CLOEXEC
                )
            else:
                (count,) = map(self._sock.recv_into, (target,))
            if self._bulk is not None and self._start == self._stop:
                self._bulk.filled += count
            elif self._long is not None:
                self._long_filled += count
            else:
                self._stop += count
        except OSError as error:
            self._note_failed_read(error)
            return 0
        self.bytes_received += count
        if ancillary or not count or flags & _TRUNCATED:
            self._note_what_came(count, ancillary, flags)
        return count

    def _note_failed_read(self, error: OSError) -> None:
        if not isinstance(error, (BlockingIOError, InterruptedError)):
            problem = f"reading failed: {error.strerror or error}"
            self.end = self.end or self._write_failure or problem

    def _note_what_came(
        self, count: int, ancillary: list[tuple[int, int, bytes]], flags: int
    ) -> None:
        """A read has brought more than bytes, or none."""
        if flags & _TRUNCATED:
            self._has_missed_some = True
        if ancillary:
            self._keep_descriptors(ancillary)
        if not count:
            self.end = self.end or self._write_failure or CLOSED

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        self._descriptors.extend(descriptors_in(ancillary))
        if len(self._descriptors) > 4 * _MAX_DESCRIPTORS:
            raise RemoteProtocolError(
                "the peer sent descriptors that no frame announces"
            )

    def _parse_small(self) -> None:
        """Takes whole frames without buffers off the read buffer.

        Nothing but speed: `_parse` does the same, and all the rest.
        """
        if self._bulk is not None or self._long is not None:
            return
        start, stop, inbox, view = self._start, self._stop, self._inbox, self._view
        while stop - start > _HEADER_BYTES:
            head_bytes, num_buffers, kind, mark = _unpack_header(view, start)
            begin = start + _HEADER_BYTES
            end = begin + head_bytes
            if num_buffers or kind or mark != _MARK or end > stop:
                return
            if head_bytes > self._max_head_bytes:
                return
            frame = Frame(view[begin:end].tobytes(), [])
            # See `_take_frame` about the order of these.
            start = self._start = end
            inbox.append(frame)

    def _parse(self) -> bool:
        """Takes one step through the bytes that are there; False if more are needed."""
        if self._bulk is not None:
            return self._parse_bulk(self._bulk)
        if self._long is not None:
            if self._long_filled < len(self._long):
                return False
            data, self._long = self._long, None
            self._take_frame(data, 0, len(data), 0)
            return True
        start, stop = self._start, self._stop
        if stop - start < _HEADER_BYTES:
            if start == stop:
                self._start = self._stop = 0
            return False
        head_bytes, num_buffers, kind, mark = _unpack_header(self._buffer, start)
        if mark != _MARK or kind > _DROP or (kind != _DATA and num_buffers):
            raise RemoteProtocolError(
                "the peer sent bytes that are no frame "
                f"(header {bytes(self._view[start : start + _HEADER_BYTES]).hex()})"
            )
        if head_bytes > self._max_head_bytes:
            raise RemoteProtocolError(
                f"the peer announced a head of {head_bytes} bytes, the limit is "
                f"{self._max_head_bytes} (options max_head_bytes, max_frame_bytes)"
            )
        size = _HEADER_BYTES + num_buffers * _DESCRIPTOR.size + head_bytes
        if stop - start < size:
            if size > self._capacity:
                whole = self._allocate_long(size)
                have = stop - start
                whole[:have] = self._view[start:stop]
                self._long, self._long_filled = whole, have
                self._start = self._stop = 0
                return True
            if start + size > self._capacity:
                rest = stop - start
                self._buffer[:rest] = self._buffer[start:stop]
                self._start, self._stop = 0, rest
            return False
        self._take_frame(self._view, start, start + size, start + size)
        return True

    def _allocate_long(self, size: int) -> memoryview:
        try:
            return memoryview(bytearray(size))
        except MemoryError as error:
            raise RemoteProtocolError(
                f"the peer announced a head of {size} bytes, which cannot be allocated "
                "here (option max_head_bytes)"
            ) from error

    def _take_frame(
        self, data: memoryview, start: int, stop: int, next_start: int
    ) -> None:
        """Takes the frame in ``data[start:stop]``, all but its streamed buffers."""
        head_bytes, num_buffers, kind, _ = _unpack_header(data, start)
        head = data[stop - head_bytes : stop].tobytes()
        if kind == _DATA and num_buffers == 0:
            frame = Frame(head, [])
            # Nothing between these two may check for signals: no call before the
            # append, which happens before the check that follows it.
            self._start = next_start
            self._inbox.append(frame)
            return
        if kind != _DATA:
            self._start = next_start
            self._segment_frame(kind, head)
            return
        at = start + _HEADER_BYTES
        table = [
            _DESCRIPTOR.unpack_from(data, at + i * _DESCRIPTOR.size)
            for i in range(num_buffers)
        ]
        total = sum(nbytes for _, nbytes in table)
        if total + head_bytes > self._limits.max_frame_bytes:
            raise RemoteProtocolError(
                f"the peer announced a frame of {total + head_bytes} bytes, the limit is "
                f"{self._limits.max_frame_bytes} (option max_frame_bytes)"
            )
        self._start = next_start
        self._bulk = IncomingBulk(head, table, self._borrowed)

    def _parse_bulk(self, bulk: IncomingBulk) -> bool:
        """Moves bytes from the read buffer into the streamed buffers of the frame."""
        while (view := bulk.missing()) is not None:
            take = min(len(view), self._stop - self._start)
            if take == 0:
                return False
            view[:take] = self._view[self._start : self._start + take]
            self._start += take
            bulk.filled += take
        frame = Frame(bulk.head, bulk.storages)
        self._bulk = None
        self._inbox.append(frame)
        return True

    def _segment_frame(self, kind: int, head: bytes) -> None:
        if not self._shares_memory or len(head) % 8:
            raise RemoteProtocolError("the peer sent a malformed shared-memory frame")
        numbers = struct.unpack(f"!{len(head) // 8}Q", head)
        if kind == _OFFER:
            if self._has_missed_some and not self._descriptors:
                # What follows cannot be read without it.
                self.end, self.broke_off = self.end or _NO_DESCRIPTORS, True
                self._start = self._stop = 0
                self.is_drained = True
                return
            if len(numbers) != 2 or not self._descriptors:
                raise RemoteProtocolError(
                    "the peer offered a segment without descriptor"
                )
            self._borrowed.offer(numbers[0], numbers[1], self._descriptors.popleft())
        elif kind == _RETURN:
            now = time.monotonic()
            with self._writing():
                for number in numbers:
                    self._lent.give_back(number, now)
        else:
            for number in numbers:
                self._borrowed.forget(number)

    # -------------------------------------------------------------- housekeeping

    def shed(self) -> None:
        if self._shares_memory:
            with self._writing():
                self._lent.shed()

    def housekeeping(self, now: float) -> None:
        if self._closed or not self._shares_memory:
            return
        with self._writing():
            dropped = self._lent.trim(now)
        data = _numbers_frame(_DROP, dropped) if dropped else b""
        if self._borrowed.ended:
            data += self._returns()
        if data:
            self._queue.append(data)
            self.flush()

    def close(self) -> None:
        with self._writing():
            if self._closed:
                return
            if self.end is None:
                self._write_queue()  # the last words of others, as far as they fit
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._abandon()
            self._lent.clear()
        self._borrowed.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def counters(self) -> dict[str, int]:
        return {
            "bytes_sent": self._bytes_sent,
            "bytes_received": self.bytes_received,
            "frames_sent": self._frames_sent,
            "frames_received": self._frames_received,
            "queued_parts": len(self._queue),
            **self._lent.counters(),
            **self._borrowed.counters(),
        }


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a read; they are ours now."""
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return descriptors.tolist()


def _numbers_frame(kind: int, numbers: list[int]) -> bytes:
    head = struct.pack(f"!{len(numbers)}Q", *numbers)
    return _pack_header(len(head), 0, kind, _MARK) + head
