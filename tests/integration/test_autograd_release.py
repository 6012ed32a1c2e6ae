"""What is left when a context or a call is over: nothing, on any worker.

Graphs are watched with an object that one of their nodes holds; the rest is counted by
``get_debug_info``. Every test ends with the check that all counts are zero everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import autograd_programs as programs
import functions
import probes
from autograd_functions import call, call_async, parameter
from gradwire import autograd, rpc
from gradwire.errors import CallTimeout, EncodeError
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


def watched_along() -> Tensor:
    """A graph that is watched on w1 and on w2."""
    y = call("w1", watch_and_relay, "w2", handlers.watched, parameter("x"))
    total: Tensor = y.sum()
    return total


def watch_and_relay(to: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    return handlers.watch_graph(call(to, function, handlers.affine(x)))


def assert_graphs(**expected: int) -> None:
    found = fn.on_all_workers(handlers.num_graphs)
    assert {worker: found[worker] for worker in expected} == expected


# ---------------------------------------------------------------------------- counting


@on_worker(0)
def test_counts_are_zero_when_idle():
    for info in fn.counts_everywhere().values():
        assert info == fn.ZERO


@on_worker(0)
def test_counts_tell_what_there_is_in_a_context():
    with autograd.context():
        y = call("w1", handlers.affine, parameter("x"))
        z = call("w1", handlers.affine, parameter("x"))

        info = fn.counts_everywhere()

        for worker in ("w0", "w1"):
            assert info[worker] == {**fn.ZERO, "contexts": 1, "sends": 2, "recvs": 2}
        assert info["w2"] == fn.ZERO
        del y, z


@on_worker(0)
def test_counts_tell_what_there_is_of_calls():
    y = call("w1", handlers.affine, parameter("x"))
    z = call("w2", handlers.affine, parameter("x"))

    info = fn.counts_everywhere()

    assert info["w0"]["contexts"] == 2
    assert info["w1"]["contexts"] == info["w2"]["contexts"] == 1
    assert info["w0"]["recvs"] == 2
    del y, z


@on_worker(0)
def test_counts_tell_of_a_pass_under_way():
    with autograd.context() as ctx:
        loss = call("w1", handlers.paused, parameter("x"), "gate").sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,))
        thread.start()
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")

        info = fn.counts_everywhere()
        fn.outside(call, "w1", functions.set_event, "gate")
        thread.join(functions.LIMIT_S)

        assert info["w0"]["passes"] == info["w1"]["passes"] == 1
        assert info["w2"]["passes"] == 0
        assert all(i["passes"] == 0 for i in fn.counts_everywhere().values())


# ------------------------------------------------------------------ leaving a context


@pytest.mark.parametrize("num_passes", [0, 1, 2])
@on_worker(0)
def test_leaving_a_context_frees_all_graphs_everywhere(num_passes):
    with fn.no_collector():
        with autograd.context() as ctx:
            loss = watched_along()
            for _ in range(num_passes):
                ctx.backward(loss, retain_graph=True)
            assert_graphs(w1=1, w2=1)
            del loss

        fn.wait_until_released()
        assert_graphs(w1=0, w2=0)


@on_worker(0)
def test_pass_that_does_not_retain_frees_the_graph_inside_the_context():
    with fn.no_collector(), autograd.context() as ctx:
        ctx.backward(watched_along())

        handlers.wait_until_graphs("w1", 0)
        handlers.wait_until_graphs("w2", 0)
        info = fn.counts_everywhere()
        for worker in ("w0", "w1", "w2"):
            assert info[worker] == {**fn.ZERO, "contexts": 1}


@on_worker(0)
def test_leaving_a_context_frees_the_gradients_of_all_workers():
    with fn.no_collector():
        with autograd.context() as ctx:
            ctx.backward(programs.there_and_back())
            call("w1", watch_gradients, ctx)
            assert call("w1", num_watched_gradients) == 2

        fn.wait_until_released()
        assert call("w1", num_watched_gradients) == 0


_gradients: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_gradients(ctx: int) -> None:
    for gradient in autograd.get_gradients(ctx).values():
        _gradients.add(gradient)


def num_watched_gradients() -> int:
    return len(_gradients)


@on_worker(0)
def test_leaving_a_context_frees_values_that_stayed_on_a_worker_when_they_are_dropped():
    with fn.no_collector():
        with autograd.context() as ctx:
            call("w1", keep_watched, parameter("x"))
            ctx.backward(
                call("w1", handlers.use_kept, "a", parameter("y")).sum(),
                retain_graph=True,
            )
            call("w1", fn.drop, "a")
            assert_graphs(w1=1)

        fn.wait_until_released()
        assert_graphs(w1=0)


def keep_watched(x: Tensor) -> None:
    fn.keep("a", handlers.watched(x))


@on_worker(0)
def test_leaving_a_context_reaches_workers_that_only_others_know():
    """w0 calls w1 only; w1 calls w2, and that w3."""
    with autograd.context():
        call("w1", handlers.forward_along, ["w2", "w3"], parameter("x"))
        assert [i["contexts"] for i in fn.counts_everywhere().values()] == [1] * 4

    fn.wait_until_released()


@on_worker(0)
def test_leaving_a_context_by_an_exception_frees_it():
    class Leave(Exception):
        pass

    with fn.no_collector():
        with pytest.raises(Leave), autograd.context():
            loss = watched_along()
            del loss
            raise Leave

        fn.wait_until_released()
        assert_graphs(w1=0, w2=0)


@pytest.mark.parametrize("mode", fn.MODES)
@pytest.mark.parametrize("broken", ["w0", "w1", "w2"])
@on_worker(0)
def test_failed_pass_leaves_nothing_behind(broken, mode):
    """Also without the cyclic collector: errors hold frames, and those hold graphs."""

    def program() -> Tensor:
        y = call(
            "w1",
            handlers.break_along,
            ["w2"],
            [broken],
            handlers.watch_graph(parameter("x")),
        )
        return (handlers.break_backward(y) if broken == "w0" else y).sum()

    def step() -> None:
        with pytest.raises(handlers.Broken):
            fn.run(program, mode)

    with fn.no_collector():
        step()

        fn.wait_until_released()
        assert_graphs(w0=0)


@on_worker(0)
def test_failed_call_leaves_nothing_behind():
    with fn.no_collector():
        for _ in range(2):
            with pytest.raises(ValueError, match="after the forward"):
                call("w1", handlers.fail_after, parameter("x"))

        fn.wait_until_released()
        handlers.wait_until_graphs("w1", 0)


def fail_and_catch(how: str) -> weakref.ref[Tensor]:
    """What this frame had computed when a call in it failed."""
    computed = parameter("x") * 2
    if how == "await":
        asyncio.run(await_and_catch(computed))
        return weakref.ref(computed)
    with contextlib.suppress(ValueError):
        if how == "sync":
            rpc.rpc_sync("w1", handlers.fail_after, args=(computed,))
        else:
            rpc.rpc_async("w1", handlers.fail_after, args=(computed,)).wait()
    return weakref.ref(computed)


async def await_and_catch(computed: Tensor) -> None:
    with contextlib.suppress(ValueError):
        await rpc.rpc_async("w1", handlers.fail_after, args=(computed,))


@pytest.mark.parametrize("how", ["sync", "future", "await"])
@on_worker(0)
def test_error_of_a_call_that_was_caught_keeps_no_frames(how):
    with fn.no_collector():
        computed = fail_and_catch(how)
        # The thread that read the answer may still have it in its hands.
        probes.wait_until(lambda: computed() is None, "the frames are gone", 3)


@on_worker(0)
def test_call_that_cannot_be_sent_leaves_nothing_behind():
    with fn.no_collector():
        with pytest.raises(EncodeError):
            call("w1", handlers.join, parameter("x"), threading.Lock())
        with autograd.context(), pytest.raises(EncodeError):
            call("w1", handlers.join, parameter("x"), threading.Lock())

        fn.wait_until_released()


@on_worker(0)
def test_call_that_timed_out_leaves_nothing_behind():
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(
            "w1",
            handlers.wait_then,
            args=("gate", handlers.watched, parameter("x")),
            timeout=0.1,
        )
    call("w1", functions.set_event, "gate")

    fn.wait_until_released()
    handlers.wait_until_graphs("w1", 0)


# ----------------------------------------------------------------------- calls in flight


@on_worker(0)
def test_context_is_left_while_its_calls_run():
    with autograd.context():
        late = call_async(
            "w1", handlers.wait_then, "gate", handlers.watched, parameter("x")
        )
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")

    fn.wait_until_no_contexts()
    call("w1", functions.set_event, "gate")
    result = late.wait()

    assert not result.requires_grad
    del late
    fn.wait_until_released()
    handlers.wait_until_graphs("w1", 0)


@on_worker(0)
def test_late_result_of_a_left_context_is_the_right_value():
    expected = fn.in_one_process(lambda: call("w1", handlers.affine, parameter("x")))

    with autograd.context():
        late = call_async(
            "w1", handlers.wait_then, "gate", handlers.affine, parameter("x")
        )
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")
    fn.wait_until_no_contexts()
    call("w1", functions.set_event, "gate")

    fn.assert_equal(late.wait(), expected.value)


@on_worker(0)
def test_nested_call_of_a_left_context_brings_nothing_back():
    """The handler on w1 calls w2 when the context is over; w2 has not heard of it."""
    with autograd.context():
        late = call_async(
            "w1",
            handlers.wait_then,
            "gate",
            handlers.affine_relay,
            "w2",
            handlers.watched,
            parameter("x"),
        )
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")

    fn.wait_until_no_contexts()
    call("w1", functions.set_event, "gate")
    late.wait()

    del late
    fn.wait_until_released()
    handlers.wait_until_graphs("w2", 0)


@on_worker(0)
def test_calls_under_way_between_others_bring_nothing_back():
    """w1 calls w2 in the context; the release reaches w2 before the last of the calls."""
    for number in range(20):
        gate = f"gate {number}"
        with autograd.context():
            calls = call_async(
                "w1",
                handlers.call_until_set,
                gate,
                "w2",
                handlers.watched,
                parameter("x"),
            )
            kept = call("w2", handlers.linear, parameter("x"))
            fn.outside(call, "w1", functions.wait_until_blocked, gate)
            del kept
        fn.outside(call, "w1", functions.set_event, gate)
        assert calls.wait() >= 1
        del calls

    fn.wait_until_released()
    handlers.wait_until_graphs("w2", 0)


@on_worker(0)
def test_nested_call_of_a_left_context_still_returns_its_value():
    expected = fn.in_one_process(
        lambda: call("w1", handlers.affine_relay, "w2", handlers.linear, parameter("x"))
    )

    with autograd.context():
        late = call_async(
            "w1",
            handlers.wait_then,
            "gate",
            handlers.affine_relay,
            "w2",
            handlers.linear,
            parameter("x"),
        )
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")
    fn.wait_until_no_contexts()
    call("w1", functions.set_event, "gate")

    fn.assert_equal(late.wait(), expected.value)


@on_worker(0)
def test_thread_that_goes_on_in_a_left_context_brings_nothing_back():
    """Its calls are calls fn.outside of any context."""
    x = parameter("x")
    with autograd.context():
        copied = contextvars.copy_context()
        ended = call("w1", handlers.linear, x)
        del ended
    fn.wait_until_released()

    y = copied.run(call, "w1", handlers.affine, x)
    y.sum().backward()

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_context_is_left_while_a_pass_runs():
    """The pass fails, and everybody is out of it."""
    errors: list[BaseException] = []

    def run(ctx: autograd.Context, loss: Tensor) -> None:
        try:
            ctx.backward(loss)
        except BaseException as error:
            errors.append(error.with_traceback(None))

    with autograd.context() as ctx:
        loss = call("w1", handlers.paused, parameter("x"), "gate").sum()
        thread = threading.Thread(target=run, args=(ctx, loss))
        thread.start()
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")
        del loss
    thread.join(functions.LIMIT_S)
    call("w1", functions.set_event, "gate")

    assert not thread.is_alive()
    assert len(errors) == 1
    assert f"the context {ctx}" in str(errors[0])
    assert "released" in str(errors[0])
    del thread
    fn.wait_until_released()


@pytest.mark.parametrize("num_open", [1, 3])
@on_worker(0)
def test_other_open_contexts_survive_a_release(num_open):
    """A release says which contexts of this worker are over; the others are not."""
    expected = fn.in_one_process(lambda: programs.there_and_back().backward())
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(num_open):
            ctx = stack.enter_context(autograd.context())
            opened.append((ctx, programs.there_and_back()))
        for _ in range(3):
            with autograd.context() as ctx:
                ctx.backward(programs.there_and_back())

        for ctx, loss in opened:
            ctx.backward(loss)
            fn.assert_same(fn.fetch_dictionary(ctx), expected.gradients)


@on_worker(0)
def test_contexts_are_released_in_any_order():
    for _ in range(3):
        fn.open_context()
        fn.inside(call, "w1", handlers.affine, parameter("x"))
    for left in (2, 1, 0):
        fn.close_contexts(1 if left else 0)
        fn.wait_until_counted("w1", contexts=left, sends=left, recvs=left)


# ------------------------------------------------------------------ what user code keeps


@on_worker(0)
def test_result_kept_after_the_release_is_counted_until_it_is_dropped():
    with fn.no_collector():
        with autograd.context():
            kept = call("w1", handlers.affine, parameter("x"))

        fn.wait_until_counted("w0", released_contexts_kept_alive=1)
        del kept
        fn.wait_until_released()


@on_worker(0)
def test_value_computed_from_a_result_keeps_the_context_alive_too():
    with fn.no_collector():
        with autograd.context():
            kept = call("w1", handlers.affine, parameter("x")).exp().sum()

        fn.wait_until_counted("w0", released_contexts_kept_alive=1)
        del kept
        fn.wait_until_released()


@on_worker(0)
def test_argument_kept_by_the_callee_is_counted_there_until_it_is_dropped():
    with fn.no_collector():
        with autograd.context():
            call("w1", fn.keep, "a", parameter("x") * 2)

        fn.wait_until_counted("w1", released_contexts_kept_alive=1)
        fn.wait_until_released("w0")
        call("w1", fn.drop, "a")
        fn.wait_until_released()


@on_worker(0)
def test_detached_result_keeps_nothing_alive():
    with autograd.context():
        kept = call("w1", handlers.affine, parameter("x")).detach()

    fn.wait_until_released()
    assert kept.shape == (3, 3)


@on_worker(0)
def test_gradients_kept_by_the_program_keep_nothing_alive():
    with autograd.context() as ctx:
        ctx.backward(programs.one_call())
        kept = autograd.get_gradients(ctx)

    fn.wait_until_released()
    assert kept


@on_worker(0)
def test_several_kept_contexts_are_counted_each():
    kept = []
    for _ in range(3):
        with autograd.context():
            kept.append(call("w1", handlers.affine, parameter("x")))

    fn.wait_until_counted("w0", released_contexts_kept_alive=3)
    kept.pop()
    fn.wait_until_counted("w0", released_contexts_kept_alive=2)
    kept.clear()
    fn.wait_until_released()


# -------------------------------------------------------------- calls without a context


@on_worker(0)
def test_dropping_the_result_frees_the_callees_half():
    with fn.no_collector():
        y = call("w1", handlers.watched, parameter("x"))
        assert_graphs(w1=1)

        del y

        handlers.wait_until_graphs("w1", 0)
        fn.wait_until_released()


@on_worker(0)
def test_dropping_the_result_frees_what_the_callee_called():
    with fn.no_collector():
        y = call("w1", watch_and_relay, "w2", handlers.watched, parameter("x"))
        assert_graphs(w1=1, w2=1)

        del y

        handlers.wait_until_graphs("w1", 0)
        handlers.wait_until_graphs("w2", 0)
        fn.wait_until_released()


@on_worker(0)
def test_value_computed_from_a_result_keeps_the_callees_half():
    with fn.no_collector():
        loss = call("w1", handlers.watched, parameter("x")).sum()
        fn.wait_until_counted("w1", contexts=1, sends=1, recvs=1)
        assert_graphs(w1=1)

        del loss

        handlers.wait_until_graphs("w1", 0)


@on_worker(0)
def test_one_of_several_results_keeps_the_callees_half():
    with fn.no_collector():
        first, second = call("w1", split_watched, parameter("x"))
        del first
        fn.wait_until_counted("w1", contexts=1, sends=1, recvs=1)
        assert_graphs(w1=1)
        second.sum().backward()
        del second
        handlers.wait_until_graphs("w1", 0)

    def program() -> None:
        call("w1", split_watched, parameter("x"))[1].sum().backward()

    fn.assert_same(fn.fetch_grad(), fn.in_one_process(program).gradients)


def split_watched(x: Tensor) -> tuple[Tensor, Tensor]:
    y = handlers.watched(x)
    return y, y * 2


@pytest.mark.parametrize("waited_for", [False, True])
@on_worker(0)
def test_dropped_future_frees_the_callees_half(waited_for):
    with fn.no_collector():
        future = call_async("w1", handlers.watched, parameter("x"))
        if waited_for:
            future.wait()
        del future

        fn.wait_until_released()
        handlers.wait_until_graphs("w1", 0)


@on_worker(0)
def test_backward_frees_the_callees_half_though_the_result_is_kept():
    with fn.no_collector():
        y = call("w1", handlers.watched, parameter("x"))
        y.sum().backward()

        handlers.wait_until_graphs("w1", 0)
        fn.wait_until_released()
        assert y.requires_grad


@on_worker(0)
def test_retained_graph_lives_until_the_result_is_dropped():
    with fn.no_collector():
        y = call("w1", handlers.watched, parameter("x"))
        y.sum().backward(retain_graph=True)
        assert_graphs(w1=1)
        assert fn.counts_everywhere()["w1"]["contexts"] == 1

        del y

        handlers.wait_until_graphs("w1", 0)
        fn.wait_until_released()


@on_worker(0)
def test_call_whose_result_needs_no_grad_is_free_at_once():
    with fn.no_collector():
        constant = call("w1", handlers.get_constant, parameter("x"))

        fn.wait_until_released()
        assert not constant.requires_grad


@on_worker(0)
def test_value_that_the_callee_keeps_is_its_own_after_the_call():
    """The caller's half is gone; the callee's graph lives as long as it is kept there."""
    with fn.no_collector():
        call("w1", keep_watched, parameter("x"))
        fn.wait_until_released("w0")
        assert_graphs(w1=1)

        call("w1", fn.drop, "a")

        handlers.wait_until_graphs("w1", 0)
        fn.wait_until_released()


@on_worker(0)
def test_call_to_oneself_is_freed_with_its_result():
    with fn.no_collector():
        y = call("w0", handlers.watched, parameter("x"))
        assert_graphs(w0=1)
        del y
        handlers.wait_until_graphs("w0", 0)
        fn.wait_until_released()


@on_worker(0)
def test_handler_that_caches_its_output_frees_the_earlier_ones():
    """One output stays on the worker between calls: the last one, and no more."""
    with fn.no_collector():
        for _ in range(5):
            call("w1", cache_output, parameter("x")).sum().backward()
        handlers.wait_until_graphs("w1", 1)
        for _ in range(5):
            with autograd.context() as ctx:
                ctx.backward(call("w1", cache_output, parameter("x")).sum())
        handlers.wait_until_graphs("w1", 1)
        info = fn.counts_everywhere()["w1"]
        assert info["contexts"] == 0
        assert info["released_contexts_kept_alive"] <= 1

        call("w1", fn.drop, "cache")
        fn.wait_until_released()


def cache_output(x: Tensor) -> Tensor:
    y = handlers.watched(x)
    fn.keep("cache", y)
    return y


@pytest.mark.parametrize("mode", fn.MODES)
@on_worker(0)
def test_many_steps_need_no_collector(mode):
    with fn.no_collector():
        for _ in range(10):
            fn.run(watched_along_and_back, mode)
            fn.on_all_workers(fn.clear_grad)

        fn.wait_until_released()
        assert_graphs(w0=0, w1=0, w2=0)
    assert gc.isenabled()


def watched_along_and_back() -> Tensor:
    y = handlers.watch_graph(
        call("w1", watch_and_relay, "w0", handlers.watched, parameter("x"))
    )
    return watched_along() * y.sum()


@on_worker(0)
def test_grad_that_was_asked_for_leaves_nothing_behind():
    with fn.no_collector():
        x = parameter("x")
        with autograd.context() as ctx:
            autograd.grad(ctx, watched_along(), x)
            torch.autograd.grad(watched_along(), x)
        torch.autograd.grad(watched_along(), x)

        fn.wait_until_released()
        assert_graphs(w1=0, w2=0)


def test_worker_that_leaves_a_context_of_another_changes_nothing(cluster):
    """Each worker's contexts end with its own releases, not with those of others."""
    ctx = cluster.run(0, open_with_graph)
    cluster.run(1, use_own_contexts)
    cluster.run(0, finish_graph, ctx)


def open_with_graph() -> autograd.Context:
    ctx = fn.open_context()
    fn.keep("loss", fn.inside(programs.there_and_back))
    return ctx


def use_own_contexts() -> None:
    for _ in range(3):
        with autograd.context() as ctx:
            ctx.backward(call("w2", handlers.affine, parameter("own")).sum())


def finish_graph(ctx: autograd.Context) -> None:
    ctx.backward(fn.take("loss"))
    expected = fn.in_one_process(lambda: programs.there_and_back().backward())
    found = fn.fetch_dictionary(ctx)
    fn.assert_same({w: found[w] for w in ("w0",)}, {"w0": expected.gradients["w0"]})
    fn.close_contexts()
    probes.wait_until(
        lambda: fn.counts_everywhere()["w1"]["contexts"] == 0, "w1 is free"
    )
