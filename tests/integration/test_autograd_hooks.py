"""Hooks on either side of a call: when they run, what they see, what they change."""

from __future__ import annotations

import functools

import pytest
import torch

import autograd_features as features
from autograd_features import (
    ALL_MODES,
    DICT,
    FEW_MODES,
    GRAD_MODES,
    LOCAL,
    call,
    check,
    leaf,
    note,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

BOTH_SIDES = pytest.mark.parametrize("where", ["w0", "w1"])


# ------------------------------------------------------------------------- tensor hooks


@pytest.mark.parametrize("kind", ["argument", "way", "leaf", "result"])
@BOTH_SIDES
@ALL_MODES
@on_worker(0)
def test_tensor_hook_sees_and_changes_the_gradient(mode, where, kind):
    def program(session):
        x = leaf("x", 3)
        y = call(where, features.hooked, x * 2, "a", kind)
        z = call("w2", features.hooked, y, "b", kind)
        session.backward((z * y * x).sum())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_hook_on_a_sent_tensor_sees_the_whole_sum_once(mode):
    # The tensor goes to two workers, twice to one of them, and is used here.
    def program(session):
        x = leaf("x", 3)
        y = x * 2
        y.register_hook(functools.partial(features.see_quietly, "y"))
        first = call("w1", features.scale, y, "a")
        second = call("w2", features.scale, y, "b")
        third = call("w1", features.relay, "w3", features.scale, y, "c")
        session.backward((first + second + third + y.sin()).sum())

    found = check(program, mode, exact=False)
    assert len(found.notes["hook of y"]) == 1


@ALL_MODES
@on_worker(0)
def test_hook_on_a_received_tensor_sees_the_whole_sum_once(mode):
    def program(session):
        y = call("w1", features.scale, leaf("x", 3), "a")
        y.register_hook(functools.partial(features.see_quietly, "y"))
        sent = call("w2", features.scale, y, "b")
        session.backward((y.sin() + sent + y * y).sum())

    found = check(program, mode, exact=False)
    assert len(found.notes["hook of y"]) == 1


@ALL_MODES
@on_worker(0)
def test_hook_can_be_removed(mode):
    def program(session):
        y = call("w1", features.scale, leaf("x", 3), "a")
        handle = y.register_hook(functools.partial(features.see_quietly, "y"))
        loss = y.sum()
        session.backward(loss, retain_graph=True)
        handle.remove()
        session.backward(loss)

    found = check(program, mode)
    assert len(found.notes["hook of y"]) == 1


@FEW_MODES
@on_worker(0)
def test_hook_on_several_tensors(mode):
    # Such a hook holds the nodes that hold it.
    def program(session):
        y = call("w1", features.hook_several, leaf("x", 3) * 2, "a")
        session.backward(features.hook_several(y, "b").sum())

    check(program, mode, exact=False, has_cycles=True)


@BOTH_SIDES
@FEW_MODES
@on_worker(0)
def test_hooks_on_nodes(mode, where):
    def program(session):
        y = call(where, features.hook_node, leaf("x", 3) * 2, "a")
        session.backward(call("w2", features.scale, y, "b").sum())

    check(program, mode)


@BOTH_SIDES
@ALL_MODES
@on_worker(0)
def test_hooks_of_modules(mode, where):
    def program(session):
        y = call("w2", features.scale, leaf("x", 2, 3), "a")
        z = call(where, features.run_hooked_module, y, "module")
        session.backward(call("w2", features.scale, z, "b").sum())

    check(program, mode)


@BOTH_SIDES
@ALL_MODES
@on_worker(0)
def test_error_in_a_hook_ends_the_backward(mode, where):
    def program(session):
        y = call("w2", features.scale, leaf("x", 3), "a")
        z = call(where, features.failing_in_backward, y, "b")
        loss = call("w2", features.scale, z, "c").sum()
        text = features.error_text(ArithmeticError, session.backward, loss)
        assert "a hook that fails" in text
        if session.mode != LOCAL and where != "w0":
            assert where in text

    # What ran before the error may have added to .grad, as in one process.
    with features.undisturbed():
        found = features.run_on_workers(program, mode)
        features.settle()
    assert found.gradients["x"] is None and found.gradients["a"] is None
    if mode == DICT:
        assert not any(g is not None for g in found.gradients.values())


# ------------------------------------------------------------------------- retain_grad


@BOTH_SIDES
@ALL_MODES
@on_worker(0)
def test_retain_grad(mode, where):
    # It fills .grad of tensors that are no leaves, in all modes.
    def program(session):
        x = leaf("x", 3)
        sent = x * 2
        sent.retain_grad()
        y = call(where, features.retaining, sent, "a")
        y.retain_grad()
        session.backward((y.sin() * sent).sum())
        for gradient in [sent.grad, y.grad, *call(where, features.read_retained)]:
            note("retained", gradient)

    check(program, mode)


# ----------------------------------------------------------------- where .grad is filled


@pytest.mark.parametrize("kind", ["hook", "prehook", "post accumulate"])
@BOTH_SIDES
@GRAD_MODES
@on_worker(0)
def test_accumulator_hooks(mode, where, kind):
    def program(session):
        for _ in range(2):
            y = call(where, features.hook_accumulator, leaf("x", 3) * 2, "a", kind)
            session.backward(call("w2", features.scale, y, "b").sum())

    check(program, mode)


@pytest.mark.parametrize("kind", ["hook", "prehook", "post accumulate"])
@on_worker(0)
def test_accumulator_hooks_do_not_run_in_a_dictionary_pass(kind):
    # Nothing is accumulated there; as with torch.autograd.grad.
    def program(session):
        y = call("w1", features.hook_accumulator, leaf("x", 3), "a", kind)
        session.backward(y.sum())

    with features.undisturbed():
        found = features.run_on_workers(program, DICT)
        features.settle()
    expected = leaf("x", 3).detach()
    features.reset()
    features.assert_same(found.gradients["a"], expected, "gradient of a")
    assert not found.notes


@BOTH_SIDES
@GRAD_MODES
@on_worker(0)
def test_optimiser_step_inside_backward(mode, where):
    def program(session):
        x = leaf("x", 3)
        for _ in range(3):
            y = call(where, features.step_in_backward, x, "a")
            session.backward((y * y).sum())
        note("weight", call(where, features.value_of, "a"))

    check(program, mode)


@BOTH_SIDES
@GRAD_MODES
@on_worker(0)
def test_queued_callback_runs_at_the_end(mode, where):
    # The gradient of the leaf is complete by then.
    def program(session):
        y = call(where, features.queueing, leaf("x", 3) * 2, "a")
        session.backward((call("w2", features.scale, y, "b") * y).sum())

    found = check(program, mode)
    assert len(found.notes["at the end a"]) == 1


@BOTH_SIDES
@on_worker(0)
def test_queued_callback_runs_in_a_dictionary_pass(where):
    def program(session):
        y = call(where, features.queueing, leaf("x", 3) * 2, "a")
        session.backward(call("w2", features.scale, y, "b").sum())

    with features.undisturbed():
        found = features.run_on_workers(program, DICT)
        features.settle()
    assert found.notes["at the end a"] == [None]


@GRAD_MODES
@on_worker(0)
def test_backward_returns_when_all_callbacks_have_run(mode):
    def program(session):
        y = call("w1", features.relay, "w2", features.queueing, leaf("x", 3), "a")
        session.backward(y.sum())
        note("callbacks", call("w2", features.num_notes, "at the end a"))

    found = check(program, mode)
    assert found.notes["callbacks"] == [1]


# --------------------------------------------------------------- calls inside a backward


@BOTH_SIDES
@pytest.mark.parametrize("to", ["w0", "w1", "w3"])
@FEW_MODES
@on_worker(0)
def test_call_inside_a_hook(mode, to, where):
    def program(session):
        y = call(where, features.calling_in_backward, leaf("x", 3) * 2, "a", to)
        session.backward((call("w2", features.scale, y, "b") * y).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_backward_inside_a_hook(mode):
    # A graph of its own, whose call is made and differentiated inside the hook.
    def inner(gradient):
        with torch.enable_grad():
            point = gradient.detach().requires_grad_()
            loss = call("w1", features.scale, point, "inner").sin().sum()
            return torch.autograd.grad(loss, point)[0]

    def program(session):
        y = call("w1", features.scale, leaf("x", 3), "a")
        y.register_hook(inner)
        session.backward(y.exp().sum())

    if mode == features.BARE:
        check(program, mode)
        return

    # In a context the call belongs to the pass that is running: a clear error.
    def refused(session):
        text = features.error_text(RuntimeError, program, session)
        assert "inside a backward" in text

    with features.undisturbed():
        features.run_on_workers(refused, mode)
        features.settle()
