"""The agent's clock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from gradwire.rpc._monitor import Monitor

LIMIT_S = 10.0
FAR_S = 3600.0


class Ticks:
    """A tick that notes its calls and wants the next one when the test says."""

    def __init__(self) -> None:
        self.times: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.delay_s = FAR_S
        self.error: Exception | None = None

    def __call__(self, now: float) -> float:
        self.times.put(now)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return now + self.delay_s

    def next(self) -> float:
        return self.times.get(timeout=LIMIT_S)


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def monitor(ticks) -> Iterator[Monitor]:
    monitor = Monitor("test", ticks)
    monitor.start()
    yield monitor
    monitor.close()


def test_first_tick_comes_at_once(monitor, ticks):
    assert time.monotonic() - ticks.next() < LIMIT_S


def test_tick_comes_when_the_last_one_wanted(monitor, ticks):
    ticks.delay_s = 0.05
    ticks.next()
    monitor.call_by(time.monotonic())

    first = ticks.next()
    second = ticks.next()

    assert second - first >= 0.05


def test_tick_can_be_brought_forward(monitor, ticks):
    ticks.next()
    wanted = time.monotonic() + 0.05

    monitor.call_by(wanted)

    assert ticks.next() >= wanted


def test_later_wish_does_not_delay_an_earlier_one(monitor, ticks):
    ticks.next()

    monitor.call_by(time.monotonic() + 0.05)
    monitor.call_by(time.monotonic() + FAR_S)

    ticks.next()


def test_wish_during_a_tick_is_not_lost(ticks):
    began, go_on = threading.Event(), threading.Event()

    def tick(now: float) -> float:
        began.set()
        assert go_on.wait(LIMIT_S)
        return ticks(now)

    monitor = Monitor("test", tick)
    monitor.start()
    assert began.wait(LIMIT_S)
    monitor.call_by(time.monotonic())
    go_on.set()

    ticks.next()
    ticks.next()
    monitor.close()


def test_failing_tick_is_logged_and_the_monitor_goes_on(monitor, ticks, caplog):
    ticks.next()
    ticks.error = ValueError("bad tick")
    monitor.call_by(time.monotonic())
    ticks.next()

    monitor.call_by(time.monotonic())
    ticks.next()

    assert "bad tick" in caplog.text
    assert "it goes on" in caplog.text


def test_tick_that_is_always_due_leaves_a_pause(monitor, ticks):
    ticks.delay_s = 0.0
    start = ticks.next()
    monitor.call_by(time.monotonic())
    for _ in range(5):
        last = ticks.next()

    assert last - start >= 0.008


def test_close_ends_the_thread_that_sleeps(ticks):
    monitor = Monitor("test", ticks)
    monitor.start()
    ticks.next()
    start = time.monotonic()

    monitor.close()
    monitor.close()

    assert time.monotonic() - start < LIMIT_S
    assert not any(t.name == "gradwire-test-monitor" for t in threading.enumerate())


def test_close_before_start_is_fine(ticks):
    Monitor("test", ticks).close()


def test_tick_may_close_the_monitor(ticks):
    monitor: Monitor

    def tick(now: float) -> float:
        monitor.close()
        return ticks(now)

    monitor = Monitor("test", tick)
    monitor.start()

    ticks.next()
