"""`Agent.call_all`: several workers called at once, and waited for by one thread."""

from __future__ import annotations

import functools
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch

import api_functions as api
import functions as targets
from gradwire import rpc
from gradwire.errors import (
    CallTimeout,
    DeadlineExceeded,
    OwnerLost,
    UnknownWorker,
    UsageError,
)
from gradwire.rpc.extension import Agent, Outcome, current_agent, start_method
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

LIMIT_S = 20.0
SHORT_S = 0.3


# ------------------------------------------------------------------- run by workers


Start: TypeAlias = Callable[[Agent], Outcome]


def ask(*starts: Start) -> list[Outcome]:
    return current_agent().call_all(starts)


def request(to: Any, function: Any, *args: Any, timeout: float = LIMIT_S) -> Start:
    return operator.methodcaller("begin_call", to, function, args, None, timeout)


def ask_for_names(*workers: str) -> list[str]:
    """What the workers say that they are."""
    outcomes = ask(*(request(worker, api.worker_name) for worker in workers))
    for outcome in outcomes:
        outcome.result()
    return [outcome.value for outcome in outcomes]


def call_back(to: str, times: int) -> int:
    return sum(
        rpc.rpc_sync(to, targets.echo, (1,), timeout=LIMIT_S) for _ in range(times)
    )


class CallsWhenUnpickled:
    """An answer that calls a worker while it is read."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.answer = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if api.worker_name() == "w0":
            self.answer = rpc.rpc_sync(self.to, api.worker_name, timeout=LIMIT_S)


class WaitsWhenUnpickled:
    """An answer that cannot be read before an event is set."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.has_waited = targets.get_event("may be unpickled").wait(LIMIT_S)

    def __getstate__(self) -> dict[str, Any]:
        return {"something": 1}


@rpc.functions.async_execution
def answer_after_callback(to: str, *workers: str) -> rpc.Future[list[str]]:
    """Asks others in a callback, which runs on a thread of the pool."""
    future = rpc.rpc_async(to, targets.echo, (1,), timeout=LIMIT_S)
    return future.then(lambda _: ask_for_names(*workers))


async def ask_in_coroutine(*workers: str) -> list[str]:
    return ask_for_names(*workers)


@rpc.functions.idempotent
def echo_again(value: Any) -> Any:
    return value


def check_idle() -> None:
    api.wait_until(api.is_idle)
    assert rpc.get_debug_info()["inflight_bytes"] == 0


# --------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    "workers",
    [["w1"], ["w1", "w2"], ["w3", "w2", "w1"], ["w0", "w1"], ["w1", "w2", "w1"], []],
    ids=str,
)
@on_worker(0)
def test_answers_come_in_the_order_of_the_requests(workers):
    for _ in range(20):
        assert ask_for_names(*workers) == workers

    check_idle()


@on_worker(0)
def test_all_are_called_before_any_is_waited_for():
    first, second = ask(
        request("w1", targets.block_until_set, "first"),
        request("w2", api.call, "w1", targets.set_event, "first"),
    )

    assert first.result() == "first"
    assert second.error is None


@on_worker(0)
def test_errors_are_outcomes_and_leave_the_others_alone():
    outcomes = ask(
        request("w1", targets.raise_value_error, "first"),
        request("w2", targets.echo, 2),
        request("w3", targets.raise_value_error, "third"),
    )

    assert [type(outcome.error) for outcome in outcomes] == [
        rpc_error(ValueError),
        type(None),
        rpc_error(ValueError),
    ]
    assert [outcome.value for outcome in outcomes] == [None, 2, None]
    assert "third" in str(outcomes[2].error)
    check_idle()


def rpc_error(kind: type[Exception]) -> type:
    """The class that an error of this kind has when it comes from another worker."""
    with pytest.raises(kind) as caught:
        rpc.rpc_sync("w1", targets.raise_value_error)
    return type(caught.value)


@on_worker(0)
def test_requests_that_cannot_be_sent_are_outcomes():
    def fail(_agent: Agent) -> Outcome:
        raise KeyError("no request")

    outcomes = ask(
        fail,
        request("nobody", targets.echo, 1),
        request("w1", targets.echo, threading.Lock()),
        request("w2", targets.echo, 2),
    )

    assert isinstance(outcomes[0].error, KeyError)
    assert isinstance(outcomes[1].error, UnknownWorker)
    assert outcomes[2].error is not None
    assert outcomes[3].result() == 2
    assert all(outcome.error.__traceback__ is None for outcome in outcomes[:3])  # type: ignore[union-attr]
    check_idle()


@on_worker(0)
def test_methods_of_values_are_called_by_requests():
    here = rpc.RRef([1])
    there: rpc.RRef[list[int]] = rpc.remote("w1", list, ((2, 2),))

    outcomes = ask(
        functools.partial(start_method, here, "append", (3,), 0),
        functools.partial(start_method, there, "count", (2,), LIMIT_S),
        functools.partial(start_method, there, "no_such_method", (), 0),
    )

    assert here.local_value() == [1, 3]
    assert outcomes[1].result() == 2
    assert isinstance(outcomes[2].error, AttributeError)


