"""What goes wrong in a pass: bad input, broken functions, foreign graphs, lost workers.

Every error is a clear one, nobody is left behind in a pass, and what comes next works.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import autograd_programs as programs
import functions
import probes
from autograd_functions import call, parameter
from gradwire import autograd, rpc
from gradwire.autograd._api import current_exchange
from gradwire.errors import (
    AutogradError,
    BackwardFailed,
    BackwardTimeout,
    ContextReleased,
    ForeignGraph,
    RemoteError,
    UnknownContext,
    UsageError,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ---------------------------------------------------------------------------- bad input


def backward_of(ctx: autograd.Context, what: str) -> None:
    y = call("w1", handlers.affine, parameter("x"))
    ones = torch.ones(3, 3, dtype=torch.double)
    if what == "root without grad":
        ctx.backward(y.detach().sum())
    elif what == "second root without grad":
        ctx.backward([y.sum(), y.detach().sum()])
    elif what == "root of any shape":
        ctx.backward(y)
    elif what == "no roots":
        ctx.backward([])
    elif what == "leaf":
        ctx.backward(parameter("scalar", 1))
    elif what == "no tensor":
        ctx.backward([3.0])  # type: ignore[list-item]
    elif what == "too few gradients":
        ctx.backward([y, y.sum()], grad_tensors=[ones])
    elif what == "gradient of another shape":
        ctx.backward(y, grad_tensors=ones[:2])
    elif what == "negative timeout":
        ctx.backward(y.sum(), timeout=-1)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("root without grad", UsageError, "requires_grad not set on root: entry 0"),
        ("second root without grad", UsageError, "entry 1 of roots has no graph"),
        ("root of any shape", UsageError, r"shape \(3, 3\), is not a scalar"),
        ("no roots", UsageError, "roots is empty"),
        ("leaf", UsageError, "it is a leaf"),
        ("no tensor", TypeError, "roots must be tensors, found float at 0"),
        ("too few gradients", ValueError, "1 entries for 2 roots"),
        ("gradient of another shape", ValueError, r"\(3, 3\).*\(2, 3\)"),
        ("negative timeout", ValueError, "at least 0 seconds, found -1"),
    ],
)
@on_worker(0)
def test_bad_input_is_refused_and_leaves_the_context_usable(what, kind, text):
    with autograd.context() as ctx:
        error = fn.catch(kind, backward_of, ctx, what)

        assert re.search(text, str(error), re.DOTALL), str(error)
        fn.assert_all_none(fn.fetch_dictionary(ctx))
        programs.check_usable(ctx)


@on_worker(0)
def test_bad_input_does_not_use_the_graph_up():
    with autograd.context() as ctx:
        loss = programs.diamond()
        fn.catch(UsageError, ctx.backward, [loss, loss.detach()])
        ctx.backward(loss)
        found = fn.fetch_dictionary(ctx)

    expected = fn.in_one_process(lambda: programs.diamond().backward())
    fn.assert_same(found, expected.gradients, exact=False)


@pytest.mark.parametrize(
    ("inputs", "kind", "text"),
    [
        ([], ValueError, "at least one input"),
        ([torch.ones(2)], UsageError, "input 0 does not require grad"),
        (None, TypeError, "inputs must be tensors, found NoneType"),
        ([3.0], TypeError, "inputs must be tensors, found float at 0"),
    ],
)
@on_worker(0)
def test_bad_inputs_of_grad_are_refused(inputs, kind, text):
    with autograd.context() as ctx:
        loss = programs.one_call()

        with pytest.raises(kind, match=text):
            autograd.grad(ctx, loss, inputs)

        del loss
        programs.check_usable(ctx)


# ------------------------------------------------------------- unknown and released ids


@pytest.mark.parametrize("known_worker", [True, False])
@on_worker(0)
def test_unknown_context_is_named(known_worker):
    number = 1 << 40 if known_worker else (7 << 48) + 1

    with pytest.raises(UnknownContext, match=f"id: {number}.*'w0' has not taken part"):
        autograd.get_gradients(number)
    with pytest.raises(UnknownContext, match=f"id: {number}"):
        autograd.backward(number, (parameter("x") * 2).sum())
    with pytest.raises(UnknownContext, match=f"id: {number}"):
        autograd.grad(number, (parameter("x") * 2).sum(), parameter("x"))


@on_worker(0)
def test_released_context_is_told_from_an_unknown_one():
    with autograd.context() as ctx:
        ctx.backward(programs.one_call())

    with pytest.raises(ContextReleased, match="read its gradients inside the block"):
        autograd.get_gradients(ctx)
    with pytest.raises(ContextReleased, match=f"id: {ctx}"):
        ctx.backward((parameter("x") * 2).sum())


@on_worker(0)
def test_released_context_is_told_from_an_unknown_one_on_other_workers():
    with autograd.context() as ctx:
        ctx.backward(programs.one_call())
    fn.wait_until_released()

    with pytest.raises(ContextReleased, match="released when its `with` block"):
        call("w1", autograd.get_gradients, ctx)


@on_worker(0)
def test_backward_after_the_block_says_that_the_context_was_released():
    with autograd.context() as ctx:
        loss = programs.one_call()

    error = fn.catch(ContextReleased, loss.backward)

    assert f"the context {ctx}" in str(error)
    assert "before its `with` block is left" in str(error)


@on_worker(0)
def test_backward_of_a_released_context_on_the_callee_says_so():
    with autograd.context() as ctx:
        call("w1", fn.keep, "a", parameter("x") * 2)
    fn.wait_until_counted("w1", released_contexts_kept_alive=1)

    y = call("w1", handlers.use_kept, "a", parameter("y"))
    error = fn.catch(ContextReleased, y.sum().backward)

    assert f"the context {ctx}" in str(error)
    assert "Raised on worker 'w1'" in str(error)


# ------------------------------------------------------------------------ two at a time


@on_worker(0)
def test_second_pass_at_the_same_time_is_refused_and_the_first_goes_on():
    with autograd.context() as ctx:
        loss = call("w1", handlers.paused, parameter("x"), "gate").sum()
        other = (parameter("x") * 2).sum()
        errors: list[BaseException] = []
        first = threading.Thread(target=_note_errors, args=(errors, ctx, loss))
        first.start()
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")

        error = fn.catch(BackwardFailed, ctx.backward, other)

        fn.outside(call, "w1", functions.set_event, "gate")
        first.join(functions.LIMIT_S)
        assert not errors
        assert "two backward passes of one context" in str(error)
        assert "when backward() has returned, or use a context for each" in str(error)
        found = fn.fetch_dictionary(ctx)
        programs.check_usable(ctx)

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same({w: found[w] for w in ("w0", "w1")}, expected.gradients)


def _note_errors(errors: list[BaseException], ctx: autograd.Context, loss: Any) -> None:
    try:
        ctx.backward(loss)
    except BaseException as error:
        errors.append(error.with_traceback(None))


@on_worker(0)
def test_second_pass_from_another_worker_at_the_same_time_is_refused():
    """w2 takes part in the pass of w0, which w1 holds up, and starts its own."""
    with autograd.context() as ctx:
        y = call("w2", handlers.affine, parameter("x"))
        loss = call("w1", handlers.paused, y, "gate").sum()
        errors: list[BaseException] = []
        first = threading.Thread(target=_note_errors, args=(errors, ctx, loss))
        first.start()
        fn.outside(call, "w1", functions.wait_until_blocked, "gate")
        fn.wait_until_counted("w2", contexts=1, passes=1)

        error = fn.catch(BackwardFailed, fn.outside, call, "w2", start_own_pass, ctx)

        fn.outside(call, "w1", functions.set_event, "gate")
        first.join(functions.LIMIT_S)
        assert not errors
        assert "the worker of rank 0 started" in str(error)
        programs.check_usable(ctx)


def start_own_pass(ctx: autograd.Context) -> None:
    with torch.enable_grad():
        loss = (parameter("own") ** 2).sum()
    ctx.backward(loss)


@pytest.mark.parametrize("attempt", range(5))
def test_passes_that_two_workers_start_at_once_end_on_both(cluster, attempt):
    """Both may fail, neither hangs, and the context stays usable."""
    ctx = cluster.run(0, open_and_keep)
    starts = [cluster.start(rank, race, ctx) for rank in (0, 1)]
    ends = [start.result(15) for start in starts]
    assert set(ends) <= {None, "BackwardFailed"}
    cluster.run(0, use_and_close, ctx)


def open_and_keep() -> autograd.Context:
    """A context that lives until it is closed, with a loss on w0 and one on w1."""
    ctx = fn.open_context()
    fn.keep("loss", fn.inside(programs.diamond))
    fn.inside(call, "w1", keep_own_loss)
    return ctx


def keep_own_loss() -> None:
    fn.keep("loss", call("w2", handlers.affine, parameter("own")).sum())


def race(ctx: autograd.Context) -> str | None:
    try:
        ctx.backward(fn.take("loss"), retain_graph=True)
    except AutogradError as error:
        return type(error).__name__
    return None


def use_and_close(ctx: autograd.Context) -> None:
    fn.inside(programs.check_usable, ctx)
    fn.close_contexts()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("where", ["on the same worker", "on another worker"])
@on_worker(0)
def test_backward_from_inside_the_same_pass_is_refused(where, retain):
    """A backward function, or a handler that it calls, starts a pass of its own."""
    with autograd.context() as ctx:
        y = call("w1", backward_inside, parameter("x"), ctx, where)

        error = fn.catch(BackwardFailed, ctx.backward, y.sum(), retain_graph=retain)

        assert "two backward passes of one context met" in str(error)
        fn.assert_all_none({"w1": fn.fetch_dictionary(ctx)["w1"]})
        programs.check_usable(ctx)


def backward_inside(x: Tensor, ctx: autograd.Context, where: str) -> Tensor:
    if where == "on the same worker":
        return handlers.run_in_backward(handlers.affine(x), start_own_pass, ctx)
    y = handlers.affine(call("w2", handlers.affine, x))
    return handlers.run_in_backward(y, call, "w2", start_own_pass, ctx)


@on_worker(0)
def test_refused_backward_inside_a_pass_does_no_harm_if_it_is_caught():
    with autograd.context() as ctx:
        y = call("w1", try_backward_inside, parameter("x"), ctx)
        ctx.backward(y.sum())
        found = fn.fetch_dictionary(ctx)

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same({w: found[w] for w in ("w0",)}, {"w0": expected.gradients["w0"]})
    fn.assert_equal(found["w1"]["weight"], expected.gradients["w1"]["weight"])
    assert found["w1"]["own"] is None


def try_backward_inside(x: Tensor, ctx: autograd.Context) -> Tensor:
    return handlers.run_in_backward(
        handlers.affine(x), fn.catch, BackwardFailed, start_own_pass, ctx
    )


# -------------------------------------------------------------------- broken functions

ROUTE = ["w1", "w2", "w3"]


def broken_loss(*broken: str) -> Tensor:
    """Through three workers, one after the other, and back."""
    y = call(ROUTE[0], handlers.break_along, ROUTE[1:], list(broken), parameter("x"))
    if "w0" in broken:
        y = handlers.break_backward(y)
    return (y * parameter("y")).sum()


def run_broken(
    mode: fn.Mode, *broken: str
) -> tuple[handlers.Broken, fn.Gradients | None]:
    """The error, and the dictionaries that the failed pass left."""
    if mode == "calls":
        return fn.catch(handlers.Broken, lambda: broken_loss(*broken).backward()), None
    accumulate: Literal["dict", "grad"] = "grad" if mode == "into grad" else "dict"
    with autograd.context(accumulate=accumulate) as ctx:
        loss = broken_loss(*broken)
        error = fn.catch(
            handlers.Broken,
            *((loss.backward,) if mode == "plain" else (ctx.backward, loss)),
        )
        del loss
        wait_until_no_passes()
        return error, fn.fetch_dictionary(ctx)


def wait_until_no_passes() -> None:
    probes.wait_until(
        lambda: not any(info["passes"] for info in fn.counts_everywhere().values()),
        "all workers have left the pass",
        5,
    )


@pytest.mark.parametrize("mode", fn.MODES)
@pytest.mark.parametrize("broken", ["w0", "w1", "w2", "w3"])
@on_worker(0)
def test_error_in_backward_keeps_its_type_and_names_the_worker(broken, mode):
    error, _ = run_broken(mode, broken)

    assert (error.code, error.reason) == (7, f"by {broken}")
    if broken == "w0":
        assert type(error) is handlers.Broken
        return
    assert isinstance(error, RemoteError)
    assert error.worker == broken
    assert f"Raised on worker {broken!r}" in str(error)
    assert "autograd_handlers.py" in error.remote_traceback
    assert "in backward" in error.remote_traceback


@pytest.mark.parametrize("broken", ["w0", "w1", "w2", "w3"])
@on_worker(0)
def test_failed_pass_adds_all_or_nothing_to_each_dictionary(broken):
    _, found = run_broken("dictionary", broken)

    assert found is not None
    fn.assert_all_none({broken: found[broken]})
    expected = fn.in_one_process(lambda: broken_loss().backward()).gradients
    for worker, names in found.items():
        if any(gradient is not None for gradient in names.values()):
            fn.assert_same({worker: names}, {worker: expected[worker]})


@pytest.mark.parametrize("mode", fn.MODES)
@pytest.mark.parametrize("broken", ["w0", "w1", "w3"])
@on_worker(0)
def test_next_context_works_at_once_after_a_failed_pass(broken, mode):
    run_broken(mode, broken)

    fn.on_all_workers(fn.clear_grad)
    fn.check(programs.deep_nesting, mode, exact=False)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("broken", ["w0", "w1", "w3"])
@on_worker(0)
def test_failed_pass_leaves_the_context_usable(broken, retain):
    with autograd.context() as ctx:
        for _ in range(2):
            loss = broken_loss(broken)
            fn.catch(handlers.Broken, ctx.backward, loss, retain_graph=retain)
            del loss
            wait_until_no_passes()

        programs.check_usable(ctx)


@pytest.mark.parametrize("mode", fn.MODES)
@on_worker(0)
def test_several_broken_workers_raise_one_of_their_errors(mode):
    error, _ = run_broken(mode, "w1", "w2", "w3")

    assert error.worker in ROUTE  # type: ignore[attr-defined]
    assert error.reason == f"by {error.worker}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", fn.MODES)
@on_worker(0)
def test_error_that_cannot_be_sent_arrives_as_text(mode):
    def program() -> Tensor:
        y = call(
            "w1",
            handlers.affine_relay,
            "w2",
            handlers.affine_broken_oddly,
            parameter("x"),
        )
        return y.sum()

    error = fn.catch(RemoteError, fn.run, program, mode)

    assert error.worker == "w2"
    assert error.remote_type == "functions.Unpicklable"
    assert "held in backward" in str(error)


@pytest.mark.parametrize("mode", fn.MODES)
@on_worker(0)
def test_error_in_a_tensor_hook_of_another_worker_arrives(mode):
    def program() -> Tensor:
        return call("w1", hooked, parameter("x")).sum()

    error = fn.catch(ValueError, fn.run, program, mode)

    assert error.worker == "w1"
    assert "refused by a hook" in str(error)


def hooked(x: Tensor) -> Tensor:
    y = handlers.affine(x)
    y.register_hook(refuse)
    return y


def refuse(_: Tensor) -> None:
    raise ValueError("refused by a hook")


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("mode", fn.CONTEXT_MODES)
@on_worker(0)
def test_error_that_comes_while_the_starter_computes_keeps_its_type(mode, retain):
    """The engine of the starter goes on for a while, and reaches another call."""

    def program() -> None:
        first = call("w1", handlers.affine, parameter("x"))
        # Comes after the backward of the third call has left, and before the first.
        second = call(
            "w1", handlers.affine, handlers.run_in_backward(first, fail_and_wait)
        )
        third = call("w2", pause_and_break)
        backward((second + third).sum(), retain_graph=retain)

    accumulate: Literal["dict", "grad"] = "grad" if mode == "into grad" else "dict"
    with autograd.context(accumulate=accumulate) as ctx:
        backward: Callable[..., Any] = ctx.backward
        if mode == "plain":
            backward = torch.autograd.backward
        fn.catch(handlers.Broken, program)
        wait_until_no_passes()
        if mode == "plain":
            fn.drain_engine()


def pause_and_break() -> Tensor:
    return handlers.pause_backward(handlers.affine_broken(parameter("own")), "gate")


def fail_and_wait() -> None:
    fn.outside(call, "w2", functions.set_event, "gate")
    probes.wait_until(lambda: not fn.counts()["passes"], "out of all passes", 5)


@on_worker(0)
def test_one_of_several_losses_fails():
    """The worker of the other loss leaves the pass, too."""
    with autograd.context() as ctx:
        good = call("w1", handlers.affine, parameter("x")).sum()
        bad = call("w2", handlers.affine_broken, parameter("x")).sum()
        fn.catch(handlers.Broken, ctx.backward, [good, bad])
        wait_until_no_passes()
        found = fn.fetch_dictionary(ctx)
        fn.assert_all_none({worker: found[worker] for worker in ("w0", "w2")})


@on_worker(0)
def test_failed_call_in_a_plain_backward_leaves_other_calls_alone():
    def program() -> None:
        call("w1", handlers.affine, parameter("x")).sum().backward()

    other = call("w1", handlers.affine, parameter("x")).sum()
    loss = call("w1", handlers.affine_broken, parameter("y")).sum()
    fn.catch(handlers.Broken, loss.backward)
    other.backward()

    expected = fn.in_one_process(program)
    found = fn.fetch_grad()
    fn.assert_same({"w1": found["w1"]}, {"w1": expected.gradients["w1"]})


@on_worker(0)
def test_failure_in_local_code_ends_the_pass_of_a_plain_backward_everywhere():
    """The engine stops here, when the other workers have begun already."""
    with autograd.context():
        y = call("w1", handlers.affine, handlers.break_backward(parameter("x")))
        z = call("w2", handlers.linear, y)

        fn.catch(handlers.Broken, z.sum().backward)

        del y, z
        wait_until_no_passes()


@on_worker(0)
def test_timeout_ends_a_pass_that_a_backward_function_holds_up():
    with autograd.context() as ctx:
        loss = call("w1", handlers.paused, parameter("x"), "gate").sum()

        start = time.monotonic()
        error = fn.catch(
            BackwardTimeout, ctx.backward, loss, retain_graph=True, timeout=0.2
        )
        took = time.monotonic() - start

        assert 0.15 < took < 5
        assert "worker 'w1' (rank 1)" in str(error)
        fn.outside(call, "w1", functions.set_event, "gate")
        wait_until_no_passes()
        fn.assert_all_none(fn.fetch_dictionary(ctx))
        programs.check_usable(ctx)


@on_worker(0)
def test_timeout_covers_the_wait_for_calls_in_flight():
    with autograd.context() as ctx:
        call_in_flight = fn.call_async(
            "w1", handlers.wait_then, "gate", handlers.affine, parameter("x")
        )
        error = fn.catch(
            BackwardTimeout, ctx.backward, (parameter("x") * 2).sum(), timeout=0.1
        )
        assert "wait_then" in str(error)

        fn.outside(call, "w1", functions.set_event, "gate")
        call_in_flight.wait()
        del call_in_flight
        programs.check_usable(ctx)


# ---------------------------------------------------------------------- foreign graphs


@on_worker(0)
def test_tensor_kept_from_another_call_names_both_calls_and_the_remedy():
    call("w1", fn.keep, "a", parameter("x") * 2)
    y = call("w1", handlers.use_kept, "a", parameter("y"))
    before = fn.fetch_grad()

    error = fn.catch(ForeignGraph, y.sum().backward)

    text = str(error)
    assert "the call of autograd_handlers:use_kept by worker 'w0'" in text
    assert "the call of autograd_functions:keep by worker 'w0'" in text
    assert "gradwire.autograd.context()" in text
    assert "detach()" in text
    assert "Raised on worker 'w1'" in text
    fn.assert_same(
        {"w0": {"x": fn.fetch_grad()["w0"]["x"]}}, {"w0": {"x": before["w0"]["x"]}}
    )


@on_worker(0)
def test_tensor_computed_from_one_kept_from_another_call_is_foreign_too():
    call("w1", handlers.keep_linear, "a", parameter("x"))
    y = call("w1", handlers.use_kept, "a", parameter("y"))

    error = fn.catch(ForeignGraph, y.sum().backward)

    assert "keep_linear by worker 'w0'" in str(error)


@on_worker(0)
def test_detached_tensor_of_another_call_can_be_kept():
    def program() -> None:
        call("w1", keep_detached, parameter("x"))
        call("w1", handlers.use_kept, "a", parameter("y")).sum().backward()

    fn.check_calls(program)


def keep_detached(x: Tensor) -> None:
    fn.keep("a", handlers.linear(x).detach())


@on_worker(0)
def test_kept_value_without_foreign_history_can_be_used_again():
    """What was computed from the worker's own leaves belongs to no call."""

    def program() -> None:
        call("w1", keep_own)
        call("w1", handlers.use_kept, "a", parameter("y")).sum().backward()

    fn.check_calls(program)


