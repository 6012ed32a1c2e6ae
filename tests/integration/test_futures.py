"""Futures of calls: waiting, callbacks, asyncio, and asynchronous functions."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from typing import Any

import pytest
import torch

import api_functions as api
import functions
from gradwire import rpc
from gradwire.errors import DeadlineExceeded, RemoteError, UsageError
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


# ----------------------------------------------------------------------------- the basics


@on_worker(0)
def test_future_is_one_of_torch():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))

    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 3


@on_worker(0)
def test_future_is_done_when_the_answer_has_come():
    with api.blocked_call("w1", "done") as future:
        assert not future.done()

    assert future.wait() == "done"
    assert future.done()
    assert future.value() == "done"


@on_worker(0)
def test_future_becomes_done_although_nobody_waits():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))

    api.wait_until(future.done)

    assert future.value() == 3


@on_worker(0)
def test_future_without_a_value_says_so():
    with (
        api.blocked_call("w1", "no value") as future,
        pytest.raises(UsageError, match=r"not done; use wait\(\)"),
    ):
        future.value()


@on_worker(0)
def test_future_can_be_waited_for_again_and_from_many_threads():
    found = []
    with api.blocked_call("w1", "many") as future:
        threads = [
            threading.Thread(target=lambda: found.append(future.wait()))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(api.LIMIT_S)

    assert found == ["many"] * 5
    assert future.wait() == "many"


@on_worker(0)
def test_futures_can_be_waited_for_in_any_order():
    futures = [rpc.rpc_async(f"w{i % 4}", functions.echo, args=(i,)) for i in range(40)]

    assert [f.wait() for f in reversed(futures)] == list(reversed(range(40)))


@on_worker(0)
def test_wait_with_a_limit_gives_up_and_the_call_goes_on():
    with api.blocked_call("w1", "limit") as future:
        with pytest.raises(DeadlineExceeded):
            future.wait(0.1)
        assert not future.done()

    assert future.wait() == "limit"


@on_worker(0)
def test_wait_raises_the_error_each_time():
    future: rpc.Future[Any] = rpc.rpc_async(
        "w1", functions.raise_value_error, args=("again",)
    )

    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            future.wait()
    with pytest.raises(ValueError, match="again"):
        future.value()


# --------------------------------------------------------------------------------- then


@on_worker(0)
def test_then_returns_our_class():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2)).then(lambda f: f.value())

    assert isinstance(future, rpc.Future)
    assert future.wait() == 3


@on_worker(0)
def test_then_can_be_chained():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))

    for _ in range(10):
        future = future.then(lambda f: f.wait() + 1)

    assert future.wait() == 13


@on_worker(0)
def test_then_keeps_the_type_of_what_its_callback_raises():
    def fail(_):
        raise KeyError("from the callback")

    future = rpc.rpc_async("w1", functions.add, args=(1, 2)).then(fail)

    with pytest.raises(KeyError, match="from the callback"):
        future.wait()


@on_worker(0)
def test_then_passes_on_the_error_of_its_parent():
    future: Any = rpc.rpc_async("w1", api.raise_error, args=("rated",))

    for _ in range(3):
        future = future.then(lambda f: f.value())

    with pytest.raises(api.Rated) as caught:
        future.wait()
    assert isinstance(caught.value, RemoteError)
    assert caught.value.rating == 3


@on_worker(0)
def test_then_on_a_future_that_is_done_runs_too():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))
    future.wait()

    assert future.then(lambda f: f.value() * 2).wait() == 6


# ---------------------------------------------------------------------------- callbacks


@on_worker(0)
def test_callback_runs_on_a_thread_of_the_pool():
    names = []

    with api.blocked_call("w1", "pool thread") as future:
        future.add_done_callback(lambda _: names.append(functions.get_thread_name()))
    api.wait_until(lambda: names)

    assert names[0].startswith("gradwire-w0-")


@on_worker(0)
def test_callback_gets_the_future_itself():
    seen: list[Any] = []
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))

    future.add_done_callback(seen.append)
    api.wait_until(lambda: seen)

    assert seen[0] is future


@on_worker(0)
def test_callback_may_make_blocking_calls():
    with api.blocked_call("w1", "blocking") as future:
        child = future.then(lambda f: f.value() + rpc.rpc_sync("w1", api.worker_name))

    assert child.wait() == "blockingw1"


@on_worker(0)
def test_many_callbacks_may_block_at_the_same_time():
    # Each callback calls back a worker that is itself waited for: if they took the
    # threads that read answers, nobody would get one.
    count = 60
    route = ["w2", "w0", "w1"]

    def call_again(future):
        return future.value() + rpc.rpc_sync(
            "w1", api.run_along, args=(route, functions.add, 100, 0)
        )

    with api.blocked_call("w1", "many callbacks"):
        children = [
            rpc.rpc_async(f"w{1 + i % 3}", functions.echo, args=(i,)).then(call_again)
            for i in range(count)
        ]
        results = [child.wait() for child in children]

    assert results == [100 + i for i in range(count)]


@on_worker(0)
def test_callback_that_raises_does_not_hurt_other_callbacks():
    def fail(_):
        raise RuntimeError("in the callback")

    with api.blocked_call("w1", "failing callback") as future:
        future.add_done_callback(fail)
        child = future.then(lambda f: f.value())

    assert child.wait(10) == "failing callback"
    assert rpc.rpc_sync("w1", functions.add, args=(3, 4)) == 7


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


@on_worker(0)
def test_callback_sees_the_context_in_which_it_was_added():
    with api.blocked_call("w1", "context") as future:
        token = variable.set("when added")
        child = future.then(lambda _: variable.get())
        variable.set("later")
    variable.reset(token)

    assert child.wait() == "when added"


@pytest.mark.parametrize("to", ["w0", "w1"], ids=["of its caller", "of itself"])
@on_worker(0)
def test_callback_does_not_run_inside_a_handler_that_waits(to):
    assert rpc.rpc_sync("w1", api.grad_modes_of_callbacks, (to,)) == [True] * 10


@on_worker(0)
def test_future_cannot_be_completed_twice():
    future = rpc.rpc_async("w1", functions.add, args=(1, 2))
    future.wait()

    with pytest.raises(UsageError, match="once"):
        future.set_result(5)
    assert future.value() == 3


# ------------------------------------------------------------------------ torch's helpers


@on_worker(0)
def test_collect_all_of_torch_gathers_our_futures():
    futures: Any = [
        rpc.rpc_async(f"w{i % 4}", functions.echo, args=(i,)) for i in range(8)
    ]

    done = torch.futures.collect_all(futures).wait()

    assert [future.value() for future in done] == list(range(8))


@on_worker(0)
def test_wait_all_of_torch_returns_values():
    futures: Any = [
        rpc.rpc_async(f"w{i % 4}", functions.echo, args=(i,)) for i in range(8)
    ]

    assert torch.futures.wait_all(futures) == list(range(8))


@on_worker(0)
def test_wait_all_of_torch_raises_the_error():
    futures: Any = [
        rpc.rpc_async("w1", functions.echo, args=(1,)),
        rpc.rpc_async("w2", functions.raise_value_error, args=("one of them",)),
    ]

    with pytest.raises(ValueError, match="one of them"):
        torch.futures.wait_all(futures)


# ------------------------------------------------------------------------------- asyncio


@on_worker(0)
def test_future_can_be_awaited():
    async def main():
        return await rpc.rpc_async("w1", functions.add, args=(1, 2))

    assert asyncio.run(main()) == 3


@on_worker(0)
def test_future_that_is_done_can_be_awaited():
    async def main():
        future = rpc.rpc_async("w1", functions.add, args=(1, 2))
        future.wait()
        return await future, await future

    assert asyncio.run(main()) == (3, 3)


@on_worker(0)
def test_await_raises_the_remote_error():
    async def main():
        await rpc.rpc_async("w1", functions.raise_value_error, args=("awaited",))

    with pytest.raises(ValueError, match="awaited") as caught:
        asyncio.run(main())
    assert isinstance(caught.value, RemoteError)


async def add_remotely(i):
    return await rpc.rpc_async(f"w{i % 4}", functions.add, args=(i, 1))


@on_worker(0)
def test_many_futures_can_be_gathered():
    async def main():
        return await asyncio.gather(*(add_remotely(i) for i in range(50)))

    assert asyncio.run(main()) == [i + 1 for i in range(50)]


@on_worker(0)
def test_futures_themselves_can_be_gathered():
    async def main():
        futures = [rpc.rpc_async("w1", functions.add, args=(i, 1)) for i in range(9)]
        return await asyncio.gather(*futures)

    assert asyncio.run(main()) == [i + 1 for i in range(9)]


@on_worker(0)
def test_task_that_awaits_can_be_cancelled():
    complaints = []

    async def main(future):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        task = asyncio.ensure_future(wait_for(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rpc.rpc_async("w1", functions.set_event, args=("cancelled",))
        return await future  # the call itself goes on

    with api.blocked_call("w1", "cancelled") as future:
        assert asyncio.run(main(future)) == "cancelled"
    assert complaints == []


async def wait_for(future):
    return await future


@on_worker(0)
def test_answer_that_comes_after_the_loop_was_closed_does_no_harm():
    async def main(future):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for(future), 0.05)

    with api.blocked_call("w1", "closed loop") as future:
        asyncio.run(main(future))

    assert future.wait() == "closed loop"
    assert rpc.rpc_sync("w1", functions.add, args=(1, 2)) == 3


# ----------------------------------------------------------------- asynchronous functions


@on_worker(0)
def test_async_function_answers_with_the_value_of_its_future():
    assert rpc.rpc_sync("w1", api.add_elsewhere, args=("w2", 1, 2, 3)) == 6


@on_worker(0)
def test_async_function_may_be_nested():
    inner = rpc.rpc_async("w1", api.add_elsewhere, args=("w2", 1, 2, 3))

    assert rpc.rpc_sync("w2", api.add_elsewhere, args=("w1", inner.wait(), 1, 1)) == 8


@on_worker(0)
def test_async_function_may_be_a_static_or_class_method():
    assert rpc.rpc_sync("w1", api.Adder.add_statically, args=("w2", 1, 2)) == 3
    assert rpc.rpc_sync("w1", api.Adder.add_as_class, args=("w2", 1, 2)) == 3


@pytest.mark.parametrize("ours", [True, False])
@on_worker(0)
def test_error_set_on_the_future_of_an_async_function_is_raised(ours):
    with pytest.raises(KeyError, match="through the future") as caught:
        rpc.rpc_sync("w1", api.fail_through_future, args=(ours,))

    assert isinstance(caught.value, RemoteError)


@on_worker(0)
def test_error_of_the_inner_call_of_an_async_function_keeps_its_origin():
    with pytest.raises(TypeError) as caught:
        rpc.rpc_sync("w1", api.add_elsewhere, args=("w2", 1, "a", 3))

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w2"


@on_worker(0)
def test_async_function_without_a_future_is_told_so():
    with pytest.raises(
        UsageError, match=r"must return a torch\.futures\.Future"
    ) as caught:
        rpc.rpc_sync("w1", api.forget_to_return_a_future)

    assert "forget_to_return_a_future returned builtins.int" in str(caught.value)


@on_worker(0)
def test_async_function_holds_no_thread_while_it_waits():
    count = 100
    before = rpc.rpc_sync("w1", api.get_debug_info)["threads"]

    futures = [
        rpc.rpc_async("w1", api.complete_when_told, args=(f"told {i}",))
        for i in range(count)
    ]
    api.wait_until(lambda: rpc.rpc_sync("w1", api.num_served_now) >= count)
    during = rpc.rpc_sync("w1", api.get_debug_info)["threads"]
    for i in range(count):
        rpc.rpc_sync("w1", api.tell, args=(f"told {i}", str(i)))

    assert [future.wait() for future in futures] == [str(i) for i in range(count)]
    assert during - before < count / 2


# ---------------------------------------------------------------------- coroutine targets


@on_worker(0)
def test_coroutine_function_can_be_called():
    assert rpc.rpc_sync("w1", api.add_soon, args=(1, 2)) == 3
    assert api.call("w1", api.add_soon, torch.ones(2), 1).tolist() == [2, 2]


@on_worker(0)
def test_coroutine_function_may_await_calls_of_its_own():
    assert rpc.rpc_sync("w1", api.add_on, args=("w2", 1, 2)) == ("w1", 3)


@on_worker(0)
def test_coroutine_function_may_await_a_call_to_its_caller():
    assert rpc.rpc_sync("w1", api.add_on, args=("w0", 1, 2)) == ("w1", 3)


@on_worker(0)
def test_error_of_a_coroutine_arrives_with_its_type():
    with pytest.raises(LookupError, match="soon") as caught:
        api.call("w1", api.fail_soon, "soon")

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w1"
    assert "in fail_soon" in caught.value.remote_traceback


@on_worker(0)
def test_error_inside_a_call_of_a_coroutine_keeps_its_origin():
    with pytest.raises(TypeError) as caught:
        api.call("w1", api.add_on, "w2", 1, "a")

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w2"


@on_worker(0)
def test_coroutines_of_one_worker_run_at_the_same_time():
    count = 50

    futures = [
        rpc.rpc_async("w1", api.meet, args=("all of them", count)) for _ in range(count)
    ]

    assert [future.wait() for future in futures] == [count] * count


@on_worker(0)
def test_coroutine_that_exits_ends_its_own_call_only():
    with pytest.raises(RemoteError, match="SystemExit: 3") as caught:
        rpc.rpc_sync("w1", api.exit_soon)

    assert "in exit_soon" in caught.value.remote_traceback
    assert rpc.rpc_sync("w1", api.add_soon, args=(1, 2)) == 3


@on_worker(0)
def test_coroutine_that_waits_without_grad_takes_it_from_nobody():
    quiet = rpc.rpc_async("w1", api.wait_without_grad, args=("without grad",))
    x = torch.ones(2, requires_grad=True)

    rpc.rpc_sync("w1", api.scale_soon, args=(x, 3.0)).sum().backward()
    rpc.rpc_sync("w1", api.wait_without_grad, args=("without grad",))
    quiet.wait()
    rpc.rpc_sync("w1", api.scale_soon, args=(x, 4.0)).sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [7.0, 7.0]


@on_worker(0)
def test_autocast_of_the_caller_reaches_all_steps_of_a_coroutine():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rpc.rpc_sync("w1", api.has_autocast) == [True, True]

    assert rpc.rpc_sync("w1", api.has_autocast) == [False, False]


@pytest.mark.parametrize("function", [api.call_and_block, api.wait_and_block])
@on_worker(0)
def test_blocking_in_a_coroutine_is_refused(function):
    with pytest.raises(UsageError, match=r"await rpc_async") as caught:
        rpc.rpc_sync("w1", function, args=("w2",))

    assert isinstance(caught.value, RemoteError)
    assert rpc.rpc_sync("w1", api.add_soon, args=(1, 2)) == 3


# --------------------------------------------------------------------------------- Ctrl-C


def wait_for_interrupt(how, name):
    """Blocks in a call until somebody sends SIGINT to this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if how == "wait":
            rpc.rpc_async("w1", functions.block_until_set, args=(name,)).wait()
        elif how == "wait with limit":
            rpc.rpc_async("w1", functions.block_until_set, args=(name,)).wait(60)
        elif how == "callback":
            future = rpc.rpc_async("w1", functions.block_until_set, args=(name,))
            future.then(lambda f: f.value()).wait()
        else:
            rpc.rpc_sync("w1", functions.block_until_set, args=(name,), timeout=0)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
    return "answered"


def call_in_all_ways(tensor):
    """Shows that the agent of this worker is as good as before."""
    assert rpc.rpc_sync("w1", functions.add, args=(1, 2)) == 3
    assert rpc.rpc_async("w1", functions.add, args=(1, 2)).wait() == 3
    assert rpc.rpc_sync("w1", api.run_along, args=(["w0"], functions.echo, 5)) == 5
    assert torch.equal(rpc.rpc_sync("w1", functions.echo, args=(tensor,)), tensor)
    api.wait_until(api.is_idle)


@pytest.mark.parametrize("how", ["wait", "wait with limit", "callback", "rpc_sync"])
def test_waiting_ends_on_ctrl_c(cluster, how):
    name = f"interrupt {how}"
    handle = cluster.start(0, wait_for_interrupt, how, name)
    cluster.run(1, functions.wait_until_blocked, name)
    cluster.run(2, api.call, "w0", api.wait_until_main_thread_waits)

    os.kill(cluster.pid(0), signal.SIGINT)

    assert handle.result(10) == "interrupted"
    cluster.run(1, functions.set_event, name)  # the late answer finds nobody
    cluster.run(0, call_in_all_ways, torch.arange(1 << 18))
