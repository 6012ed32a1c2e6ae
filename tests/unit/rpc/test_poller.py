"""Both pollers behave the same."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gradwire.rpc._poller import (
    EpollPoller,
    Event,
    Poller,
    SelectorPoller,
    make_poller,
)

LIMIT_S = 10.0
# Long enough to see an event that should not be there, short enough to wait for.
QUIET_S = 0.05

needs_epoll = pytest.mark.skipif(
    not hasattr(select, "epoll"), reason="this platform has no epoll"
)


@pytest.fixture(
    params=[pytest.param(EpollPoller, marks=needs_epoll), SelectorPoller],
)
def poller(request) -> Iterator[Poller]:
    poller: Poller = request.param()
    yield poller
    poller.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def next_event(poller: Poller, limit_s: float = LIMIT_S) -> Event | None:
    """The next event; a poller may return without one at any time."""
    deadline = time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0:
        event = poller.wait(left)
        if event is not None:
            return event
    return None


class Waiters:
    """Threads that wait as those of the pool do, and note what they were told."""

    def __init__(self, poller: Poller, count: int) -> None:
        self._poller = poller
        self._stop = False
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.num_returns = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop:
            event = self._poller.wait(LIMIT_S)
            self.num_returns += 1
            if event is not None:
                self.events.put(event)

    def stop(self) -> None:
        self._stop = True
        deadline = time.monotonic() + LIMIT_S
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                self._poller.wake()
                thread.join(0.01)
            assert not thread.is_alive()


@pytest.fixture
def waiters(poller) -> Iterator[Waiters]:
    waiters = Waiters(poller, 5)
    yield waiters
    waiters.stop()


def test_make_poller_takes_the_best():
    poller = make_poller()
    poller.close()

    assert type(poller) is (EpollPoller if hasattr(select, "epoll") else SelectorPoller)


def test_wait_returns_none_after_its_limit(poller):
    start = time.monotonic()

    assert poller.wait(0.05) is None
    assert time.monotonic() - start >= 0.04


def test_readable_descriptor_is_reported(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, False)
    theirs.send(b"x")

    assert next_event(poller) == Event(ours.fileno(), readable=True, writable=False)


def test_writable_descriptor_is_reported(poller, pair):
    ours, _ = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), False, True)

    assert next_event(poller) == Event(ours.fileno(), readable=False, writable=True)


def test_both_are_reported_at_once(poller, pair):
    ours, theirs = pair
    theirs.send(b"x")
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, True)

    assert next_event(poller) == Event(ours.fileno(), readable=True, writable=True)


def test_hang_up_is_readable(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, False)
    theirs.close()

    event = next_event(poller)
    assert event is not None
    assert event.readable


def test_descriptor_starts_unarmed(poller, pair):
    ours, theirs = pair
    theirs.send(b"x")
    poller.add(ours.fileno())

    assert next_event(poller, QUIET_S) is None


def test_event_is_one_shot(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, False)
    theirs.send(b"x")
    assert next_event(poller) is not None

    theirs.send(b"y")

    assert next_event(poller, QUIET_S) is None


def test_descriptor_is_reported_again_when_armed_again(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    theirs.send(b"x")
    for _ in range(3):
        poller.arm(ours.fileno(), True, False)
        assert next_event(poller) == Event(ours.fileno(), True, False)


def test_disarmed_descriptor_is_quiet(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, True)
    poller.arm(ours.fileno(), False, False)
    theirs.send(b"x")

    assert next_event(poller, QUIET_S) is None


def test_unarmed_descriptor_is_not_reported_again_and_again(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), False, False)
    theirs.close()

    # Linux reports a hang-up even unasked; once is all that a pool can bear.
    next_event(poller, QUIET_S)

    assert next_event(poller, QUIET_S) is None


def test_removed_descriptor_is_not_reported(poller):
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        for ours, theirs in pairs:
            theirs.send(b"x")
            poller.add(ours.fileno())
            poller.arm(ours.fileno(), True, False)
        first = next_event(poller)
        assert first is not None
        (other,) = {ours.fileno() for ours, _ in pairs} - {first.fileno}

        poller.remove(other)

        assert next_event(poller, QUIET_S) is None
    finally:
        for ours, theirs in pairs:
            ours.close()
            theirs.close()


def test_descriptor_disarmed_in_time_is_not_reported(poller):
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        for ours, theirs in pairs:
            theirs.send(b"x")
            poller.add(ours.fileno())
            poller.arm(ours.fileno(), True, False)
        first = next_event(poller)
        assert first is not None
        (other,) = {ours.fileno() for ours, _ in pairs} - {first.fileno}

        poller.arm(other, False, False)

        assert next_event(poller, QUIET_S) is None
    finally:
        for ours, theirs in pairs:
            ours.close()
            theirs.close()


def test_number_can_be_used_again_after_removal(poller, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, False)
    poller.remove(ours.fileno())
    poller.add(ours.fileno())
    theirs.send(b"x")
    assert next_event(poller, QUIET_S) is None

    poller.arm(ours.fileno(), True, False)

    assert next_event(poller) == Event(ours.fileno(), True, False)


def test_wake_before_the_wait_is_not_lost(poller):
    poller.wake()
    start = time.monotonic()

    assert poller.wait(LIMIT_S) is None
    assert time.monotonic() - start < LIMIT_S / 2


def test_wake_makes_a_waiting_thread_return(poller):
    returned = threading.Event()

    def wait() -> None:
        poller.wait(LIMIT_S)
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    poller.wake()

    assert returned.wait(LIMIT_S / 2)
    thread.join(LIMIT_S)


def test_each_event_goes_to_one_waiting_thread(poller, waiters):
    pairs = [socket.socketpair() for _ in range(20)]
    try:
        for ours, theirs in pairs:
            poller.add(ours.fileno())
            poller.arm(ours.fileno(), True, False)
            theirs.send(b"x")
        found = [waiters.events.get(timeout=LIMIT_S) for _ in pairs]

        assert sorted(e.fileno for e in found) == sorted(o.fileno() for o, _ in pairs)
        with pytest.raises(queue.Empty):
            waiters.events.get(timeout=QUIET_S)
        for ours, _ in pairs:
            poller.remove(ours.fileno())
    finally:
        for ours, theirs in pairs:
            ours.close()
            theirs.close()


def test_descriptor_armed_while_threads_wait_is_reported(poller, waiters, pair):
    ours, theirs = pair
    theirs.send(b"x")
    poller.add(ours.fileno())
    for _ in range(50):
        poller.arm(ours.fileno(), True, False)
        assert waiters.events.get(timeout=LIMIT_S) == Event(ours.fileno(), True, False)
    poller.remove(ours.fileno())


def test_remove_does_not_wait_for_sleepers(poller, waiters):
    longest = 0.0
    for _ in range(10):
        ours, theirs = socket.socketpair()
        poller.add(ours.fileno())
        poller.arm(ours.fileno(), True, False)
        start = time.monotonic()
        poller.remove(ours.fileno())
        longest = max(longest, time.monotonic() - start)
        ours.close()
        theirs.close()

    assert longest < LIMIT_S / 4


def test_waiting_threads_sleep_when_there_is_nothing(poller, waiters, pair):
    ours, theirs = pair
    poller.add(ours.fileno())
    poller.arm(ours.fileno(), True, False)
    theirs.send(b"x")
    waiters.events.get(timeout=LIMIT_S)
    settled = time.monotonic() + LIMIT_S
    before = -1
    while waiters.num_returns != before and time.monotonic() < settled:
        before = waiters.num_returns
        time.sleep(QUIET_S)

    assert waiters.num_returns == before
    poller.remove(ours.fileno())
