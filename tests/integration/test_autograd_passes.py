"""What an explicit context joins: tasks, threads, handlers, passes, workers."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
import traceback
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
from gradwire.autograd._exchange import Exchange
from gradwire.autograd._messages import GradientAndStart
from gradwire.autograd._recorder import Recorder
from gradwire.errors import GraphConsumed, UsageError
from gradwire.rpc._api import current_agent
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ------------------------------------------------------------------ what joins a context


@on_worker(0)
def test_asyncio_tasks_are_in_the_context():
    async def program() -> Tensor:
        async def branch(to: str) -> Tensor:
            await asyncio.sleep(0)
            result: Tensor = await call_async(to, handlers.affine, parameter("x"))
            return result

        left, right = await asyncio.gather(branch("w1"), branch("w2"))
        return (left * right).sum()

    expected = fn.in_one_process(lambda: programs.two_calls_at_once().backward())

    with autograd.context() as ctx:
        ctx.backward(asyncio.run(program()))
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_contexts_of_concurrent_asyncio_tasks_are_apart():
    async def step(to: str) -> fn.Gradients:
        with autograd.context() as ctx:
            y = await call_async(to, handlers.affine, parameter("x"))
            await asyncio.sleep(0)
            z = await call_async(to, handlers.linear, y)
            ctx.backward(z.sum())
            return fn.fetch_dictionary(ctx)

    async def program() -> list[fn.Gradients]:
        return await asyncio.gather(*(step(to) for to in ("w1", "w2", "w1")))

    found = asyncio.run(program())

    for to, gradients in zip(("w1", "w2", "w1"), found, strict=True):
        expected = fn.in_one_process(functools.partial(backward_of_chain, to))
        fn.assert_same(gradients, expected.gradients)


def chain(to: str) -> Tensor:
    y = call(to, handlers.affine, parameter("x"))
    total: Tensor = call(to, handlers.linear, y).sum()
    return total


def backward_of_chain(to: str) -> None:
    chain(to).backward()


@on_worker(0)
def test_then_callbacks_are_in_the_context():
    def program() -> Tensor:
        future = call_async("w1", handlers.affine, parameter("x"))
        second = future.then(lambda done: call("w2", handlers.linear, done.value()))
        return second.wait().sum()

    fn.check(program, "dictionary")


@on_worker(0)
def test_done_callbacks_are_in_the_context():
    def program() -> Tensor:
        ended: rpc.Future[Tensor] = rpc.Future()
        future = call_async("w1", handlers.affine, parameter("x"))
        future.add_done_callback(
            lambda done: ended.set_result(call("w2", handlers.linear, done.value()))
        )
        return ended.wait().sum()

    fn.check(program, "dictionary")


def _in_thread(function: Callable[[], Any]) -> Any:
    found: rpc.Future[Any] = rpc.Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(functions.LIMIT_S)
    return found.wait(functions.LIMIT_S)


@on_worker(0)
def test_threads_with_the_copied_context_are_in_it():
    def program() -> Tensor:
        copied, x = contextvars.copy_context(), parameter("x")
        y = _in_thread(lambda: copied.run(call, "w1", handlers.affine, x))
        return call("w2", handlers.linear, y).sum()

    fn.check(program, "dictionary")


@on_worker(0)
def test_threads_without_it_are_not():
    """Their calls are contexts of their own, and fill ``.grad``."""
    x = parameter("x")
    with autograd.context() as ctx:
        _in_thread(lambda: call("w1", handlers.affine, x).sum().backward())
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_calls_from_several_threads_join_one_context():
    workers = ["w1", "w2", "w3", "w1", "w2", "w3", "w0", "w1"]

    def part(number: int) -> Tensor:
        x = parameter(f"x{number}")
        y = call(workers[number], handlers.affine_relay, "w2", handlers.linear, x)
        return call("w1", handlers.affine, y)

    def one_by_one() -> Tensor:
        return sum(part(i).sum() for i in range(len(workers)))  # type: ignore[return-value]

    def at_once() -> Tensor:
        found: dict[int, Tensor] = {}

        def run(number: int) -> None:
            found[number] = part(number)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(run, i))
            for i in range(len(workers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(functions.LIMIT_S)
        return sum(found[i].sum() for i in range(len(workers)))  # type: ignore[return-value]

    expected = fn.in_one_process(lambda: one_by_one().backward())
    found = fn.run(at_once, "dictionary")
    fn.assert_same(found, expected.gradients, exact=False)


@pytest.mark.parametrize(
    "name",
    [
        "there_and_back",
        "deep_nesting",
        "coroutine_that_calls",
        "reply_from_a_callback",
        "call_from_a_callback",
        "diamond_inside_a_handler",
    ],
)
@on_worker(0)
def test_handlers_and_their_calls_are_in_the_callers_context(name):
    """Also those that the loss does not depend on: all are told of the pass."""
    with autograd.context() as ctx:
        programs.PROGRAMS[name]()
        took_part = [worker for worker, n in _contexts().items() if n]
        ctx.backward((parameter("y") ** 2).sum())

    one_process = fn.in_one_process(programs.PROGRAMS[name])
    assert set(took_part) == {"w0", *one_process.gradients}


def _contexts() -> dict[str, int]:
    return {w: info["contexts"] for w, info in fn.counts_everywhere().items()}


@on_worker(0)
def test_handlers_threads_forget_the_context_afterwards():
    """A thread of the pool serves one call in a context, and the next without any."""
    x = parameter("x")
    for _ in range(3):
        with autograd.context() as ctx:
            ctx.backward(
                call("w1", handlers.affine_relay, "w2", handlers.linear, x).sum()
            )
        call("w1", handlers.affine_relay, "w2", handlers.linear, x).sum().backward()

    def program() -> None:
        for _ in range(3):
            call(
                "w1", handlers.affine_relay, "w2", handlers.linear, parameter("x")
            ).sum().backward()

    fn.assert_same(fn.fetch_grad(), fn.in_one_process(program).gradients)


@on_worker(0)
def test_call_without_grad_takes_its_handler_into_the_context():
    """Nothing that needs grad is sent, but the handler uses what stayed there."""

    def program() -> Tensor:
        call("w1", handlers.keep_linear, "a", parameter("x"))
        return call("w1", handlers.kept_total, "a")

    fn.check(program, "dictionary")


# ------------------------------------------------------------------------ several passes


@on_worker(0)
def test_forward_and_backward_alternate_in_one_context():
    def program(backward: Callable[[Tensor], Any]) -> None:
        for _ in range(4):
            backward(programs.diamond())

    expected = fn.in_one_process(lambda: program(torch.autograd.backward))

    with autograd.context() as ctx:
        program(ctx.backward)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients, exact=False)


def forward_forward_backward_backward(
    backward: Callable[..., Any], retain: bool
) -> None:
    first = call(
        "w1", handlers.affine_relay, "w2", handlers.linear, parameter("x")
    ).sum()
    second = call(
        "w2", handlers.affine_relay, "w1", handlers.linear, parameter("x")
    ).sum()
    backward(first, retain_graph=retain)
    backward(second)


@pytest.mark.parametrize("mode", fn.CONTEXT_MODES)
@on_worker(0)
def test_two_forwards_then_two_backwards_with_a_retained_graph(mode):
    expected = fn.in_one_process(
        lambda: forward_forward_backward_backward(torch.autograd.backward, True)
    )

    accumulate = "grad" if mode == "into grad" else "dict"
    with autograd.context(accumulate=accumulate) as ctx:  # type: ignore[arg-type]
        backward = torch.autograd.backward if mode == "plain" else ctx.backward
        forward_forward_backward_backward(backward, True)
        found = fn.fetch_dictionary(ctx) if mode == "dictionary" else fn.fetch_grad()

    fn.assert_same(found, expected.gradients, exact=False)


@pytest.mark.parametrize("mode", fn.CONTEXT_MODES)
@on_worker(0)
def test_two_forwards_then_two_backwards_name_the_remedies(mode):
    accumulate = "grad" if mode == "into grad" else "dict"
    with autograd.context(accumulate=accumulate) as ctx:  # type: ignore[arg-type]
        backward = torch.autograd.backward if mode == "plain" else ctx.backward

        error = fn.catch(
            GraphConsumed, forward_forward_backward_backward, backward, False
        )

        text = str(error)
        assert f"the context {ctx}" in text
        for remedy in (
            "backward([loss1, loss2])",
            "retain_graph=True",
            "a context for each forward",
            "no context",
        ):
            assert remedy in text


@on_worker(0)
def test_value_that_stayed_on_a_worker_is_consumed_too():
    with autograd.context() as ctx:
        call("w1", handlers.keep_linear, "a", parameter("x"))
        ctx.backward(call("w1", handlers.use_kept, "a", parameter("y")).sum())

        again = call("w1", handlers.use_kept, "a", parameter("y")).sum()
        error = fn.catch(GraphConsumed, ctx.backward, again)

        assert "'w1'" in str(error)


@on_worker(0)
def test_two_contexts_are_open_at_once_in_one_thread():
    """Forward, forward, backward, backward, in either order, without retaining."""

    expected = [
        fn.in_one_process(lambda: programs.diamond().backward()),
        fn.in_one_process(lambda: programs.there_and_back().backward()),
    ]

    with autograd.context() as first:
        one = programs.diamond()
        with autograd.context() as second:
            other = programs.there_and_back()
            first.backward(one)
            second.backward(other)
            found = [fn.fetch_dictionary(ctx) for ctx in (first, second)]

    for gradients, wanted in zip(found, expected, strict=True):
        fn.assert_same(gradients, wanted.gradients, exact=False)


@on_worker(0)
def test_outer_context_is_current_again_after_the_inner_one():
    expected = fn.in_one_process(lambda: chain("w1").backward())

    with autograd.context() as outer:
        y = call("w1", handlers.affine, parameter("x"))
        with autograd.context() as inner:
            inner.backward(call("w1", handlers.linear, parameter("other")).sum())
        z = call("w1", handlers.linear, y)
        outer.backward(z.sum())
        found = fn.fetch_dictionary(outer)

    fn.assert_same(found, expected.gradients)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@on_worker(0)
def test_contexts_are_left_in_another_order_than_entered(order):
    with autograd.context() as outer:
        managers = [autograd.context() for _ in range(3)]
        *_, inner = [manager.__enter__() for manager in managers]
        for number in order:
            managers[number].__exit__(None, None, None)
        programs.check_usable(inner)
        managers[2].__exit__(None, None, None)
        programs.check_usable(outer)


@on_worker(0)
def test_context_of_another_thread_is_left_inside_of_another_context():
    manager = autograd.context()
    thread = threading.Thread(target=manager.__enter__)
    thread.start()
    thread.join()

    with autograd.context() as ctx:
        manager.__exit__(None, None, None)
        programs.check_usable(ctx)


@on_worker(0)
def test_context_cannot_be_entered_twice():
    manager = autograd.context()
    with manager as ctx:
        with pytest.raises(UsageError, match="open already"):
            manager.__enter__()

        programs.check_usable(ctx)


# ---------------------------------------------------------------------- several workers


@on_worker(0)
def test_second_pass_is_started_by_another_worker():
    """w0 and w1 each have a loss; w0's pass retains the graph for w1's."""

    def program(ctx: autograd.Context | None) -> None:
        call("w1", handlers.keep_linear, "a", parameter("x"))
        loss = call("w1", handlers.use_kept, "a", parameter("y")).sum()
        if ctx is None:
            loss.backward(retain_graph=True)
        else:
            ctx.backward(loss, retain_graph=True)
        call("w1", backward_of_kept, ctx, "a")

    expected = fn.in_one_process(lambda: program(None))

    with autograd.context() as ctx:
        program(ctx)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


def backward_of_kept(ctx: autograd.Context | None, name: str) -> None:
    loss = fn.get_kept(name).tanh().sum()
    if ctx is None:
        loss.backward()
    else:
        ctx.backward(loss)


@on_worker(0)
def test_second_pass_from_another_worker_needs_a_retained_graph():
    with autograd.context() as ctx:
        call("w1", handlers.keep_linear, "a", parameter("x"))
        ctx.backward(call("w1", handlers.use_kept, "a", parameter("y")).sum())

        fn.catch(GraphConsumed, call, "w1", backward_of_kept, ctx, "a")


@on_worker(0)
def test_plain_backward_on_another_worker_runs_through_the_context():
    """The handler's ``loss.backward()`` goes back through the call that it serves."""

    def program() -> None:
        call("w1", backward_there, parameter("x"))

    expected = fn.in_one_process(program)

    with autograd.context():
        program()

    fn.assert_same(fn.fetch_grad(), expected.gradients)


