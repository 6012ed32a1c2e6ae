"""Workers that send nothing but leaves, as parameter servers do: no nodes, one message."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import probes
from autograd_functions import call, parameter
from gradwire import autograd
from gradwire.autograd import _context, _exchange, _leaves
from gradwire.autograd._api import current_exchange
from gradwire.autograd._engine import Destination
from gradwire.autograd._messages import (
    Gradient,
    GradientAndStart,
    Gradients,
    PassStart,
)
from gradwire.rpc._api import current_agent
from gradwire.wire import encode
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

LARGE = 130  # a square of doubles that is too large to be held
ONES = torch.ones(2, fn.SIZE, fn.SIZE, dtype=torch.double)  # for two parameters


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ----------------------------------------------------------------- what is called there


def fetch(to: str, name: str) -> Tensor:
    fetched: Tensor = call(to, handlers.get_parameter, name)
    return fetched


def get_large() -> Tensor:
    return parameter("large", LARGE, LARGE)


def get_two() -> tuple[Tensor, Tensor]:
    return parameter("weight"), parameter("bias")


def hook_doubles(name: str) -> None:
    parameter(name).register_hook(lambda gradient: gradient * 2)


def set_requires_grad(name: str, requires: bool) -> None:
    parameter(name).requires_grad_(requires)


def freeze(name: str) -> None:
    parameter(name).requires_grad_(False)


def reshape(name: str) -> None:
    parameter(name).data = torch.zeros(2, 2, dtype=torch.double)


def relay_leaf(to: str, name: str) -> Tensor:
    """A leaf, from a worker that has recorded something itself meanwhile."""
    return fetch(to, name) * 0 + parameter("weight")


# ------------------------------------------------------------------------- what is noted

_patch = pytest.MonkeyPatch()
_noted: Counter[str] = Counter()


def begin_to_note() -> None:
    """Counts the nodes that this worker makes of sends, and what comes about passes."""
    make, take_at_once = _context.apply_send, _exchange.take_at_once

    def noting_passes(*args: Any) -> bool:
        is_over = take_at_once(*args)
        _noted["at once" if is_over else "in steps"] += 1
        return is_over

    def noting(*args: Any) -> Any:
        _noted["nodes"] += 1
        return make(*args)

    _patch.setattr(_context, "apply_send", noting)
    _patch.setattr(_exchange, "take_at_once", noting_passes)
    agent = current_agent()
    tables: tuple[dict[Any, Any], ...] = agent._requests, agent._handlers
    for table in tables:
        for kind in (PassStart, Gradient, GradientAndStart, Gradients):
            if kind in table:
                _patch.setitem(table, kind, functools.partial(_note, table[kind]))


def _note(handle: Callable[..., Any], peer: Any, message: Any, frame: Any) -> Any:
    _noted[type(message).__name__] += 1
    return handle(peer, message, frame)


def noted() -> dict[str, int]:
    _patch.undo()
    found = dict(_noted)
    _noted.clear()
    return found


def noting(program: Callable[[], Any], worker: str = "w1") -> dict[str, int]:
    """What a worker notes during a program."""
    fn.outside(call, worker, begin_to_note)
    try:
        program()
    finally:
        found: dict[str, int] = fn.outside(call, worker, noted)
    return found


# -------------------------------------------------------------------------- exactness


def one() -> Tensor:
    return (fetch("w1", "bias") * parameter("x")).sum()


def several_of_two_workers() -> Tensor:
    w, b = fetch("w1", "weight"), fetch("w1", "bias")
    v = fetch("w2", "weight")
    return (torch.tanh(parameter("x") @ w + b) @ v).square().sum()


def two_in_one_message() -> Tensor:
    w, b = call("w1", get_two)
    return (parameter("x") @ w + b).sum()


def one_of_two_unused() -> Tensor:
    w, _ = call("w1", get_two)
    return (parameter("x") @ w).sum()


def unused() -> Tensor:
    fetch("w1", "weight")
    return (fetch("w1", "bias") * parameter("x")).sum()


def the_same_twice() -> Tensor:
    first, second = fetch("w1", "bias"), fetch("w1", "bias")
    return (first * second * parameter("x")).sum()


def beside_something_computed() -> Tensor:
    b = fetch("w1", "bias")
    y = call("w1", handlers.affine, parameter("x") * b)
    return (y * b).sum()


def before_it_gets_something() -> Tensor:
    b = fetch("w1", "bias")
    return call("w1", handlers.linear, parameter("x") + b).sum() * b.sum()


def large_and_small() -> Tensor:
    b = fetch("w1", "bias")
    large = call("w1", get_large)
    return b.sum() * large.square().sum() + fetch("w1", "weight").sum()


def through_another() -> Tensor:
    w = call("w2", relay_leaf, "w1", "bias")
    return (fetch("w1", "weight") @ w).sum()


def one_gradient_for_two() -> Tensor:
    """Each gets a view of it."""
    return (fetch("w1", "weight").view(-1) + fetch("w1", "bias").view(-1)).sin().sum()


def of_myself() -> Tensor:
    return (fetch("w0", "bias") * fetch("w1", "bias")).sum()


PROGRAMS = (
    one,
    several_of_two_workers,
    two_in_one_message,
    one_of_two_unused,
    unused,
    the_same_twice,
    beside_something_computed,
    before_it_gets_something,
    large_and_small,
    through_another,
    of_myself,
)


@pytest.mark.parametrize("mode", fn.MODES)
@pytest.mark.parametrize("program", PROGRAMS)
@on_worker(0)
def test_gradients_are_those_of_one_process(program, mode):
    fn.check(program, mode, exact=False)


def random_program(seed: int) -> Callable[[], Tensor]:
    """Fetches leaves from several workers, some of which also compute."""

    def program() -> Tensor:
        choose = random.Random(seed)
        who_computes = choose.choice((["w1"], ["w1", "w2"], []))
        values = [parameter("x")]
        for _ in range(choose.randint(2, 9)):
            to = choose.choice(("w1", "w2", "w3"))
            kind = choose.choice(("one", "one", "one", "two", "large", "computed"))
            if kind == "two":
                values += call(to, get_two)
            elif kind == "large":
                values.append(call(to, get_large)[: fn.SIZE, : fn.SIZE])
            elif kind == "computed" and to in who_computes:
                values.append(call(to, handlers.affine, choose.choice(values)))
            else:
                values.append(fetch(to, choose.choice(("weight", "bias"))))
        total = parameter("x") * 0
        for value in choose.sample(values, choose.randint(1, len(values))):
            other = choose.choice(values)
            total = total + torch.tanh(value) * (other + choose.uniform(-1, 1))
        return total.sum()

    return program


@pytest.mark.parametrize("seed", range(40))
@on_worker(0)
def test_random_programs_are_those_of_one_process(seed):
    fn.check(random_program(seed), "dictionary", exact=False)


@pytest.mark.parametrize("program", PROGRAMS)
@on_worker(0)
def test_gradients_of_a_graph_that_is_retained(program):
    with autograd.context() as ctx:
        loss = program()
        ctx.backward(loss, retain_graph=True)
        ctx.backward(loss)
        found = fn.fetch_dictionary(ctx)

    def twice() -> None:
        loss = program()
        loss.backward(retain_graph=True)
        loss.backward()

    fn.assert_same(found, fn.in_one_process(twice).gradients, exact=False)


@on_worker(0)
def test_passes_of_one_context_add_up():
    with autograd.context() as ctx:
        for _ in range(3):
            ctx.backward(several_of_two_workers())
        found = fn.fetch_dictionary(ctx)

    def thrice() -> None:
        for _ in range(3):
            several_of_two_workers().backward()

    fn.assert_same(found, fn.in_one_process(thrice).gradients, exact=False)


@on_worker(0)
def test_gradients_of_gradients():
    def program(grad: Callable[..., Any]) -> Tensor:
        b = fetch("w1", "bias")
        x = parameter("x")
        (gradient,) = grad((b.pow(3) * x.pow(2)).sum(), (x,))
        return gradient.square().sum()

    with autograd.context() as ctx:
        ctx.backward(
            program(
                lambda loss, inputs: autograd.grad(ctx, loss, inputs, create_graph=True)
            )
        )
        found = fn.fetch_dictionary(ctx)

    def alone() -> None:
        program(functools.partial(torch.autograd.grad, create_graph=True)).backward()

    fn.assert_same(found, fn.in_one_process(alone).gradients, exact=False)


# ------------------------------------------------------------- without nodes, in one go


@on_worker(0)
def test_no_node_is_made_and_one_message_comes():
    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(several_of_two_workers())

    assert noting(step) == {"Gradients": 1, "at once": 1}


@on_worker(0)
def test_a_single_gradient_brings_the_begin_of_the_pass():
    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(one())

    assert noting(step) == {"GradientAndStart": 1}


@on_worker(0)
def test_large_gradients_do_not_wait_for_others():
    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(large_and_small())

    found = noting(step)

    assert found["Gradient"] >= 1
    assert "nodes" not in found


@on_worker(0)
def test_who_computes_with_gradients_gets_them_at_once():
    def step() -> None:
        with autograd.context() as ctx:
            ctx.backward(beside_something_computed())

    found = noting(step)

    assert found["PassStart"] == 1
    assert found["nodes"] == 2


# ----------------------------------------------------------- passes that are over at once


def begin_to_take_steps() -> None:
    """From now on no pass is over at once on this worker."""
    _patch.setattr(_exchange, "take_at_once", lambda *_: False)


def state_of(ctx: int) -> dict[str, Any]:
    """What this worker knows of a context, but for what only people look at."""
    side = current_exchange().registry.get(ctx)
    names = set(side.state.__slots__) - {"_describe", "last"}
    return {
        **{name: getattr(side.state, name) for name in names},
        "sends": side.num_sends,
        "rest": (len(side._tail), len(side._of_leaves), len(side._unrecorded)),
        "run": side.run,
    }


def run_twice(program: Callable[[], Tensor]) -> tuple[Any, Any]:
    """The gradients of two passes of one context, and what is left of it on a worker."""
    with autograd.context() as ctx:
        for _ in range(2):
            ctx.backward(program())
        return fn.fetch_dictionary(ctx), fn.outside(call, "w1", state_of, int(ctx))


@pytest.mark.parametrize(
    "program",
    [several_of_two_workers, two_in_one_message, unused, one_gradient_for_two],
)
@on_worker(0)
def test_pass_at_once_comes_to_the_same_as_in_steps(program):
    gradients, state = run_twice(program)
    call("w1", begin_to_take_steps)
    try:
        expected, expected_state = run_twice(program)
    finally:
        call("w1", noted)

    fn.assert_same(gradients, expected)
    assert state == expected_state


def three_messages() -> Tensor:
    w, b = call("w1", get_two)
    return (fetch("w1", "weight") @ w + b * fetch("w1", "bias")).sum()


def two_and_one() -> Tensor:
    w, b = call("w1", get_two)
    return (fetch("w1", "third") @ w + b).sum()


def half_of_two_and_one() -> Tensor:
    w, _ = call("w1", get_two)
    return (fetch("w1", "third") @ w).sum()


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (several_of_two_workers, "at once"),
        (unused, "at once"),
        (two_and_one, "at once"),
        (three_messages, "in steps"),  # leaves are there twice
        (half_of_two_and_one, "in steps"),
    ],
)
@on_worker(0)
def test_later_passes_of_a_context_are_over_at_once_as_well(program, how):
    found: dict[str, Any] = {}

    def steps() -> None:
        with autograd.context() as ctx:
            for _ in range(3):
                ctx.backward(program())
            found.update(fn.fetch_dictionary(ctx))

    assert noting(steps)[how] == 3

    def thrice() -> None:
        for _ in range(3):
            program().backward()

    fn.assert_same(found, fn.in_one_process(thrice).gradients, exact=False)


def fetch_here(to: str, name: str) -> None:
    fetch(to, name)


@on_worker(0)
def test_pass_is_not_over_at_once_where_others_have_to_be_told():
    def step() -> None:
        with autograd.context() as ctx:
            call("w2", fetch_here, "w1", "bias")
            ctx.backward(several_of_two_workers())

    assert "at once" not in noting(step)


@on_worker(0)
def test_pass_that_goes_to_grad_is_not_over_at_once():
    def step() -> None:
        with autograd.context(accumulate="grad") as ctx:
            ctx.backward(several_of_two_workers())

    found = noting(step)

    assert (found["in steps"], found["nodes"]) == (1, 2)


@pytest.mark.parametrize("step", [hook_doubles, freeze])
@on_worker(0)
def test_pass_is_not_over_at_once_if_the_engine_has_to_see_a_leaf(step):
    def program() -> None:
        with autograd.context() as ctx:
            loss = several_of_two_workers()
            fn.outside(call, "w1", step, "bias")
            ctx.backward(loss)

    found = noting(program)

    assert (found["in steps"], found["nodes"]) == (1, 2)


@on_worker(0)
def test_pass_fails_if_a_leaf_has_another_shape_meanwhile():
    with autograd.context() as ctx:
        loss = several_of_two_workers()
        fn.outside(call, "w1", reshape, "bias")
        with pytest.raises(RuntimeError, match="shape"):
            ctx.backward(loss)
        assert not any(v is not None for v in fn.fetch_dictionary(ctx)["w1"].values())


def break_sums() -> None:
    """From now on nothing can be added up on this worker."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no sum")

    _patch.setattr(_leaves, "accumulate", broken)
    _patch.setattr(_exchange, "accumulate", broken)


