"""How long to look before going to sleep."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from gradwire.rpc import _spin
from gradwire.rpc._spin import SpinGauge, readiness


@pytest.fixture(autouse=True)
def several_cores(monkeypatch):
    monkeypatch.setattr(_spin, "num_cores", lambda: 4)


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by one microsecond with each look; one thread is busy."""

    class Clock:
        now = 0.0
        step = 1e-6

        def look(self) -> float:
            self.now += self.step
            return self.now

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.look)
    monkeypatch.setattr(time, "process_time", lambda: clock.now)
    return clock


def never(_: int) -> bool:
    return False


def always(_: int) -> bool:
    return True


def length_of_spin(gauge: SpinGauge, clock) -> float:
    start = clock.now
    assert not gauge.spin(never)
    return clock.now - start


def test_spin_finds_what_is_there():
    assert SpinGauge().spin(always)


def test_spin_finds_what_comes(clock):
    looks = iter([False] * 10 + [True])

    assert SpinGauge().spin(lambda _: next(looks))


def test_spin_asks_without_waiting():
    asked = []

    def look(limit: int) -> bool:
        asked.append(limit)
        return True

    SpinGauge().spin(look)

    assert asked == [0]


def test_spin_gives_up_soon(clock):
    assert 10e-6 < length_of_spin(SpinGauge(), clock) < 200e-6


def test_spin_lasts_about_as_long_as_waits_do(clock):
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(100e-6)

    assert 100e-6 < length_of_spin(gauge, clock) < 800e-6


def test_spin_outlasts_the_longer_waits_of_a_conversation(clock):
    gauge = SpinGauge()
    for _ in range(50):  # as for a reply, a gradient, and the end of a pass
        for waited_s in (250e-6, 700e-6, 50e-6):
            gauge.note(waited_s)

    assert length_of_spin(gauge, clock) > 700e-6


def test_spin_is_bounded(clock):
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(0.9 * _spin._LONGEST_SPIN_S)

    assert length_of_spin(gauge, clock) < 1.1 * _spin._LONGEST_SPIN_S


def test_long_waits_end_the_spinning():
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(1.0)

    assert not gauge.spin(always)


def test_one_long_wait_does_not_end_the_spinning():
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(20e-6)

    gauge.note(60.0)

    assert gauge.spin(always)


def test_short_waits_bring_the_spinning_back():
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(1.0)
    for _ in range(50):
        gauge.note(20e-6)

    assert gauge.spin(always)


@pytest.mark.parametrize(("num_busy", "is_brief"), [(1, False), (2, True)])
def test_spin_is_brief_while_other_threads_are_busy(
    clock, monkeypatch, num_busy, is_brief
):
    gauge = SpinGauge()
    for _ in range(50):
        gauge.note(500e-6)
    monkeypatch.setattr(time, "process_time", lambda: num_busy * clock.now)

    length = length_of_spin(gauge, clock)

    assert length < 300e-6 if is_brief else length > 900e-6


def test_gap_between_looks_suspends_the_spinning(clock):
    gauge = SpinGauge()
    clock.step = 2 * _spin._PREEMPTED_S
    assert not gauge.spin(never)
    clock.step = 1e-6

    refused = 0
    while not gauge.spin(always):
        refused += 1
    assert _spin._FEWEST_SKIPPED <= refused <= _spin._MOST_SKIPPED


def test_gap_after_gap_suspends_for_longer(clock):
    gauge = SpinGauge()
    looks: list[int] = []
    clock.step = 2 * _spin._PREEMPTED_S
    gauge.spin(looks.append)
    refused = []
    for _ in range(2):
        before, count = len(looks), 0
        while True:  # until it looks again, and sees a gap again
            assert not gauge.spin(looks.append)
            if len(looks) > before:
                break
            count += 1
        refused.append(count)

    assert refused[1] > refused[0] > 0


def test_success_forgets_earlier_gaps(clock):
    gauge = SpinGauge()
    refused = []
    for _ in range(2):
        clock.step = 2 * _spin._PREEMPTED_S
        assert not gauge.spin(never)
        clock.step = 1e-6
        count = 0
        while not gauge.spin(always):
            count += 1
        refused.append(count)

    assert refused[1] == refused[0] > 0


def test_one_core_never_spins(monkeypatch):
    monkeypatch.setattr(_spin, "num_cores", lambda: 1)

    assert not SpinGauge().spin(always)


def test_only_one_thread_spins():
    entered, leave = threading.Event(), threading.Event()

    def look(_: int) -> bool:
        entered.set()
        return leave.wait(10.0)

    thread = threading.Thread(target=SpinGauge().spin, args=(look,))
    thread.start()
    assert entered.wait(10.0)

    assert not SpinGauge().spin(always)

    leave.set()
    thread.join(10.0)
    assert SpinGauge().spin(always)


def test_spin_lets_others_spin_after_an_error():
    def fail(_: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SpinGauge().spin(fail)

    assert SpinGauge().spin(always)


def test_readiness_tells_whether_there_is_something():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        is_ready = readiness(ours.fileno())
        assert not is_ready(0)

        theirs.send(b"x")

        assert is_ready(0)
        assert is_ready(10_000)


def test_readiness_works_without_poll(monkeypatch):
    monkeypatch.delattr("select.poll")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        is_ready = readiness(ours.fileno())
        assert not is_ready(1)

        theirs.send(b"x")

        assert is_ready(10_000)