def backward_there(x: Tensor) -> None:
    call("w2", handlers.linear, handlers.affine(x)).sum().backward()


def test_trainers_share_parameters_but_not_gradients(cluster):
    """Two trainers against two servers, several contexts of each, all at once."""
    num_steps = 4
    trainers = [cluster.start(rank, train_in_contexts, num_steps) for rank in (0, 1)]
    found = [trainer.result() for trainer in trainers]

    for rank, steps in enumerate(found):
        cluster.run(rank, check_steps, steps)


def train_in_contexts(num_steps: int) -> list[fn.Gradients]:
    found = []
    for number in range(num_steps):
        with autograd.context() as ctx:
            ctx.backward(training_loss(number))
            found.append(fn.fetch_dictionary(ctx))
    fn.assert_all_none(fn.fetch_grad())
    return found


def training_loss(number: int) -> Tensor:
    x = parameter("x") * (number + 1)
    y = call("w2", handlers.affine_relay, "w3", handlers.linear, x)
    total: Tensor = (call("w3", handlers.affine, y) * x).sum()
    return total


def check_steps(steps: list[fn.Gradients]) -> None:
    def run(number: int) -> None:
        training_loss(number).backward()

    for number, found in enumerate(steps):
        expected = fn.in_one_process(functools.partial(run, number))
        fn.assert_same(found, expected.gradients, exact=False)