@pytest.mark.parametrize("value", [2, 2**80, "\ud800", (1, [2])], ids=ascii)
@on_worker(0)
def test_arguments_of_methods_may_be_anything(value):
    here: rpc.RRef[list[Any]] = rpc.RRef([value, 1])
    there: rpc.RRef[list[Any]] = rpc.remote("w1", list, ([value, 1],))

    outcomes = ask(
        functools.partial(start_method, here, "index", (value,), 0),
        functools.partial(start_method, there, "index", (value,), LIMIT_S),
    )

    assert [outcome.result() for outcome in outcomes] == [0, 0]
    check_idle()


@on_worker(0)
def test_large_tensors_travel_both_ways():
    x = torch.arange(1 << 18)

    first, second = ask(request("w1", torch.add, x, 1), request("w2", torch.mul, x, 2))

    assert torch.equal(first.result(), x + 1)
    assert torch.equal(second.result(), x * 2)


@on_worker(0)
def test_idempotent_functions_may_be_among_them():
    outcomes = ask(request("w1", echo_again, 1), request("w2", targets.echo, 2))

    assert [outcome.result() for outcome in outcomes] == [1, 2]


# -------------------------------------------------------------------------- deadlines


@on_worker(0)
def test_each_call_has_its_own_deadline():
    start = time.monotonic()
    outcomes = ask(
        request("w1", targets.block_until_set, "never 1", timeout=SHORT_S),
        request("w2", targets.echo, 2),
        request("w3", targets.block_until_set, "never 3", timeout=2 * SHORT_S),
    )
    took_s = time.monotonic() - start

    assert isinstance(outcomes[0].error, CallTimeout)
    assert outcomes[1].result() == 2
    assert isinstance(outcomes[2].error, CallTimeout)
    assert 2 * SHORT_S <= took_s < 4 * SHORT_S + 1.0
    for worker, name in (("w1", "never 1"), ("w3", "never 3")):
        rpc.rpc_sync(worker, targets.set_event, (name,))
    check_idle()


@on_worker(0)
def test_deadline_behind_a_call_that_takes_longer_holds():
    releaser = threading.Timer(
        3 * SHORT_S, rpc.rpc_sync, ("w1", targets.set_event, ("long",))
    )
    releaser.start()
    late = threading.Timer(
        2 * SHORT_S, rpc.rpc_sync, ("w2", targets.set_event, ("late",))
    )
    late.start()

    first, second = ask(
        request("w1", targets.block_until_set, "long", timeout=0),
        request("w2", targets.block_until_set, "late", timeout=SHORT_S),
    )

    assert first.result() == "long"
    assert isinstance(second.error, DeadlineExceeded)
    releaser.join()
    late.join()
    check_idle()


# ------------------------------------------------------------------------ lost workers


@pytest.mark.parametrize("workers", [["w1", "w2"], ["w2", "w1"], ["w0", "w1"]], ids=str)
def test_worker_that_dies_while_it_is_asked_fails_alone(make_cluster, workers):
    cluster = make_cluster(3)
    waiting = cluster.start(0, ask_until_lost, workers)
    cluster.run(1, targets.wait_until_blocked, "doomed")

    cluster.kill(1)

    assert waiting.result() == {
        worker: "PeerLostError" if worker == "w1" else "" for worker in workers
    }


def ask_until_lost(workers: list[str]) -> dict[str, str]:
    """Asks all, of whom w1 never answers; what failed, by worker."""
    outcomes = ask(
        *(
            request(
                worker,
                targets.block_until_set if worker == "w1" else targets.echo,
                "doomed",
                timeout=0,
            )
            for worker in workers
        )
    )
    check_idle()
    return {
        worker: type(outcome.error).__name__ if outcome.error is not None else ""
        for worker, outcome in zip(workers, outcomes, strict=True)
    }


def refer_and_lose(killed: str) -> str:
    there: rpc.RRef[list[int]] = rpc.remote("w1", list, ((1,),))
    there.to_here()
    targets.get_event(killed).set()
    api.wait_until(lambda: rpc.get_debug_info()["workers_lost"])
    (outcome,) = ask(functools.partial(start_method, there, "count", (1,), 0))
    return type(outcome.error).__name__


def test_value_of_a_lost_owner_cannot_be_asked(make_cluster):
    cluster = make_cluster(2)
    asking = cluster.start(0, refer_and_lose, "refers")
    cluster.run(1, api.call, "w0", targets.block_until_set, "refers")

    cluster.kill(1)

    assert asking.result() == OwnerLost.__name__


# ---------------------------------------------------------------- threads and handlers


@on_worker(0)
def test_handler_may_ask_others():
    for _ in range(10):
        found = rpc.rpc_sync("w1", ask_for_names, ("w0", "w1", "w2"), timeout=LIMIT_S)
        assert found == ["w0", "w1", "w2"]


@on_worker(0)
def test_callback_may_ask_others():
    workers = ("w0", "w2", "w1")

    found = rpc.rpc_sync("w1", answer_after_callback, ("w2", *workers), timeout=LIMIT_S)

    assert found == list(workers)


