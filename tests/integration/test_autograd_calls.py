"""Backward through calls, without any context: it means what it means in one process.

The programs are in autograd_functions.py; those that make sense with and without a
context run here in all ways that there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import autograd_programs as programs
import functions
from autograd_functions import call, call_async, parameter
from gradwire import rpc
from gradwire.autograd._context import Side
from gradwire.errors import AutogradError, GraphConsumed
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# -------------------------------------------------------------- programs, in all modes


@pytest.mark.parametrize("mode", fn.MODES)
@pytest.mark.parametrize("name", programs.PROGRAMS)
@on_worker(0)
def test_program_matches_one_process(name, mode):
    fn.check(programs.PROGRAMS[name], mode, exact=name not in programs.UNORDERED)


# ------------------------------------------------------------------- what is asked for


@on_worker(0)
def test_backward_fills_grad_on_every_worker():
    x = parameter("x")

    call("w1", handlers.affine_relay, "w2", handlers.linear, x).sum().backward()

    assert x.grad is not None
    grads = fn.fetch_grad()
    assert {(w, n) for w, names in grads.items() for n, g in names.items()} == {
        ("w0", "x"),
        ("w1", "weight"),
        ("w1", "bias"),
        ("w2", "weight"),
    }
    assert all(g is not None for names in grads.values() for g in names.values())


@on_worker(0)
def test_grad_returns_gradients_and_leaves_grad_alone_everywhere():
    def program() -> Any:
        x, y = parameter("x"), parameter("y")
        loss = (call("w1", handlers.affine_relay, "w2", handlers.linear, x) * y).sum()
        return torch.autograd.grad(loss, [x, y])

    fn.check_calls(program)
    fn.assert_all_none(fn.fetch_grad())


@on_worker(0)
def test_grad_of_an_intermediate_value():
    def program() -> Any:
        hidden = call("w1", handlers.affine, parameter("x"))
        loss = call("w2", handlers.affine, hidden).sum()
        return torch.autograd.grad(loss, hidden)

    fn.check_calls(program)


@on_worker(0)
def test_grad_of_an_unused_input_is_none():
    def program() -> Any:
        x, y = parameter("x"), parameter("y")
        used, _ = call("w1", handlers.split, x), call("w1", handlers.linear, y)
        return torch.autograd.grad(used[0].sum(), [x, y], allow_unused=True)

    fn.check_calls(program)


@on_worker(0)
def test_grad_of_any_shape():
    def program() -> Any:
        x = parameter("x")
        y = call("w1", handlers.affine, x)
        return torch.autograd.grad(y, x, torch.full_like(y, 0.25))

    fn.check_calls(program)


@on_worker(0)
def test_backward_with_inputs_fills_only_those():
    def program() -> None:
        x, y = parameter("x"), parameter("y")
        loss = (call("w1", handlers.affine_relay, "w2", handlers.linear, x) * y).sum()
        loss.backward(inputs=[x])

    fn.check_calls(program)
    grads = fn.fetch_grad()
    assert [n for n, grad in grads["w0"].items() if grad is not None] == ["x"]
    fn.assert_all_none({worker: grads[worker] for worker in ("w1", "w2", "w3")})


@on_worker(0)
def test_backward_with_a_gradient_of_any_shape():
    def program() -> None:
        y = call("w1", handlers.affine, parameter("x"))
        y.backward(torch.arange(9, dtype=torch.double).view(3, 3))

    fn.check_calls(program)


@on_worker(0)
def test_gradients_of_several_backwards_add_up():
    def program() -> None:
        for _ in range(3):
            call("w1", handlers.affine, parameter("x")).sum().backward()

    fn.check_calls(program)


# -------------------------------------------------------------- what is left untouched


@on_worker(0)
def test_backward_leaves_unused_calls_untouched():
    x = parameter("x")
    unused = call("w1", handlers.counted, x, "unused")

    call("w1", handlers.counted, x, "used").sum().backward()

    assert call("w1", handlers.num_backwards, "used") == 1
    assert call("w1", handlers.num_backwards, "unused") == 0
    del unused


@on_worker(0)
def test_unused_call_can_still_be_used_after_another_backward():
    def program() -> None:
        x = parameter("x")
        first, second = (call("w1", handlers.affine, x) for _ in range(2))
        first.sum().backward()
        (second**2).sum().backward()

    fn.check_calls(program)


@on_worker(0)
def test_one_backward_goes_through_several_calls_of_one_worker_once_each():
    x = parameter("x")
    calls = [call("w1", handlers.counted, x, str(number)) for number in range(3)]

    sum(calls).sum().backward()

    assert [call("w1", handlers.num_backwards, str(i)) for i in range(3)] == [1, 1, 1]


# -------------------------------------------------------------------- several at a time


@on_worker(0)
def test_forwards_and_backwards_interleave():
    def program() -> None:
        x = parameter("x")
        first = call("w1", handlers.affine_relay, "w2", handlers.linear, x).sum()
        second = (call("w1", handlers.affine, x) ** 2).sum()
        second.backward()
        third = call("w2", handlers.affine_relay, "w1", handlers.affine, x).sum()
        first.backward()
        fourth = call("w1", handlers.linear, x).sum()
        fourth.backward()
        third.backward()

    fn.check_calls(program, exact=False)


@on_worker(0)
def test_results_of_one_call_can_be_used_by_one_backward_after_the_other():
    """As in one process: what both need must be retained."""

    def program() -> None:
        first, second = call("w1", handlers.split, parameter("x"))
        first.sum().backward(retain_graph=True)
        (second**2).sum().backward()

    fn.check_calls(program)


@on_worker(0)
def test_retained_graph_can_be_used_again():
    def program() -> None:
        x = parameter("x")
        loss = call("w1", handlers.affine_relay, "w2", handlers.affine, x).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    fn.check_calls(program)


@on_worker(0)
def test_retained_graph_can_be_used_by_grad_and_then_by_backward():
    def program() -> Any:
        x = parameter("x")
        loss = call("w1", handlers.affine_relay, "w2", handlers.affine, x).sum()
        found = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return found

    fn.check_calls(program)


@pytest.mark.parametrize("num_retained", [0, 1])
@on_worker(0)
def test_backward_after_the_last_one_says_that_the_graph_is_gone(num_retained):
    y = call("w1", handlers.affine, parameter("x"))
    for _ in range(num_retained):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    before = fn.fetch_grad()

    error = fn.catch(GraphConsumed, y.sum().backward)

    assert "affine by worker 'w0'" in str(error)
    assert "retain_graph=True" in str(error)
    fn.assert_same(fn.fetch_grad(), before)


@on_worker(0)
def test_second_backward_through_a_nested_call_says_that_the_graph_is_gone():
    """Here the graph is retained on the caller, but was used up behind the callee."""
    y = call("w1", handlers.affine_relay, "w2", handlers.linear, parameter("x"))
    torch.autograd.backward(y.sum())

    with pytest.raises(GraphConsumed):
        torch.autograd.backward(y.sum())


@on_worker(0)
def test_grad_without_retain_uses_the_graph_up():
    x = parameter("x")
    y = call("w1", handlers.affine, x)
    torch.autograd.grad(y.sum(), x)

    with pytest.raises(GraphConsumed):
        y.sum().backward()


# ------------------------------------------------------------------------------ threads


@on_worker(0)
def test_threads_run_forward_and_backward_at_once():
    num_threads, num_steps = 4, 5

    def step(number: int) -> None:
        x = parameter(f"x{number}")
        loss = call(
            "w1", handlers.affine_relay, "w2", handlers.linear, x * number
        ).sum()
        loss.backward()

    def one_by_one() -> None:
        for number in range(num_threads):
            for _ in range(num_steps):
                step(number)

    def all_at_once() -> None:
        def work(number: int) -> None:
            for _ in range(num_steps):
                step(number)

        _run_in_threads(work, num_threads)

    expected = fn.in_one_process(one_by_one)
    found = fn.across_workers(all_at_once)
    fn.assert_same(found.gradients, expected.gradients, exact=False)


@on_worker(0)
def test_backward_runs_on_another_thread_than_forward():
    def program() -> None:
        loss = call(
            "w1", handlers.affine_relay, "w2", handlers.linear, parameter("x")
        ).sum()
        _run_in_threads(lambda _: loss.backward(), 1)

    fn.check_calls(program)


def _run_in_threads(work: Any, number: int) -> None:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(functions.LIMIT_S)
    if errors:
        raise errors[0]


def test_two_trainers_share_a_server(cluster):
    """Both add to the same ``.grad`` on the server, at the same time."""
    trainers = (0, 1)
    steps = [cluster.start(rank, train, "w2", 5) for rank in trainers]
    for step in steps:
        step.result()

    cluster.run(0, check_training, [f"w{rank}" for rank in trainers], "w2", 5)


def train(server: str, num_steps: int) -> None:
    """One trainer."""
    for number in range(num_steps):
        x = parameter("x") * (number + 1)
        call(server, handlers.affine_relay, "w3", handlers.linear, x).sum().backward()


def check_training(trainers: list[str], server: str, num_steps: int) -> None:
    found = fn.fetch_grad()

    def one_by_one() -> None:
        for trainer in trainers:
            call(trainer, train, server, num_steps)

    expected = fn.in_one_process(one_by_one)
    fn.assert_same(found, expected.gradients, exact=False)


@on_worker(0)
def test_handler_runs_a_backward_of_its_own():
    def program() -> Any:
        return call("w1", train_here, parameter("x").detach())

    fn.check_calls(program)


def train_here(x: Tensor) -> Tensor:
    loss = call("w2", handlers.affine, x @ parameter("weight")).sum()
    loss.backward()
    return loss.detach()


@on_worker(0)
def test_handler_runs_a_backward_of_its_own_beside_the_callers():
    """The gradient of the handler's backward is part of what it returns."""

    def program() -> None:
        call("w1", penalise, parameter("x")).sum().backward()

    fn.check_calls(program)