@on_worker(0)
def test_contexts_of_several_threads_share_parameters():
    num_threads, num_steps = 4, 3
    found: dict[int, list[fn.Gradients]] = {}

    def run(number: int) -> None:
        found[number] = train_in_contexts(num_steps)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(functions.LIMIT_S)

    assert len(found) == num_threads
    for steps in found.values():
        check_steps(steps)


# -------------------------------------------------------------------- calls in flight


@on_worker(0)
def test_backward_waits_for_calls_that_nobody_waited_for():
    x = parameter("x")
    with autograd.context() as ctx:
        forgotten = call_async("w1", handlers.wait_then, "gate", handlers.affine, x)
        loss = call("w2", handlers.linear, x).sum()
        done = threading.Event()

        def run() -> None:
            ctx.backward(loss)
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        was_early = done.wait(0.05)
        fn.outside(call, "w1", functions.set_event, "gate")
        thread.join(functions.LIMIT_S)
        assert not was_early
        assert done.is_set()
        found = fn.fetch_dictionary(ctx)
        assert forgotten.done()

    expected = fn.in_one_process(lambda: programs.unused_result().backward())
    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_futures_that_nobody_waited_for_do_not_disturb_a_pass():
    def program() -> Tensor:
        for worker in ("w1", "w2", "w3"):
            call_async(worker, handlers.affine, parameter("x"))
        return call("w1", handlers.linear, parameter("x")).sum()

    fn.check(program, "dictionary")


