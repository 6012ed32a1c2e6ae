"""Explicit contexts: their ids, their two destinations, and what they join."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as fn
import autograd_handlers as handlers
import autograd_programs as programs
from autograd_functions import call, parameter
from gradwire import autograd
from gradwire.errors import AutogradError, UnknownContext, UsageError
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


@pytest.mark.parametrize("mode", fn.CONTEXT_MODES)
@pytest.mark.parametrize("name", programs.CONTEXT_PROGRAMS)
@on_worker(0)
def test_program_with_values_that_stay_matches_one_process(name, mode):
    fn.check(programs.CONTEXT_PROGRAMS[name], mode)


# ------------------------------------------------------------------------------- the id


@on_worker(0)
def test_id_compares_and_hashes_like_the_int_that_it_is():
    with autograd.context() as ctx:
        number = int(ctx)

        assert isinstance(ctx, int)
        assert type(number) is int
        assert ctx == number
        assert hash(ctx) == hash(number)
        names: dict[int, str] = {ctx: "found"}
        assert names[number] == "found"
        assert str(ctx) == str(number)


@on_worker(0)
def test_ids_of_contexts_differ():
    with autograd.context() as first, autograd.context() as second:
        pass
    with autograd.context() as third:
        pass

    assert len({first, second, third}) == 3


def test_ids_of_different_workers_differ(cluster):
    ids = [cluster.run(rank, open_and_close) for rank in range(4) for _ in range(2)]

    assert len(set(ids)) == len(ids)


def open_and_close() -> int:
    with autograd.context() as ctx:
        return int(ctx)


@on_worker(0)
def test_id_survives_pickling_as_a_context():
    with autograd.context() as ctx:
        loaded = pickle.loads(pickle.dumps(ctx))

    assert loaded == ctx
    assert isinstance(loaded, autograd.Context)


@on_worker(0)
def test_id_says_what_it_is():
    with autograd.context() as ctx:
        assert repr(ctx) == f"<autograd context {int(ctx)}, opened by rank 0>"


@pytest.mark.parametrize("as_int", [False, True])
@on_worker(0)
def test_id_works_on_a_worker_that_it_is_sent_to(as_int):
    with autograd.context() as ctx:
        loss = call("w1", handlers.affine, parameter("x")).sum()
        ctx.backward(loss)

        found = call("w1", fn.dictionary_here, int(ctx) if as_int else ctx)

    expected = fn.in_one_process(lambda: programs.one_call().backward())
    fn.assert_same({"w1": found}, {"w1": expected.gradients["w1"]})


@on_worker(0)
def test_worker_runs_forward_and_backward_in_a_context_that_it_was_sent():
    expected = fn.in_one_process(lambda: call("w1", run_program_of_w1, None))

    with autograd.context() as ctx:
        call("w1", run_program_of_w1, ctx)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


def run_program_of_w1(ctx: autograd.Context | None) -> None:
    y = call("w2", handlers.affine, parameter("y"))
    loss = (call("w0", handlers.linear, y) * y).sum()
    if ctx is None:
        loss.backward()
    else:
        ctx.backward(loss)


# ----------------------------------------------------------------------------- backward


def two_losses() -> list[Tensor]:
    y = call("w1", handlers.affine, parameter("x"))
    return [y.sum(), (call("w2", handlers.linear, y) ** 2).sum()]


@on_worker(0)
def test_backward_takes_an_id_and_a_list_as_in_torch():
    expected = fn.in_one_process(lambda: programs.one_call().backward())

    with autograd.context() as ctx:
        autograd.backward(int(ctx), [programs.one_call()])
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@pytest.mark.parametrize("as_method", [False, True])
@on_worker(0)
def test_backward_takes_one_tensor(as_method):
    expected = fn.in_one_process(lambda: programs.one_call().backward())

    with autograd.context() as ctx:
        loss = programs.one_call()
        ctx.backward(loss) if as_method else autograd.backward(ctx, loss)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@pytest.mark.parametrize("as_method", [False, True])
@on_worker(0)
def test_backward_takes_several_tensors(as_method):
    expected = fn.in_one_process(lambda: torch.autograd.backward(two_losses()))

    with autograd.context() as ctx:
        losses = two_losses()
        ctx.backward(losses) if as_method else autograd.backward(ctx, losses)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_backward_takes_any_shape_with_a_gradient():
    seed = torch.arange(9, dtype=torch.double).view(3, 3)
    expected = fn.in_one_process(
        lambda: call("w1", handlers.affine, parameter("x")).backward(seed)
    )

    with autograd.context() as ctx:
        ctx.backward(call("w1", handlers.affine, parameter("x")), grad_tensors=seed)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_backward_takes_several_shapes_with_gradients_and_none_for_scalars():
    seed = torch.full((3, 3), 0.5, dtype=torch.double)

    def roots() -> list[Tensor]:
        y = call("w1", handlers.affine, parameter("x"))
        return [y, y.sum(), call("w2", handlers.linear, y)]

    seeds = [seed, None, seed * 2]
    expected = fn.in_one_process(lambda: torch.autograd.backward(roots(), seeds))

    with autograd.context() as ctx:
        autograd.backward(ctx, roots(), grad_tensors=seeds)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_gradient_that_was_given_shares_no_memory_with_the_dictionary():
    x = parameter("x")
    given = torch.ones_like(x)
    with autograd.context() as ctx:
        ctx.backward(x + 0, grad_tensors=given)
        ctx.gradients()[x].zero_()

    assert torch.equal(given, torch.ones_like(x))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (1.0, TypeError, "found float"),
        ([[1.0]], TypeError, "found list at 0"),
        (torch.ones(3, 3, dtype=torch.cfloat), ValueError, "both must be complex"),
    ],
    ids=["number", "list", "complex"],
)
@on_worker(0)
def test_backward_says_what_is_wrong_with_a_gradient(given, error, words):
    with autograd.context() as ctx:
        with pytest.raises(error, match=words):
            ctx.backward(parameter("x") * 2, grad_tensors=given)
        ctx.backward((parameter("x") * 2).sum())


@on_worker(0)
def test_backward_makes_up_no_gradient_for_a_complex_root():
    with autograd.context() as ctx:
        root = parameter("x").sum() * 1j
        with pytest.raises(UsageError, match="real scalars only"):
            ctx.backward(root)
        ctx.backward(root, grad_tensors=torch.ones_like(root))


@pytest.mark.parametrize("wrong", [1.5, True, "1", None])
@on_worker(0)
def test_context_is_an_int_and_nothing_that_looks_like_one(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        autograd.get_gradients(wrong)


@on_worker(0)
def test_backward_takes_a_tensor_with_one_element_as_a_scalar():
    def root() -> Tensor:
        total: Tensor = call("w1", handlers.affine, parameter("x")).sum().view(1, 1)
        return total

    expected = fn.in_one_process(lambda: root().backward())

    with autograd.context() as ctx:
        ctx.backward(root())
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_backward_without_any_call_works_as_in_one_process():
    def root() -> Tensor:
        return (parameter("x") ** 2).sum()

    expected = fn.in_one_process(lambda: root().backward())

    with autograd.context() as ctx:
        ctx.backward(root())
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


@on_worker(0)
def test_backward_runs_outside_the_block_of_the_thread_that_it_is_called_in():
    """What counts is the id, not what is current."""
    expected = fn.in_one_process(lambda: programs.one_call().backward())

    with autograd.context() as ctx:
        loss = programs.one_call()
        fn.outside(ctx.backward, loss)
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients)


# ------------------------------------------------------------------------ the dictionary


@on_worker(0)
def test_dictionary_is_keyed_by_the_very_leaves():
    x, y = parameter("x"), parameter("y")
    with autograd.context() as ctx:
        ctx.backward((call("w1", handlers.affine, x) * y).sum())

        gradients = autograd.get_gradients(ctx)

    assert {id(leaf) for leaf in gradients} == {id(x), id(y)}
    assert gradients[x].shape == x.shape


@on_worker(0)
def test_dictionary_of_another_worker_is_keyed_by_its_very_leaves():
    with autograd.context() as ctx:
        ctx.backward(call("w1", handlers.affine, parameter("x")).sum())

        assert call("w1", are_keys, ctx, ["weight", "bias"])


def are_keys(ctx: int, names: list[str]) -> bool:
    leaves = {id(leaf) for leaf in autograd.get_gradients(ctx)}
    return leaves == {id(parameter(name)) for name in names}


@on_worker(0)
def test_dictionary_is_also_a_method_of_the_context():
    x = parameter("x")
    with autograd.context() as ctx:
        ctx.backward(call("w1", handlers.affine, x).sum())

        assert torch.equal(ctx.gradients()[x], autograd.get_gradients(ctx)[x])


@on_worker(0)
def test_dictionary_has_no_entry_for_leaves_without_a_gradient():
    with autograd.context() as ctx:
        call("w1", handlers.linear, parameter("unused"))
        ctx.backward(call("w1", handlers.linear, parameter("x")).sum())

        assert set(autograd.get_gradients(ctx)) == {parameter("x")}


@on_worker(0)
def test_dictionary_is_empty_before_the_first_pass():
    with autograd.context() as ctx:
        loss = programs.one_call()

        assert autograd.get_gradients(ctx) == {}
        assert call("w1", autograd.get_gradients, ctx) == {}
        del loss


@on_worker(0)
def test_dictionary_that_was_given_out_is_the_programs_own():
    x = parameter("x")
    with autograd.context() as ctx:
        ctx.backward(call("w1", handlers.affine, x).sum())

        autograd.get_gradients(ctx).clear()

        assert x in autograd.get_gradients(ctx)


@on_worker(0)
def test_dictionary_leaves_earlier_grad_untouched():
    x = parameter("x")
    call("w1", handlers.affine, x).sum().backward()
    before = fn.fetch_grad()
    storage = x.grad

    with autograd.context() as ctx:
        ctx.backward((call("w1", handlers.affine, x) ** 2).sum())

    fn.assert_same(fn.fetch_grad(), before)
    assert x.grad is storage


@on_worker(0)
def test_dictionary_sums_over_passes():
    def program() -> None:
        programs.one_call().backward()
        programs.result_goes_back_to_its_worker().backward()

    expected = fn.in_one_process(program)

    with autograd.context() as ctx:
        ctx.backward(programs.one_call())
        ctx.backward(programs.result_goes_back_to_its_worker())
        found = fn.fetch_dictionary(ctx)

    fn.assert_same(found, expected.gradients, exact=False)


@on_worker(0)
def test_gradients_of_two_leaves_share_no_memory():
    """The engine may hand out one tensor as the gradient of both."""
    x, y = parameter("x"), parameter("y")
    with autograd.context() as ctx:
        ctx.backward(call("w1", handlers.double, x + y).sum())
        gradients = autograd.get_gradients(ctx)

    gradients[x].add_(1)

    assert torch.equal(gradients[y], torch.full((3, 3), 2.0, dtype=torch.double))


@on_worker(0)
def test_dictionary_is_unknown_to_workers_that_took_no_part():
    with autograd.context() as ctx:
        ctx.backward(programs.one_call())

        with pytest.raises(UnknownContext, match="'w3' has not taken part"):
            fn.outside(call, "w3", autograd.get_gradients, ctx)


# ------------------------------------------------------------------------------- .grad


@on_worker(0)
def test_context_with_grad_fills_grad_and_no_dictionary():
    expected = fn.in_one_process(lambda: programs.diamond().backward())

    with autograd.context(accumulate="grad") as ctx:
        ctx.backward(programs.diamond())
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    fn.assert_same(fn.fetch_grad(), expected.gradients, exact=False)


@on_worker(0)
def test_context_with_grad_adds_to_what_is_there():
    def program() -> None:
        programs.one_call().backward()
        programs.one_call().backward()

    expected = fn.in_one_process(program)

    programs.one_call().backward()
    with autograd.context(accumulate="grad") as ctx:
        ctx.backward(programs.one_call())

    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_context_with_grad_is_one_also_for_the_worker_that_it_is_sent_to():
    expected = fn.in_one_process(lambda: call("w1", run_program_of_w1, None))

    with autograd.context(accumulate="grad") as ctx:
        call("w1", run_program_of_w1, ctx)
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_context_refuses_other_destinations():
    with pytest.raises(ValueError, match='"dict" or "grad", found \'list\''):
        autograd.context(accumulate="list")  # type: ignore[arg-type]


@on_worker(0)
def test_plain_backward_in_a_context_fills_grad_everywhere():
    expected = fn.in_one_process(lambda: programs.diamond().backward())

    with autograd.context() as ctx:
        programs.diamond().backward()
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    fn.assert_same(fn.fetch_grad(), expected.gradients, exact=False)


@on_worker(0)
def test_plain_backward_of_several_losses_in_a_context():
    expected = fn.in_one_process(lambda: torch.autograd.backward(two_losses()))

    with autograd.context():
        torch.autograd.backward(two_losses())

    fn.assert_same(fn.fetch_grad(), expected.gradients)


@on_worker(0)
def test_plain_and_explicit_backward_alternate_in_one_context():
    expected = fn.in_one_process(lambda: programs.one_call().backward())

    with autograd.context() as ctx:
        programs.one_call().backward()
        ctx.backward(programs.one_call())
        programs.one_call().backward()
        in_dictionary = fn.fetch_dictionary(ctx)

    fn.assert_same(in_dictionary, expected.gradients)
    twice = {
        worker: {name: grad * 2 for name, grad in names.items() if grad is not None}
        for worker, names in expected.gradients.items()
    }
    fn.assert_same(fn.fetch_grad(), twice)


@on_worker(0)
def test_plain_backward_of_retained_graph_in_a_context():
    def program() -> None:
        loss = programs.diamond()
        loss.backward(retain_graph=True)
        loss.backward()

    expected = fn.in_one_process(program)

    with autograd.context():
        program()

    fn.assert_same(fn.fetch_grad(), expected.gradients, exact=False)


# ------------------------------------------------------------------------------- grad()


@on_worker(0)
def test_grad_matches_torch_and_leaves_dictionary_and_grad_alone():
    def wanted() -> list[Tensor]:
        return [parameter("x"), parameter("y")]

    expected = fn.in_one_process(
        lambda: torch.autograd.grad(programs.result_goes_back_to_its_worker(), wanted())
    )

    with autograd.context() as ctx:
        found = autograd.grad(ctx, programs.result_goes_back_to_its_worker(), wanted())
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    fn.assert_equal(found, expected.value)
    fn.assert_all_none(fn.fetch_grad())


@on_worker(0)
def test_grad_adds_nothing_to_a_dictionary_that_has_something():
    with autograd.context() as ctx:
        ctx.backward(programs.one_call())
        before = fn.fetch_dictionary(ctx)

        autograd.grad(ctx, programs.result_used_twice(), parameter("x"))

        fn.assert_same(fn.fetch_dictionary(ctx), before)


@on_worker(0)
def test_plain_grad_in_a_context_matches_torch_and_leaves_both_alone():
    def program() -> Any:
        return torch.autograd.grad(programs.diamond(), parameter("x"))

    expected = fn.in_one_process(program)

    with autograd.context() as ctx:
        found = program()
        fn.assert_all_none(fn.fetch_dictionary(ctx))

    fn.assert_equal(found, expected.value, exact=False)
    fn.assert_all_none(fn.fetch_grad())


@on_worker(0)
def test_grad_of_an_intermediate_value_and_of_any_shape():
    seed = torch.arange(9, dtype=torch.double).view(3, 3)

    def program(grad: Callable[..., Any]) -> Any:
        hidden = call("w1", handlers.affine, parameter("x"))
        output = call("w2", handlers.affine, hidden)
        return grad(output, hidden, grad_outputs=seed)

    expected = fn.in_one_process(lambda: program(torch.autograd.grad))

    with autograd.context() as ctx:
        found = program(lambda *args, **kwargs: autograd.grad(ctx, *args, **kwargs))

    fn.assert_equal(found, expected.value)


@on_worker(0)
def test_grad_then_backward_over_a_retained_graph():
    def program() -> Any:
        loss = programs.diamond()
        found = torch.autograd.grad(loss, parameter("x"), retain_graph=True)
        loss.backward()
        return found

    expected = fn.in_one_process(program)

    with autograd.context() as ctx:
        loss = programs.diamond()
        found = autograd.grad(ctx, loss, parameter("x"), retain_graph=True)
        ctx.backward(loss)
        kept = fn.fetch_dictionary(ctx)

    fn.assert_equal(found, expected.value, exact=False)
    fn.assert_same(kept, expected.gradients, exact=False)


@on_worker(0)
def test_grad_gives_none_or_zeros_for_unused_inputs_if_asked():
    with autograd.context() as ctx:
        inputs = [parameter("x"), parameter("unused")]
        used, unused = autograd.grad(
            ctx, programs.one_call(), inputs, retain_graph=False, allow_unused=True
        )
        same, zeros = autograd.grad(
            ctx, programs.one_call(), inputs, materialize_grads=True
        )

    assert unused is None
    fn.assert_equal(same, used)
    fn.assert_equal(zeros, torch.zeros(3, 3, dtype=torch.double))


@on_worker(0)
def test_grad_says_which_input_is_unused():
    with autograd.context() as ctx:
        inputs = [parameter("x"), parameter("unused")]

        with pytest.raises(UsageError, match="input 1 was not used"):
            autograd.grad(ctx, programs.one_call(), inputs)

        programs.check_usable(ctx)


@on_worker(0)
def test_hook_that_asks_for_leaves_is_told_where_it_works():
    x = parameter("x")
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook([x], seen.append)
    try:
        with autograd.context() as ctx:
            loss = call("w1", handlers.affine, x).sum()
            with pytest.raises(AutogradError, match="accumulate='grad'"):
                ctx.backward(loss)
        with autograd.context(accumulate="grad") as ctx:
            ctx.backward(call("w1", handlers.affine, x).sum())
    finally:
        handle.remove()

    assert len(seen) == 1
