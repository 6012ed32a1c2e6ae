"""The agent's threads."""

from __future__ import annotations

import functools
import os
import queue
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.rpc import _pool
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._turn import about_to_block

LIMIT_S = 10.0


class Checker:
    """Calls `check_stall` as the monitor does, while it is wanted."""

    def __init__(self) -> None:
        self.pool: WorkerPool
        self.wanted = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop:
            self.wanted.wait(0.05)
            if self.wanted.is_set() and not self.pool.check_stall():
                self.wanted.clear()
            time.sleep(0.002)

    def start(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._thread.join(LIMIT_S)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., WorkerPool]]:
    made: list[tuple[WorkerPool, Checker]] = []

    def make(keep_idle: int = 4) -> WorkerPool:
        checker = Checker()
        pool = WorkerPool("test", keep_idle, checker.wanted.set)
        pool.start()
        checker.start(pool)
        made.append((pool, checker))
        return pool

    yield make
    for pool, checker in made:
        checker.stop()
        assert pool.close(LIMIT_S) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.005)


def test_submitted_work_runs_on_a_pool_thread(make_pool):
    pool = make_pool()
    found: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    pool.submit(
        lambda: found.put((threading.current_thread().name, pool.is_pool_thread))
    )

    name, is_pool_thread = found.get(timeout=LIMIT_S)
    assert name.startswith("gradwire-test-")
    assert is_pool_thread
    assert not pool.is_pool_thread


def test_much_work_is_done_once_each(make_pool):
    pool = make_pool()
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    pool.submit(*[lambda n=n: done.put(n) for n in range(500)])

    assert sorted(done.get(timeout=LIMIT_S) for _ in range(500)) == list(range(500))


def test_work_that_blocks_does_not_stop_others(make_pool):
    pool = make_pool(keep_idle=1)
    gate = threading.Event()
    entered = threading.Semaphore(0)

    def block() -> None:
        entered.release()
        assert gate.wait(LIMIT_S)

    pool.submit(*[block] * 40)
    for _ in range(40):
        assert entered.acquire(timeout=LIMIT_S)
    assert pool.num_threads > 40

    done = threading.Event()
    pool.submit(done.set)

    assert done.wait(LIMIT_S)
    gate.set()


def test_pool_shrinks_when_its_threads_are_idle(make_pool, monkeypatch):
    monkeypatch.setattr(_pool, "_IDLE_S", 0.05)
    pool = make_pool(keep_idle=2)
    gate = threading.Event()
    entered = threading.Semaphore(0)

    def block() -> None:
        entered.release()
        assert gate.wait(LIMIT_S)

    pool.submit(*[block] * 20)
    for _ in range(20):
        assert entered.acquire(timeout=LIMIT_S)
    assert pool.num_threads > 20

    gate.set()

    wait_until(lambda: pool.num_threads <= 3)
    assert pool.num_threads >= 1
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(LIMIT_S)


def test_of_two_idle_threads_one_stays_when_both_want_to_leave():
    pool = WorkerPool("test", 1, lambda: None)
    pool.num_idle = 2  # none runs: who asks first is certain

    assert pool._leaves()
    assert not pool._leaves()

    assert pool.close(LIMIT_S) == []


def test_failing_work_is_logged_and_the_pool_goes_on(make_pool, caplog):
    pool = make_pool()

    def fail() -> None:
        raise ValueError("bad work")

    pool.submit(*[fail] * 10)
    done = threading.Event()
    pool.submit(done.set)

    assert done.wait(LIMIT_S)
    wait_until(lambda: caplog.text.count("ValueError: bad work") == 10)
    assert "an internal task failed" in caplog.text
    wait_until(lambda: pool.num_idle == pool.num_threads)


def test_descriptor_event_calls_back_on_a_pool_thread(make_pool):
    pool = make_pool()
    events: queue.SimpleQueue[tuple[bool, bool, bool]] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.watch(ours.fileno(), lambda r, w: events.put((r, w, pool.is_pool_thread)))
        pool.poller.arm(ours.fileno(), True, False)
        theirs.send(b"x")

        assert events.get(timeout=LIMIT_S) == (True, False, True)
        pool.unwatch(ours.fileno())


def test_failing_callback_is_logged_and_the_pool_goes_on(make_pool, caplog):
    pool = make_pool()
    called = threading.Semaphore(0)

    def fail(readable: bool, writable: bool) -> None:
        called.release()
        raise ValueError("bad callback")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.watch(ours.fileno(), fail)
        theirs.send(b"x")
        for _ in range(10):
            pool.poller.arm(ours.fileno(), True, False)
            assert called.acquire(timeout=LIMIT_S)
        pool.unwatch(ours.fileno())

    wait_until(lambda: "bad callback" in caplog.text)


def test_unwatched_descriptor_is_quiet(make_pool):
    pool = make_pool()
    events: queue.SimpleQueue[bool] = queue.SimpleQueue()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool.watch(ours.fileno(), lambda r, w: events.put(r))
        pool.poller.arm(ours.fileno(), True, False)

        pool.unwatch(ours.fileno())
        pool.unwatch(ours.fileno())
        theirs.send(b"x")

        with pytest.raises(queue.Empty):
            events.get(timeout=0.05)