@pytest.mark.parametrize("mode", fn.MODES)
@on_worker(0)
def test_failed_call_does_not_disturb_a_pass(mode):
    def program() -> Tensor:
        x = parameter("x")
        with pytest.raises(ValueError, match="after the forward"):
            call("w1", handlers.fail_after, x)
        return call("w1", handlers.affine, x).sum()

    fn.check(program, mode)


@on_worker(0)
def test_handler_that_never_calls_back_does_not_disturb_a_pass():
    """A call that reached its deadline: its reply comes late, and is dropped."""
    x = parameter("x")
    with autograd.context() as ctx:
        with pytest.raises(TimeoutError):
            rpc.rpc_sync(
                "w1",
                handlers.wait_then,
                args=("never", handlers.affine, x),
                timeout=0.1,
            )
        ctx.backward(call("w2", handlers.linear, x).sum())
        found = fn.fetch_dictionary(ctx)
        fn.outside(call, "w1", functions.set_event, "never")

    expected = fn.in_one_process(
        lambda: call("w2", handlers.linear, parameter("x")).sum().backward()
    )
    fn.assert_same(found, expected.gradients)


# --------------------------------------------------------- the order in which it waits


@on_worker(0)
def test_worker_in_the_middle_waits_for_replies_before_requests():
    """What it ships for the replies is what those that it has asked wait for."""
    x = parameter("x").detach()
    with autograd.context() as ctx:
        # Its events: request 0, its answer, reply 2, request 3, its answer, reply 5.
        total = sum(
            call("w1", handlers.affine_relay, "w2", handlers.linear, x).sum()
            for _ in range(2)
        )
        fn.outside(call, "w1", begin_to_note_waits)
        ctx.backward(total)
    waits = call("w1", noted_waits)

    assert waits == [5, 2, 3, 0]


_waits: list[int] = []
_patch = pytest.MonkeyPatch()