def keep_own() -> None:
    fn.keep("a", parameter("weight") * 2)


@on_worker(0)
def test_tensor_kept_from_a_call_is_foreign_to_a_context():
    call("w1", fn.keep, "a", parameter("x") * 2)
    with autograd.context() as ctx:
        y = call("w1", handlers.use_kept, "a", parameter("y"))

        error = fn.catch(ForeignGraph, ctx.backward, y.sum())

        assert f"the context {ctx}" in str(error)
        assert "the call of autograd_functions:keep by worker 'w0'" in str(error)


@on_worker(0)
def test_tensor_kept_from_a_context_is_foreign_to_another():
    with autograd.context() as first:
        call("w1", fn.keep, "a", parameter("x") * 2)
        with autograd.context() as second:
            y = call("w1", handlers.use_kept, "a", parameter("y"))

            error = fn.catch(ForeignGraph, second.backward, y.sum())

            assert f"the context {first}" in str(error)
            assert f"the context {second}" in str(error)
        programs.check_usable(first)


@pytest.mark.parametrize("retain", [False, True])
@on_worker(0)
def test_result_of_one_context_is_foreign_to_another(retain):
    with autograd.context() as first:
        y = call("w1", handlers.affine, parameter("x"))
        with autograd.context() as second:
            z = call("w2", handlers.linear, y)

            error = fn.catch(
                ForeignGraph, second.backward, z.sum(), retain_graph=retain
            )

            assert f"the context {first}" in str(error)
            assert f"the context {second}" in str(error)
            assert "detach()" in str(error)
            fn.assert_all_none({"w0": fn.fetch_dictionary(second)["w0"]})
        del z
        first.backward(y.sum())
        found = fn.fetch_dictionary(first)

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same({w: found[w] for w in ("w0", "w1")}, expected.gradients)