def penalise(x: Tensor) -> Tensor:
    inner = parameter("inner")
    loss = (call("w2", handlers.affine, inner) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, inner)
    return x * gradient


# ---------------------------------------------------------------- what is never waited for


@on_worker(0)
def test_future_that_nobody_waits_for_does_not_disturb():
    def program() -> None:
        x = parameter("x")
        call_async("w1", handlers.affine, x)
        forgotten = call_async("w2", handlers.affine, x)
        call("w3", handlers.affine, x).sum().backward()
        del forgotten

    fn.check_calls(program)


@on_worker(0)
def test_result_may_come_after_a_backward_that_does_not_use_it():
    x = parameter("x")
    late = rpc.rpc_async("w1", handlers.wait_then, args=("late", handlers.affine, x))

    call("w1", handlers.affine, x).sum().backward()
    call("w1", functions.set_event, "late")
    (late.wait() ** 2).sum().backward()

    def program() -> None:
        call("w1", handlers.affine, parameter("x")).sum().backward()
        (call("w1", handlers.affine, parameter("x")) ** 2).sum().backward()

    fn.assert_same(fn.fetch_grad(), fn.in_one_process(program).gradients)


# ------------------------------------------- results that are changed once they have left


@on_worker(0)
def test_result_may_be_changed_in_place_by_the_next_call():
    """Its node is made when it has left; but before anything else runs there."""
    x = parameter("x")
    rpc.rpc_sync("w1", hold_up_nodes, args=("changed",))

    y = call("w1", keep_linear, x)
    call("w1", double_in_place)  # the thread that has answered is held up
    call("w1", functions.set_event, "changed")
    y.sum().backward()

    def program() -> None:
        call("w1", handlers.linear, parameter("x")).sum().backward()

    fn.assert_same(fn.fetch_grad(), fn.in_one_process(program).gradients)


@on_worker(0)
def test_result_that_another_thread_changes_meanwhile_is_an_error():
    x = parameter("x")
    rpc.rpc_sync("w1", change_before_nodes)

    y = call("w1", keep_linear, x)

    with pytest.raises(AutogradError, match="changed in place by another thread"):
        y.sum().backward()


def keep_linear(x: Tensor) -> Tensor:
    y = handlers.linear(x)
    fn.keep("result", y)
    return y


def double_in_place() -> None:
    fn.get_kept("result").mul_(2)


def hold_up_nodes(event: str) -> None:
    """Holds up the next thread here that makes the node of a message that it has sent."""
    _before_next_node(lambda: functions.block_until_set(event))


def change_before_nodes() -> None:
    _before_next_node(double_in_place)


def _before_next_node(do: Callable[[], object]) -> None:
    finish_sends = Side.finish_sends

    def first(side: Side) -> None:
        Side.finish_sends = finish_sends  # type: ignore[method-assign]
        do()
        finish_sends(side)

    Side.finish_sends = first  # type: ignore[assignment, method-assign]
