"""One caller that reads several connections: it leaves each as it should be."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.rpc import _several
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._link import Link
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._several import Reading, read_several
from gradwire.rpc._spin import readiness
from gradwire.rpc._turn import Turn, about_to_block, current_turn
from gradwire.transport import Frame, Limits
from gradwire.transport._stream import StreamConnection

LIMIT_S = 10.0


class Owner:
    """Frames are answers, and begin with the number of their call."""

    request_kinds: Container[int] = b"r"
    watch = SimpleNamespace(settled_until=0.0)

    def __init__(self) -> None:
        self.calls: dict[int, PendingCall] = {}
        self.threads: list[threading.Thread] = []
        self.on_answer: Any = lambda: None

    def accept(self, link: Link, frame: Frame) -> Any:
        self.threads.append(threading.current_thread())
        if not frame.head.startswith(b"request"):
            self.on_answer()
            self.calls[int(frame.head)].settle(bytes(frame.head), None)

    def serve(self, link: Link, request: Any) -> None:
        raise AssertionError("there are no requests")

    def turn_begins(self, now: float) -> None:
        pass

    def link_ended(self, link: Link, reason: str) -> None:
        pass


class Peers:
    """Connections, each with a call that nobody has answered."""

    def __init__(self, pool: WorkerPool, stack: contextlib.ExitStack) -> None:
        self.owner = Owner()
        self.others: list[StreamConnection] = []
        self.readings: list[Reading] = []
        for number in range(3):
            sockets = socket.socketpair()
            other, ours = (StreamConnection("test", s, Limits()) for s in sockets)
            link = Link(ours, pool, self.owner)
            stack.callback(other.close)
            stack.callback(link.close)
            call = PendingCall(
                id=number,
                target="it",
                deadline=0.0,
                cost=0,
                link=link,
                await_answer=lambda *_: True,
            )
            self.owner.calls[number] = call
            self.others.append(other)
            self.readings.append(Reading(link, call, [call]))

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.others[number].send(b"%d" % number)

    def answered(self) -> list[bool]:
        return [call.done for call in self.owner.calls.values()]


@pytest.fixture
def peers() -> Iterator[Peers]:
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    with contextlib.ExitStack() as stack:
        stack.callback(pool.close, LIMIT_S)
        yield Peers(pool, stack)


def in_a_moment() -> float:
    return time.monotonic() + 0.1


def test_answers_of_all_are_read_on_the_thread_that_waits(peers):
    threading.Timer(0.05, peers.answer, (0, 1)).start()
    threading.Timer(0.1, peers.answer, (2,)).start()

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert peers.answered() == [True, True, True]
    assert peers.owner.threads == [threading.current_thread()] * 3
    assert current_turn() is None


def test_turns_end_with_the_limit(peers):
    peers.answer(1)

    read_several(peers.readings, in_a_moment())

    assert peers.answered() == [False, True, False]
    for reading in peers.readings:
        again = reading.link.take_callers_turn()
        assert again is not None
        reading.link.end_turn(again)


def test_connection_that_another_reads_is_left_to_it(peers):
    theirs = peers.readings[1].link.take_callers_turn()
    peers.answer(0, 1, 2)

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert peers.answered() == [True, False, True]
    assert not theirs.is_over


def test_nothing_is_read_if_others_read_everything(peers):
    for reading in peers.readings:
        assert reading.link.take_callers_turn() is not None

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert current_turn() is None


def test_wait_of_another_kind_gives_all_turns_away(peers):
    """As what an answer runs when it is read may."""

    def wait_elsewhere() -> None:
        about_to_block()
        turns = [reading.turn for reading in peers.readings]
        assert all(turn.is_over for turn in turns)

    peers.owner.on_answer = wait_elsewhere
    peers.answer(1)

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert peers.answered()[1]


def test_turns_are_used_again(peers):
    peers.answer(0, 1, 2)
    read_several(peers.readings, time.monotonic() + LIMIT_S)
    turns = [reading.turn for reading in peers.readings]

    assert [turn.siblings for turn in turns] == [()] * 3
    again = [reading.link.take_callers_turn() for reading in peers.readings]
    assert again == turns


def test_turn_that_was_left_is_not_ended_by_those_that_are_read_still(peers):
    first, second, _ = peers.readings
    taken: list[Turn | None] = []

    def wait_elsewhere() -> None:
        """By then the first one has been left, and somebody else has taken it."""
        if second.turn.siblings[0] is not first.turn:
            taken.append(first.link.take_callers_turn())
            about_to_block()

    peers.owner.on_answer = wait_elsewhere
    peers.answer(0)
    threading.Timer(0.05, peers.answer, (2,)).start()

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert taken == [first.turn]
    assert not first.turn.is_over
    assert second.turn.is_over


def test_what_waits_is_kept_for_the_next(peers, monkeypatch):
    made: list[tuple[int, ...]] = []

    def make(*filenos: int) -> Any:
        made.append(filenos)
        return readiness(*filenos)

    monkeypatch.setattr(_several, "_kept", {})
    monkeypatch.setattr(_several, "readiness", make)
    read_several(peers.readings, in_a_moment())
    read_several(peers.readings, in_a_moment())

    assert made == [tuple(reading.link.fileno for reading in peers.readings)]


def test_what_waits_is_for_one_at_a_time(peers, monkeypatch):
    """A signal handler may give the turns away to a thread that waits for the same."""
    made: list[Any] = []

    def make(*filenos: int) -> Any:
        is_ready = readiness(*filenos)

        def look(ms: float) -> Any:
            if len(made) == 1:
                about_to_block()
                read_on_another_thread(peers)
            return is_ready(ms)

        made.append(look)
        return look

    monkeypatch.setattr(_several, "_kept", {})
    monkeypatch.setattr(_several, "readiness", make)

    read_several(peers.readings, in_a_moment())

    assert len(made) == 2


def read_on_another_thread(peers: Peers) -> None:
    readings = [Reading(r.link, r.calls[0], r.calls_there) for r in peers.readings]
    thread = threading.Thread(target=read_several, args=(readings, in_a_moment()))
    thread.start()
    thread.join()


def test_reading_is_left_to_those_who_serve_if_there_is_much_to_serve(peers):
    for _ in range(20):
        peers.others[0].send(b"request")
    limit = time.monotonic() + LIMIT_S

    read_several(peers.readings, limit)

    assert time.monotonic() < limit
    assert threading.current_thread() not in peers.owner.threads


def test_end_of_one_connection_leaves_the_others_alone(peers):
    peers.others[0].close()
    threading.Timer(0.05, peers.answer, (1, 2)).start()

    read_several(peers.readings, time.monotonic() + LIMIT_S)

    assert peers.answered() == [False, True, True]


def test_what_was_finished_before_is_not_waited_for(peers):
    for call in peers.owner.calls.values():
        call.settle(None, None)
    limit = time.monotonic() + LIMIT_S

    read_several(peers.readings, limit)

    assert time.monotonic() < limit
