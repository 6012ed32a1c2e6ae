"""Pooled shared memory between two workers on one host.

The sending side owns segments: anonymous files (``memfd``) that it maps, fills, and
lends to the receiver. The descriptor travels once, when the segment is new; both sides
then keep only their mappings, so segments cost no descriptors, and the kernel frees
everything when both processes are gone, however they went.

A segment is lent from the moment a frame names it until the receiver's tensor on it
has died. The receiver then returns its number, and the sender may fill it again: the
pages stay warm on both sides, which is where the speed comes from.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import OrderedDict, deque

import torch

from gradwire.errors import RemoteProtocolError

if sys.platform == "linux":  # the module must import everywhere, and serve here
    import fcntl

__all__ = [
    "BorrowedSegments",
    "LentSegments",
    "Mapping",
    "is_all_read",
    "is_supported",
]

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE if hasattr(mmap, "PROT_READ") else 0
_IDLE_S = 30.0
_MOST_RETURNED = 1024  # in one frame
_SHED_BYTES = 16 << 20  # smaller segments are not worth the faults when they are filled
_MADV_DONTNEED = 4
_SIOCOUTQ = 0x5411
# Descriptors that nobody has taken yet count against a limit that all processes of a user
# share, as large as the limit of open files of one; and while they wait to be sent, they
# are open here.
_MOST_UNSEEN = 64


def is_supported() -> bool:
    """Whether this platform has anonymous files that can be passed and sealed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def is_all_read(fileno: int) -> bool:
    """Whether the other end of a Unix socket has read all that was written to it."""
    try:
        return not any(fcntl.ioctl(fileno, _SIOCOUTQ, bytes(4)))
    except OSError:
        return False


def _load_libc() -> ctypes.CDLL | None:
    if not is_supported():
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.madvise.restype = ctypes.c_int
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.restype = ctypes.c_int
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load_libc()


