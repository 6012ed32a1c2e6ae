"""How workers part."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import api_functions as api
import functions
from bare_workers import (
    join_all,
    join_without_calls,
    leave_all,
)
from cluster import WorkerTimeout
from gradwire import rpc
from gradwire.errors import (
    CallTimeout,
    ConnectTimeout,
    NotInitialized,
    PeerLostError,
    ShutdownTimeout,
    UsageError,
)
from gradwire.rpc._api import current_agent
from gradwire.rpc._link import Link
from gradwire.wire import Goodbye, kind_of

pytestmark = pytest.mark.multiproc


# ---------------------------------------------------------------------- graceful shutdown


@rpc.functions.async_execution
def block_far_away(route: list[str], name: str) -> rpc.Future[Any]:
    """Asynchronous calls along a route, at whose end a handler blocks."""
    if len(route) == 1:
        return rpc.rpc_async(route[0], functions.block_until_set, args=(name,))
    future = rpc.rpc_async(route[0], block_far_away, args=(route[1:], name))
    return future.then(lambda done: str(done.value()) + "!")


def call_and_leave(route, name):
    future = rpc.rpc_async(route[0], block_far_away, args=(route[1:], name))
    rpc.shutdown()
    return future.value()


_leaving: list[threading.Thread] = []


def start_to_leave(**kwargs):
    thread = threading.Thread(target=rpc.shutdown, kwargs=kwargs)
    thread.start()
    _leaving.append(thread)


def finish_to_leave():
    thread = _leaving.pop()
    thread.join(api.LIMIT_S)
    return not thread.is_alive()


def test_shutdown_waits_for_calls_of_all_workers(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_and_leave, ["w1", "w2", "w1", "w2"], "last")
    bare.run(2, functions.wait_until_blocked, "last")
    between = bare.start(1, rpc.shutdown)
    bare.run(2, start_to_leave)

    with pytest.raises(WorkerTimeout):
        caller.result(0.3)
    with pytest.raises(WorkerTimeout):
        between.result(0.05)
    bare.run(2, functions.set_event, "last")

    assert caller.result() == "last!!"
    between.result()
    assert bare.run(2, finish_to_leave)


def call_back_and_forth(to, depth):
    """A chain of calls that goes on while everybody is leaving already."""
    if depth == 0:
        return rpc.get_worker_info().name
    here = rpc.get_worker_info().name
    return rpc.rpc_sync(to, call_back_and_forth, args=(here, depth - 1))


def start_chain_and_leave(to):
    future = rpc.rpc_async(to, call_back_and_forth, args=("w0", 30))
    rpc.shutdown()
    return future.value()


def test_shutdown_waits_for_calls_that_begin_meanwhile(bare, file_url):
    join_all(bare, file_url)
    handles = [bare.start(0, start_chain_and_leave, "w1")]
    handles += [bare.start(rank, rpc.shutdown) for rank in (1, 2)]

    assert [handle.result() for handle in handles] == ["w1", None, None]


def words_of_a_long_wait():
    """What is logged, at the level that programs see without more ado."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    current_agent().departure._pause_s = 0.01
    logger = logging.getLogger("gradwire.rpc")
    logger.addHandler(handler)
    try:
        with pytest.raises(ShutdownTimeout):
            rpc.shutdown(timeout=1.0)
    finally:
        logger.removeHandler(handler)
    return said


def test_long_wait_in_a_shutdown_is_warned_about(bare, file_url):
    join_all(bare, file_url)

    said = bare.run(1, words_of_a_long_wait)

    assert "worker w1 still waits in a graceful shutdown" in said[0]


def shut_down_late(timeout):
    """The text of the error, and whether the worker is down all the same."""
    start = time.monotonic()
    with pytest.raises(ShutdownTimeout) as caught:
        rpc.shutdown(timeout=timeout)
    assert timeout <= time.monotonic() - start < timeout + 5
    assert not rpc.is_initialized()
    with pytest.raises(NotInitialized):
        rpc.rpc_sync("w0", functions.get_pid)
    assert api.list_threads() == []
    return str(caught.value)


