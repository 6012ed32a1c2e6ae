"""Handlers and callbacks that block, nest, compute and call: nobody waits for a thread."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import functions
import probes
from gradwire import rpc
from gradwire.errors import CallTimeout
from gradwire.rpc._turn import current_turn
from gradwire.transport._stream import StreamConnection
from gradwire.wire import Reply, kind_of

pytestmark = pytest.mark.multiproc

PROMPT_S = 1.0
"""Limit for what has to be served while handlers block: milliseconds, and some noise."""

NUM_CHAINS = 6  # from each side: 600 handlers wait at the same time
DEPTH = 50
NUM_BLOCKED = 100


# ------------------------------------------------------------------- run by workers

_meetings: dict[str, threading.Barrier] = {}
_meetings_lock = threading.Lock()  # guards _meetings; handlers on any thread


def meet(name: str, parties: int) -> None:
    """Blocks until so many handlers of this process have come here."""
    with _meetings_lock:
        barrier = _meetings.setdefault(name, threading.Barrier(parties))
    barrier.wait(functions.LIMIT_S)


def call(to: str, function: Callable[..., Any], *args: Any, timeout: float = 25) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def bounce(depth: int, there: str, here: str, meeting: str, parties: int) -> int:
    """Calls back and forth; all chains are at their deepest point at the same time."""
    if depth == 0:
        meet(meeting, parties)
        return 0
    below = call(there, bounce, depth - 1, here, there, meeting, parties)
    return 1 + int(below)


def keep_busy(duration_s: float) -> bool:
    """Keeps busy for a while; returns whether more requests had come in the same turn."""
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        pass
    turn = current_turn()
    return turn is not None and bool(turn.rest)


def answers_of_burst(to: str, duration_s: float) -> list[tuple[bool, bool]]:
    """For calls that come in a burst: whether more had come, and the answer was held."""
    for _ in range(200):
        rpc.rpc_sync(to, watch_held_answers)
        calls = [rpc.rpc_async(to, keep_busy, (duration_s,)) for _ in range(8)]
        had_more = [call.wait() for call in calls]
        held = rpc.rpc_sync(to, held_answers)[-len(calls) :]
        if any(had_more):
            return list(zip(had_more, held, strict=True))
    raise AssertionError("no two requests were ever read together")


_held: list[bool] = []


def watch_held_answers() -> None:
    """From now on, notes of what this worker sends whether it is held back."""
    _held.clear()
    if StreamConnection.send is not _send:
        return

    def send(self: Any, head: bytes, buffers: Any = (), *, hold: bool = False) -> Any:
        if head[0] == kind_of(Reply):
            _held.append(hold)
        return _send(self, head, buffers, hold=hold)

    StreamConnection.send = send  # type: ignore[method-assign]


def held_answers() -> list[bool]:
    StreamConnection.send = _send  # type: ignore[method-assign]
    return list(_held)


_send = StreamConnection.send


def start_chains(here: str, there: str, meeting: str) -> list[int]:
    chains = [
        rpc.rpc_async(there, bounce, (DEPTH, here, there, meeting, NUM_CHAINS))
        for _ in range(NUM_CHAINS)
    ]
    return [chain.wait() for chain in chains]


_pipes: dict[str, tuple[int, int]] = {}
_pipes_lock = threading.Lock()  # guards _pipes; handlers on any thread


def _pipe(name: str) -> tuple[int, int]:
    with _pipes_lock:
        if name not in _pipes:
            _pipes[name] = os.pipe()
        return _pipes[name]


def block_in_read(name: str) -> int:
    """Blocks in the kernel, where the agent cannot see it."""
    functions.set_event(f"{name}:entered")
    return len(os.read(_pipe(name)[0], 1))


def release_reads(name: str, number: int) -> None:
    os.write(_pipe(name)[1], b"x" * number)


def block_all_then_release(to: str, number: int) -> float:
    """The time from the call that releases the handlers to the last reply."""
    futures = [
        rpc.rpc_async(to, functions.block_until_set, ("all",)) for _ in range(number)
    ]
    start = time.monotonic()
    rpc.rpc_async(to, functions.set_event, ("all",)).wait()
    for future in futures:
        future.wait()
    return time.monotonic() - start


def call_behind_blocked(
    to: str, block: Callable[[str], Any], name: str, number: int
) -> list[float]:
    """Times of calls that were sent in one flood with handlers that block."""
    blocked = [rpc.rpc_async(to, block, (name,)) for _ in range(number)]
    start = time.monotonic()
    futures = [rpc.rpc_async(to, functions.echo, (i,)) for i in range(20)]
    assert [future.wait() for future in futures] == list(range(20))
    flood_s = time.monotonic() - start
    start = time.monotonic()
    assert call(to, functions.echo, 1) == 1
    single_s = time.monotonic() - start
    assert not any(future.done() for future in blocked)
    call(to, release_reads, name, number)
    call(to, functions.set_event, name)
    for future in blocked:
        future.wait()
    return [flood_s, single_s]


def longest_of(to: str, number: int) -> float:
    """The time of the longest one of so many short calls, one after the other."""
    longest = 0.0
    for i in range(number):
        start = time.monotonic()
        assert call(to, functions.echo, i) == i
        longest = max(longest, time.monotonic() - start)
    return longest


def block_in_call(name: str) -> Any:
    """Blocks in a call to another worker."""
    return call("w3", functions.block_until_set, name)


def measure_timeout(to: str, name: str, timeout: float) -> float:
    start = time.monotonic()
    try:
        call(to, functions.block_until_set, name, timeout=timeout)
    except CallTimeout:
        return time.monotonic() - start
    raise AssertionError("the call returned")


def measure_async_timeout(to: str, name: str, timeout: float) -> float:
    """Nobody waits for this call: the agent itself has to look at the clock."""
    ended = threading.Event()
    start = time.monotonic()
    future = rpc.rpc_async(to, functions.block_until_set, (name,), timeout=timeout)
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(functions.LIMIT_S)
    took = time.monotonic() - start
    with pytest.raises(CallTimeout):
        future.wait()
    return took


def block_callbacks(to: str, number: int) -> float:
    """Time of a call in a process in which so many callbacks block."""
    gate = threading.Event()
    entered = threading.Semaphore(0)

    def block(_: rpc.Future[Any]) -> None:
        entered.release()
        assert gate.wait(functions.LIMIT_S)

    # The answers come after the callbacks were added; later ones would run right here.
    blocked = [
        rpc.rpc_async(to, functions.block_until_set, ("answers",)).then(block)
        for _ in range(number)
    ]
    call(to, functions.set_event, "answers")
    for _ in range(number):
        assert entered.acquire(timeout=functions.LIMIT_S)
    start = time.monotonic()
    futures = [rpc.rpc_async(to, functions.echo, (i,)) for i in range(20)]
    assert [future.wait() for future in futures] == list(range(20))
    assert call(to, functions.echo, 1) == 1
    took = time.monotonic() - start
    gate.set()
    for future in blocked:
        future.wait()
    return took


def call_in_callbacks(to: str, steps: int) -> int:
    """Each callback calls again and waits inside itself."""

    def next_step(future: rpc.Future[int]) -> int:
        return int(call(to, functions.add, future.wait(), 1))

    future = rpc.rpc_async(to, functions.add, (0, 1))
    for _ in range(steps):
        future = future.then(next_step)
    return future.wait()


def call_from_nested_callbacks(to: str, depth: int) -> int:
    """Callbacks that add callbacks and wait for them."""
    if depth == 0:
        return 0
    future = rpc.rpc_async(to, functions.add, (depth, 0))
    return future.then(
        lambda f: f.wait() + call_from_nested_callbacks(to, depth - 1)
    ).wait()


def compute(seconds: float) -> float:
    """Keeps a core busy inside C functions, without the interpreter lock."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 400_000)
    return time.monotonic()


