"""Rendezvous on real stores, with threads as workers.

HashStore is shared by all threads; FileStore and TCPStore get one client per worker, as
they would between processes.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch.distributed as dist

from gradwire._ids import new_incarnation
from gradwire.errors import (
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
    UsageError,
)
from gradwire.rpc import _rendezvous
from gradwire.rpc._open_group import claim_rank
from gradwire.rpc._records import encode_record, membership_digest
from gradwire.rpc._rendezvous import Rendezvous, WorkerRecord, parse_record
from gradwire.rpc._store import read_key

pytestmark = pytest.mark.timeout(20)

NewStore = Callable[[], dist.Store]
LIMIT = timedelta(seconds=10)
WAIT_S = 10.0


@dataclass
class Meeting:
    """One store, as several workers and an onlooker see it."""

    new_store: NewStore
    watcher: dist.Store


@pytest.fixture(scope="module", autouse=True)
def tcp_stores() -> Iterator[list[dist.Store]]:
    """A served store and some clients of it.

    Made once, and before the leak check looks: libuv keeps a pipe for the life of the
    process, and a client may be slow to make, since torch looks up names for its log.
    """
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT)
    stores: list[dist.Store] = [server]
    for _ in range(4):
        stores.append(dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT))
    yield stores
    stores.clear()


@pytest.fixture(params=["hash", "file", "tcp"])
def meeting(
    request: pytest.FixtureRequest, tmp_path: Path, tcp_stores: list[dist.Store]
) -> Meeting:
    if request.param == "hash":
        store = dist.HashStore()
        return Meeting(lambda: store, store)
    if request.param == "file":
        path = str(tmp_path / "store")
        return Meeting(lambda: dist.FileStore(path, 100), dist.FileStore(path, 100))
    prefix = f"test-{new_incarnation()}"
    # A wait blocks its client for others, so the onlooker has one of its own.
    clients = itertools.cycle(tcp_stores[1:])
    return Meeting(
        lambda: dist.PrefixStore(prefix, next(clients)),
        dist.PrefixStore(prefix, tcp_stores[0]),
    )


@pytest.fixture
def new_store(meeting: Meeting) -> NewStore:
    return meeting.new_store


@pytest.fixture
def watcher(meeting: Meeting) -> dist.Store:
    return meeting.watcher


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def make_record(
    rank: int, name: str | None = None, *, active: bool = False
) -> WorkerRecord:
    return WorkerRecord(
        name=f"w{rank}" if name is None else name,
        rank=rank,
        incarnation=new_incarnation(),
        world_size=rank + 1,
        boot_id="boot",
        network_namespace="4026531840",
        addresses={"unix": f"gradwire-{rank}"},
        active=active,
    )


def dead(record: WorkerRecord) -> bool:
    return False


def alive(record: WorkerRecord) -> bool:
    return True


def rendezvous(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    name: str | None = None,
    contact: Callable[[WorkerRecord], bool] = dead,
    timeout_s: float = WAIT_S,
) -> Rendezvous:
    return Rendezvous(store, make_record(rank, name), world_size, timeout_s, contact)


def spawn(worker: Rendezvous) -> Future[list[WorkerRecord]]:
    """Joins on a thread of its own."""
    future: Future[list[WorkerRecord]] = Future()

    def run() -> None:
        try:
            future.set_result(worker.join())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def post(store: dist.Store, record: WorkerRecord, world_size: int) -> WorkerRecord:
    """Leaves a record behind, as a worker that was killed does."""
    record = msgspec.structs.replace(record, world_size=world_size)
    store.set(f"worker/{record.rank}", encode_record(record))
    # A TCP store does not confirm ``set``: another client might overtake it.
    assert store.check([f"worker/{record.rank}"])
    return record


def await_key(store: dist.Store, key: str) -> None:
    store.wait([key], LIMIT)


def keys_left(store: dist.Store, world_size: int) -> list[str]:
    keys = ["changes", "complete"]
    for rank in range(world_size):
        keys += [f"worker/{rank}", f"ready/{rank}"]
    return [key for key in keys if store.check([key])]


def test_all_workers_join(new_store: NewStore):
    futures = [spawn(rendezvous(new_store(), rank, 4)) for rank in range(4)]
    groups = [future.result(WAIT_S) for future in futures]
    for rank, group in enumerate(groups):
        assert [record.name for record in group] == ["w0", "w1", "w2", "w3"]
        assert group[rank].active
        assert membership_digest(group) == membership_digest(groups[0])


def test_one_worker_is_a_group(new_store: NewStore):
    assert [record.rank for record in rendezvous(new_store(), 0, 1).join()] == [0]


def test_many_workers_join_quickly(new_store: NewStore):
    workers = [rendezvous(new_store(), rank, 32) for rank in range(32)]
    start = time.monotonic()
    futures = [spawn(worker) for worker in workers]
    digests = {membership_digest(future.result(WAIT_S)) for future in futures}
    assert len(digests) == 1
    assert time.monotonic() - start < 8.0


def test_leave_deletes_all_keys(new_store: NewStore, watcher: dist.Store):
    workers = [rendezvous(new_store(), rank, 3) for rank in range(3)]
    for future in [spawn(worker) for worker in workers]:
        future.result(WAIT_S)
    assert watcher.check(["worker/0", "ready/0", "worker/2", "complete"])

    workers[0].leave()
    assert not watcher.check(["worker/0"])
    assert not watcher.check(["ready/0"])
    assert watcher.check(["worker/1", "worker/2"])
    workers[1].leave()
    workers[2].leave()

    assert keys_left(watcher, 3) == []


class Interrupted:
    """A store where something else happens before the next post is counted."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.before_count: Callable[[], None] | None = None

    def add(self, key: str, amount: int) -> int:
        event, self.before_count = self.before_count, None
        if event is not None:
            event()
        return self._store.add(key, amount)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_nothing_stays_of_two_that_leave_at_the_same_time(store):
    interrupted = Interrupted(store)
    first = rendezvous(cast(Any, interrupted), 0, 2)
    second = rendezvous(store, 1, 2)
    for future in [spawn(first), spawn(second)]:
        future.result(WAIT_S)
    interrupted.before_count = second.leave

    first.leave()

    assert interrupted.before_count is None
    assert keys_left(store, 2) == []


