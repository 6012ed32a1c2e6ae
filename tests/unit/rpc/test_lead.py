"""One thread of the pool leads; who comes after it, and when."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.rpc import _poller, _pool
from gradwire.rpc._lead import Lead
from gradwire.rpc._pool import WorkerPool

LIMIT_S = 10.0
MOMENT_S = 0.05


def on_another_thread(function: Callable[[], Any]) -> Any:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(function()))
    thread.start()
    thread.join(LIMIT_S)
    return found.get(timeout=LIMIT_S)


# ------------------------------------------------------------------------------ the lead


def test_one_thread_leads_until_it_is_deposed():
    watched: list[bool] = []
    lead = Lead(watched.append)

    assert lead.claim()
    assert lead.claim()
    assert lead.is_mine
    assert not on_another_thread(lead.claim)
    assert watched == []

    assert lead.depose(threading.get_ident())

    assert not lead.is_mine
    assert not lead.depose(threading.get_ident())
    assert watched == [True]


def test_claim_ends_the_watch():
    watched: list[bool] = []
    lead = Lead(watched.append)
    lead.claim()
    lead.depose(threading.get_ident())

    assert on_another_thread(lead.claim)

    assert watched == [True, False]


def test_claim_after_the_watch_was_used_up_does_not_end_it_again():
    watched: list[bool] = []
    lead = Lead(watched.append)
    lead.claim()
    lead.depose(threading.get_ident())

    lead.was_called()
    lead.claim()

    assert watched == [True]


def test_nobody_is_deposed_who_does_not_lead():
    watched: list[bool] = []
    lead = Lead(watched.append)
    other = on_another_thread(threading.get_ident)

    assert not lead.depose(0)
    lead.claim()
    assert not lead.depose(other)

    assert lead.is_mine
    assert watched == []


def test_all_lead_where_nobody_can_be_woken_by_events():
    lead = Lead(None)

    assert lead.claim()
    assert on_another_thread(lead.claim)
    assert on_another_thread(lambda: lead.is_mine)
    assert not lead.depose(threading.get_ident())
    assert lead.is_mine


# --------------------------------------------------------------------------- in the pool


class Source:
    """A descriptor of the pool; the callback notes its thread, and does something."""

    def __init__(self, pool: WorkerPool, work: Callable[[], object]) -> None:
        self.threads: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._pool = pool
        self._work = work
        self._ours, self._theirs = socket.socketpair()
        pool.watch(self._ours.fileno(), self._on_event)
        self._arm()

    def _arm(self) -> None:
        self._pool.poller.arm(self._ours.fileno(), True, False)

    def _on_event(self, readable: bool, writable: bool) -> None:
        self._ours.recv(1)
        self.threads.put(threading.get_ident())
        self._work()
        self._arm()

    def ring(self) -> None:
        self._theirs.send(b"x")

    def next_thread(self) -> int:
        return self.threads.get(timeout=LIMIT_S)

    def unwatch(self) -> None:
        self._pool.unwatch(self._ours.fileno())

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def make_source(pool: WorkerPool) -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def make(work: Callable[[], object] = lambda: None) -> Source:
        made.append(Source(pool, work))
        return made[-1]

    yield make
    for source in made:
        source.unwatch()
        source.close()


def test_one_thread_serves_all_that_is_short(make_source):
    sources = [make_source() for _ in range(4)]
    threads = set()

    for _ in range(50):
        for source in sources:
            source.ring()
        threads |= {source.next_thread() for source in sources}

    assert len(threads) == 1


def test_event_waits_while_the_leader_is_at_work(make_source):
    gate = threading.Event()
    busy, other = make_source(lambda: gate.wait(LIMIT_S)), make_source()
    busy.ring()
    leader = busy.next_thread()

    other.ring()
    with pytest.raises(queue.Empty):
        other.threads.get(timeout=MOMENT_S)
    gate.set()

    assert other.next_thread() == leader


@pytest.mark.parametrize("is_rung_before", [False, True])
def test_another_thread_leads_when_the_leader_has_resigned(
    make_source, pool, is_rung_before
):
    gate, may_resign = threading.Event(), threading.Event()

    def work() -> None:
        assert may_resign.wait(LIMIT_S)
        pool.resign()
        assert gate.wait(LIMIT_S)

    busy, other = make_source(work), make_source()
    busy.ring()
    leader = busy.next_thread()
    if is_rung_before:
        other.ring()
    may_resign.set()
    if not is_rung_before:
        other.ring()

    assert other.next_thread() != leader
    gate.set()


def test_another_thread_works_at_the_queue_when_the_leader_has_resigned(
    make_source, pool
):
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        pool.submit(done.set)
        assert not done.wait(MOMENT_S)
        pool.resign()
        assert gate.wait(LIMIT_S)

    busy = make_source(work)
    busy.ring()

    assert done.wait(LIMIT_S)
    gate.set()


def test_leader_that_is_stuck_in_a_piece_of_work_is_deposed(make_source, pool):
    gate, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(LIMIT_S)

    other = make_source()
    pool.submit(block)
    assert entered.wait(LIMIT_S)
    other.ring()

    begin = time.monotonic()
    while other.threads.empty() and time.monotonic() < begin + LIMIT_S:
        pool.check_stall()
        time.sleep(0.001)

    other.next_thread()
    gate.set()


def test_descriptor_in_reserve_is_served_while_the_leader_is_stuck(make_source, pool):
    gate, called = threading.Event(), threading.Event()
    busy = make_source(lambda: gate.wait(LIMIT_S))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.watch(ours.fileno(), lambda _r, _w: called.set(), in_reserve=True)
        pool.reserve.arm(ours.fileno(), True, False)
        busy.ring()
        busy.next_thread()

        theirs.send(b"x")

        assert called.wait(LIMIT_S)
        gate.set()
        pool.unwatch(ours.fileno())


def test_pool_without_epoll_has_no_leader(monkeypatch):
    monkeypatch.setattr(_pool, "make_poller", _poller.SelectorPoller)
    pool = WorkerPool("test", 2, lambda: None)
    pool.start()
    gate = threading.Event()
    busy, other = Source(pool, lambda: gate.wait(LIMIT_S)), Source(pool, lambda: None)
    try:
        busy.ring()
        leader = busy.next_thread()
        other.ring()

        assert other.next_thread() != leader
    finally:
        gate.set()
        busy.unwatch()
        other.unwatch()
        assert pool.close(LIMIT_S) == []
        busy.close()
        other.close()
