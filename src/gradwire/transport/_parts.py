"""Parts of frames that are more than bytes in a buffer: memory on its way, descriptors."""

from __future__ import annotations

import os
import threading
import time

import torch

from gradwire.errors import RemoteProtocolError
from gradwire.transport import _memory, _segments
from gradwire.transport.base import RawBuffer, Ticket

__all__ = ["Bulk", "IncomingBulk", "Offer", "Tickets"]


class Bulk(Ticket):
    """Memory of the sender that is being written, straight from where it lies."""

    __slots__ = ("_lock", "_owner", "_unwritten", "view")

    def __init__(self, buffer: RawBuffer, write_lock: threading.Lock) -> None:
        address, nbytes, owner = buffer
        self.view = _memory.view(address, nbytes)
        self._owner: object = owner
        # A bare lock, held until all is written: waiting for it is a single C call, which
        # a signal handler may interrupt without harm.
        self._unwritten = threading.Lock()
        self._unwritten.acquire()
        self._lock = write_lock

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        self._owner = None
        if self._unwritten.locked():
            self._unwritten.release()

    def wait(self, timeout_s: float | None) -> bool:
        written = self._unwritten.acquire(
            timeout=-1 if timeout_s is None else timeout_s
        )
        if written:
            self._unwritten.release()
        return written

    def detach(self) -> None:
        with self._lock:  # nobody advances the view meanwhile
            if self._unwritten.locked():
                self.view = memoryview(bytes(self.view))
                self._owner = None


class Tickets(Ticket):
    """Several buffers of one frame."""

    def __init__(self, tickets: list[Bulk]) -> None:
        self._tickets = tickets

    def wait(self, timeout_s: float | None) -> bool:
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        for ticket in self._tickets:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not ticket.wait(left):
                return False
        return True

    def detach(self) -> None:
        for ticket in self._tickets:
            ticket.detach()


class Offer:
    """A frame that carries a descriptor beside its bytes."""

    __slots__ = ("descriptor", "mapping", "number", "view")

    def __init__(
        self, data: bytes, descriptor: int, number: int, mapping: _segments.Mapping
    ) -> None:
        self.view = memoryview(data)
        self.descriptor: int | None = descriptor
        self.number, self.mapping = number, mapping  # of the segment

    def begin(self) -> None:
        self.finish()  # the descriptor went with the first byte

    def finish(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class IncomingBulk:
    """A frame whose buffers are still coming through the stream."""

    __slots__ = ("_at", "_views", "filled", "head", "storages")

    def __init__(
        self,
        head: bytes,
        table: list[tuple[int, int]],
        borrowed: _segments.BorrowedSegments,
    ) -> None:
        self.head = head
        self.storages: list[torch.UntypedStorage] = []
        self._views: list[memoryview] = []
        self._at = 0
        self.filled = 0  # of the view at `_at`
        for segment, nbytes in table:
            if segment:
                self.storages.append(borrowed.borrow(segment, nbytes))
                continue
            try:
                storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
            except (RuntimeError, MemoryError) as error:
                raise RemoteProtocolError(
                    f"the peer announced a buffer of {nbytes} bytes, which cannot be "
                    "allocated here (option max_frame_bytes)"
                ) from error
            self.storages.append(storage)
            if nbytes:
                self._views.append(_memory.view_of_storage(storage))

    def missing(self) -> memoryview | None:
        """The part of the current view that is not filled; None if all are."""
        while self._at < len(self._views):
            view = self._views[self._at]
            if self.filled < len(view):
                return view[self.filled :]
            self._at, self.filled = self._at + 1, 0
        return None

    def target(self) -> memoryview:
        view = self.missing()
        if view is None:
            raise AssertionError("a frame that is complete asks for more bytes")
        return view