@on_worker(0)
def test_result_of_a_call_is_foreign_to_a_dictionary():
    """Its gradients would go to ``.grad``, those of the context to the dictionary."""
    y = call("w1", handlers.affine, parameter("x"))
    with autograd.context() as ctx:
        error = fn.catch(
            ForeignGraph, ctx.backward, call("w2", handlers.linear, y).sum()
        )

        assert f"the context {ctx}" in str(error)
        assert "the call of autograd_handlers:affine by worker 'w0'" in str(error)
        fn.assert_all_none({"w0": fn.fetch_dictionary(ctx)["w0"]})


@pytest.mark.parametrize("plain", [False, True])
@on_worker(0)
def test_result_of_a_call_can_be_used_in_a_context_with_grad(plain):
    y = call("w1", handlers.affine, parameter("x"))
    with autograd.context(accumulate="grad") as ctx:
        loss = call("w2", handlers.linear, y).sum()
        loss.backward() if plain else ctx.backward(loss)
        del loss
    del y

    expected = fn.in_one_process(
        lambda: (
            call("w2", handlers.linear, call("w1", handlers.affine, parameter("x")))
            .sum()
            .backward()
        )
    )
    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_plain_backward_over_two_contexts_matches_one_process_or_names_both():
    """Two contexts in one loss: either all gradients are there, or none and an error."""

    def program() -> Tensor:
        y = call("w1", handlers.affine, parameter("x"))
        z = call("w2", handlers.affine, parameter("x"))
        return (y * z).sum()

    with autograd.context() as first:
        y = call("w1", handlers.affine, parameter("x"))
        with autograd.context() as second:
            z = call("w2", handlers.affine, parameter("x"))
            try:
                (y * z).sum().backward()
            except ForeignGraph as error:
                text = str(error)
                error.__traceback__ = None
                assert f"the context {first}" in text
                assert f"the context {second}" in text
                return
        del y, z

    expected = fn.in_one_process(lambda: program().backward())
    fn.assert_same(fn.fetch_grad(), expected.gradients)