class Mapping:
    """A mapped file; unmapped when the last reference goes.

    Python's own ``mmap`` keeps a copy of the descriptor open; thousands of segments
    would then run into the limit of open files.
    """

    __slots__ = ("address", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        if _libc is None:
            raise OSError("shared memory is not supported on this platform")
        address = _libc.mmap(0, size, _PROTECTION, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        self.size = size

    def shed(self) -> None:
        """Forgets the pages of this process; the memory itself is the file's, and stays."""
        if _libc is not None:
            _libc.madvise(self.address, self.size, _MADV_DONTNEED)

    def __del__(self, _libc: ctypes.CDLL | None = _libc) -> None:
        if _libc is not None and hasattr(self, "address"):
            _libc.munmap(self.address, self.size)


class LentSegments:
    """The sender's side: segments by number, and which of them are free.

    Not thread-safe: the connection calls it under its own lock.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._all: dict[int, Mapping] = {}
        # Oldest first, with the time of return: what was unused longest goes first.
        self._free: OrderedDict[int, float] = OrderedDict()
        self._free_bytes = 0
        self._next = 1
        self._last_seen = 0  # the receiver has this one, and so all before it

    def take(self, nbytes: int) -> tuple[int, Mapping, int | None] | None:
        """A segment of at least ``nbytes``.

        Returns:
            Number, mapping, and the descriptor to pass if the segment is new; None if
            the system has no memory or descriptors for one, or the receiver is far
            behind (see `note_seen`).
        """
        best = 0
        best_size = 2 * nbytes + 1  # more than twice too large would waste it
        for number in self._free:
            size = self._all[number].size
            if nbytes <= size < best_size:
                best, best_size = number, size
        if best:
            del self._free[best]
            self._free_bytes -= best_size
            return best, self._all[best], None
        if self._next - self._last_seen > _MOST_UNSEEN:
            return None
        return self._create(_round_up(nbytes))

    def note_seen(self) -> None:
        """The receiver has taken all segments that it was offered."""
        self._last_seen = self._next - 1

    def withdraw(self, number: int) -> None:
        """A new segment could not be offered."""
        self._all.pop(number, None)  # all are gone if the connection was closed

    def _create(self, size: int) -> tuple[int, Mapping, int | None] | None:
        try:
            descriptor = os.memfd_create(
                "gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, size)
            # The receiver must be able to rely on the size: a file that shrinks under
            # a mapping kills the process that touches it.
            fcntl.fcntl(
                descriptor,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            mapping = Mapping(descriptor, size)
        except OSError:
            os.close(descriptor)
            return None
        number = self._next
        self._next += 1
        self._all[number] = mapping
        return number, mapping, descriptor

    def give_back(self, number: int, now: float) -> None:
        """The receiver no longer uses the segment."""
        mapping = self._all.get(number)
        if mapping is None or number in self._free:
            raise RemoteProtocolError(
                f"the peer returned shared-memory segment {number}, which it does not hold"
            )
        self._free[number] = now
        self._free_bytes += mapping.size
        self._last_seen = max(self._last_seen, number)

    def trim(self, now: float) -> list[int]:
        """Forgets free segments over the limit or unused for long; returns their numbers."""
        dropped = []
        while self._free:
            number, since = next(iter(self._free.items()))
            if self._free_bytes <= self._keep_bytes and now - since < _IDLE_S:
                break
            del self._free[number]
            self._free_bytes -= self._all.pop(number).size
            dropped.append(number)
        return dropped

    def shed(self) -> None:
        """Forgets our pages of large segments, until they are filled again."""
        for mapping in self._all.values():
            if mapping.size >= _SHED_BYTES:
                mapping.shed()

    def clear(self) -> None:
        """The connection is closed: forgets all segments."""
        self._all.clear()
        self._free.clear()
        self._free_bytes = 0

    def counters(self) -> dict[str, int]:
        """How many segments there are, how many are free, and their bytes."""
        return {
            "segments": len(self._all),
            "segments_free": len(self._free),
            "segment_bytes": sum(m.size for m in list(self._all.values())),
        }


def _round_up(nbytes: int) -> int:
    # Steps of an eighth of the power of two: a segment can serve again for sizes that
    # differ a little, and pages that are never touched cost nothing.
    step = max(1 << 16, 1 << max(0, nbytes.bit_length() - 4))
    return (nbytes + step - 1) // step * step


class _Loan(weakref.ref["ctypes.Array[ctypes.c_ubyte]"]):
    """Notices that the tensor on a segment has died."""

    __slots__ = ("number",)
    number: int


class BorrowedSegments:
    """The receiver's side: mapped segments of the peer, and tensors that live on them.

    Callbacks of weak references run anywhere, even in a thread that holds our locks, or
    at a point where a signal handler may raise: all of them are single C calls.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Mapping] = {}
        self._loans: dict[int, _Loan] = {}
        self.ended: deque[_Loan] = deque()
        """Loans of segments that wait to be returned; see `take_returns`."""

    def offer(self, number: int, size: int, descriptor: int) -> None:
        """Maps a new segment. Closes the descriptor in any case."""
        try:
            if number in self._mapped:
                raise RemoteProtocolError(f"the peer offered segment {number} twice")
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            found = os.fstat(descriptor).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size <= 0 or found < size:
                raise RemoteProtocolError(
                    f"the peer offered segment {number} of {size} bytes, but its file has "
                    f"{found} bytes and seals {seals:#x}"
                )
            self._mapped[number] = Mapping(descriptor, size)
        except OSError as error:
            raise RemoteProtocolError(
                f"segment {number} of {size} bytes cannot be mapped: {error}"
            ) from error
        finally:
            os.close(descriptor)

    def borrow(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """A storage on the segment's memory; its death returns the segment."""
        mapping = self._mapped.get(number)
        if mapping is None or not 0 < nbytes <= mapping.size:
            raise RemoteProtocolError(
                f"the peer used {nbytes} bytes of segment {number}, which "
                + ("it never offered" if mapping is None else f"has {mapping.size}")
            )
        if number in self._loans:
            raise RemoteProtocolError(
                f"the peer used segment {number} while it is lent"
            )
        array = (ctypes.c_ubyte * nbytes).from_address(mapping.address)
        # The tensor holds the array, and so the memory, also when we are gone.
        array.mapping = mapping  # type: ignore[attr-defined]
        loan = _Loan(array, self.ended.append)
        loan.number = number
        self._loans[number] = loan
        return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()

    def take_returns(self) -> list[int]:
        """The numbers of segments that the peer may have back, some of them at least."""
        numbers: list[int] = []
        while self.ended and len(numbers) < _MOST_RETURNED:
            try:
                number = self.ended.popleft().number
            except IndexError:  # another thread was faster
                break
            self._loans.pop(number, None)
            numbers.append(number)
        return numbers

    def forget(self, number: int) -> None:
        """The peer dropped a segment that it had back."""
        if number not in self._mapped or number in self._loans:
            raise RemoteProtocolError(f"the peer dropped segment {number} out of turn")
        del self._mapped[number]

    def clear(self) -> None:
        """The connection is closed: forgets all that no tensor uses."""
        self._mapped.clear()
        self._loans.clear()

    def counters(self) -> dict[str, int]:
        """How many segments of the peer are mapped, and how many are in use."""
        return {
            "segments_mapped": len(self._mapped),
            "segments_borrowed": len(self._loans) - len(self.ended),
        }
