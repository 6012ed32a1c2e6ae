"""How the workers of one group find each other through a store.

Each worker posts a record of itself under ``worker/<rank>``. One that sees the records
of all workers posts a digest of exactly those (ranks and incarnations) as
``ready/<rank>``. When all have posted the same digest, all have seen the same group, and
it is complete. A worker of a running group is marked active in its record; it posts
nothing any more, so one that joins later (again, after a crash) contacts it instead.

Why this is safe:
1. Incarnations are random, so what a dead worker left behind never adds up to a digest
   of the living. A restarted worker posts a new incarnation, and all count anew.
2. A worker publishes ``ready`` before it marks itself active, and records are read
   before digests; so whoever sees the mark of its own round sees the digest as well.
3. The first to see a group complete posts its digest as ``complete``. A worker that is
   slow to look is not stranded when a quick one has left again meanwhile.
4. ``changes`` counts the posts, so that waiting costs one read per look. The count is
   also what makes a post certain: a TCP store does not confirm ``set``.

A key is read by a comparison that fails (see ``read_key``) and never waited for.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import msgspec

from gradwire.errors import (
    ConnectTimeout,
    GradwireError,
    RemoteProtocolError,
    UsageError,
)
from gradwire.rpc._future import Outcome
from gradwire.rpc._log import log as _log
from gradwire.rpc._records import (
    WorkerRecord,
    encode_record,
    membership_digest,
    parse_record,
)
from gradwire.rpc._store import KIND_KEY, StoreThread, open_store, read_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

__all__ = ["Rendezvous", "WorkerRecord", "open_store", "parse_record"]

CLEANUP_S = 2.0
"""Limit for deleting our keys; whoever finds them later can tell that they are stale."""

_FIRST_DELAY_S = 0.005
_LAST_DELAY_S = 0.05
# A worker may die between a post and its count; look at everything now and then.
_FULL_LOOK_S = 1.0
_ASK_AGAIN_S = 1.0  # whoever did not answer
_GRACE_S = 0.25  # who contacts others gives up at the same time as we, and knows why
_MAX_CONFLICT_BYTES = 2048
_MAX_GIVEN_UP = 16
# Those who come late to a group that has given up: how old the news may be, and how long
# they wait whether somebody tries again.
_NEWS_S = 60.0
_PATIENCE_S = 2.0


def _worker_key(rank: int) -> str:
    return f"worker/{rank}"


def _ready_key(rank: int) -> str:
    return f"ready/{rank}"


def _conflict_key(rank: int) -> str:
    return f"conflict/{rank}"


class _Conflict(msgspec.Struct):
    """Why there will be no group with the one that this is addressed to.

    Workers that exclude each other all fail, and with them those that wait for the same
    group. The first to notice leaves word for the others, which would else wait for it
    until their timeouts; also for those that are still to come.

    Attributes:
        incarnation: The one that it is addressed to; 0: whoever comes.
        text: Why.
        given_up: Ranks and incarnations of those who exclude each other. If another life
            of such a rank is there, it is a new try.
        at: When, by the clock of the writer's host.
    """

    incarnation: int
    text: str
    given_up: list[tuple[int, int]] = []
    at: float = 0.0


class _View(NamedTuple):
    """One look at the store."""

    records: dict[int, WorkerRecord]  # by rank
    digest: str  # of all records; empty while some are missing
    ready: frozenset[int]  # ranks that posted this very digest
    complete: bytes | None  # digest that somebody has seen complete
    conflict: str | None = None  # what another worker has against this one
    rumour: _Conflict | None = None  # what made others give up before it came


_NOTHING = _View({}, "", frozenset(), None)


class Rendezvous:
    """One worker's way into a group, and out of it. Join once with one object.

    Args:
        store: Where the workers meet.
        record: This worker.
        world_size: How many workers there are.
        timeout_s: How long ``join`` waits for the others.
        contact: Tries to connect to a worker, with the handshake; False means that
            nobody answers there, so that the record is stale, or its worker cut off: it
            is asked again now and then. What it raises ends ``join``.
        submit: Runs something on another thread; without it, workers are contacted one
            after the other.
    """

    is_open = False

    def __init__(
        self,
        store: Store,
        record: WorkerRecord,
        world_size: int,
        timeout_s: float,
        contact: Callable[[WorkerRecord], bool],
        submit: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        if not 0 <= record.rank < world_size:
            raise UsageError(
                f"rank must be between 0 and world_size - 1 = {world_size - 1}, worker "
                f"{record.name!r} has rank {record.rank}"
            )
        self._store = store
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._contact = contact
        self._submit = submit
        self._record = msgspec.structs.replace(
            record, world_size=world_size, active=False
        )
        self._text = encode_record(self._record)
        self._key = _worker_key(record.rank)
        self._answers: dict[int, bool] = {}  # what ``contact`` said, by incarnation
        self._ask_again: dict[int, float] = {}  # when, if nobody answered
        self._snapshot = _NOTHING  # the group whose digest we have posted
        self._names: dict[int, str] = {}  # of all that were seen, by rank
        self._begin = self._deadline = 0.0

    def join(self) -> list[WorkerRecord]:
        """Waits until all workers are there, and returns their records by rank.

        If it fails or is interrupted, what it has posted is deleted.

        Raises:
            ConnectTimeout: Workers are missing; the message names them.
            UsageError: The rank or the name is taken, or world sizes differ.
            RemoteProtocolError: The store holds something else than records.
            ConnectError: The store failed.
        """
        self._begin = time.monotonic()
        self._deadline = self._begin + self._timeout_s
        with StoreThread() as thread:
            try:
                self._claim_rank(thread)
                return self._await_group(thread)
            except BaseException:
                self._clean_up(thread)
                raise

    def leave(self, timeout_s: float = CLEANUP_S) -> None:
        """Deletes what this worker has posted; best effort, bounded, never raises."""
        with StoreThread() as thread:
            self._clean_up(thread, min(timeout_s, CLEANUP_S))

    def _claim_rank(self, thread: StoreThread) -> None:
        """Posts our record, unless a living worker holds the rank."""
        expected = ""
        while True:
            found = self._call(thread, self._swap, expected, self._text)
            if found == self._text.encode():
                break
            if expected and found == expected.encode():
                expected = ""  # the stale record has vanished meanwhile
                continue
            holder = parse_record(found, self._key)
            if self._is_answering(holder):
                raise UsageError(
                    f"rank {holder.rank} is taken by worker {holder.name!r}, which is "
                    f"alive, so worker {self._record.name!r} cannot join with it; give "
                    "every worker a rank of its own"
                )
            if time.monotonic() >= self._deadline:
                raise ConnectTimeout(
                    f"worker {self._record.name!r} waited {self._timeout_s:.1f} s to find "
                    f"out whether worker {holder.name!r}, which has left a record under "
                    f"rank {holder.rank}, is alive"
                )
            expected = found.decode()
        self._call(thread, self._store.add, "changes", 1)

    def _swap(self, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(self._key, expected, desired))

    def _await_group(self, thread: StoreThread) -> list[WorkerRecord]:
        delay_s = _FIRST_DELAY_S
        next_look = 0.0
        seen: bytes | None = None
        view = _NOTHING
        while True:
            changes = self._call(thread, read_key, self._store, "changes")
            if changes != seen or time.monotonic() >= next_look:
                if changes != seen:
                    delay_s = _FIRST_DELAY_S
                seen, next_look = changes, time.monotonic() + _FULL_LOOK_S
                view = self._call(thread, self._look)
                self._names |= {r: record.name for r, record in view.records.items()}
                self._check_conflicts(thread, view)
                self._check_rumour(thread, view)
                if self._is_complete(thread, view):
                    return self._enter(thread)
            self._check_time(view)
            time.sleep(delay_s)
            delay_s = min(delay_s * 2, _LAST_DELAY_S)

    def _look(self) -> _View:
        """Reads the store; runs on the store's thread, all reads in one go."""
        complete = read_key(self._store, "complete")
        records: dict[int, WorkerRecord] = {}
        for rank in range(self._world_size):
            key = _worker_key(rank)
            data = read_key(self._store, key)
            if data is None:
                continue
            records[rank] = parse_record(data, key)
            if records[rank].rank != rank:
                raise RemoteProtocolError(
                    f"the rendezvous store must hold the worker of rank {rank} under "
                    f"{key!r}, found worker {records[rank].name!r} of rank "
                    f"{records[rank].rank}; is the store shared with another program?"
                )
        if self._record.rank not in records:
            # An earlier life of this rank was leaving just now, and deleted our record
            # as its own.
            self._swap("", self._text)
            self._store.add("changes", 1)
        conflict, rumour = self._read_conflict()
        if len(records) < self._world_size:
            return _View(records, "", frozenset(), complete, conflict, rumour)
        digest = membership_digest(records.values())
        ready = frozenset(
            rank
            for rank in records
            if read_key(self._store, _ready_key(rank)) == digest.encode()
        )
        return _View(records, digest, ready, complete, conflict, rumour)

    def _check_conflicts(self, thread: StoreThread, view: _View) -> None:
        if view.conflict is not None:
            raise UsageError(view.conflict)
        me = self._record
        own = view.records.get(me.rank)
        if own is not None and own.incarnation != me.incarnation:
            raise UsageError(
                f"rank {me.rank} of worker {me.name!r} was taken over by worker "
                f"{own.name!r} while it was joining; give every worker a rank of its own"
            )
        # A dead worker may have left anything behind. It excludes nobody, so a conflict
        # is one only with a worker that answers.
        by_name: dict[str, WorkerRecord] = {}
        counts = Counter(record.name for record in view.records.values())
        self._ask(
            record
            for record in view.records.values()
            if (record.world_size, record.serializer) != (me.world_size, me.serializer)
            or counts[record.name] > 1
        )
        for record in view.records.values():
            if record.world_size != me.world_size and self._is_answering(record):
                self._quarrel(
                    thread,
                    view,
                    [record],
                    f"all workers must be given the same world_size: worker {me.name!r} "
                    f"(rank {me.rank}) has {me.world_size}, worker {record.name!r} (rank "
                    f"{record.rank}) has {record.world_size}",
                )
            if record.serializer != me.serializer and self._is_answering(record):
                self._quarrel(
                    thread,
                    view,
                    [record],
                    f"all workers must have the same option serializer: worker {me.name!r} "
                    f"(rank {me.rank}) has {me.serializer!r}, worker {record.name!r} (rank "
                    f"{record.rank}) has {record.serializer!r}",
                )
            twin = by_name.setdefault(record.name, record)
            if twin is record:
                continue
            if self._is_answering(twin) and self._is_answering(record):
                self._quarrel(
                    thread,
                    view,
                    [r for r in view.records.values() if r.name == record.name],
                    f"worker name {record.name!r} is not unique: ranks {twin.rank} and "
                    f"{record.rank} both have it; give every worker a name of its own",
                )
            if not self._is_answering(twin):
                by_name[record.name] = record

    def _check_rumour(self, thread: StoreThread, view: _View) -> None:
        """Fails if others have given up before we came, and none of them is back."""
        if view.rumour is None:
            return
        if any(
            rank in view.records and view.records[rank].incarnation != life
            for rank, life in view.rumour.given_up
        ):
            key = _conflict_key(self._record.rank)
            self._call(thread, self._store.delete_key, key)  # it is a new try
        elif time.monotonic() - self._begin > _PATIENCE_S:
            raise UsageError(view.rumour.text)

    def _quarrel(
        self, thread: StoreThread, view: _View, parties: list[WorkerRecord], text: str
    ) -> NoReturn:
        """Raises the error here, and leaves word for the other workers."""
        told = {r.rank: r.incarnation for r in parties}
        if not any(record.active for record in view.records.values()):
            # Nobody runs yet, and nobody will: the group cannot become complete.
            told = dict.fromkeys(range(self._world_size), 0)
            told |= {r.rank: r.incarnation for r in view.records.values()}
        told.pop(self._record.rank, None)
        given_up = sorted({(r.rank, r.incarnation) for r in (self._record, *parties)})
        now = time.time()
        words = {
            rank: _Conflict(incarnation, text, given_up[:_MAX_GIVEN_UP], now)
            for rank, incarnation in told.items()
        }
        self._call(thread, self._leave_word, words)
        raise UsageError(text)

    def _leave_word(self, words: dict[int, _Conflict]) -> None:
        for rank, conflict in words.items():
            self._store.set(_conflict_key(rank), msgspec.json.encode(conflict).decode())
        self._store.add("changes", 1)

    def _read_conflict(self) -> tuple[str | None, _Conflict | None]:
        """What other workers, which have given up by now, had against us, or in general."""
        data = read_key(self._store, _conflict_key(self._record.rank))
        if data is None:
            return None, None
        try:
            conflict = msgspec.json.decode(data[:_MAX_CONFLICT_BYTES], type=_Conflict)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None, None  # not a word of ours; no reason to fail
        conflict.text = "".join(c for c in conflict.text if c.isprintable())
        if conflict.incarnation == self._record.incarnation:
            return conflict.text, None
        if conflict.incarnation or abs(time.time() - conflict.at) > _NEWS_S:
            return None, None
        return None, conflict

    def _is_answering(self, record: WorkerRecord) -> bool:
        if record.incarnation == self._record.incarnation:
            return True
        self._ask([record])
        return self._answers.get(record.incarnation, False)

    def _ask(self, records: Iterable[WorkerRecord]) -> None:
        """Contacts those that have not answered yet, all at once, if it is time to."""
        start = time.monotonic()
        asked: list[tuple[int, Outcome]] = []
        for record in records:
            life = record.incarnation
            if life == self._record.incarnation or self._answers.get(life):
                continue
            if self._ask_again.get(life, 0.0) <= start < self._deadline:
                asked.append((life, Outcome()))
                self._submit(functools.partial(self._find_out, record, asked[-1][1]))
        for life, answer in asked:
            left_s = max(0.0, self._deadline - time.monotonic())
            in_time = answer.wait(left_s + _GRACE_S)
            self._answers[life] = in_time and answer.result()
            # One that is cut off may cost a whole limit each time: others come first.
            now = time.monotonic()
            self._ask_again[life] = now + max(_ASK_AGAIN_S, 2 * (now - start))

    def _find_out(self, record: WorkerRecord, answer: Outcome) -> None:
        try:
            answer.finish(self._contact(record), None)
        except Exception as error:
            answer.finish(None, error)

    def _is_complete(self, thread: StoreThread, view: _View) -> bool:
        posted = self._snapshot.digest
        if posted and view.complete == posted.encode():
            return True
        if not view.digest:
            return False
        # All running workers are contacted, also if one of them is found to be dead:
        # the answers are wanted anyway, when it comes back.
        running = [
            record
            for record in view.records.values()
            if record.active and record.rank not in view.ready
        ]
        self._ask(running)
        if not all(map(self._is_answering, running)) or self._stale_ranks(view):
            return False
        if posted != view.digest:
            self._call(thread, self._post_ready, view.digest)
            self._snapshot = view
        return not self._unconfirmed_ranks(view)

    def _post_ready(self, digest: str) -> None:
        self._store.set(_ready_key(self._record.rank), digest)
        self._store.add("changes", 1)

    def _enter(self, thread: StoreThread) -> list[WorkerRecord]:
        """Marks this worker as running and returns the group."""
        active = msgspec.structs.replace(self._record, active=True)
        text = encode_record(active)

        def post() -> bytes:
            self._store.set("complete", self._snapshot.digest)
            found = self._swap(self._text, text)
            if found == self._text.encode():
                found = self._swap("", text)  # it was gone, see ``_look``
            self._store.add("changes", 1)
            return found

        found = self._call(thread, post)
        if found != text.encode():
            holder = parse_record(found, self._key)
            raise UsageError(
                f"rank {active.rank} of worker {active.name!r} was taken over by worker "
                f"{holder.name!r} while it was joining; give every worker a rank of its "
                "own"
            )
        records = self._snapshot.records | {active.rank: active}
        return [records[rank] for rank in range(self._world_size)]

    def _stale_ranks(self, view: _View) -> list[int]:
        """Ranks whose record was left by a worker that does not answer any more."""
        return [
            rank
            for rank, record in sorted(view.records.items())
            if rank not in view.ready and self._answers.get(record.incarnation) is False
        ]

    def _unconfirmed_ranks(self, view: _View) -> list[int]:
        """Ranks that are there, but are not known to see the same group as we do."""
        return [
            rank
            for rank, record in sorted(view.records.items())
            if rank not in view.ready
            and rank != self._record.rank
            and not self._answers.get(record.incarnation)
        ]

    def _call(self, thread: StoreThread, work: Callable[..., T], *args: object) -> T:
        left_s = max(self._deadline - time.monotonic(), 0.5)
        return thread.call(lambda: work(*args), timeout_s=left_s)

    def _check_time(self, view: _View) -> None:
        if time.monotonic() < self._deadline:
            return
        absent = [r for r in range(self._world_size) if r not in self._names]
        # Workers give up at about the same time. One that did so a moment before us is
        # not the one that was missing.
        gone = [r for r in self._names if r not in view.records]
        stale = self._stale_ranks(view)
        silent = [] if absent or gone or stale else self._unconfirmed_ranks(view)
        parts = []
        if absent:
            # Whoever is in a graceful shutdown has left the store, though it serves on.
            is_running = any(record.active for record in view.records.values())
            hint = " (or called shutdown, after which nobody can come back to it)"
            parts.append(
                f"{_ranks_text(absent)} not joined{hint if is_running else ''}"
            )
        for ranks, text in (
            (stale, "left a record, but nobody answers at its addresses"),
            (silent, "has joined, but did not confirm"),
            (gone, "had joined, but has left again"),
        ):
            parts += [f"rank {r} ({self._names[r]!r}) {text}" for r in ranks]
        num_missing = len(absent) + len(stale) + len(silent) or len(gone)
        raise ConnectTimeout(
            f"worker {self._record.name!r} (rank {self._record.rank}) waited "
            f"{self._timeout_s:.1f} s for {num_missing} of {self._world_size} workers: "
            f"{'; '.join(parts)}. Check that they were started, with the same init_method "
            "and world_size"
        )

    def _clean_up(self, thread: StoreThread, timeout_s: float = CLEANUP_S) -> None:
        try:
            thread.call(self._delete_keys, timeout_s=timeout_s)
        except GradwireError as error:
            # Keys that stay are recognised as stale by whoever finds them.
            _log.debug("worker %r left keys behind: %s", self._record.name, error)

    def _delete_keys(self) -> None:
        data = read_key(self._store, self._key)
        if data is not None and parse_record(data, self._key).incarnation == (
            self._record.incarnation
        ):
            self._store.delete_key(self._key)
        if any(self._read_conflict()):
            self._store.delete_key(_conflict_key(self._record.rank))
        ready_key = _ready_key(self._record.rank)
        posted = self._snapshot.digest
        if posted and read_key(self._store, ready_key) == posted.encode():
            self._store.delete_key(ready_key)
        if self._is_anybody_there():
            self._store.add("changes", 1)
        # Asked again: the last one may have left meanwhile, before the count was made.
        if not self._is_anybody_there():
            # The last one puts out the light.
            self._store.delete_key(KIND_KEY)
            self._store.delete_key("complete")
            self._store.delete_key("changes")

    def _is_anybody_there(self) -> bool:
        return any(
            read_key(self._store, _worker_key(rank)) is not None
            for rank in range(self._world_size)
        )


def _ranks_text(ranks: Iterable[int]) -> str:
    shown = list(ranks)
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    text = ", ".join(str(rank) for rank in shown[:20]) + more
    return f"rank {text} has" if len(shown) == 1 else f"ranks {text} have"
