"""When to look whether something is stuck."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gradwire.rpc import _watch
from gradwire.rpc._alarm import Alarm, make_alarm
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._turn import LOOK_S
from gradwire.rpc._watch import TurnWatch

LIMIT_S = 10.0


# ----------------------------------------------------------------------------- the alarm


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = make_alarm()
    if alarm is None:
        pytest.skip("no timers of the kernel here")
    yield alarm
    alarm.close()


def rings(alarm: Alarm, within_s: float) -> bool:
    return bool(select.select([alarm.fileno()], [], [], within_s)[0])


def test_alarm_rings_at_its_time(alarm):
    when = time.monotonic() + 0.02

    alarm.set(when)

    assert rings(alarm, LIMIT_S)
    assert time.monotonic() >= when


def test_alarm_rings_at_once_if_it_is_late(alarm):
    alarm.set(time.monotonic() - 1.0)

    assert rings(alarm, LIMIT_S)


def test_alarm_can_be_put_off(alarm):
    alarm.set(time.monotonic() + 0.02)
    alarm.set(time.monotonic() + 1000.0)

    assert not rings(alarm, 0.05)


def test_alarm_can_be_stopped(alarm):
    alarm.set(time.monotonic() - 1.0)
    assert rings(alarm, LIMIT_S)

    alarm.stop()
    alarm.stop()  # also if it does not ring

    assert not rings(alarm, 0.0)


def test_alarm_is_not_inherited(alarm):
    assert not os.get_inheritable(alarm.fileno())


# ----------------------------------------------------------------------------- the watch


class StubAlarm:
    """Takes down for when it is set."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def fileno(self) -> int:
        return 7

    def set(self, when: float) -> None:
        self.times.append(when)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class StubPool:
    """Nothing is in its queue, unless that is said."""

    is_stalled = False
    num_checks = 0

    def __init__(self) -> None:
        self.reserve = self

    def watch(self, fileno: int, callback: Any, *, in_reserve: bool = False) -> None:
        assert in_reserve
        self.callback = callback

    def unwatch(self, fileno: int) -> None:
        pass

    def arm(self, fileno: int, read: bool, write: bool) -> None:
        pass

    def check_stall(self) -> bool:
        self.num_checks += 1
        return self.is_stalled


class Case:
    """A watch whose clock the test moves."""

    def __init__(self, has_alarm: bool = True) -> None:
        self.pool = cast("Any", StubPool())
        self.alarm = cast("Any", StubAlarm() if has_alarm else None)
        self.asked: list[float] = []
        self.watch = TurnWatch(self.pool, list, self.asked.append, self.alarm)
        self.now = 1000.0

    def begin_turns(self, for_s: float) -> None:
        """A turn each millisecond."""
        end = self.now + for_s
        while self.now < end:
            if self.now > self.watch.settled_until:
                self.watch.put_off(self.now)
            self.now += 0.001

    def ring(self) -> None:
        self.pool.callback(True, False)


@pytest.fixture
def case(monkeypatch) -> Case:
    case = Case()
    monkeypatch.setattr(time, "monotonic", lambda: case.now)
    return case


def test_watch_looks_when_no_turn_begins_any_more(case):
    case.begin_turns(0.03)
    last = case.now - 0.001

    assert last + LOOK_S <= case.alarm.times[-1] <= last + 2 * LOOK_S + 1e-6


def test_turns_put_the_look_off_with_few_system_calls(case):
    case.begin_turns(0.03)

    assert case.alarm.times[-1] > case.now
    assert 2 <= len(case.alarm.times) <= 4


def test_watch_looks_now_and_then_though_turns_go_on(case):
    start = case.now

    case.begin_turns(1.0)

    assert case.alarm.times[-1] == pytest.approx(start + _watch._LONGEST_S)


def test_next_turn_puts_off_again_after_a_look(case):
    case.begin_turns(1.0)
    case.ring()
    number = len(case.alarm.times)

    case.begin_turns(0.002)

    assert len(case.alarm.times) == number + 1
    assert case.alarm.times[-1] > case.now


def test_what_is_held_back_is_looked_at_though_turns_go_on(case):
    case.begin_turns(0.005)

    case.watch.look_soon()
    wanted = case.now + LOOK_S
    case.begin_turns(1.0)

    assert case.alarm.times[-1] == pytest.approx(wanted)


def test_watch_is_set_once_for_all_that_is_held_back(case):
    for _ in range(100):
        case.watch.look_soon()
        case.now += 1e-5

    assert len(case.alarm.times) == 1


def test_watch_goes_on_looking_while_something_is_stuck(case):
    case.pool.is_stalled = True

    case.ring()

    assert case.pool.num_checks == 1
    assert case.alarm.times == [pytest.approx(case.now + LOOK_S)]


def test_watch_is_quiet_when_nothing_is_stuck(case):
    case.ring()

    assert case.pool.num_checks == 1
    assert case.alarm.times == []


def test_monitor_is_asked_where_there_is_no_alarm(monkeypatch):
    case = Case(has_alarm=False)
    monkeypatch.setattr(time, "monotonic", lambda: case.now)

    case.begin_turns(0.03)
    assert len(case.asked) == 1

    assert not case.watch.look(case.now)
    case.begin_turns(0.001)
    assert len(case.asked) == 2


def test_watch_looks_on_a_thread_of_the_pool(alarm):
    pool = WorkerPool("test", 2, lambda: None)
    looked = threading.Event()
    threads: list[bool] = []

    def links() -> list[Any]:
        threads.append(pool.is_pool_thread)
        looked.set()
        return []

    watch = TurnWatch(pool, links, lambda when: None, make_alarm())
    pool.start()
    watch.start()
    try:
        for _ in range(2):  # it rings more than once
            looked.clear()
            watch.put_off(time.monotonic())
            assert looked.wait(LIMIT_S)
    finally:
        watch.close()
        assert pool.close(LIMIT_S) == []

    assert all(threads)
