"""Callbacks of futures may do anything: nobody else waits for them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any, NoReturn

import pytest
import torch

import api_functions as api
import functions
from gradwire import rpc
from gradwire.errors import DeadlineExceeded, DecodeError, PeerLostError, RemoteError
from gradwire.rpc import Future
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

SOON_S = 5.0  # much less than it takes to notice by silence that a worker is lost
NUM_LINKS = 400


class Exits:
    """An object that ends the program where it is unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def return_what_exits() -> Exits:
    return Exits()


def die() -> NoReturn:
    os._exit(1)


# --------------------------------------------------------------------------- long chains


@on_worker(0)
def test_chain_of_many_futures_comes_to_its_end():
    with api.blocked_call("w1", "chain") as first:
        last: Future[Any] = first.then(lambda _: 0)
        for _ in range(NUM_LINKS):
            last = last.then(lambda f: f.value() + 1)

    assert last.wait(SOON_S) == NUM_LINKS


def test_chain_of_futures_of_ones_own_comes_to_its_end():
    first: Future[int] = Future()
    last = first
    for _ in range(NUM_LINKS):
        last = last.then(lambda f: f.value() + 1)

    first.set_result(0)

    assert last.value() == NUM_LINKS


@on_worker(0)
def test_callback_that_raises_anything_leaves_others_alone():
    ran = threading.Event()

    def cancel(_: object) -> NoReturn:
        raise asyncio.CancelledError

    with api.blocked_call("w1", "callbacks") as future:
        future.add_done_callback(cancel)
        future.add_done_callback(lambda _: ran.set())

    assert ran.wait(SOON_S)


@on_worker(0)
def test_callback_that_switches_grad_off_does_not_change_the_next_one():
    def switch_off(_: object) -> None:
        torch.set_grad_enabled(False)

    found: list[bool] = []
    with api.blocked_call("w1", "grad mode") as future:
        off = future.then(switch_off)
        after = off.then(lambda _: torch.is_grad_enabled())
        future.add_done_callback(switch_off)
        future.add_done_callback(lambda _: found.append(torch.is_grad_enabled()))

    assert after.wait(SOON_S) is True
    api.wait_until(lambda: found)
    assert found == [True]
    assert rpc.rpc_sync("w1", api.call, ("w0", api.is_grad_enabled)) is True


# -------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize("is_async", [False, True])
@on_worker(0)
def test_answer_that_exits_where_it_is_read_is_an_error(is_async):
    def call() -> Any:
        if is_async:
            return rpc.rpc_async("w1", return_what_exits).wait(SOON_S)
        return rpc.rpc_sync("w1", return_what_exits, timeout=SOON_S)

    def read_elsewhere() -> None:
        try:
            call()
        except DecodeError as error:
            found.append(str(error))

    found: list[str] = []
    thread = threading.Thread(target=read_elsewhere)
    thread.start()
    thread.join(SOON_S)

    assert len(found) == 1
    assert "SystemExit: 3" in found[0]
    assert rpc.rpc_sync("w1", functions.add, (1, 2)) == 3


@on_worker(0)
def test_argument_that_exits_where_it_is_read_is_an_error():
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        rpc.rpc_sync("w1", functions.echo, (Exits(),), timeout=SOON_S)

    assert rpc.rpc_sync("w1", rpc.get_debug_info)["server_active_calls"] == 1


class AsksWhenRead:
    """An object that calls where it is unpickled, and waits for that."""

    def __reduce__(self) -> Any:
        return _ask, ()


def _ask() -> None:
    # While this one waits, its thread reads the answer of `aside`, which lets it go on.
    rpc.rpc_async("w1", functions.set_event, ("aside",))
    rpc.rpc_sync("w1", functions.block_until_set, ("asked",), timeout=SOON_S)


def return_what_asks() -> AsksWhenRead:
    return AsksWhenRead()


