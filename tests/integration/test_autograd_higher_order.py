"""Gradients of gradients through calls, against one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import api_functions as api
import autograd_features as features
from autograd_features import (
    ALL_MODES,
    BARE,
    CONTEXT_MODES,
    DICT,
    FEW_MODES,
    call,
    check,
    leaf,
    note,
    numbers,
)
from gradwire import autograd
from gradwire.errors import ForeignGraph
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


ROUTES = {
    "one hop": lambda x: call("w1", features.body_of_network, x, "a"),
    "oneself": lambda x: call("w0", features.body_of_network, x, "a"),
    "two hops": lambda x: call(
        "w1", features.relay, "w2", features.body_of_network, x, "a"
    ),
    "there and back": lambda x: call(
        "w1", features.relay, "w0", features.body_of_network, x, "a"
    ),
    "chain": lambda x: call(
        "w2",
        features.body_of_network,
        call("w1", features.body_of_network, x, "a").cos(),
        "b",
    ),
    "diamond": lambda x: (
        call("w1", features.body_of_network, x, "a")
        * call("w2", features.body_of_network, x, "b")
    ),
}
ALL_ROUTES = pytest.mark.parametrize("route", list(ROUTES))


# --------------------------------------------------------------------- gradient penalty


@ALL_ROUTES
@ALL_MODES
@on_worker(0)
def test_gradient_penalty(mode, route):
    def program(session):
        x = leaf("x", 2, 3)
        loss = (ROUTES[route](x) * leaf("head", 3)).sum()
        (gradient,) = session.grad(loss, [x], create_graph=True)
        note("gradient", gradient)
        penalty = (gradient.norm(dim=1) - 1).pow(2).sum()
        session.backward(loss + penalty)

    check(program, mode, exact=False)


@ALL_ROUTES
@ALL_MODES
@on_worker(0)
def test_gradient_penalty_after_backward_with_create_graph(mode, route):
    # Here .grad, or the dictionary, holds what is differentiated next.
    def program(session):
        x = leaf("x", 2, 3)
        loss = (ROUTES[route](x) * leaf("head", 3)).pow(2).sum()
        session.backward(loss, create_graph=True)
        gradient = session.gradient(x)
        assert gradient.requires_grad
        session.backward((gradient * gradient).sum())

    check(program, mode, exact=False)


@CONTEXT_MODES
@on_worker(0)
def test_penalty_on_gradients_of_remote_leaves(mode):
    def program(session):
        x = leaf("x", 2, 3)
        loss = ROUTES["chain"](x).pow(2).sum()
        session.backward(loss, create_graph=True)
        context = session.context if session.mode == DICT else None
        penalty = call("w1", features.gradient_norm, "a 1", context)
        penalty = penalty + call("w2", features.gradient_norm, "b 2", context)
        gradient = session.gradient(x)
        session.backward(penalty + gradient.pow(2).sum())

    check(program, mode, exact=False)


@on_worker(0)
def test_penalty_on_gradients_of_remote_leaves_needs_a_context():
    def program(session):
        session.backward(ROUTES["one hop"](leaf("x", 2, 3)).sum(), create_graph=True)
        penalty = call("w1", features.gradient_norm, "a 1", None)
        text = features.error_text(ForeignGraph, session.backward, penalty)
        assert "gradwire.autograd.context()" in text

    with features.undisturbed():
        features.run_on_workers(program, BARE)
        features.settle()


@ALL_MODES
@on_worker(0)
def test_second_backward_only_over_part_of_the_graph(mode):
    # Some of the first pass is of no use to the second.
    def program(session):
        x, unused = leaf("x", 2, 3), leaf("unused", 2, 3)
        y = call("w1", features.body_of_network, x, "a")
        z = call("w2", features.body_of_network, unused, "b")
        loss = (y * leaf("head", 3)).sum() + z.sum()
        gradients = session.grad(loss, [x, unused], create_graph=True)
        session.backward(gradients[0].pow(2).sum())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_unused_inputs_and_linear_parts(mode):
    # The gradient of something linear has no history.
    def program(session):
        x, other = leaf("x", 3), leaf("other", 3)
        y = call("w1", features.sine, x) + call("w2", features.apply, torch.neg, other)
        gradients = session.grad(
            y.sum(), [x, other, leaf("third", 3)], create_graph=True, allow_unused=True
        )
        note("none", [g is None for g in gradients])
        note("history", [g is not None and g.requires_grad for g in gradients])
        session.backward((gradients[0] * gradients[1]).sum())

    check(program, mode, exact=False)


# --------------------------------------------------------------------------------- MAML


@pytest.mark.parametrize("num_steps", [1, 3])
@ALL_MODES
@on_worker(0)
def test_maml_inner_steps_with_weights_of_the_caller(mode, num_steps):
    def program(session):
        weights = [leaf("first", 3, 4), leaf("second", 4, 1)]
        fast = weights
        for _ in range(num_steps):
            out = call("w1", features.network, numbers("support", 5, 3), *fast)
            inner = (out - numbers("targets", 5, 1)).pow(2).mean()
            gradients = session.grad(inner, fast, create_graph=True)
            fast = [w - 0.1 * g for w, g in zip(fast, gradients, strict=True)]
        out = call("w2", features.network, numbers("query", 4, 3), *fast)
        session.backward((out - 1).pow(2).mean())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_maml_inner_step_of_a_head_on_a_remote_body(mode):
    def program(session):
        head = leaf("head", 3, 1)
        hidden = call("w1", features.body_of_network, numbers("support", 4, 3), "a")
        inner = (hidden @ head).pow(2).mean()
        (gradient,) = session.grad(inner, [head], create_graph=True)
        hidden = call("w1", features.body_of_network, numbers("query", 4, 3), "a")
        session.backward((hidden @ (head - 0.5 * gradient) - 1).pow(2).mean())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_maml_over_several_tasks(mode):
    def program(session):
        weights = [leaf("first", 3, 4), leaf("second", 4, 1)]
        total = torch.zeros((), dtype=torch.float64)
        for task, to in enumerate(["w1", "w2", "w1"]):
            out = call(to, features.network, numbers(f"support {task}", 5, 3), *weights)
            gradients = session.grad(out.pow(2).mean(), weights, create_graph=True)
            fast = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
            out = call(to, features.network, numbers(f"query {task}", 5, 3), *fast)
            total = total + (out - task).pow(2).mean()
        session.backward(total)

    check(program, mode, exact=False)


# ------------------------------------------------------------------------- higher orders


@pytest.mark.parametrize("to", ["w0", "w1"])
@FEW_MODES
@on_worker(0)
def test_third_order(mode, to):
    def program(session):
        x = leaf("x", 3)
        y = call(to, features.cube, x, "a").sum()
        (first,) = session.grad(y, [x], create_graph=True)
        (second,) = session.grad(first.sum(), [x], create_graph=True)
        (third,) = session.grad(second.sin().sum(), [x], create_graph=True)
        note("derivatives", first)
        note("derivatives", second)
        note("derivatives", third)
        session.backward(third.pow(2).sum())

    check(program, mode, exact=False)


@ALL_ROUTES
@ALL_MODES
@on_worker(0)
def test_hessian_vector_product(mode, route):
    def program(session):
        x = leaf("x", 2, 3)
        loss = ROUTES[route](x).pow(2).sum()
        (gradient,) = session.grad(loss, [x], create_graph=True)
        for seed in range(2):
            (product,) = session.grad(
                gradient, [x], numbers(f"v{seed}", 2, 3), retain_graph=True
            )
            note("product", product)
        session.backward(loss)

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_two_graphs_of_one_call_and_a_penalty_over_both(mode):
    def program(session):
        x = leaf("x", 3)
        y = call("w1", features.cube, x, "a")
        (first,) = session.grad(y.sum(), [x], retain_graph=True, create_graph=True)
        (second,) = session.grad(
            (y * y).sum(), [x], retain_graph=True, create_graph=True
        )
        session.backward((first * second).sum())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_passes_of_all_orders_add_up(mode):
    def program(session):
        x = leaf("x", 3)
        y = call("w1", features.cube, x, "a").sum()
        session.backward(y, retain_graph=True)
        (gradient,) = session.grad(y, [x], create_graph=True)
        session.backward(gradient.sum(), retain_graph=True)
        session.backward(gradient.pow(2).sum() + y)

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_gradients_given_to_a_second_order_pass(mode):
    # The seed has a history of its own.
    def program(session):
        x, v = leaf("x", 3), leaf("v", 3)
        y = call("w1", features.cube, x, "a")
        (product,) = session.grad(y, [x], v.sin(), create_graph=True)
        session.backward(product, numbers("seed", 3))

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_gradients_sent_to_another_worker(mode):
    # The result of a first pass goes through a call like any other tensor.
    def program(session):
        x = leaf("x", 2, 3)
        loss = call("w1", features.body_of_network, x, "a").pow(2).sum()
        (gradient,) = session.grad(loss, [x], create_graph=True)
        session.backward(call("w2", features.body_of_network, gradient, "b").sum())

    check(program, mode, exact=False)


@pytest.mark.parametrize("where", ["here", "there", "both"])
@ALL_MODES
@on_worker(0)
def test_call_made_by_a_backward_is_differentiated(mode, where):
    def program(session):
        y = x = leaf("x", 3)
        if where != "here":
            y = y * call("w1", features.slow_square, x, "w2")
        if where != "there":
            y = y * features.slow_square(x, "w3")
        (gradient,) = session.grad(y.sum(), [x], create_graph=True)
        session.backward(gradient.pow(2).sum())

    check(program, mode, exact=False)


@pytest.mark.parametrize("where", ["caller", "callee"])
@FEW_MODES
@on_worker(0)
def test_second_order_through_a_checkpoint(mode, where):
    def block(x):
        return call("w1", features.cube, x.sin(), "a").cos()

    def program(session):
        x = leaf("x", 2, 3)
        if where == "caller":
            y = checkpoint(block, x, use_reentrant=False)
        else:
            y = call("w1", features.checkpointed, x, "a", False)
        (gradient,) = session.grad(y.sum(), [x], create_graph=True)
        session.backward(gradient.pow(2).sum())

    check(program, mode, exact=False, has_cycles=True)


@pytest.mark.parametrize("to", [None, "w2", "w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_derivative_taken_inside_a_handler(mode, to):
    # The handler differentiates with respect to what it received, maybe through a call
    # of its own, and its result is differentiated once more.
    def program(session):
        x = leaf("x", 3)
        for _ in range(3):
            y = call("w1", features.forces, x * 2, "a", to)
            session.backward((y * y * x).sum())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_loss_of_energies_and_forces(mode):
    def program(session):
        x = leaf("x", 3)
        positions = x.sin()
        energy = call("w1", features.energy_of, positions, "a")
        found = call("w1", features.forces, positions, "a", None)
        (local,) = session.grad(energy, [positions], create_graph=True)
        note("difference", bool((local + found).abs().max() < 1e-12))
        session.backward(energy + (found * local).sum())

    check(program, mode, exact=False)


# ------------------------------------------------------------------ torch's own programs


@on_worker(0)
def test_gradcheck_through_a_call():
    def function(x, first, second):
        return call("w1", features.network, x, first, second)

    inputs = [leaf("x", 2, 2), leaf("first", 2, 2), leaf("second", 2, 1)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    del inputs
    features.settle()


@pytest.mark.parametrize("what", ["hessian", "vhp", "jacobian", "jvp"])
@on_worker(0)
def test_functional_api_through_a_call(what):
    def program(session):
        def function(x):
            y = call("w1", features.cube, x, "a")
            return y if what in ("jacobian", "jvp") else y.sum()

        arguments = [leaf("x", 3)]
        if what in ("vhp", "jvp"):
            arguments.append(numbers("v", 3))
        result = getattr(torch.autograd.functional, what)(function, *arguments)
        note("result", result)

    found = check(program, BARE, exact=False)
    assert found.gradients["a"] is None


# ------------------------------------------------------------------------------ releases


@pytest.fixture
def no_collector(cluster):
    """No cyclic collector on any worker."""
    for rank in range(len(features.WORKERS)):
        cluster.run(rank, features.switch_collector, False)
    yield "off"
    for rank in range(len(features.WORKERS)):
        cluster.run(rank, features.switch_collector, True)


@ALL_ROUTES
@ALL_MODES
@on_worker(0)
def test_graphs_of_gradients_are_freed_when_dropped(mode, route, no_collector):
    def program(session):
        x = leaf("x", 2, 3)
        loss = ROUTES[route](x).pow(2).sum()
        (first,) = session.grad(loss, [x], create_graph=True)
        (second,) = session.grad(first.pow(2).sum(), [x], create_graph=True)
        assert second.requires_grad
        note("counts", [autograd.get_debug_info()["passes"]])

    assert no_collector == "off"
    features.run_on_workers(program, mode)
    features.settle()


@ALL_MODES
@on_worker(0)
def test_many_graphs_of_gradients_leave_nothing_behind(mode, no_collector):
    def program(session):
        x = leaf("x", 2, 3)
        for _ in range(10):
            loss = ROUTES["chain"](x).pow(2).sum()
            (gradient,) = session.grad(loss, [x], create_graph=True)
            session.backward(gradient.sum())
        if mode == BARE:
            del loss, gradient
            api.wait_until(features.is_idle)

    features.run_on_workers(program, mode)
    features.settle()