def test_group_can_meet_again_after_it_has_left(new_store: NewStore):
    for _ in range(2):
        workers = [rendezvous(new_store(), rank, 2) for rank in range(2)]
        for future in [spawn(worker) for worker in workers]:
            assert len(future.result(WAIT_S)) == 2
        for worker in workers:
            worker.leave()


def test_missing_workers_are_named_and_nothing_stays(
    new_store: NewStore, watcher: dist.Store
):
    futures = [
        spawn(rendezvous(new_store(), rank, 4, timeout_s=0.4)) for rank in (0, 1)
    ]
    with pytest.raises(ConnectTimeout) as caught:
        futures[0].result(WAIT_S)
    assert "worker 'w0' (rank 0) waited 0.4 s for 2 of 4 workers" in str(caught.value)
    assert "ranks 2, 3 have not joined" in str(caught.value)
    assert futures[1].exception(WAIT_S) is not None
    assert keys_left(watcher, 4) == []


def test_worker_that_comes_back_to_one_in_shutdown_is_told_what_may_be_wrong(store):
    post(store, make_record(1, active=True), 3)
    with pytest.raises(ConnectTimeout, match="rank 0 has not joined") as caught:
        rendezvous(store, 2, 3, contact=alive, timeout_s=0.1).join()
    assert "(or called shutdown, after which nobody can come back" in str(caught.value)


def test_one_missing_worker_is_named(store):
    with pytest.raises(ConnectTimeout, match=r"1 of 2 workers: rank 1 has not joined"):
        rendezvous(store, 0, 2, timeout_s=0.1).join()


def test_join_works_after_a_join_that_failed(new_store: NewStore):
    with pytest.raises(ConnectTimeout):
        rendezvous(new_store(), 0, 2, timeout_s=0.1).join()
    late = spawn(rendezvous(new_store(), 1, 2))
    assert len(rendezvous(new_store(), 0, 2).join()) == 2
    assert len(late.result(WAIT_S)) == 2