def wait_for_the_end_in_a_callback() -> str:
    """How a call ends whose worker dies, if a callback waits for it."""
    ends: list[str] = []

    def see_it_die(_: object) -> None:
        try:
            rpc.rpc_async("w1", die).wait(SOON_S)
        except Exception as error:
            ends.append(type(error).__name__)

    aside = rpc.rpc_async("w1", functions.block_until_set, ("aside",))
    aside.add_done_callback(
        lambda _: rpc.rpc_sync("w1", functions.set_event, ("asked",))
    )
    answer = rpc.rpc_async("w1", return_what_asks)
    answer.add_done_callback(see_it_die)
    api.wait_until(lambda: ends)
    return ends[0]


@pytest.mark.chaos
def test_callback_of_an_answer_that_called_when_it_was_read_may_wait(make_cluster):
    """It runs when the answer counts as read, or the end of its worker would wait for it."""
    cluster = make_cluster(2)

    end = cluster.run(0, wait_for_the_end_in_a_callback)
    cluster.wait_dead(1)

    assert end == PeerLostError.__name__


# ----------------------------------------------------------------------- limits of waits


@on_worker(0)
def test_wait_ends_at_its_limit_while_other_answers_come_all_the_time():
    is_over = threading.Event()

    def again(_: object) -> None:
        if not is_over.is_set():
            rpc.rpc_async("w1", functions.add, (1, 2)).add_done_callback(again)

    with api.blocked_call("w1", "busy") as blocked:
        for _ in range(8):
            again(None)
        for _ in range(5):
            start = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                blocked.wait(0.2)
            assert time.monotonic() - start < 1.0
        is_over.set()


@on_worker(0)
def test_waits_that_end_leave_nothing_in_a_future():
    with api.blocked_call("w1", "leave") as blocked:
        for _ in range(50):
            with pytest.raises(DeadlineExceeded):
                blocked.wait(0)
        assert not blocked._outcome._waiters


# --------------------------------------------------------------------------- lost workers


@pytest.mark.chaos
def test_callback_during_which_its_worker_dies_is_told_at_once(make_cluster):
    cluster = make_cluster(2)

    took_s, cpu_s = cluster.run(0, call_to_death_in_callback)
    cluster.wait_dead(1)

    assert took_s < SOON_S
    assert cpu_s < 2.0


def call_to_death_in_callback() -> tuple[float, float]:
    found: list[tuple[float, float]] = []
    done = threading.Event()

    def callback(_: object) -> None:
        start, cpu = time.monotonic(), time.process_time()
        with pytest.raises(PeerLostError):
            rpc.rpc_sync("w1", die)
        found.append((time.monotonic() - start, time.process_time() - cpu))
        done.set()

    with api.blocked_call("w1", "callback") as future:
        future.add_done_callback(callback)
    assert done.wait(30.0)
    return found[0]


@pytest.mark.chaos
def test_loss_is_told_to_all_though_a_callback_waits(make_cluster):
    cluster = make_cluster(2)
    waits = cluster.start(0, lose_worker_that_callbacks_wait_for)
    cluster.run(1, functions.wait_until_blocked, "second")
    cluster.kill(1)

    assert waits.result() == ["PeerLostError"] * 3


def lose_worker_that_callbacks_wait_for() -> list[str]:
    found: list[str] = []
    gate = threading.Event()

    def note(future: Future[Any], timeout: float | None = None) -> None:
        try:
            future.wait(timeout)
        except Exception as error:
            found.append(type(error).__name__)

    def hold_up(_: object) -> None:
        gate.wait(SOON_S)

    first = rpc.rpc_async("w1", functions.block_until_set, ("first",), timeout=0)
    second = rpc.rpc_async("w1", functions.block_until_set, ("second",), timeout=0)
    second.add_done_callback(lambda _: note(first, SOON_S))
    second.add_done_callback(hold_up)
    note(first)
    note(second)
    api.wait_until(lambda: len(found) == 3)
    gate.set()
    return found
