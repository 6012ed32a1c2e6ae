"""One thread's turns at several connections: what it keeps, and what it lets go."""

from __future__ import annotations

import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.rpc._future import Outcome
from gradwire.rpc._link import Link
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._round import _MOST_TURNS
from gradwire.rpc._spin import SpinGauge
from gradwire.rpc._turn import LONGEST_TURN_S, about_to_block, about_to_compute
from gradwire.transport import Frame, Limits
from gradwire.transport._stream import StreamConnection

LIMIT_S = 10.0
SPIN_S = 6.0  # so long that a round ends only where something ends it


@pytest.fixture(autouse=True)
def _spins_for_long(monkeypatch):
    def spin(_: SpinGauge, look: Callable[[int], Any]) -> Any:
        end = time.monotonic() + SPIN_S
        while not (found := look(0)):
            if time.monotonic() > end:
                return None
            time.sleep(0)
        return found

    monkeypatch.setattr(SpinGauge, "spin", spin)


class Bench:
    """A pool, and connections to it; requests are run by what is set for them."""

    request_kinds: Container[int] = range(256)
    watch = SimpleNamespace(settled_until=0.0)

    def __init__(self, number: int) -> None:
        self.pool = WorkerPool("test", 2, lambda: None)
        self.handlers: dict[bytes, Callable[[], object]] = {}
        self.served: queue.SimpleQueue[tuple[bytes, int]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.peers: list[StreamConnection] = []
        self.links: list[Link] = []
        for _ in range(number):
            ours, theirs = socket.socketpair()
            self.peers.append(StreamConnection("test", theirs, Limits()))
            connection = StreamConnection("test", ours, Limits())
            self.links.append(Link(connection, self.pool, self))
        self.pool.start()
        for link in self.links:
            link.start()

    def accept(self, link: Link, frame: Frame) -> Any:
        return bytes(frame.head)

    def serve(self, link: Link, request: Any) -> None:
        self.handlers.get(request, lambda: None)()
        self.served.put((request, threading.get_ident()))

    def turn_begins(self, now: float) -> None:
        pass

    def link_ended(self, link: Link, reason: str) -> None:
        self.ended.put(link)

    def ask(self, number: int, request: bytes = b"quick") -> int:
        """Sends a request on one connection, and returns the thread that has served it."""
        self.peers[number].send(request)
        found, thread = self.served.get(timeout=LIMIT_S)
        assert found == request
        return thread

    def close(self) -> None:
        for link in self.links:
            link.close()
        for peer in self.peers:
            peer.close()
        assert self.pool.close(LIMIT_S) == []


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(getattr(request, "param", 2))
    yield bench
    bench.close()


def test_one_thread_serves_all_without_the_poller(bench, monkeypatch):
    threads = {bench.ask(0), bench.ask(1)}  # from here on it has its turns
    armed: list[int] = []
    arm = bench.pool.poller.arm

    def noting(fileno: int, read: bool, write: bool) -> None:
        armed.append(fileno)
        arm(fileno, read, write)

    monkeypatch.setattr(bench.pool.poller, "arm", noting)

    threads |= {bench.ask(number % 2) for number in range(50)}

    assert len(threads) == 1
    assert armed == []


@pytest.mark.parametrize("tell", [about_to_block, about_to_compute])
def test_handler_that_makes_way_leaves_the_other_connections(bench, tell):
    other = threading.Event()

    def wait() -> None:
        tell()
        assert other.wait(LIMIT_S)

    bench.handlers = {b"wait": wait, b"end": other.set}
    bench.ask(0), bench.ask(1)

    bench.peers[0].send(b"wait")
    bench.ask(1, b"end")

    assert bench.served.get(timeout=LIMIT_S)[0] == b"wait"
    assert bench.ask(0) and bench.ask(1)


def test_turn_that_ends_while_another_one_is_served_is_left_to_others(bench, caplog):
    entered, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert may_go_on.wait(LIMIT_S)

    bench.handlers = {b"hold": hold, b"make way": about_to_block}
    bench.ask(0), bench.ask(1)

    bench.peers[0].send(b"hold")
    assert entered.wait(LIMIT_S)
    bench.peers[0].send(b"make way")  # both connections are ready when it looks again
    bench.peers[1].send(b"make way")
    may_go_on.set()

    found = [bench.served.get(timeout=LIMIT_S)[0] for _ in range(3)]
    assert sorted(found) == [b"hold", b"make way", b"make way"]
    assert bench.ask(0) and bench.ask(1)
    assert not caplog.records


def test_connections_of_a_thread_that_is_stuck_are_taken_away(bench):
    stuck, other = threading.Event(), threading.Event()

    def wait() -> None:
        stuck.set()
        assert other.wait(LIMIT_S)

    bench.handlers = {b"wait": wait, b"end": other.set}
    bench.ask(0), bench.ask(1)

    bench.peers[0].send(b"wait")
    assert stuck.wait(LIMIT_S)
    for link in bench.links:  # as the watch does
        link.check_turn(time.monotonic() + 2 * LONGEST_TURN_S)
    bench.ask(1, b"end")

    assert bench.served.get(timeout=LIMIT_S)[0] == b"wait"
    assert bench.ask(0) and bench.ask(1)


def test_connection_that_ends_is_reported_and_others_go_on(bench):
    bench.ask(0), bench.ask(1)

    bench.peers[1].close()

    assert bench.ended.get(timeout=LIMIT_S) is bench.links[1]
    for _ in range(3):
        bench.ask(0)


def test_connection_that_we_close_is_let_go(bench):
    bench.ask(0), bench.ask(1)

    bench.links[1].close()

    for _ in range(3):
        bench.ask(0)


def test_work_of_the_pool_does_not_wait_for_the_end_of_a_round(bench):
    bench.ask(0), bench.ask(1)
    done = threading.Event()

    bench.pool.submit(done.set)

    assert done.wait(SPIN_S / 2)
    assert bench.ask(0) and bench.ask(1)


def test_other_descriptors_do_not_wait_for_the_end_of_a_round(bench):
    ours, theirs = socket.socketpair()
    rang = threading.Event()
    bench.pool.watch(ours.fileno(), lambda *_: rang.set())
    bench.pool.poller.arm(ours.fileno(), True, False)
    try:
        bench.ask(0), bench.ask(1)

        theirs.send(b"x")

        assert rang.wait(SPIN_S / 2)
        assert bench.ask(0) and bench.ask(1)
    finally:
        bench.pool.unwatch(ours.fileno())
        ours.close()
        theirs.close()


@pytest.mark.parametrize("bench", [_MOST_TURNS + 3], indirect=True)
def test_more_connections_than_one_thread_keeps_are_served(bench):
    depths: set[int] = set()
    bench.handlers = {b"look": lambda: depths.add(len(traceback.extract_stack()))}

    for number in range(200):
        bench.ask(number % len(bench.links), b"look")

    assert max(depths) - min(depths) < 10


def test_round_ends_when_somebody_waits_for_an_answer_that_was_read(bench):
    """That one needs the interpreter, and so do others if they are looked at meanwhile."""
    outcome = Outcome()
    waiter = threading.Thread(target=outcome.block, args=(LIMIT_S,))
    waiter.start()
    while not outcome._waiters:
        time.sleep(0.001)
    bench.ask(0), bench.ask(1)
    bench.handlers = {b"answer": lambda: outcome.finish(None, None)}

    start = time.monotonic()
    bench.peers[0].send(b"answer")
    waiter.join(LIMIT_S)
    while bench.links[1]._turn is not None:
        assert time.monotonic() - start < SPIN_S / 2, "it looks on"
        time.sleep(0.001)


def test_round_goes_on_if_nobody_waits_for_what_was_read(bench):
    bench.ask(0), bench.ask(1)
    bench.links[0].waits_elsewhere(+1)  # for something else

    bench.peers[0].send(b"news")
    assert bench.served.get(timeout=LIMIT_S)[0] == b"news"
    turn = bench.links[1]._turn
    bench.ask(0)

    assert turn is not None and bench.links[1]._turn is turn
    bench.links[0].waits_elsewhere(-1)


def test_requests_that_come_at_the_same_time_are_all_served(bench):
    bench.ask(0), bench.ask(1)

    for number in range(40):
        bench.peers[number % 2].send(b"%d" % number)

    found = {int(bench.served.get(timeout=LIMIT_S)[0]) for _ in range(40)}
    assert found == set(range(40))


def test_all_connections_are_watched_while_one_is_served(bench):
    """Else a look could not take them away."""
    bench.ask(0), bench.ask(1)
    since: list[float] = []

    def note() -> None:
        since.extend(link._turn.serving_since for link in bench.links)

    bench.handlers = {b"note": note}
    before = time.monotonic()
    bench.ask(0, b"note")
    bench.ask(1, b"note")

    assert len(since) == 4
    assert all(before <= when <= time.monotonic() for when in since)
    while any(link._turn.serving_since for link in bench.links):
        assert time.monotonic() - before < LIMIT_S, (
            "a turn that reads is taken for stuck"
        )