@on_worker(0)
def test_pass_fails_if_gradients_cannot_be_added_up():
    with autograd.context() as ctx:
        loss = several_of_two_workers()
        fn.outside(call, "w1", break_sums)
        try:
            with pytest.raises(ZeroDivisionError, match="no sum"):
                ctx.backward(loss)
        finally:
            fn.outside(call, "w1", noted)
        assert not any(v is not None for v in fn.fetch_dictionary(ctx)["w1"].values())
        ctx.backward(one())
        found = fn.fetch_dictionary(ctx)["w1"]  # others have added up what came first

    expected = fn.in_one_process(lambda: one().backward()).gradients["w1"]
    fn.assert_same({"w1": found}, {"w1": expected})


@pytest.mark.parametrize(
    ("answers", "values"),
    [
        pytest.param([(0, (True,)), (1, (True,))], (1, 2), id="no tensors"),
        pytest.param([(0, (True,)), (2, (True,))], ONES, id="another"),
        pytest.param([(1, (True,))], ONES[:1], id="too few"),
        pytest.param([], (), id="none"),
        pytest.param([(0, (True, True)), (1, ())], ONES, id="two for one"),
    ],
)
@on_worker(0)
def test_begin_of_a_pass_with_wrong_answers_leaves_no_gradients(answers, values):
    with autograd.context() as ctx:
        fetched = fetch("w1", "weight"), fetch("w1", "bias")
        exchange = current_exchange()
        side = exchange.registry.get(int(ctx))
        start = (Destination.INTO_DICTIONARY, False, False, None)
        begin = Gradients(*side.name, exchange.me, 0, answers, True, start)
        exchange.telling.send(1, encode(begin, tuple(values)))
        found = fn.outside(call, "w1", fn.dictionary_here, int(ctx))
        assert not any(v is not None for v in found.values())
    del fetched