def test_worker_that_does_not_confirm_is_named(store):
    post(store, make_record(1), 2)
    with pytest.raises(
        ConnectTimeout, match=r"rank 1 \('w1'\) has joined, but did not"
    ):
        rendezvous(store, 0, 2, timeout_s=0.2).join()
    assert keys_left(store, 1) == ["changes"]


def test_stale_joining_record_waits_for_the_next_life(
    new_store: NewStore, watcher: dist.Store
):
    # Killed while it was joining, before the others came.
    ghost = post(new_store(), make_record(1), 2)
    first = spawn(rendezvous(new_store(), 0, 2))
    await_key(watcher, "ready/0")  # it has taken the ghost for a worker

    second = spawn(rendezvous(new_store(), 1, 2))

    assert first.result(WAIT_S)[1].incarnation != ghost.incarnation
    assert first.result(WAIT_S)[1].incarnation == second.result(WAIT_S)[1].incarnation


def test_stale_active_record_waits_for_the_next_life(new_store: NewStore):
    ghost = post(new_store(), make_record(1, active=True), 2)
    tried = threading.Event()
    asked: list[int] = []

    def contact(record: WorkerRecord) -> bool:
        asked.append(record.incarnation)
        tried.set()
        return False

    first = spawn(rendezvous(new_store(), 0, 2, contact=contact))
    assert tried.wait(WAIT_S)
    second = spawn(rendezvous(new_store(), 1, 2))

    assert first.result(WAIT_S)[1].incarnation != ghost.incarnation
    assert len(second.result(WAIT_S)) == 2
    assert set(asked) == {ghost.incarnation}  # and nobody of this round


def test_active_worker_that_was_cut_off_is_asked_again(new_store: NewStore):
    other = post(new_store(), make_record(1, active=True), 2)
    answers = iter([False, True])

    found = rendezvous(new_store(), 0, 2, contact=lambda _: next(answers)).join()

    assert found[1].incarnation == other.incarnation


def test_stale_active_record_is_named_in_the_timeout(store):
    post(store, make_record(1, active=True), 3)
    post(store, make_record(2, active=True), 3)
    with pytest.raises(ConnectTimeout) as caught:
        rendezvous(
            store, 0, 3, timeout_s=0.2, contact=lambda record: record.rank == 2
        ).join()
    assert "1 of 3 workers" in str(caught.value)
    assert "rank 1 ('w1') left a record, but nobody answers" in str(caught.value)


