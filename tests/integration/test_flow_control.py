"""Floods: many calls in flight, with bounded memory, and no deadlock for lack of credit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import functions
import probes
from gradwire import rpc
from gradwire.errors import CallTimeout
from gradwire.rpc.functions import async_execution

pytestmark = pytest.mark.multiproc

MANY = 10_000
CREDIT = 256 << 10
PAYLOAD = 8 << 10
# What one call may cost beside its payload: names, headers, and the callee's overhead.
OVERHEAD = 2 << 10
# All payloads of a flood are 80 MiB; whoever grows by this holds too many of them.
MAX_GROWTH = 24 << 20


# ------------------------------------------------------------------- run by workers

_waiting: list[rpc.Future[int]] = []
_waiting_lock = threading.Lock()  # guards _waiting; handlers on any thread


def call(to: str, function: Any, *args: Any, timeout: float = 25) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


@async_execution
def answer_later(value: int) -> rpc.Future[int]:
    """Occupies no thread: the call stays unanswered until `answer_all`."""
    future: rpc.Future[int] = rpc.Future()
    with _waiting_lock:
        _waiting.append(future)
    return future.then(lambda f: f.wait() + value)


def count_waiting() -> int:
    return len(_waiting)


def answer_all() -> int:
    with _waiting_lock:
        futures, _waiting[:] = list(_waiting), []
    for future in futures:
        future.set_result(1000)
    return len(futures)


def hold_many(to: str, number: int) -> tuple[int, int, bool]:
    """Calls held by the callee at once, those in flight here, whether all came back."""
    futures = [rpc.rpc_async(to, answer_later, (i,)) for i in range(number)]
    probes.wait_until(
        lambda: call(to, count_waiting) == number, "the callee holds all calls"
    )
    in_flight = rpc.get_debug_info()["client_active_calls"]
    held = call(to, answer_all)
    good = all(f.wait() == 1000 + i for i, f in enumerate(futures))
    return held, in_flight, good


class _Sampler:
    """Watches the agent's counts, on a thread of its own."""

    def __init__(self) -> None:
        self.most_bytes = self.most_calls = self.num_looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(0.002):
            info = rpc.get_debug_info()
            self.most_bytes = max(self.most_bytes, info["inflight_bytes"])
            self.most_calls = max(self.most_calls, info["client_active_calls"])
            self.num_looks += 1

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def get_length(data: bytes) -> int:
    return len(data)


def flood(to: str, number: int, nbytes: int = PAYLOAD) -> dict[str, int]:
    probes.reset_peak()
    before = probes.peak_bytes()
    num_right = 0
    with _Sampler() as sampler:
        futures = []
        for i in range(number):
            data = b"x" * (nbytes + i % 10)
            futures.append((i, rpc.rpc_async(to, get_length, (data,))))
        for i, future in futures:
            num_right += future.wait() == nbytes + i % 10
    return {
        "right": num_right,
        "most_bytes": sampler.most_bytes,
        "most_calls": sampler.most_calls,
        "looks": sampler.num_looks,
        "left_bytes": rpc.get_debug_info()["inflight_bytes"],
        "growth": probes.peak_bytes() - before,
    }


_flooding: dict[str, Any] = {}


def start_flood(to: str, number: int) -> None:
    """Floods on a thread of its own; the main thread stays free to answer."""

    def run() -> None:
        _flooding["result"] = flood(to, number)

    thread = threading.Thread(target=run)
    _flooding["thread"] = thread
    thread.start()


def end_flood() -> dict[str, int]:
    _flooding["thread"].join(25)
    result: dict[str, int] = _flooding["result"]
    return result


def use_up_credit(to: str) -> list[rpc.Future[Any]]:
    """Unanswered calls that leave no credit for one more payload."""
    number = CREDIT // (100 << 10)
    return [
        rpc.rpc_async(to, block_with_payload, (b"x" * (100 << 10),))
        for _ in range(number)
    ]


def block_with_payload(data: bytes) -> int:
    functions.block_until_set("credit")
    return len(data)


def call_without_credit(to: str, sync: bool) -> tuple[str, float]:
    held = use_up_credit(to)
    start = time.monotonic()
    data = b"y" * (100 << 10)
    try:
        if sync:
            rpc.rpc_sync(to, get_length, (data,), timeout=0.5)
        else:
            rpc.rpc_async(to, get_length, (data,), timeout=0.5)
    except CallTimeout as error:
        took = time.monotonic() - start
        # A call that fits is not held up, and lets the blocked ones go.
        rpc.rpc_sync(to, functions.set_event, ("credit",))
        assert [f.wait() for f in held] == [100 << 10] * len(held)
        assert call(to, get_length, data) == len(data)
        return str(error), took
    raise AssertionError("there was credit")


def wait_for_credit(to: str) -> tuple[bool, bool, int]:
    """Whether `rpc_async` waited, whether it returned after the release, and its value."""
    held = use_up_credit(to)
    returned = threading.Event()
    results: list[rpc.Future[int]] = []

    def send() -> None:
        results.append(rpc.rpc_async(to, get_length, (b"y" * (100 << 10),), timeout=20))
        returned.set()

    thread = threading.Thread(target=send)
    thread.start()
    waited = not returned.wait(0.3)
    rpc.rpc_sync(to, functions.set_event, ("credit",))
    went_on = returned.wait(functions.LIMIT_S)
    thread.join(functions.LIMIT_S)
    for future in held:
        future.wait()
    return waited, went_on, results[0].wait()