def hold_interpreter(number: int) -> int:
    """One long C call that keeps the interpreter lock."""
    return sum(range(number))


def call_during(to: str, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Calls a slow function, then short ones; its result, and when they had ended."""
    slow = rpc.rpc_async(to, function, args)
    for i in range(20):
        assert call(to, functions.echo, i) == i
    end = time.monotonic()
    return slow.wait(), end


def call_from_threads(to: str, num_threads: int, num_calls: int) -> list[BaseException]:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(num_calls):
                value = (number, i)
                if i % 2:
                    assert call(to, functions.echo, value) == value
                else:
                    assert rpc.rpc_async(to, functions.echo, (value,)).wait() == value
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(functions.LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return problems


def wait_in_handler(to: str, name: str) -> str:
    """A handler that waits for a future, not for `rpc_sync`."""
    return rpc.rpc_async(to, functions.block_until_set, (name,)).wait()


def import_slowly(path: str, module: str) -> None:
    """Starts the import of a module whose body waits for an event."""
    sys.path.append(path)
    threading.Thread(target=importlib.import_module, args=(module,)).start()
    functions.wait_until_blocked("import")


def call_by_name(to: str, path: str, module: str) -> rpc.Future[Any]:
    sys.path.append(path)
    functions.set_event("import")  # on this side nothing waits
    function = importlib.import_module(module).answer
    future = rpc.rpc_async(to, function)
    call(to, functions.set_event, "import")
    return future.wait()


# ------------------------------------------------------------------------- the tests


def test_deep_chains_of_nested_calls_complete(make_cluster):
    cluster = make_cluster(2)

    chains = [
        cluster.start(0, start_chains, "w0", "w1", "from w0"),
        cluster.start(1, start_chains, "w1", "w0", "from w1"),
    ]

    for chain in chains:
        assert chain.result() == [DEPTH] * NUM_CHAINS


def test_chain_of_calls_to_oneself_completes(make_cluster):
    cluster = make_cluster(1)

    assert cluster.run(0, start_chains, "w0", "w0", "own") == [DEPTH] * NUM_CHAINS


def test_blocked_handlers_are_released_by_a_later_call(cluster):
    cluster.run(1, functions.forget_events)

    assert cluster.run(0, block_all_then_release, "w1", NUM_BLOCKED) < 5
    cluster.run(1, functions.forget_events)


def test_handlers_that_wait_for_calls_are_released_by_a_later_call(make_cluster):
    cluster = make_cluster(3)
    chains = [
        cluster.start(0, call, "w1", wait_in_handler, "w0", "event"),
        cluster.start(1, call, "w0", wait_in_handler, "w1", "event"),
    ]

    # The main threads of both wait: only calls get through, past handlers that wait.
    for name in ("w0", "w1"):
        cluster.run(2, call, name, functions.wait_until_blocked, "event")
    for name in ("w0", "w1"):
        cluster.run(2, call, name, functions.set_event, "event")

    assert [chain.result() for chain in chains] == ["event", "event"]


@pytest.mark.parametrize("block", [functions.block_until_set, block_in_read])
@pytest.mark.parametrize("number", [1, 40])
def test_blocked_handlers_do_not_delay_other_requests(make_cluster, block, number):
    cluster = make_cluster(2)

    times = cluster.run(0, call_behind_blocked, "w1", block, "held", number)

    assert max(times) < PROMPT_S


@pytest.mark.parametrize(
    ("block", "where"),
    [(functions.block_until_set, 0), (block_in_read, 0), (block_in_call, 3)],
)
def test_handler_that_blocks_for_one_caller_does_not_delay_others(
    make_cluster, block, where
):
    cluster = make_cluster(4)
    for _ in range(3):
        # Served in turn, by a thread that keeps all three connections.
        chats = [cluster.start(rank, longest_of, "w0", 200) for rank in (1, 2, 3)]
        for chat in chats:
            chat.result()
        blocked = cluster.start(1, call, "w0", block, "held")
        chats = [cluster.start(rank, longest_of, "w0", 200) for rank in (2, 3)]
        assert max(chat.result() for chat in chats) < PROMPT_S

        cluster.run(where, functions.wait_until_blocked, "held")
        cluster.run(where, release_reads, "held", 1)
        cluster.run(where, functions.set_event, "held")
        blocked.result()
        cluster.run(where, functions.forget_events)


def test_blocked_handlers_do_not_delay_replies(make_cluster):
    cluster = make_cluster(2)
    blocked = cluster.start(0, call, "w1", block_in_read, "held")
    cluster.run(1, functions.wait_until_blocked, "held")

    start = time.monotonic()
    assert cluster.run(1, call, "w0", functions.echo, 1) == 1
    assert time.monotonic() - start < PROMPT_S

    cluster.run(1, release_reads, "held", 1)
    assert blocked.result() == 1


@pytest.mark.parametrize("measure", [measure_timeout, measure_async_timeout])
def test_blocked_handlers_do_not_delay_timeouts(make_cluster, measure):
    cluster = make_cluster(2)
    # w0 has a handler of w1 that blocks, while it waits for its own deadline.
    blocked = cluster.start(1, call, "w0", block_in_read, "held")
    probes.wait_until(
        lambda: cluster.run(0, rpc.get_debug_info)["server_active_calls"] == 1,
        "a handler blocks",
    )

    took = cluster.run(0, measure, "w1", "never", 0.3)

    assert 0.3 <= took < 0.3 + PROMPT_S
    cluster.run(0, release_reads, "held", 1)
    cluster.run(1, functions.set_event, "never")
    assert blocked.result() == 1


def test_blocked_handlers_do_not_stop_heartbeats(make_cluster):
    cluster = make_cluster(2, {"lost_after": 1.0})
    blocked = cluster.start(0, call, "w1", block_in_read, "held")
    cluster.run(1, functions.wait_until_blocked, "held")

    probes.pass_time(2.0)

    cluster.run(1, release_reads, "held", 1)
    assert blocked.result() == 1
    assert cluster.run(0, rpc.get_debug_info)["workers_lost"] == 0


def test_blocked_callbacks_do_not_delay_replies(make_cluster):
    cluster = make_cluster(2)

    assert cluster.run(0, block_callbacks, "w1", 30) < PROMPT_S


def block_when_it_is_lost(to: str, name: str) -> None:
    future = rpc.rpc_async(to, functions.block_until_set, args=("never",))
    future.then(lambda _: functions.block_until_set(name))


def ping_while_blocked(to: str, name: str) -> float:
    """How long the slowest of some calls took, of which the last one ends the blocking."""
    call(to, functions.wait_until_blocked, name)
    slowest = 0.0
    for _ in range(20):
        start = time.monotonic()
        call(to, functions.get_pid)
        slowest = max(slowest, time.monotonic() - start)
    call(to, functions.set_event, name)
    return slowest


def test_callback_that_blocks_when_a_worker_is_lost_does_not_delay_others(make_cluster):
    cluster = make_cluster(3)
    cluster.run(0, call, "w1", functions.get_pid)
    cluster.run(1, block_when_it_is_lost, "w2", "blocked")
    cluster.run(2, functions.wait_until_blocked, "never")

    cluster.kill(2)

    assert cluster.run(0, ping_while_blocked, "w1", "blocked") < PROMPT_S


def test_callbacks_may_call(cluster):
    assert cluster.run(0, call_in_callbacks, "w1", 20) == 21


def test_callbacks_may_call_and_wait_inside_each_other(cluster):
    assert cluster.run(0, call_from_nested_callbacks, "w1", 20) == 210


def test_long_computation_does_not_delay_other_requests(cluster):
    slow_end, short_end = cluster.run(0, call_during, "w1", compute, 1.0)

    assert short_end < slow_end


def test_long_c_call_that_holds_the_interpreter_only_delays(cluster):
    value, _ = cluster.run(0, call_during, "w1", hold_interpreter, 10_000_000)

    assert value == 49_999_995_000_000


def test_answers_that_took_their_time_leave_at_once(cluster):
    for had_more, was_held in cluster.run(0, answers_of_burst, "w1", 200e-6):
        assert not (had_more and was_held)


def test_many_threads_call_one_worker(cluster):
    assert cluster.run(0, call_from_threads, "w1", 32, 40) == []


def test_many_threads_call_their_own_worker(cluster):
    assert cluster.run(0, call_from_threads, "w0", 16, 40) == []


def test_call_waits_for_an_import_that_another_thread_does(make_cluster, tmp_path):
    cluster = make_cluster(2)
    (tmp_path / "slow_to_import.py").write_text(
        textwrap.dedent("""
            import functions

            functions.block_until_set("import")


            def answer():
                return 42
        """)
    )
    cluster.run(1, import_slowly, str(tmp_path), "slow_to_import")

    assert cluster.run(0, call_by_name, "w1", str(tmp_path), "slow_to_import") == 42