def triple_gradient(name: str) -> None:
    gradient = parameter(name).grad
    assert gradient is not None
    gradient.mul_(3)


@on_worker(0)
def test_gradients_of_two_leaves_share_no_memory():
    with autograd.context(accumulate="grad") as ctx:
        ctx.backward(one_gradient_for_two())
    call("w1", triple_gradient, "weight")

    found = fn.fetch_grad()["w1"]
    assert found["weight"] is not None and found["bias"] is not None
    torch.testing.assert_close(found["weight"], 3 * found["bias"])


def dense_gradient(ctx: int, name: str) -> Tensor:
    return autograd.get_gradients(ctx)[parameter(name)].to_dense()


@on_worker(0)
def test_sparse_gradients_of_leaves():
    def program() -> Tensor:
        rows, table = torch.tensor([1, 2, 2]), fetch("w1", "weight")
        found = torch.nn.functional.embedding(rows, table, sparse=True)
        return (found * fetch("w1", "bias")).sum()

    with autograd.context() as ctx:
        ctx.backward(program())
        found = [
            fn.outside(call, "w1", dense_gradient, int(ctx), name)
            for name in ("weight", "bias")
        ]

    expected = fn.in_one_process(lambda: program().backward()).gradients["w1"]
    for name, gradient in zip(("weight", "bias"), found, strict=True):
        value = expected[name]
        assert value is not None
        torch.testing.assert_close(gradient, value.to_dense())