class Slow:
    """Contacts on threads of their own, which get no answer before they are released."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._released = threading.Event()
        self._threads: list[threading.Thread] = []

    def contact(self, record: WorkerRecord) -> bool:
        self.asked.append(record.rank)
        return self._released.wait(WAIT_S)

    def submit(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def release(self) -> None:
        self._released.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.release()


@pytest.mark.parametrize("world_size", [3, 4], ids=["same size", "other size"])
def test_workers_that_do_not_answer_take_the_limit_once(store, slow, world_size):
    for rank in (1, 2):
        post(store, make_record(rank, active=True), world_size)
    start = time.monotonic()

    with pytest.raises(ConnectTimeout) as caught:
        Rendezvous(store, make_record(0), 3, 0.3, slow.contact, slow.submit).join()

    assert time.monotonic() - start < WAIT_S / 2
    assert sorted(slow.asked) == [1, 2]
    assert "2 of 3 workers" in str(caught.value)
    for rank in (1, 2):
        assert f"rank {rank} ('w{rank}') left a record, but nobody answers" in str(
            caught.value
        )


def test_rank_is_not_taken_over_before_its_holder_could_answer(store, slow):
    holder = post(store, make_record(0, "holder", active=True), 1)

    with pytest.raises(ConnectTimeout, match=r"'holder', .* under rank 0, is alive"):
        Rendezvous(store, make_record(0), 1, 0.3, slow.contact, slow.submit).join()

    assert read_key(store, "worker/0") == encode_record(holder).encode()


def test_what_a_contact_raises_elsewhere_ends_the_join(store, slow):
    post(store, make_record(1, active=True), 2)

    def contact(record: WorkerRecord) -> bool:
        raise RemoteProtocolError("another secret")

    with pytest.raises(RemoteProtocolError, match="another secret"):
        Rendezvous(store, make_record(0), 2, WAIT_S, contact, slow.submit).join()


def test_whole_group_restarts_over_its_remains(new_store: NewStore):
    for rank in range(3):
        post(new_store(), make_record(rank, active=True), 3)
    futures = [spawn(rendezvous(new_store(), rank, 3)) for rank in range(3)]
    assert len({membership_digest(f.result(WAIT_S)) for f in futures}) == 1


def test_crashed_worker_rejoins_a_running_group(new_store: NewStore):
    futures = [spawn(rendezvous(new_store(), rank, 3)) for rank in range(3)]
    group = futures[0].result(WAIT_S)
    for future in futures:
        future.result(WAIT_S)
    asked: list[str] = []

    def contact(record: WorkerRecord) -> bool:
        asked.append(record.name)
        return record.rank != 1

    again = rendezvous(new_store(), 1, 3, contact=contact).join()

    assert sorted(asked) == ["w0", "w1", "w2"]  # once each
    assert again[0].incarnation == group[0].incarnation
    assert again[1].incarnation != group[1].incarnation
    assert again[2].addresses == group[2].addresses


def test_two_crashed_workers_rejoin_together(new_store: NewStore):
    for rank in range(3):
        post(new_store(), make_record(rank, active=True), 3)

    def contact(record: WorkerRecord) -> bool:
        return record.rank == 0

    futures = [
        spawn(rendezvous(new_store(), rank, 3, contact=contact)) for rank in (1, 2)
    ]
    assert len({membership_digest(f.result(WAIT_S)) for f in futures}) == 1


def test_quick_worker_may_leave_before_a_slow_one_looks(store):
    # All posts of the quick worker but "complete" are gone when the slow one looks.
    slow = spawn(rendezvous(store, 0, 2))
    ghost = post(store, make_record(1), 2)
    store.add("changes", 1)
    await_key(store, "ready/0")
    store.delete_key("worker/1")
    store.set("complete", store.get("ready/0"))
    store.add("changes", 1)
    assert slow.result(WAIT_S)[1] == ghost


def test_same_name_fails_on_both_and_names_both_ranks(
    new_store: NewStore, watcher: dist.Store
):
    futures = [
        spawn(rendezvous(new_store(), rank, 2, name="twin", contact=alive))
        for rank in range(2)
    ]
    for future in futures:
        error = future.exception(WAIT_S)
        assert isinstance(error, UsageError)
        assert "'twin' is not unique: ranks 0 and 1" in str(error)
    assert keys_left(watcher, 2) == []


def test_same_name_fails_on_all_that_wait_for_the_same_group(new_store: NewStore):
    futures = [
        spawn(rendezvous(new_store(), rank, 4, name=name, contact=alive))
        for rank, name in enumerate(("other", "twin", "twin"))
    ]
    for future in futures:
        error = future.exception(WAIT_S)
        assert isinstance(error, UsageError)
        assert "'twin' is not unique: ranks 1 and 2" in str(error)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rendezvous, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(_rendezvous, "_FULL_LOOK_S", 0.1)


def give_up(store: dist.Store, world_size: int) -> None:
    """Two workers quarrel, and leave; the others have not come yet."""
    futures = [
        spawn(rendezvous(store, rank, world_size, name="twin", contact=alive))
        for rank in range(2)
    ]
    for future in futures:
        assert isinstance(future.exception(WAIT_S), UsageError)


@pytest.mark.usefixtures("impatient")
def test_those_who_come_after_a_quarrel_hear_of_it(store):
    give_up(store, 4)

    late = [spawn(rendezvous(store, rank, 4, contact=alive)) for rank in (2, 3)]

    for future in late:
        error = future.exception(WAIT_S)
        assert isinstance(error, UsageError)
        assert "'twin' is not unique: ranks 0 and 1" in str(error)


@pytest.mark.usefixtures("impatient")
def test_who_comes_during_a_quarrel_hears_of_it(store):
    """The others have not left yet: that they are there does not make it a new try."""
    give_up(store, 3)
    given_up = json.loads(store.get("conflict/2"))["given_up"]
    for rank, life in given_up:
        record = msgspec.structs.replace(make_record(rank), incarnation=life)
        post(store, record, 3)

    late = spawn(rendezvous(store, 2, 3))

    assert "'twin' is not unique" in str(late.exception(WAIT_S))


def test_quarrel_of_an_earlier_try_is_forgotten_in_the_next(store):
    give_up(store, 3)

    first = spawn(rendezvous(store, 2, 3, contact=alive))
    others = [spawn(rendezvous(store, rank, 3, contact=alive)) for rank in range(2)]

    for future in [first, *others]:
        assert [record.name for record in future.result(WAIT_S)] == ["w0", "w1", "w2"]


@pytest.mark.usefixtures("impatient")
def test_old_quarrel_is_no_news(store, monkeypatch):
    give_up(store, 3)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)

    with pytest.raises(ConnectTimeout, match=r"waited 0\.5 s for 2 of 3 workers"):
        rendezvous(store, 2, 3, timeout_s=0.5).join()


@pytest.mark.usefixtures("impatient")
def test_newcomer_with_a_name_that_is_taken_disturbs_no_other(store):
    """The group runs; two workers of it are replaced at the same time."""
    post(store, make_record(0, "w0", active=True), 3)
    bad = spawn(rendezvous(store, 1, 3, name="w0", contact=alive))
    assert isinstance(bad.exception(WAIT_S), UsageError)

    good = rendezvous(store, 2, 3, contact=alive, timeout_s=0.5)
    with pytest.raises(ConnectTimeout, match="rank 1 has not joined"):
        good.join()


def test_name_left_by_a_dead_worker_of_another_rank_is_free(store):
    post(store, make_record(1, "w0"), 2)
    first = spawn(rendezvous(store, 0, 2))
    second = spawn(rendezvous(store, 1, 2))
    assert [record.name for record in first.result(WAIT_S)] == ["w0", "w1"]
    assert len(second.result(WAIT_S)) == 2


def test_rank_of_a_living_worker_is_taken(store):
    holder = post(store, make_record(1, "holder", active=True), 2)
    with pytest.raises(UsageError, match="rank 1 is taken by worker 'holder'"):
        rendezvous(store, 1, 2, contact=alive).join()
    assert parse_record(store.get("worker/1")) == holder


def test_same_rank_at_once_lets_one_in(new_store: NewStore):
    rivals = [
        spawn(rendezvous(new_store(), 1, 2, name=name, contact=alive))
        for name in ("one", "two")
    ]
    other = rendezvous(new_store(), 0, 2, contact=alive).join()
    errors = [error for rival in rivals if (error := rival.exception(WAIT_S))]
    assert len(errors) == 1
    assert isinstance(errors[0], UsageError)
    assert "rank 1 is taken by worker" in str(errors[0])
    assert other[1].name in ("one", "two")


def test_worker_whose_rank_is_taken_over_fails(
    new_store: NewStore, watcher: dist.Store
):
    # The rival did not find it alive, for whatever reason, and took the rank.
    first = spawn(rendezvous(new_store(), 0, 2, name="first"))
    await_key(watcher, "worker/0")
    second = rendezvous(new_store(), 0, 2, name="second")
    rival = spawn(second)

    error = first.exception(WAIT_S)

    assert isinstance(error, UsageError)
    assert "was taken over by worker 'second'" in str(error)
    assert parse_record(watcher.get("worker/0")).name == "second"
    assert len(rendezvous(new_store(), 1, 2).join()) == 2
    assert len(rival.result(WAIT_S)) == 2


def test_different_world_sizes_fail_on_both(new_store: NewStore, watcher: dist.Store):
    futures = [
        spawn(rendezvous(new_store(), 0, 2, contact=alive)),
        spawn(rendezvous(new_store(), 1, 4, contact=alive)),
    ]
    for future in futures:
        error = future.exception(WAIT_S)
        assert isinstance(error, UsageError)
        assert "(rank 0) has 2" in str(error)
        assert "(rank 1) has 4" in str(error)
    assert keys_left(watcher, 4) == []


def test_world_size_of_a_dead_worker_does_not_matter(store):
    post(store, make_record(1), 4)
    first = spawn(rendezvous(store, 0, 2))
    assert len(rendezvous(store, 1, 2).join()) == 2
    assert len(first.result(WAIT_S)) == 2


def test_rank_must_be_below_the_world_size(store):
    with pytest.raises(UsageError, match="rank 2"):
        rendezvous(store, 2, 2)


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x00\xff\xfe random",
        pickle.dumps(_Bomb()),
        b"[" * 4000,
        b'{"name": "w1"}',
        b"x" * 5000,
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_junk_in_the_store_is_refused(store, junk, rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.set(f"worker/{rank}", junk)
    if rank == 0 and junk == b"":
        assert rendezvous(store, 0, 1).join()  # an empty value is no value
        return
    with pytest.raises(RemoteProtocolError, match=f"'worker/{rank}', found b"):
        rendezvous(store, 0, 2).join()
    assert list(tmp_path.iterdir()) == []
    assert not store.check([f"worker/{1 - rank}"])


def test_record_of_another_rank_is_refused(store):
    store.set("worker/1", encode_record(make_record(0)))
    with pytest.raises(RemoteProtocolError, match="found worker 'w0' of rank 0"):
        rendezvous(store, 0, 2).join()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "no spaces"},
        {"name": ""},
        {"rank": -1},
        {"rank": 2**31},
        {"rank": "1"},
        {"rank": True},
        {"rank": 5},
        {"incarnation": 0},
        {"incarnation": 2**63},
        {"world_size": 0},
        {"boot_id": "b" * 257},
        {"network_namespace": "\n"},
        {"addresses": {"tcp": "x" * 257}},
        {"addresses": {"tcp": "na\u00efve"}},
        {"addresses": {"tcp": "a\x00"}},
        {"addresses": {str(i): "a" for i in range(9)}},
        {"addresses": ["a"]},
        {"active": 1},
        {"extra": 1},
    ],
)
def test_record_that_is_not_valid_is_refused(change):
    fields = {**json.loads(encode_record(make_record(1))), **change}
    with pytest.raises(RemoteProtocolError, match="'worker/7'"):
        parse_record(json.dumps(fields).encode(), "worker/7")


def test_error_about_a_record_fits_on_one_line_of_a_log():
    fields = json.loads(encode_record(make_record(1)))
    for name in ("two\nlines", "\x1b[2J", "x" * 3000):
        data = json.dumps({**fields, name: 1}).encode()
        with pytest.raises(RemoteProtocolError, match="unknown field") as caught:
            parse_record(data)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "junk", [b'{"a":' + b"[" * 1019, b"\xff", b"[" * 5000, b"{}", b'{"text":1}']
)
def test_junk_in_place_of_a_conflict_is_passed_over(store, junk):
    store.set("conflict/0", junk)
    assert rendezvous(store, 0, 1).join()


@pytest.mark.parametrize("junk", [b"x", b"-1", b"9" * 5000, b"99999", b"\xc2\xb2"])
def test_junk_in_place_of_a_rank_is_refused(store, junk):
    store.set("rank_of/w0", junk)
    with pytest.raises(RemoteProtocolError, match="must hold the rank of worker 'w0'"):
        claim_rank(store, "w0", None, WAIT_S)


def test_record_survives_the_store():
    record = make_record(3)
    assert parse_record(encode_record(record).encode()) == record


def test_failure_of_contact_ends_the_join_and_cleans_up(store):
    post(store, make_record(1, active=True), 2)

    def contact(record: WorkerRecord) -> bool:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        rendezvous(store, 0, 2, contact=contact).join()
    assert keys_left(store, 1) == ["changes"]  # the other record is still there


def test_interrupt_cleans_up(store):
    post(store, make_record(1, active=True), 2)

    def contact(record: WorkerRecord) -> bool:
        assert store.check(["worker/0"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rendezvous(store, 0, 2, contact=contact).join()
    assert not store.check(["worker/0"])


def test_dead_store_is_a_connect_error_and_leave_is_silent():
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT)
    worker = rendezvous(client, 0, 2, contact=alive)
    joining = spawn(worker)
    await_key(server, "worker/0")
    del server
    with pytest.raises(ConnectError, match="rendezvous store failed"):
        joining.result(WAIT_S)
    worker.leave()


def test_read_key_never_waits(new_store: NewStore):
    store = new_store()
    assert read_key(store, "key") is None
    assert not store.check(["key"])
    store.set("key", "\x00z")
    assert read_key(store, "key") == b"\x00z"
    store.delete_key("key")
    assert read_key(store, "key") is None