# -------------------------------------------------------------- failures at the same time


def fail_elsewhere_before_the_end() -> None:
    """From now on, once: a pass fails elsewhere just when our part has come to its end."""
    exchange = current_exchange()
    end_part = exchange.end_part

    def end(side: Any, run: Any) -> None:
        exchange.end_part = end_part  # type: ignore[method-assign]
        exchange.abort(side, run, RuntimeError("elsewhere"))
        end_part(side, run)

    exchange.end_part = end  # type: ignore[method-assign]


def count_failed_runs() -> int:
    return sum(side.failed is not None for side in current_exchange().registry.sides())


@on_worker(0)
def test_pass_that_fails_elsewhere_at_the_end_of_a_part_is_forgotten_there():
    x = torch.ones(2, requires_grad=True)
    rpc.rpc_sync("w1", fail_elsewhere_before_the_end)
    with autograd.context() as ctx:
        y = rpc.rpc_sync("w1", torch.mul, (x * 1, 2))
        with pytest.raises(RuntimeError, match="elsewhere"):
            autograd.backward(ctx, [y.sum()], timeout=10.0)

        assert rpc.rpc_sync("w1", count_failed_runs) == 0
        y = rpc.rpc_sync("w1", torch.mul, (x * 1, 3))
        autograd.backward(ctx, [y.sum()], timeout=10.0)