@on_worker(0)
def test_call_of_another_thread_during_a_pass_can_be_used_in_the_next_one():
    late: list[Tensor] = []

    def call_again() -> None:
        """In another thread; what is called in a backward itself cannot be used in it."""
        run = contextvars.copy_context().run
        thread = threading.Thread(
            target=run, args=(lambda: late.append(fetch("w1", "bias").sum()),)
        )
        thread.start()
        thread.join(20)

    with autograd.context() as ctx:
        # The later one is answered first, so that something is held meanwhile.
        first = handlers.run_in_backward(fetch("w1", "weight"), call_again)
        ctx.backward((first * fetch("w1", "bias")).sum())
        ctx.backward(late[0])
        found = fn.fetch_dictionary(ctx)

    def alone() -> None:
        (fetch("w1", "weight") * fetch("w1", "bias")).sum().backward()
        fetch("w1", "bias").sum().backward()

    fn.assert_same(found, fn.in_one_process(alone).gradients, exact=False)


# ----------------------------------------------------------------- where it is not simple


@on_worker(0)
def test_hooks_of_a_leaf_see_its_gradient():
    call("w1", hook_doubles, "bias")

    with autograd.context() as ctx:
        ctx.backward(several_of_two_workers())
        found = fn.fetch_dictionary(ctx)

    def hooked() -> None:
        call("w1", hook_doubles, "bias")
        several_of_two_workers().backward()

    fn.assert_same(found, fn.in_one_process(hooked).gradients, exact=False)