def test_shutdown_with_a_limit_names_who_was_not_ready(bare, file_url):
    join_all(bare, file_url)
    leaving = bare.start(1, rpc.shutdown)

    text = bare.run(0, shut_down_late, 0.5)

    assert "worker 'w0' waited 0.5 s" in text
    assert "for 'w2' (rank 2)" in text
    bare.run(2, rpc.shutdown)
    leaving.result()


def test_shutdown_of_a_higher_rank_has_a_limit_too(bare, file_url):
    join_all(bare, file_url)

    assert "for 'w0' (rank 0)" in bare.run(1, shut_down_late, 0.3)


@pytest.mark.parametrize("rank", [0, 2])
def test_shutdown_has_a_limit_also_if_others_cannot_be_reached(make_cluster, rank):
    cluster = make_cluster(3)
    others = {0, 1, 2} - {rank}
    for other in others:
        cluster.stop(other)

    text = cluster.run(rank, shut_down_late, 0.5)

    # A member waits for the lowest rank, and that one for all.
    for other in others if rank == 0 else {0}:
        assert f"for 'w{other}' (rank {other})" in text


def call_and_shut_down_late(name):
    future = rpc.rpc_async("w1", functions.block_until_set, args=(name,))
    text = shut_down_late(0.3)
    with pytest.raises(NotInitialized):
        future.value()
    return text


def test_shutdown_with_a_limit_names_calls_in_flight(bare, file_url):
    join_all(bare, file_url, 2)

    try:
        text = bare.run(0, call_and_shut_down_late, "not ready")
    finally:
        bare.run(1, functions.set_event, "not ready")

    assert "functions:block_until_set on 'w1'" in text


def block_the_leaver(function, name):
    rpc.rpc_async("w0", function, args=(name,))


def shut_down_while_blocked(name):
    """How long that took; the handler goes on to its end."""
    functions.wait_until_blocked(name)
    start = time.monotonic()
    with pytest.raises(ShutdownTimeout, match="requests that it still serves"):
        rpc.shutdown(timeout=0.3)
    took_s = time.monotonic() - start
    functions.set_event(name)
    api.wait_until(lambda: api.list_threads() == [])
    return took_s


@pytest.mark.parametrize("function", [functions.block_until_set, api.block_the_loop])
def test_shutdown_with_a_limit_does_not_wait_long_for_handlers(
    bare, file_url, function
):
    join_all(bare, file_url, 2)
    name = f"blocks {function.__name__}"
    bare.run(1, block_the_leaver, function, name)

    assert bare.run(0, shut_down_while_blocked, name) < 2.5


def shut_down_within(limit):
    rpc.shutdown(timeout=limit)


def test_shutdown_takes_a_limit_that_is_none(bare, file_url):
    join_all(bare, file_url, 2, join_without_calls)

    for handle in [bare.start(r, shut_down_within, float("inf")) for r in range(2)]:
        handle.result()


@pytest.mark.parametrize("timeout", [-1, "5", None, float("nan")], ids=repr)
def test_shutdown_refuses_a_wrong_limit(bare, file_url, timeout):
    join_all(bare, file_url, 1)

    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        bare.run(0, shut_down_within, timeout)
    assert bare.run(0, rpc.is_initialized)


def shut_down_inside_a_handler():
    rpc.shutdown()


async def shut_down_inside_a_coroutine():
    rpc.shutdown()


@pytest.mark.parametrize(
    "function", [shut_down_inside_a_handler, shut_down_inside_a_coroutine]
)
def test_shutdown_inside_a_handler_is_refused(bare, file_url, function):
    join_all(bare, file_url, 2)

    with pytest.raises(UsageError, match=r"a handler of worker 'w1'.*graceful=False"):
        bare.run(0, api.call, "w1", function)
    leave_all(bare, 2)


# ------------------------------------------------------------------- shutdown all at once


def call_and_leave_at_once(name):
    future = rpc.rpc_async("w1", functions.block_until_set, args=(name,))
    blocked: list[BaseException] = []

    def call():
        try:
            rpc.rpc_sync("w1", functions.block_until_set, args=(name,))
        except NotInitialized as error:
            blocked.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    api.wait_until(lambda: rpc.get_debug_info()["client_active_calls"] == 2)
    rpc.shutdown(graceful=False)
    thread.join(api.LIMIT_S)
    assert len(blocked) == 1
    with pytest.raises(NotInitialized, match="shut down while the call was in flight"):
        future.wait()