@on_worker(0)
def test_coroutine_is_refused():
    with pytest.raises(UsageError, match="async def"):
        rpc.rpc_sync("w1", ask_in_coroutine, ("w0", "w2"), timeout=LIMIT_S)


@on_worker(0)
def test_many_threads_get_their_own_answers():
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(40):
            value = (number, i)
            outcomes = ask(*(request(f"w{n}", targets.echo, value) for n in range(4)))
            alone = rpc.rpc_sync(f"w{i % 4}", targets.echo, (value,), timeout=LIMIT_S)
            found = [alone, *(outcome.value for outcome in outcomes)]
            if found != [value] * 5:
                wrong.append((value, found))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(api.LIMIT_S)

    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    check_idle()


@on_worker(0)
def test_those_who_are_asked_may_call_back_often():
    outcomes = ask(
        request("w1", call_back, "w0", 50),
        request("w2", call_back, "w0", 50),
        request("w3", call_back, "w1", 50),
    )

    assert [outcome.result() for outcome in outcomes] == [50, 50, 50]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@on_worker(0)
def test_modes_of_the_caller_do_not_matter(mode):
    with mode():
        assert ask_for_names("w1", "w2") == ["w1", "w2"]


@pytest.mark.parametrize("to", ["w1", "w2", "w3"])
@on_worker(0)
def test_answer_that_calls_when_it_is_read(to):
    for _ in range(5):
        first, second = ask(
            request("w1", CallsWhenUnpickled, to), request("w2", api.worker_name)
        )

        assert first.result().answer == to
        assert second.result() == "w2"
    check_idle()


@on_worker(0)
def test_slow_answer_of_one_does_not_keep_requests_of_others_from_being_served():
    targets.forget_events()

    first, second = ask(
        request("w1", WaitsWhenUnpickled),
        # This thread has the turn at both connections when that comes.
        request("w2", call_later, "w0", targets.set_event, "may be unpickled"),
    )

    assert first.result().has_waited
    assert second.result() == "w2"


def call_later(to: str, function: Any, *args: Any) -> str:
    """Calls when the answer of the other one has surely been read."""
    time.sleep(SHORT_S)
    rpc.rpc_sync(to, function, args, timeout=LIMIT_S)
    return api.worker_name()


# -------------------------------------------------------------------------- interrupts


class Interrupted(Exception):
    """What a signal handler of a test raises."""


def ask_and_be_interrupted(names: dict[str, str]) -> float:
    """Asks workers that do not answer; when the signal has ended that."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        with pytest.raises(Interrupted):
            ask(
                *(
                    request(worker, targets.block_until_set, name, timeout=0)
                    for worker, name in names.items()
                )
            )
        return time.monotonic()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_interrupt_gives_up_all_calls(cluster):
    names = {"w1": "given up 1", "w2": "given up 2"}
    waiting = cluster.start(0, ask_and_be_interrupted, names)
    cluster.run(1, targets.wait_until_blocked, "given up 1")
    cluster.run(2, targets.wait_until_blocked, "given up 2")
    cluster.run(1, api.call, "w0", api.wait_until_main_thread_waits)

    start = time.monotonic()
    os.kill(cluster.pid(0), signal.SIGUSR2)
    end = waiting.result()

    assert end - start < 1.0
    assert cluster.run(0, rpc.get_debug_info)["client_active_calls"] == 0
    assert cluster.run(0, ask_for_names, "w1", "w2") == ["w1", "w2"]
    cluster.run(1, targets.set_event, "given up 1")
    cluster.run(2, targets.set_event, "given up 2")
    cluster.run(0, check_idle)


def ask_and_call_in_handler(workers: list[str], name: str) -> tuple[list[str], Any]:
    """Waits for w1 and w2, and in the middle of that calls these in a signal handler."""
    found: list[str] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        for worker in workers:
            found.append(rpc.rpc_sync(worker, api.worker_name, timeout=LIMIT_S))
        found.extend(ask_for_names(*workers))
        ask(
            request("w1", targets.set_event, name),
            request("w2", targets.set_event, name),
        )

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        outcomes = ask(
            request("w1", targets.block_until_set, name),
            request("w2", targets.block_until_set, name),
        )
    finally:
        signal.signal(signal.SIGUSR2, before)
    return found, [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    "workers", [["w1"], ["w2"], ["w1", "w2"], ["w3"], ["w3", "w2", "w0"]], ids=str
)
def test_signal_handler_may_call_while_its_thread_waits_for_several(cluster, workers):
    name = f"{workers} in a handler, for several"
    waiting = cluster.start(0, ask_and_call_in_handler, workers, name)
    cluster.run(1, targets.wait_until_blocked, name)
    cluster.run(2, targets.wait_until_blocked, name)
    cluster.run(1, api.call, "w0", api.wait_until_main_thread_waits)

    os.kill(cluster.pid(0), signal.SIGUSR2)

    assert waiting.result() == (workers + workers, [name, name])
    cluster.run(0, check_idle)