def fan_out(depth: int, width: int, here: str, there: str) -> int:
    """Counts the calls of a tree, each level on the other worker."""
    if depth == 0:
        return 1
    futures = [
        rpc.rpc_async(there, fan_out, (depth - 1, width, there, here))
        for _ in range(width)
    ]
    return 1 + sum(future.wait() for future in futures)


def send_one(to: str, nbytes: int) -> int:
    return int(call(to, get_length, b"x" * nbytes))


# ------------------------------------------------------------------------- the tests


def test_ten_thousand_calls_are_in_flight_at_once(make_cluster):
    cluster = make_cluster(2)

    held, in_flight, good = cluster.run(0, hold_many, "w1", MANY)

    assert held == in_flight == MANY
    assert good


def test_flood_keeps_to_the_credit_on_the_caller(make_cluster):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT})

    seen = cluster.run(0, flood, "w1", MANY)

    assert seen["right"] == MANY
    assert seen["looks"] > 10
    # It was really used: the flood was not one call after the other.
    assert CREDIT // 2 < seen["most_bytes"] <= CREDIT + PAYLOAD + OVERHEAD
    assert seen["left_bytes"] == 0


def test_flood_needs_little_memory_on_both_sides(make_cluster):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT})
    cluster.run(0, flood, "w1", 100, 4 * PAYLOAD)  # threads and buffers that stay
    cluster.run(1, probes.reset_peak)
    before = cluster.run(1, probes.peak_bytes)

    seen = cluster.run(0, flood, "w1", MANY // 4, 4 * PAYLOAD)

    assert cluster.run(1, probes.peak_bytes) - before < MAX_GROWTH
    assert seen["growth"] < MAX_GROWTH


@pytest.mark.parametrize("sync", [True, False])
def test_call_without_credit_ends_at_its_deadline(make_cluster, sync):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT})

    text, took = cluster.run(0, call_without_credit, "w1", sync)

    assert "'w1'" in text
    assert "max_inflight_bytes" in text
    assert "not sent" in text
    assert 0.5 <= took < 3.0


def test_call_without_credit_goes_on_when_there_is_some(make_cluster):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT})

    waited, went_on, value = cluster.run(0, wait_for_credit, "w1")

    assert waited
    assert went_on
    assert value == 100 << 10


def test_call_larger_than_the_whole_credit_is_sent(make_cluster):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT})

    assert cluster.run(0, send_one, "w1", 3 * CREDIT) == 3 * CREDIT


def test_nested_calls_need_no_credit(make_cluster):
    # One unanswered call uses up everything: a nested call that waited would wait for
    # ever.
    cluster = make_cluster(2, {"max_inflight_bytes": 1, "num_worker_threads": 1})

    trees = [
        cluster.start(0, call, "w1", fan_out, 4, 3, "w1", "w0"),
        cluster.start(1, call, "w0", fan_out, 4, 3, "w0", "w1"),
    ]

    for tree in trees:
        assert tree.result() == 1 + 3 + 9 + 27 + 81


def test_credit_of_one_callee_does_not_hold_up_calls_to_another(make_cluster):
    cluster = make_cluster(3, {"max_inflight_bytes": CREDIT})
    cluster.run(0, start_flood_that_waits, "w1")

    assert cluster.run(0, send_one, "w2", CREDIT) == CREDIT

    cluster.run(1, functions.set_event, "credit")
    cluster.run(0, end_waiting)


def start_flood_that_waits(to: str) -> None:
    held = use_up_credit(to)

    def run() -> None:
        call(to, get_length, b"y" * (100 << 10))
        for future in held:
            future.wait()

    thread = threading.Thread(target=run)
    _flooding["waiting"] = thread
    thread.start()


def end_waiting() -> None:
    _flooding["waiting"].join(25)
    assert not _flooding["waiting"].is_alive()


@pytest.mark.chaos
def test_stopped_callee_does_not_grow_the_callers_memory(make_cluster):
    cluster = make_cluster(2, {"max_inflight_bytes": CREDIT, "lost_after": 40.0})
    cluster.run(0, flood, "w1", 200)
    before = cluster.run(0, probes.resident_bytes)
    cluster.stop(1)
    cluster.run(0, start_flood, "w1", MANY // 2)

    def credit_is_used_up() -> bool:
        used = cluster.run(0, rpc.get_debug_info)["inflight_bytes"]
        return used > CREDIT - PAYLOAD - OVERHEAD

    probes.wait_until(credit_is_used_up, "the caller has used up its credit")
    probes.pass_time(0.5)  # it would go on filling its memory
    grown = cluster.run(0, probes.resident_bytes) - before
    cluster.cont(1)
    seen = cluster.run(0, end_flood)

    assert grown < 8 << 20
    assert seen["most_bytes"] <= CREDIT + PAYLOAD + OVERHEAD
    assert seen["right"] == MANY // 2
