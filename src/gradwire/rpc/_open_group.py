"""Groups without a size: workers come and go while others work.

What the store holds, all under the prefix of the group:

    rank_of/<name>, name_of/<rank>   who is who, for the life of the group
    next_rank                        ranks that were handed out
    life/<rank>                      record of the worker that has the rank, or had it last
    entries, entry/<i>               records of workers, in the order of their joining

A worker first takes the place of its earlier life, in one step and only if that is over;
so of two that have the same name one fails before anybody else hears of it. Then it posts
its record and reads those of all others, so of two that join at the same time at least
one sees the other. It connects to all that it finds, and that is how they learn of it;
from then on the connection tells when it is gone. So there is no lock that a dying worker
could keep, and nobody waits for anybody who is not there.

An entry belongs to one life of one worker and is never written again. Whoever finds that
nobody listens any more at its addresses deletes it. For all other trouble the entry stays:
its worker may live, and be reached by others.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from gradwire._ids import check_worker_name
from gradwire.errors import (
    ConnectError,
    ConnectTimeout,
    GradwireError,
    HandshakeRefused,
    PeerLostError,
    RemoteProtocolError,
    UsageError,
)
from gradwire.rpc import _handshake
from gradwire.rpc._connect import nobody_listens
from gradwire.rpc._log import log as _log
from gradwire.rpc._records import WorkerRecord, encode_record, parse_record
from gradwire.rpc._store import StoreThread, read_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from gradwire.rpc._network import Network

__all__ = ["MAX_SIZE", "OpenGroup", "claim_rank"]

T = TypeVar("T")

MAX_SIZE = 1 << 15
"""Ids of contexts have room for so many ranks."""

_LEAVE_S = 2.0
_AGAIN_S = 0.05
_ANOTHER_LIFE_S = 2.0


def _entry_key(number: int) -> str:
    return f"entry/{number}"


def claim_rank(store: Store, name: str, rank: int | None, timeout_s: float) -> int:
    """The rank of a worker in an open group; its name keeps it for the group's life.

    Args:
        store: Where the workers meet.
        name: Name of the worker.
        rank: The rank that it wants; None for any.
        timeout_s: Limit for the store to answer.

    Raises:
        UsageError: The rank belongs to another name, or the name to another rank.
    """
    if rank is not None and not 0 <= rank < MAX_SIZE:
        raise UsageError(f"rank must be between 0 and {MAX_SIZE - 1}, found {rank}")
    with StoreThread() as thread:
        return thread.call(
            lambda: _claim(store, check_worker_name(name), rank), timeout_s=timeout_s
        )


def _claim(store: Store, name: str, wanted: int | None) -> int:
    known = read_key(store, f"rank_of/{name}")
    if known is None:
        rank = _allot(store, name) if wanted is None else wanted
        _claim_name(store, name, rank)
        known = bytes(store.compare_set(f"rank_of/{name}", "", str(rank)))
    # Short enough to be one, or ``int`` refuses by itself.
    if len(known) > 5 or not known.isdigit() or int(known) >= MAX_SIZE:
        raise RemoteProtocolError(
            f"the rendezvous store must hold the rank of worker {name!r}, found "
            f"{known[:40]!r}; is the store shared with another program?"
        )
    if wanted is not None and int(known) != wanted:
        raise UsageError(
            f"worker name {name!r} belongs to rank {int(known)} in this group, so it cannot "
            f"join with rank {wanted}; leave the rank out, or choose another name"
        )
    return int(known)


def _claim_name(store: Store, name: str, rank: int) -> None:
    holder = bytes(store.compare_set(f"name_of/{rank}", "", name))
    if holder != name.encode():
        raise UsageError(
            f"rank {rank} belongs to worker {holder[:128].decode(errors='replace')!r} in "
            f"this group, so worker {name!r} cannot join with it; leave the rank out, or "
            "choose another one"
        )


def _allot(store: Store, name: str) -> int:
    """A rank that is nobody's; others may have claimed ranks of their choice."""
    while True:
        rank = int(store.add("next_rank", 1)) - 1
        if rank >= MAX_SIZE:
            raise UsageError(
                f"the group has handed out all of its {MAX_SIZE} ranks; start a new group, "
                "and give a worker that comes back the name that it had"
            )
        if bytes(store.compare_set(f"name_of/{rank}", "", name)) == name.encode():
            return rank