def begin_to_note_waits() -> None:
    wait = Exchange.await_answer

    def noting(self: Exchange, side: Any, run: Any, event: int, peer: int) -> Any:
        _waits.append(event)
        return wait(self, side, run, event, peer)

    _patch.setattr(Exchange, "await_answer", noting)


def noted_waits() -> list[int]:
    _patch.undo()
    waits = _waits.copy()
    _waits.clear()
    return waits


# ------------------------------------------------------------------ when a part begins


def num_waiting_parts(expected: int) -> int:
    """How many threads of this worker wait in a part of the pass, which it knows of."""

    def count() -> int:
        stacks = map(traceback.extract_stack, sys._current_frames().values())
        return sum(any(f.name == "await_gradients" for f in s) for s in stacks)

    probes.wait_until(lambda: autograd.get_debug_info()["passes"] == 1, "a pass")
    if expected:
        probes.wait_until(lambda: count() == expected, f"{expected} parts")
    return count()


def fetch() -> Tensor:
    fetched: Tensor = call("w1", handlers.get_parameter, "bias")
    return fetched


def compute_there() -> Tensor:
    """There it has no recv, and ships nothing."""
    computed: Tensor = call("w1", handlers.get_own)
    return computed


def compute() -> Tensor:
    computed: Tensor = call("w1", handlers.linear, parameter("x"))
    return computed


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize(("make", "num_waiting"), [(compute_there, 0), (compute, 1)])
@on_worker(0)
def test_no_thread_waits_in_a_part_that_ships_nothing(make, num_waiting, num_calls):
    found: list[int] = []

    def note() -> None:
        found.append(fn.outside(call, "w1", num_waiting_parts, num_waiting))

    def program() -> Tensor:
        return torch.stack([make().square().sum() for _ in range(num_calls)]).sum()

    with autograd.context() as ctx:
        ctx.backward(handlers.run_in_backward(program(), note))
        gradients = fn.fetch_dictionary(ctx)

    assert found == [num_waiting]
    expected = fn.in_one_process(lambda: program().backward())
    fn.assert_same(gradients, expected.gradients)


def fail() -> None:
    raise ZeroDivisionError("before the first gradient")


@on_worker(0)
def test_pass_that_fails_before_a_part_begins_leaves_nothing():
    def watched() -> Tensor:
        total: Tensor = call("w1", handlers.watched, parameter("x").detach()).sum()
        return total

    with autograd.context() as ctx:
        with pytest.raises(ZeroDivisionError, match="before the first"):
            ctx.backward(handlers.run_in_backward(watched(), fail))
        handlers.wait_until_graphs("w1", 0)
        ctx.backward(watched())
        gradients = fn.fetch_dictionary(ctx)

    expected = fn.in_one_process(lambda: watched().backward())
    fn.assert_same(gradients, expected.gradients)


def begin_to_handle_starts_late() -> None:
    """A gradient that comes with the begin of a pass is the last of two to be handled."""
    handle = Exchange.on_gradient_and_start

    def late(self: Exchange, peer: Any, message: Any, frame: Any) -> Any:
        probes.wait_until(
            lambda: any(
                s.run and len(s.run.awaited) == 1 for s in self.registry.sides()
            ),
            "the other gradient",
        )
        return handle(self, peer, message, frame)

    agent = current_agent()
    (recorder,) = (i for i in agent.interceptors if isinstance(i, Recorder))
    requests: dict[Any, Any] = agent._requests
    _patch.setitem(
        requests, GradientAndStart, functools.partial(late, recorder.exchange)
    )


def handle_starts_as_ever() -> None:
    _patch.undo()  # this worker's


def fetch_and_sum() -> Tensor:
    total: Tensor = call("w1", handlers.get_parameter, "bias").sum()
    return total


@on_worker(0)
def test_part_runs_if_its_last_gradient_comes_with_a_second_word_of_the_pass():
    """The first word comes from w2, by another connection."""
    fn.outside(call, "w1", begin_to_handle_starts_late)

    def program() -> Tensor:
        return call("w2", fetch_and_sum) + 2 * fetch().sum()

    try:
        with autograd.context(accumulate="grad"):
            program().backward()
    finally:
        fn.outside(call, "w1", handle_starts_as_ever)
    expected = fn.in_one_process(lambda: program().backward())

    fn.assert_same(fn.fetch_grad(), expected.gradients)
