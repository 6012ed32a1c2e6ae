"""References and gradients: every program is compared with the same one in one process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autograd_functions as ag
import rref_functions as fn
from autograd_functions import call, parameter
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import OwnerLost, UnknownContext, UsageError
from gradwire.rpc import RRef
from on_worker import on_worker
from rref_functions import Layer, own, refer

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from ag.clean(request)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# ----------------------------------------------------------------------------- programs


def fetched() -> Tensor:
    return refer("w1", fn.weighted, parameter("x")).to_here().sum()


def fetched_twice() -> Tensor:
    """Each call is an edge of its own."""
    rref = refer("w1", fn.weighted, parameter("x"))
    return (rref.to_here() * rref.to_here().exp()).sum()


def fetched_in_vain() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    unused = [rref.to_here() for _ in range(3)]
    loss = rref.to_here().sum()
    del unused
    rref.to_here()
    return loss


def made_in_vain() -> Tensor:
    unused = refer("w2", fn.weighted, parameter("x"))
    loss = refer("w1", fn.weighted, parameter("x")).to_here().sum()
    del unused
    return loss


def fetched_by_a_third() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    return call("w2", fn.fetch_and_weight, rref).sum()


def fetched_by_everybody() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    found = [call(to, fn.fetch_and_weight, rref) for to in ("w0", "w1", "w2", "w3")]
    return sum((y.sum() for y in found), rref.to_here().prod())


def relayed() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    return call("w2", fn.relay, rref, "w3").sum()


def relayed_back() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    return call("w2", fn.relay, rref, "w1").sum()


def chain_of_references() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    for to in ("w2", "w3", "w1"):
        rref = refer(to, fn.fetch_and_weight, rref)
    return rref.to_here().sum()


def references_to_references() -> Tensor:
    rref = refer("w1", fn.weighted, parameter("x"))
    return refer("w2", fn.refer_onwards, rref, "w3").to_here().to_here().sum()


def own_value_is_fetched() -> Tensor:
    rref = own(parameter("x") * 2)
    return call("w1", fn.fetch_and_weight, rref).sum() + rref.to_here().sum()


def own_leaf_is_fetched() -> Tensor:
    return call("w1", fn.fetch_and_weight, own(parameter("x"))).sum()


def leaf_of_another_is_fetched() -> Tensor:
    return (refer("w1", fn.weight).to_here() @ parameter("x")).sum()


def result_is_a_reference() -> Tensor:
    return call("w1", fn.weight_and_refer, parameter("x")).to_here().sum()


def made_at_home() -> Tensor:
    return refer("w0", fn.weighted, parameter("x")).to_here().sum()


def methods() -> Tensor:
    layer = refer("w1", Layer)
    x = parameter("x")
    return (
        layer.rpc_sync().forward(x)
        + layer.rpc_async().forward(x).wait()
        + layer.remote().forward(x).to_here()
    ).sum()


def methods_with_references() -> Tensor:
    layers = [refer(to, Layer) for to in ("w1", "w2", "w3")]
    y = refer("w3", fn.weighted, parameter("x"))
    for layer in layers:
        y = layer.remote().forward_all(y, y)
    return y.to_here().sum()


def asynchronous_method() -> Tensor:
    layer = refer("w1", Layer)
    y = layer.rpc_sync().forward_elsewhere("w2", parameter("x"))
    return (y + layer.remote().forward_elsewhere("w3", parameter("x")).to_here()).sum()


def recurrent() -> Tensor:
    """A state that stays on a worker from one step to the next."""
    state = refer("w1", fn.weighted, parameter("x"))
    for _ in range(4):
        state = refer("w1", fn.fetch_and_weight, state)
    return state.to_here().sum()


CONTEXT_PROGRAMS: dict[str, Callable[[], Tensor]] = {
    program.__name__: program
    for program in (
        fetched,
        fetched_twice,
        fetched_in_vain,
        made_in_vain,
        fetched_by_a_third,
        fetched_by_everybody,
        relayed,
        relayed_back,
        chain_of_references,
        references_to_references,
        own_value_is_fetched,
        own_leaf_is_fetched,
        leaf_of_another_is_fetched,
        result_is_a_reference,
        made_at_home,
        methods,
        methods_with_references,
        asynchronous_method,
        recurrent,
    )
}


@pytest.mark.parametrize("mode", ag.CONTEXT_MODES)
@pytest.mark.parametrize("name", CONTEXT_PROGRAMS)
@on_worker(0)
def test_program_in_a_context_matches_one_process(name, mode):
    ag.check(CONTEXT_PROGRAMS[name], mode, exact=False)


# -------------------------------------------------------------------- outside a context


def methods_outside() -> Tensor:
    layer = refer("w1", Layer)
    x = parameter("x")
    return (layer.rpc_sync().forward(x) + layer.rpc_async().forward(x).wait()).sum()


def pipeline_outside() -> Tensor:
    y = parameter("x")
    for layer in [refer(to, Layer) for to in ("w1", "w2", "w3", "w0")]:
        y = layer.rpc_sync().forward(y)
    return y.sum()


def asynchronous_method_outside() -> Tensor:
    layer = refer("w1", Layer)
    return layer.rpc_sync().forward_elsewhere("w2", parameter("x")).sum()


@pytest.mark.parametrize(
    "program", [methods_outside, pipeline_outside, asynchronous_method_outside]
)
@on_worker(0)
def test_methods_outside_a_context_are_ordinary_calls(program):
    ag.check(program, "calls")


@on_worker(0)
def test_methods_outside_a_context_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methods_outside().backward()


@on_worker(0)
def test_fetched_tensor_outside_a_context_is_a_constant():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rref = rpc.remote("w1", fn.weighted, args=(parameter("x"),))
        y = rref.to_here()

    assert not y.requires_grad
    assert torch.equal(y, rref.to_here())


@on_worker(0)
def test_fetched_leaf_outside_a_context_is_a_leaf():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rpc.remote("w1", fn.weight).to_here()

    assert found.requires_grad
    assert found.is_leaf


def caught_warnings(function: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return list(caught)


@on_worker(0)
def test_cut_graph_is_said_once_for_each_place():
    rref = RRef(parameter("x") * 2)
    theirs = rpc.rpc_sync("w1", fn.keep_computed, args=("cut",))

    def here() -> None:
        theirs.to_here()

    def there() -> None:
        theirs.to_here()

    (first,) = caught_warnings(here)
    assert caught_warnings(here) == []
    (second,) = caught_warnings(there)

    for warning, function in ((first, here), (second, there)):
        assert warning.filename == __file__
        assert warning.lineno == function.__code__.co_firstlineno + 1
        assert "the autograd graph is cut" in str(warning.message)
        assert "with gradwire.autograd.context() as ctx" in str(warning.message)
    del rref


@on_worker(0)
def test_arguments_that_are_cut_are_warned_of():
    x = parameter("x") * 2

    def make() -> None:
        rpc.remote("w1", fn.weighted, args=(x,))

    (warning,) = caught_warnings(make)
    assert (warning.filename, warning.lineno) == (
        __file__,
        make.__code__.co_firstlineno + 1,
    )
    assert caught_warnings(make) == []


@on_worker(0)
def test_leaves_and_constants_are_not_warned_of():
    def program() -> None:
        rpc.remote("w1", fn.weight).to_here()
        rpc.remote("w1", fn.square, args=(torch.ones(2),)).to_here()
        with torch.no_grad():
            rpc.remote("w1", fn.weighted, args=(parameter("x") * 2,)).to_here()

    assert caught_warnings(program) == []


@on_worker(0)
def test_nothing_is_warned_of_inside_a_context():
    def program() -> None:
        with autograd.context():
            fetched_by_everybody()

    assert caught_warnings(program) == []


@on_worker(0)
def test_warning_names_the_place_of_the_thread_that_fetched():
    theirs = rpc.rpc_sync("w1", fn.keep_computed, args=("cut",))
    gate = threading.Barrier(4)

    def one() -> None:
        gate.wait()
        theirs.to_here()

    def two() -> None:
        gate.wait()
        theirs.to_here()

    def fetch() -> None:
        threads = [threading.Thread(target=f) for f in (one, one, two, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = sorted(warning.lineno for warning in caught_warnings(fetch))
    assert lines == [f.__code__.co_firstlineno + 2 for f in (one, two)]


# ------------------------------------------------------------------------- RRef.backward


def loss_there(to: str) -> Any:
    return refer(to, fn.loss_of, parameter("x"))


def expected_for(to: str) -> ag.Gradients:
    return ag.in_one_process(lambda: loss_there(to).to_here().backward()).gradients


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_of_a_reference_in_a_context(to):
    with autograd.context() as ctx:
        rref = loss_there(to)
        rref.backward(ctx)
        found = ag.fetch_dictionary(ctx)

    ag.assert_same(found, expected_for(to))


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_of_a_reference_takes_a_number_for_a_context(to):
    with autograd.context() as ctx:
        loss_there(to).backward(dist_autograd_ctx_id=int(ctx))
        found = ag.fetch_dictionary(ctx)

    ag.assert_same(found, expected_for(to))


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_of_a_reference_in_a_context_with_grad(to):
    with autograd.context(accumulate="grad") as ctx:
        loss_there(to).backward(ctx)

    ag.assert_same(ag.fetch_grad(), expected_for(to))


@on_worker(0)
def test_backward_of_a_reference_that_another_worker_made():
    def program() -> Any:
        first = refer("w1", fn.weighted, parameter("x"))
        return refer("w2", fn.fetch_loss, first)

    expected = ag.in_one_process(lambda: program().to_here().backward()).gradients
    with autograd.context() as ctx:
        rref = program()
        rpc.rpc_sync("w3", run_backward, args=(rref, int(ctx)))
        found = ag.fetch_dictionary(ctx)

    ag.assert_same(found, expected)


def run_backward(rref: RRef[Tensor], ctx: int) -> None:
    rref.backward(ctx)


@pytest.mark.parametrize("to", ["w0", "w1"])
@pytest.mark.parametrize(
    ("context", "kind"),
    [("a", TypeError), (1.5, TypeError), (True, TypeError), (-5, UnknownContext)],
)
@on_worker(0)
def test_backward_of_a_reference_refuses_what_is_no_context(to, context, kind):
    rref = loss_there(to)
    with pytest.raises(kind, match="context"):
        rref.backward(context)


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_of_a_reference_can_retain_the_graph(to):
    with autograd.context() as ctx:
        rref = loss_there(to)
        rref.backward(ctx, retain_graph=True)
        rref.backward(ctx)
        found = ag.fetch_dictionary(ctx)

    def twice() -> None:
        loss = loss_there(to).to_here()
        loss.backward(retain_graph=True)
        loss.backward()

    ag.assert_same(found, ag.in_one_process(twice).gradients)


@on_worker(0)
def test_backward_of_a_reference_needs_an_unused_graph():
    with autograd.context() as ctx:
        rref = loss_there("w1")
        rref.backward(ctx)

        fn.catch(RuntimeError, rref.backward, ctx)


def local_loss() -> Tensor:
    return (parameter("x") @ parameter("y")).sum()


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_without_a_context_is_a_plain_one_where_the_value_lives(to):
    rpc.remote(to, local_loss).backward()

    expected = ag.in_one_process(lambda: call(to, local_loss).backward()).gradients
    ag.assert_same(ag.fetch_grad(), expected)


@on_worker(0)
def test_backward_without_a_context_can_retain_the_graph():
    rref = RRef(local_loss())
    rref.backward(retain_graph=True)
    rref.backward()

    def twice() -> None:
        loss = local_loss()
        loss.backward(retain_graph=True)
        loss.backward()

    ag.assert_same(ag.fetch_grad(), ag.in_one_process(twice).gradients)


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_needs_a_tensor(to):
    rref = rpc.remote(to, str, args=("text",))

    error = fn.catch(UsageError, rref.backward)
    assert "tensor" in str(error)
    assert "str" in str(error)
    with autograd.context() as ctx:
        fn.catch(UsageError, rref.backward, ctx)


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_backward_needs_a_scalar(to):
    rref = rpc.remote(to, fn.weight)

    assert "scalar" in str(fn.catch(RuntimeError, rref.backward))
    with autograd.context() as ctx:
        fn.catch((RuntimeError, ValueError), rref.backward, ctx)


@on_worker(0)
def test_backward_raises_what_the_function_raised():
    rref: rpc.RRef[Any] = rpc.remote("w1", fn.raise_my_error)

    fn.catch(fn.MyError, rref.backward)


@on_worker(0)
def test_backward_needs_a_context_that_is_open():
    with autograd.context() as ctx:
        rref = loss_there("w1")
        rref.to_here()

    fn.catch(UsageError, rref.backward, ctx)


# ------------------------------------------------------------------------ what is left


@on_worker(0)
def test_reference_may_outlive_its_context():
    with autograd.context() as ctx:
        rref = refer("w1", fn.weighted, parameter("x"))
        ctx.backward(rref.to_here().sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = rref.to_here()
    assert not again.requires_grad
    assert torch.equal(again, rref.to_here())


@on_worker(0)
def test_reference_may_be_used_in_a_later_context():
    layer = rpc.remote("w1", Layer)

    for _ in range(3):
        with autograd.context() as ctx:
            ctx.backward(layer.rpc_sync().forward(parameter("x")).sum())
            found = ag.fetch_dictionary(ctx)
        expected = ag.in_one_process(
            lambda: (
                refer("w1", Layer).rpc_sync().forward(parameter("x")).sum().backward()
            )
        ).gradients
        ag.assert_same(found, expected)


@pytest.mark.chaos
def test_lost_owner_in_a_context(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(3, {"lost_after": 2.0})
    cluster.run(0, make_in_open_context)
    cluster.kill(1)

    cluster.run(0, fetch_in_open_context)


def make_in_open_context() -> None:
    ag.open_context()
    fn.keep("rref", ag.inside(refer, "w1", fn.weighted, parameter("x")))
    ag.inside(fn.kept["rref"].to_here)


def fetch_in_open_context() -> None:
    rref = fn.kept.pop("rref")
    fn.catch(OwnerLost, ag.inside, rref.to_here)
    fn.catch(OwnerLost, ag.inside, rref.backward)
    ag.close_contexts()
    fn.wait_until_nothing_is_left()