def test_ensure_follower_leaves_a_thread_that_waits(make_pool):
    pool = make_pool(keep_idle=1)
    done = threading.Event()
    idle: list[int] = []

    def work() -> None:
        pool.ensure_follower()
        idle.append(pool.num_idle)
        done.set()

    pool.submit(work)

    assert done.wait(LIMIT_S)
    assert idle[0] >= 1


def test_close_names_threads_that_are_busy(make_pool):
    pool = WorkerPool("busy", 2, lambda: None)
    pool.start()
    entered, gate = threading.Event(), threading.Event()
    names: list[str] = []

    def block() -> None:
        names.append(threading.current_thread().name)
        entered.set()
        gate.wait(LIMIT_S)

    pool.submit(block)
    assert entered.wait(LIMIT_S)

    assert pool.close(0.05) == names
    gate.set()
    assert pool.close(LIMIT_S) == []


def test_close_from_a_pool_thread_returns(make_pool):
    pool = WorkerPool("self", 2, lambda: None)
    pool.start()
    stuck: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    pool.submit(lambda: stuck.put(pool.close(LIMIT_S)))

    assert stuck.get(timeout=LIMIT_S) == []
    wait_until(lambda: pool.num_threads == 0)


# Computes on a thread of the pool; prints by how many threads the process has grown.
COMPUTES = textwrap.dedent(
    """
    import os
    import queue
    import torch
    from gradwire.rpc._pool import WorkerPool

    torch.set_num_threads(1)
    layer, x = torch.nn.Linear(256, 256), torch.randn(32, 256)
    grown = queue.SimpleQueue()

    def compute():
        before = len(os.listdir("/proc/self/task"))
        torch.autograd.grad(layer(x).sum(), layer.parameters())
        grown.put(len(os.listdir("/proc/self/task")) - before)

    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    pool.submit(compute)
    print(grown.get(timeout=10))
    pool.close(10)
    """
)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it looks there")
def test_threads_compute_with_as_many_threads_as_the_program_has_set():
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    run = subprocess.run(
        [sys.executable, "-c", COMPUTES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert run.stdout.strip() == "0"


def test_thread_that_cannot_be_started_is_missed_only_while_it_cannot(
    make_pool, monkeypatch, caplog
):
    pool = make_pool()
    started = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gates = [threading.Event() for _ in range(4)]
    begun = [threading.Event() for _ in range(4)]
    for gate, event in zip(gates, begun, strict=True):
        pool.submit(functools.partial(_begin_and_wait, event, gate))
    for event in begun[:2]:  # as many as there are threads
        assert event.wait(LIMIT_S)
    wait_until(lambda: "no thread can be started" in caplog.text)
    assert pool.num_threads == 2

    monkeypatch.setattr(threading.Thread, "start", started)
    pool.ensure_follower()

    assert all(event.wait(LIMIT_S) for event in begun)
    for gate in gates:
        gate.set()


def _begin_and_wait(begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(LIMIT_S)


def test_pool_that_cannot_start_at_all_says_so(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = WorkerPool("test", 1, lambda: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.start()

    pool.close(LIMIT_S)


def test_close_runs_what_is_queued_though_nobody_leads():
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    begun, gate = threading.Event(), threading.Event()

    def hold() -> None:
        about_to_block()
        begun.set()
        gate.wait(LIMIT_S)

    pool.submit(hold)
    assert begun.wait(LIMIT_S)
    stuck: list[str] = []
    closing = threading.Thread(target=lambda: stuck.extend(pool.close(LIMIT_S)))
    closing.start()
    wait_until(lambda: pool.num_threads == 1)  # the others have left
    ran: queue.SimpleQueue[int] = queue.SimpleQueue()
    pool.submit(*[functools.partial(ran.put, number) for number in range(20)])
    gate.set()
    closing.join(LIMIT_S)

    assert stuck == []
    assert ran.qsize() == 20


def test_work_that_is_submitted_after_the_end_is_run_by_who_submits_it():
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    assert pool.close(LIMIT_S) == []
    names: list[str] = []

    pool.submit(lambda: names.append(threading.current_thread().name))

    assert names == [threading.current_thread().name]


def test_many_pieces_that_all_get_stuck_are_begun_by_more_and_more_threads():
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    gate = threading.Event()
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()

    def block() -> None:
        begun.put(None)
        gate.wait(LIMIT_S)

    pool.submit(*[block] * 100)
    wait_until(lambda: begun.qsize() > 0)
    looks = 0
    while begun.qsize() < 100:
        looks += 1
        before = begun.qsize()
        pool.check_stall()
        wanted = min(100, before + pool._num_helped - 1)
        wait_until(lambda: begun.qsize() >= wanted)  # noqa: B023 - waited for here
    gate.set()

    assert looks < 20  # two at a time would take fifty
    assert pool.close(LIMIT_S) == []


def test_work_that_exits_does_not_end_its_thread(make_pool, caplog):
    pool = make_pool()
    threads: list[threading.Thread] = []

    def leave() -> None:
        threads.append(threading.current_thread())
        sys.exit()

    pool.submit(leave)
    done = threading.Event()

    pool.submit(done.set)

    assert done.wait(LIMIT_S)
    wait_until(lambda: "an internal task failed" in caplog.text)
    assert threads[0].is_alive()