@pytest.mark.parametrize("program", [one, the_same_twice])
@on_worker(0)
def test_leaf_that_is_frozen_meanwhile_gets_no_gradient(program):
    with autograd.context() as ctx:
        loss = program()
        fn.outside(call, "w1", set_requires_grad, "bias", False)
        ctx.backward(loss)
        found = fn.fetch_dictionary(ctx)
    fn.outside(call, "w1", set_requires_grad, "bias", True)

    def frozen() -> None:
        loss = program()
        call("w1", set_requires_grad, "bias", False)
        loss.backward()

    fn.assert_same(found, fn.in_one_process(frozen).gradients)


def fail() -> None:
    raise ZeroDivisionError("before the last gradient")


@on_worker(0)
def test_pass_that_fails_before_anything_is_told_leaves_nothing():
    def program() -> Tensor:
        b = handlers.run_in_backward(fetch("w1", "bias"), fail)
        return (fetch("w1", "weight") @ b).sum()

    with autograd.context() as ctx:
        with pytest.raises(ZeroDivisionError, match="before the last"):
            ctx.backward(program())
        assert not any(v is not None for v in fn.fetch_dictionary(ctx)["w1"].values())
        ctx.backward(one())
        found = fn.fetch_dictionary(ctx)
    fn.wait_until_released()

    fn.assert_same(found, fn.in_one_process(lambda: one().backward()).gradients)


@on_worker(0)
def test_pass_that_fails_elsewhere_can_be_followed_by_another():
    def program() -> Tensor:
        paused = handlers.run_in_backward(fetch("w1", "bias"), wait_for_failure)
        y = call("w2", handlers.affine_broken, parameter("x"))  # later: answered first
        return (paused * y).sum()

    def wait_for_failure() -> None:
        sides = current_exchange().registry.sides
        probes.wait_until(lambda: any(side.failed for side in sides()), "a failure")

    with autograd.context() as ctx:
        with pytest.raises(handlers.Broken):
            ctx.backward(program())
        ctx.backward(one())
        found = fn.fetch_dictionary(ctx)
    fn.wait_until_released()

    fn.assert_same(found, fn.in_one_process(lambda: one().backward()).gradients)