class OpenGroup:
    """One worker's membership in a group without a size.

    Args:
        store: Where the workers meet.
        record: This worker.
        network: Connects to the others.
        timeout_s: Limit for `join`.
        submit: Runs something on another thread.
    """

    is_open = True

    def __init__(
        self,
        store: Store,
        record: WorkerRecord,
        network: Network,
        timeout_s: float,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._store = store
        self._record = record
        self._network = network
        self._timeout_s = timeout_s
        self._submit = submit
        self._text = encode_record(record)
        self._life_key = f"life/{record.rank}"
        self._number = 0  # of our entry
        self._deadline = 0.0

    def join(self) -> None:
        """Enters the group and connects to all who are there; waits for nobody else.

        Raises:
            UsageError: A living worker has this name or rank.
            ConnectTimeout: The store did not answer, or some workers did not let us in.
            HandshakeRefused: A worker has another secret.
        """
        self._deadline = time.monotonic() + self._timeout_s
        with StoreThread() as thread:
            try:
                self._take_place(thread)
                self._call(thread, self._post)
                others = self._call(thread, self._read_entries)
                stale = self._meet_all(others)
                self._call(thread, lambda: self._delete(stale))
            except BaseException:
                self._clean_up(thread)
                raise
        self._network.is_complete()

    def leave(self, timeout_s: float = _LEAVE_S) -> None:
        """Deletes our entry; best effort, bounded, never raises."""
        with StoreThread() as thread:
            self._clean_up(thread, min(timeout_s, _LEAVE_S))

    def _call(self, thread: StoreThread, work: Callable[[], T]) -> T:
        left_s = max(self._deadline - time.monotonic(), 0.5)
        return thread.call(work, timeout_s=left_s)

    # ----------------------------------------------------------------------------- store

    def _post(self) -> None:
        self._number = int(self._store.add("entries", 1))
        self._store.set(_entry_key(self._number), self._text)
        # A TCP store does not confirm ``set``, but it answers ``add`` after it.
        self._store.add("entries", 0)

    def _read_entries(self) -> dict[int, WorkerRecord]:
        """All entries but our own, by number."""
        found = {}
        for number in range(1, int(self._store.add("entries", 0)) + 1):
            data = read_key(self._store, _entry_key(number))
            if data is not None and number != self._number:
                found[number] = parse_record(data, _entry_key(number))
        return found

    def _delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._store.delete_key(_entry_key(number))

    def _clean_up(self, thread: StoreThread, timeout_s: float = _LEAVE_S) -> None:
        def delete() -> None:
            if self._number:
                self._delete([self._number])
            self._swap_life(self._text, "")  # unless it is somebody else's

        try:
            thread.call(delete, timeout_s=timeout_s)
        except GradwireError as error:
            # Whoever finds the entry notices that nobody listens any more.
            _log.debug("worker %r left its entry behind: %s", self._record.name, error)

    def _swap_life(self, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(self._life_key, expected, desired))

    def _take_place(self, thread: StoreThread) -> None:
        """Makes this life the one of our rank, unless a living worker has it.

        Names and ranks belong together, see `claim_rank`; so that is our name as well.
        """
        me, expected = self._record, ""
        while True:
            swap = functools.partial(self._swap_life, expected, self._text)
            found = self._call(thread, swap)
            if found == self._text.encode():
                return
            if not found or found == expected.encode():
                expected = ""  # whoever was there has left meanwhile
                continue
            holder = parse_record(found, self._life_key)
            if self._network.probe(holder):
                raise UsageError(
                    f"worker {holder.name!r} of rank {holder.rank} is in the group and "
                    f"alive, so worker {me.name!r} of rank {me.rank} cannot join; give "
                    "every worker a name and a rank of its own"
                )
            expected = found.decode()

    # --------------------------------------------------------------------------- meeting

    def _meet_all(self, entries: dict[int, WorkerRecord]) -> list[int]:
        """Connects to all at once; returns the numbers of entries that are stale."""
        # A worker that comes back has made sure that its earlier life is over.
        latest = {record.rank: number for number, record in sorted(entries.items())}
        outlived = [n for n, record in entries.items() if latest[record.rank] != n]
        meetings = [_Meeting(self, n, entries[n]) for n in latest.values()]
        for meeting in meetings:
            self._submit(meeting.run)
        for meeting in meetings:
            meeting.over.wait(max(0.0, self._deadline - time.monotonic()))
        problems = [m.problem for m in meetings if m.problem is not None]
        if problems:
            raise problems[0]
        late = [repr(m.record.name) for m in meetings if not m.over.is_set()]
        if late:
            raise ConnectTimeout(
                f"worker {self._record.name!r} waited {self._timeout_s:.1f} s to be let in "
                f"by {', '.join(late[:16])}"
            )
        return outlived + [m.number for m in meetings if m.is_stale]

    def meet(self, record: WorkerRecord) -> bool:
        """Connects to a worker; False if its record is stale."""
        me, other = self._record, record
        if me.name == other.name or me.rank == other.rank:
            return False  # an earlier life of ours: `_take_place` has looked
        limit = min(self._deadline, time.monotonic() + _ANOTHER_LIFE_S)
        while self._network.is_connected_to_another_life(record):
            # Either that one is over, which is noticed in a moment, or it came after
            # the entry was written, and has found us itself.
            if time.monotonic() > limit:
                return True
            time.sleep(_AGAIN_S)
        while True:
            try:
                self._network.meet(record)
            except HandshakeRefused as error:
                # It has not noticed yet that our earlier life is over.
                if error.code == _handshake.TAKEN and time.monotonic() < self._deadline:
                    time.sleep(_AGAIN_S)
                    continue
                if error.code == _handshake.CERTIFICATE:
                    self._miss(record, error)  # of another group, or misconfigured
                    return True
                self._network.forget(record)
                if error.code == _handshake.CLOSING:
                    return True  # it deletes its entry itself
                if error.code == _handshake.IDENTITY:
                    return False  # somebody else has its address by now
                raise
            except (ConnectError, ConnectTimeout) as error:
                if nobody_listens(error):
                    self._network.forget(record)
                    return False
                self._miss(record, error)
            except (PeerLostError, RemoteProtocolError) as error:
                self._miss(record, error)
            return True

    def _miss(self, record: WorkerRecord, error: GradwireError) -> None:
        """Joins without a worker that others may reach, or that may only be slow."""
        self._network.miss(record, error)
        _log.warning(
            "worker %s joins without worker %s of its group, which it does not reach: %s",
            self._record.name,
            record.name,
            error,
        )


class _Meeting:
    """One attempt to connect, on a thread of its own."""

    def __init__(self, group: OpenGroup, number: int, record: WorkerRecord) -> None:
        self.number = number
        self.record = record
        self.is_stale = False
        self.problem: Exception | None = None
        self.over = threading.Event()
        self._group = group

    def run(self) -> None:
        try:
            self.is_stale = not self._group.meet(self.record)
        except Exception as error:
            self.problem = error
        finally:
            self.over.set()
