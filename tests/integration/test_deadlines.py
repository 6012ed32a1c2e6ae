"""Deadlines of calls: on the caller, on the callee, and what remains afterwards."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

import api_functions as api
import functions
from gradwire import rpc
from gradwire.errors import CallTimeout, DeadlineExceeded
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

SHORT_S = 0.3
LATE_S = 3.0  # a deadline that is noticed this late is not noticed at all
MARGIN_S = 1.0  # how exactly two workers know each other's clock, at the very least
MIB = 1 << 20


def call_sync(function, *args, to="w1", timeout=SHORT_S):
    return rpc.rpc_sync(to, function, args=args, timeout=timeout)


def call_async(function, *args, to="w1", timeout=SHORT_S):
    return rpc.rpc_async(to, function, args=args, timeout=timeout).wait()


def call_with_callback(function, *args, to="w1", timeout=SHORT_S):
    future = rpc.rpc_async(to, function, args=args, timeout=timeout)
    return future.then(lambda f: f.value()).wait()


def call_and_await(function, *args, to="w1", timeout=SHORT_S):
    async def main():
        return await rpc.rpc_async(to, function, args=args, timeout=timeout)

    return asyncio.run(main())


WAYS = pytest.mark.parametrize(
    "way", [call_sync, call_async, call_with_callback, call_and_await]
)


# ------------------------------------------------------------------------- on the caller


@WAYS
@on_worker(0)
def test_deadline_ends_a_call_and_names_the_worker(way):
    name = f"deadline {way.__name__}"

    start = time.monotonic()
    with pytest.raises(CallTimeout, match=r"functions:block_until_set.*'w1'") as caught:
        way(functions.block_until_set, name)
    elapsed = time.monotonic() - start
    rpc.rpc_sync("w1", functions.set_event, args=(name,))

    assert SHORT_S <= elapsed < SHORT_S + LATE_S
    assert caught.value.worker == "w1"
    assert isinstance(caught.value, TimeoutError)


@on_worker(0)
def test_deadline_of_a_call_to_oneself_holds_too():
    with pytest.raises(CallTimeout, match="'w0'"):
        call_sync(functions.block_until_set, "myself", to="w0")

    functions.set_event("myself")


@on_worker(0)
def test_deadline_of_a_nested_call_is_reported_by_the_worker_in_between():
    with pytest.raises(CallTimeout) as caught:
        rpc.rpc_sync(
            "w1",
            call_sync,
            args=(functions.block_until_set, "nested"),
            kwargs={"to": "w2"},
        )

    rpc.rpc_sync("w2", functions.set_event, args=("nested",))
    assert caught.value.worker == "w1"
    assert "on worker 'w2'" in str(caught.value)


@on_worker(0)
def test_future_that_nobody_waits_for_ends_at_its_deadline():
    seen: list[object] = []

    future = rpc.rpc_async(
        "w1", functions.block_until_set, args=("nobody waits",), timeout=SHORT_S
    )
    future.add_done_callback(lambda f: seen.append(f.done()))
    api.wait_until(lambda: seen)

    rpc.rpc_sync("w1", functions.set_event, args=("nobody waits",))
    with pytest.raises(CallTimeout):
        future.value()


@on_worker(0)
def test_deadlines_of_many_calls_are_all_noticed():
    futures = [
        rpc.rpc_async(
            "w1", functions.block_until_set, args=("crowd",), timeout=0.1 + 0.01 * i
        )
        for i in range(30)
    ]

    for future in futures:
        with pytest.raises(CallTimeout):
            future.wait()
    rpc.rpc_sync("w1", functions.set_event, args=("crowd",))


@pytest.fixture
def impatient(make_cluster):
    """Two workers whose calls have a short deadline unless they say otherwise."""
    return make_cluster(2, {"rpc_timeout": SHORT_S})


@on_worker(0, fixture="impatient")
def test_default_deadline_comes_from_the_options():
    assert rpc.get_rpc_timeout() == SHORT_S
    for timeout in (None, -1):
        start = time.monotonic()
        with pytest.raises(CallTimeout):
            call_sync(functions.block_until_set, "default", timeout=timeout)
        assert SHORT_S <= time.monotonic() - start < SHORT_S + LATE_S
    rpc.rpc_sync("w1", functions.set_event, args=("default",), timeout=30)


@pytest.mark.parametrize("timeout", [0, 30])
def test_deadline_of_a_call_overrides_the_default(impatient, timeout):
    impatient.run(0, outlive_the_default, timeout)


def outlive_the_default(timeout):
    future = rpc.rpc_async(
        "w1", functions.block_until_set, args=("patient",), timeout=timeout
    )
    # This one was sent later and has ended, so the first has outlived the default.
    with pytest.raises(CallTimeout):
        call_sync(functions.block_until_set, "impatient", timeout=-1)
    assert not future.done()
    for name in ("patient", "impatient"):
        rpc.rpc_sync("w1", functions.set_event, args=(name,), timeout=30)
    assert future.wait() == "patient"


def test_default_of_zero_means_no_deadline(make_cluster):
    cluster = make_cluster(2, {"rpc_timeout": 0})

    assert cluster.run(0, rpc.get_rpc_timeout) == 0
    cluster.run(0, outlive_a_deadline)


def outlive_a_deadline():
    result = []
    thread = threading.Thread(
        target=lambda: result.append(
            rpc.rpc_sync("w1", functions.block_until_set, args=("endless",))
        )
    )
    thread.start()
    with pytest.raises(CallTimeout):
        call_sync(functions.block_until_set, "ends")
    assert result == []
    for name in ("endless", "ends"):
        rpc.rpc_sync("w1", functions.set_event, args=(name,))
    thread.join(api.LIMIT_S)
    assert result == ["endless"]


# ------------------------------------------------------------------------- on the callee


def time_out(function, *args, limit_s=SHORT_S):
    """Calls a worker that does not answer; returns how long it took to notice."""
    start = time.monotonic()
    with pytest.raises(CallTimeout):
        call_sync(function, *args, timeout=limit_s)
    return time.monotonic() - start


def call_before_there_is_a_connection():
    """The deadlines pass at all points of the handshake."""
    for number in range(1, 40):
        try:
            rpc.rpc_sync("w1", functions.echo, args=(1,), timeout=number * 1e-4)
        except DeadlineExceeded:
            continue
        break
    return rpc.rpc_sync("w1", functions.echo, args=(2,))


def test_deadline_that_passes_while_connecting_does_not_lose_the_worker(make_cluster):
    cluster = make_cluster(2)

    assert cluster.run(0, call_before_there_is_a_connection) == 2


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_request_whose_deadline_has_passed_is_not_run(make_cluster, scheme):
    cluster = make_cluster(
        2,
        {"transports": (scheme,), "advertise_address": "127.0.0.1", "lost_after": 60.0},
        secret="open sesame",
    )
    cluster.run(0, api.call, "w1", api.mark, "in time")

    cluster.stop(1)
    cluster.run(0, time_out, api.mark, "too late")
    cluster.run(0, time_out, functions.get_pid, limit_s=MARGIN_S)
    cluster.cont(1)
    cluster.run(0, api.call, "w1", api.mark, "in time again")

    assert cluster.run(0, api.call, "w1", api.get_marks) == ["in time", "in time again"]


def call_before_and_after_the_deadline():
    late = rpc.rpc_async("w1", api.mark, args=("late",), timeout=SHORT_S)
    patient = rpc.rpc_async("w1", api.mark, args=("patient",), timeout=60)
    with pytest.raises(CallTimeout):
        late.wait()
    time_out(functions.get_pid, limit_s=MARGIN_S)
    api.keep("patient", patient)


def wait_for_kept(name):
    return api.take_kept(name).wait()


def test_request_with_time_left_is_run_although_its_neighbour_is_not(make_cluster):
    cluster = make_cluster(2, {"lost_after": 60.0})
    cluster.run(0, api.call, "w1", functions.get_pid)

    cluster.stop(1)
    cluster.run(0, call_before_and_after_the_deadline)
    cluster.cont(1)
    cluster.run(0, wait_for_kept, "patient")

    assert cluster.run(0, api.call, "w1", api.get_marks) == ["patient"]


def test_deadline_holds_while_a_big_argument_is_half_sent(make_cluster):
    cluster = make_cluster(
        2,
        {"transports": ("tcp",), "advertise_address": "127.0.0.1", "lost_after": 60.0},
        secret="open sesame",
    )
    cluster.run(0, api.call, "w1", functions.get_pid)
    big = torch.ones(8 * MIB)  # 32 MiB: more than any socket takes

    cluster.stop(1)
    elapsed = cluster.run(0, time_out, api.total, big)
    cluster.cont(1)

    assert SHORT_S <= elapsed < SHORT_S + LATE_S
    # The rest of it must follow, or the stream would be out of step.
    assert cluster.run(0, api.call, "w1", api.total, big) == 8 * MIB


# ---------------------------------------------------------------------------- afterwards


@WAYS
@on_worker(0)
def test_late_answer_is_dropped(way):
    name = f"late {way.__name__}"
    with pytest.raises(CallTimeout):
        way(functions.block_until_set, name)
    active = rpc.rpc_sync("w1", api.num_served_now)

    rpc.rpc_sync("w1", functions.set_event, args=(name,))
    api.wait_until(lambda: rpc.rpc_sync("w1", api.num_served_now) < active)

    # Its answer was sent before this one's, on the same connection.
    assert [way(functions.echo, i, timeout=30) for i in range(5)] == list(range(5))


@on_worker(0)
def test_late_big_answer_is_dropped():
    with pytest.raises(CallTimeout):
        call_sync(api.block_and_return, "late and big", MIB)

    rpc.rpc_sync("w1", functions.set_event, args=("late and big",))
    api.wait_until(api.is_idle)

    assert api.total(rpc.rpc_sync("w1", torch.ones, args=(MIB,))) == MIB


@pytest.fixture
def poor(make_cluster):
    """Two workers that may owe each other one mebibyte of calls."""
    return make_cluster(2, {"max_inflight_bytes": MIB})


@on_worker(0, fixture="poor")
def test_call_that_timed_out_costs_credit_until_it_is_answered():
    argument = torch.ones(180 << 10)  # 720 KiB: there is room for one
    with pytest.raises(CallTimeout):
        call_sync(api.block_and_take, "credit", argument)
    assert rpc.get_debug_info()["inflight_bytes"] >= argument.nbytes

    with pytest.raises(CallTimeout, match=r"max_inflight_bytes.*not sent") as caught:
        call_sync(api.total, argument)
    assert caught.value.worker == "w1"

    rpc.rpc_sync("w1", functions.set_event, args=("credit",))
    assert call_sync(api.total, argument, timeout=30) == argument.numel()
    api.wait_until(api.is_idle)


@WAYS
@on_worker(0)
def test_credit_of_calls_that_timed_out_comes_back(way):
    name = f"credit {way.__name__}"
    for _ in range(5):
        with pytest.raises(CallTimeout):
            way(functions.block_until_set, name, timeout=0.05)
    assert rpc.get_debug_info()["inflight_bytes"] > 0

    rpc.rpc_sync("w1", functions.set_event, args=(name,))

    api.wait_until(api.is_idle, 5)


@on_worker(0, fixture="poor")
def test_call_without_credit_waits_for_it():
    argument = torch.ones(180 << 10)
    first = rpc.rpc_async("w1", api.block_and_take, args=("wait for credit", argument))
    rpc.rpc_sync("w1", functions.wait_until_blocked, args=("wait for credit",))
    results: list[float] = []
    thread = threading.Thread(
        target=lambda: results.append(call_async(api.total, argument, timeout=30))
    )
    thread.start()
    with pytest.raises(CallTimeout):  # as long as this one waited, so did the other
        call_sync(api.total, argument)
    assert results == []

    rpc.rpc_sync("w1", functions.set_event, args=("wait for credit",))
    first.wait()
    thread.join(api.LIMIT_S)

    assert results == [argument.numel()]


@on_worker(0)
def test_limit_of_a_wait_is_no_deadline_of_the_call():
    with api.blocked_call("w1", "limit of a wait", timeout=30) as future:
        with pytest.raises(DeadlineExceeded) as caught:
            future.wait(0.05)
        assert not isinstance(caught.value, CallTimeout)
        assert "block_until_set on worker 'w1'" in str(caught.value)
        assert caught.value.about == "w1"

    assert future.wait() == "limit of a wait"