def test_shutdown_at_once_fails_own_calls(bare, file_url):
    join_all(bare, file_url, 2)

    try:
        bare.run(0, call_and_leave_at_once, "abandoned")
    finally:
        bare.run(1, functions.set_event, "abandoned")


def has_left_nothing():
    api.wait_until(lambda: api.list_threads() == [])
    return not rpc.is_initialized()


def test_coroutine_may_shut_its_worker_down_at_once(bare, file_url):
    join_all(bare, file_url, 2)

    with pytest.raises(PeerLostError, match="it shut down"):
        bare.run(0, api.call, "w1", api.leave_at_once)

    assert bare.run(1, has_left_nothing)


def call_a_sleeper_and_leave_at_once():
    """How long it takes to leave while a connection is being opened."""
    with pytest.raises((CallTimeout, ConnectTimeout)):
        rpc.rpc_sync("w1", functions.get_pid, timeout=0.1)
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    took_s = time.monotonic() - start
    assert api.list_threads() == []
    return took_s


def test_shutdown_at_once_does_not_wait_for_connections(make_cluster):
    cluster = make_cluster(2, {"connect_timeout": 60.0})
    cluster.stop(1)

    assert cluster.run(0, call_a_sleeper_and_leave_at_once) < 4


def begin_to_close():
    # What `shutdown` does first; the handshakes that meet this moment are rare.
    current_agent().network.is_closing = True


def call_one_that_is_closing():
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(PeerLostError, match=r"'w1' \(rank 1\).*shutting down"):
            call("w1", functions.get_pid)
    with pytest.raises(PeerLostError, match="shutting down"):
        rpc.remote("w1", functions.get_pid).to_here()


def test_call_that_meets_a_closing_worker_says_that_it_is_lost(bare, file_url):
    join_all(bare, file_url, join=join_without_calls)
    bare.run(1, begin_to_close)

    bare.run(2, call_one_that_is_closing)


def call_one_that_leaves(name):
    with pytest.raises(PeerLostError, match=r"'w1' \(rank 1\) has left") as caught:
        rpc.rpc_sync("w1", functions.block_until_set, args=(name,))
    assert caught.value.worker == "w1"
    with pytest.raises(PeerLostError, match="'w1'"):
        rpc.rpc_sync("w1", functions.get_pid)


def test_shutdown_at_once_fails_the_calls_of_others(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_one_that_leaves, "left alone")
    bare.run(1, functions.wait_until_blocked, "left alone")

    bare.run(1, start_to_leave, graceful=False)
    try:
        caller.result(10)
    finally:
        bare.run(1, functions.set_event, "left alone")

    assert bare.run(1, finish_to_leave)
    assert bare.run(0, api.call, "w2", api.worker_name) == "w2"  # the others go on


def block_elsewhere(name):
    """A handler that waits for a call of its own."""
    return rpc.rpc_sync("w2", functions.block_until_set, args=(name,))


def call_one_that_leaves_while_it_calls(name):
    with pytest.raises(PeerLostError, match="'w1'"):
        rpc.rpc_sync("w1", block_elsewhere, args=(name,))


def leave_with_a_slow_goodbye():
    """Leaves, and lets handlers that fail thereby answer before anybody hears of it."""
    agent = current_agent()
    send = Link.send

    def send_slowly(self: Link, head: bytes, *args: Any, **kwargs: Any) -> Any:
        if head[0] == kind_of(Goodbye):
            limit = time.monotonic() + api.LIMIT_S
            while agent.num_active and time.monotonic() < limit:
                time.sleep(0.001)  # until the handler is over
        return send(self, head, *args, **kwargs)

    Link.send = send_slowly  # type: ignore[method-assign]
    try:
        rpc.shutdown(graceful=False)
    finally:
        Link.send = send  # type: ignore[method-assign]


def test_handler_whose_worker_leaves_did_not_fail(bare, file_url):
    join_all(bare, file_url)
    caller = bare.start(0, call_one_that_leaves_while_it_calls, "elsewhere")
    bare.run(2, functions.wait_until_blocked, "elsewhere")

    try:
        bare.run(1, leave_with_a_slow_goodbye)
        caller.result(10)
    finally:
        bare.run(2, functions.set_event, "elsewhere")
