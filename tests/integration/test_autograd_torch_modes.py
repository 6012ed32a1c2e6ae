"""Modes, checkpoints and hooks of torch round calls, against one process."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autograd_features as features
from autograd_features import (
    ALL_MODES,
    CONTEXT_MODES,
    DICT,
    FEW_MODES,
    GRAD_MODES,
    call,
    check,
    leaf,
    note,
    numbers,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


# -------------------------------------------------------------------------- checkpointing


@ALL_MODES
@on_worker(0)
def test_checkpoint_around_a_call(mode):
    def block(x):
        y = call("w1", features.tanh_layer, torch.sin(x) * leaf("factor", 3), "a")
        note("ran", True)
        return torch.exp(y)

    def program(session):
        x = leaf("x", 2, 3)
        y = checkpoint(block, x.cos(), use_reentrant=False)
        session.backward((y * x).sum())

    found = check(program, mode)
    assert len(found.notes["ran"]) == 2


@ALL_MODES
@on_worker(0)
def test_checkpoint_around_nested_calls(mode):
    def block(x):
        y = call("w1", features.relay, "w2", features.tanh_layer, x, "b")
        return call("w1", features.tanh_layer, y.sin(), "a").sin()

    def program(session):
        x = leaf("x", 2, 3)
        y = checkpoint(block, x, use_reentrant=False)
        z = checkpoint(block, y * 2, use_reentrant=False)
        session.backward((z * y).sum())

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_checkpoint_around_a_call_inside_a_handler(mode):
    def program(session):
        x = leaf("x", 2, 3)
        y = call("w1", features.checkpointed_relay, x, "w2", "a")
        session.backward(call("w2", features.tanh_layer, y * x, "b").sum())

    check(program, mode)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("where", ["caller", "callee"])
@GRAD_MODES
@on_worker(0)
def test_checkpoint_around_local_code(mode, where, reentrant):
    def program(session):
        x = leaf("x", 2, 3)
        if where == "callee":
            y = call("w1", features.checkpointed, x, "a", reentrant)
        else:
            y = features.checkpointed(x, "a", reentrant)
        session.backward(call("w2", features.tanh_layer, y * x, "b").sum())

    found = check(program, mode)
    assert len(found.notes["a ran"]) == 2


@pytest.mark.parametrize("where", ["caller", "callee"])
@on_worker(0)
def test_checkpoint_around_local_code_in_dictionary_pass(where):
    def program(session):
        x = leaf("x", 2, 3)
        if where == "callee":
            y = call("w1", features.checkpointed, x, "a", False)
        else:
            y = features.checkpointed(x, "a", False)
        session.backward(call("w2", features.tanh_layer, y * x, "b").sum())

    check(program, DICT)


@pytest.mark.parametrize("where", ["caller", "callee"])
@on_worker(0)
def test_reentrant_checkpoint_in_dictionary_pass_is_refused(where):
    # Torch's own limit: such a checkpoint adds to .grad by itself.
    def program(session):
        x = leaf("x", 2, 3)
        if where == "callee":
            y = call("w1", features.checkpointed, x, "a", True)
        else:
            y = call("w1", features.scale, features.checkpointed(x, "a", True), "b")
        text = features.error_text(RuntimeError, session.backward, y.sum())
        assert "use_reentrant=False" in text

    features.run_on_workers(program, DICT)
    features.settle()


@CONTEXT_MODES
@on_worker(0)
def test_reentrant_checkpoint_around_a_call_in_a_context_is_refused(mode):
    def block(x):
        return call("w1", features.scale, x.sin(), "a")

    def refused(session):
        y = checkpoint(block, leaf("x", 3), use_reentrant=True)
        loss = call("w2", features.scale, y, "b").sum()
        text = features.error_text(RuntimeError, session.backward, loss)
        assert "use_reentrant=False" in text

    with features.undisturbed():
        features.run_on_workers(refused, mode)
        features.settle()

    def program(session):
        session.backward(block(leaf("x", 3)).sum())

    check(program, mode)


@on_worker(0)
def test_reentrant_checkpoint_around_a_call_works_without_a_context():
    def block(x):
        y = call("w1", features.tanh_layer, torch.sin(x) * leaf("factor", 3), "a")
        return torch.exp(y)

    def program(session):
        x = leaf("x", 2, 3)
        y = checkpoint(block, x.cos(), use_reentrant=True)
        session.backward((call("w2", features.tanh_layer, y, "b") * x).sum())

    check(program, features.BARE)


# ------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("where", ["w0", "w1"])
@FEW_MODES
@on_worker(0)
def test_compiled_module(mode, where):
    def program(session):
        x = leaf("x", 2, 3)
        y = call(where, features.run_compiled, x.sin(), "net")
        z = features.tanh_layer(call("w2", features.scale, y, "b"), "c")
        session.backward((z * x).sum())

    check(program, mode)


@pytest.mark.parametrize("where", ["w0", "w1"])
@FEW_MODES
@on_worker(0)
def test_compiled_code_with_a_call_in_it(mode, where):
    def program(session):
        y = features.compile_with_a_call(leaf("x", 2, 3), where)
        session.backward(y.sum())

    check(program, mode)


# -------------------------------------------------------------------- grad mode and modes


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "set_grad_enabled"])
@FEW_MODES
@on_worker(0)
def test_part_of_a_handler_is_not_recorded(mode, how):
    def program(session):
        y, constant = call("w1", features.without_grad, leaf("x", 3), "a", how)
        note("constant", features.describe(constant))
        session.backward((y * constant).sum())

    check(program, mode)


@pytest.mark.parametrize("where", ["w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_grad_mode_of_a_handler_ends_with_it(mode, where):
    def program(session):
        # In one process nobody ends it.
        is_local = session.mode == features.LOCAL
        function = features.scale if is_local else features.leave_grad_off
        y = call(where, function, leaf("x", 3) * 2, "a")
        assert torch.is_grad_enabled()
        note("modes", call(where, features.modes_here))
        session.backward(y.sum())

    check(program, mode)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
@ALL_MODES
@on_worker(0)
def test_calls_without_grad_mode_are_not_recorded(mode, how):
    def program(session):
        x = leaf("x", 3)
        guard = torch.no_grad() if how == "no_grad" else torch.inference_mode()
        with guard:
            constant = call("w1", features.scale, x * 2, "a")
            nested = call("w1", features.relay, "w2", features.scale, x, "b")
            note("history", features.describe(constant, nested))
            note("inside", call("w1", features.modes_here)[2])
        y = call("w1", features.scale, x * constant.clone() * nested.clone(), "c")
        session.backward(y.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_leaves_stay_leaves_in_calls_without_grad_mode(mode):
    # They arrive as leaves of their own, and nothing leads back.
    def program(session):
        with torch.no_grad():
            copy = call("w1", features.get_parameter, "weight", 3)
            sent = call("w1", features.describe, leaf("x", 3), leaf("x", 3) * 2)
        assert features.describe(copy) == [(True, True)]
        assert sent == [(True, True), (False, True)]
        session.backward(call("w2", features.scale, copy, "a").sum())
        features.adopt("copy", copy)

    found = features.run_on_workers(program, mode).gradients
    features.settle()
    features.assert_same(found["copy"], numbers("a", 3), "the copy")
    assert found["weight"] is None and found["x"] is None


@ALL_MODES
@on_worker(0)
def test_result_of_a_call_under_inference_mode_is_a_normal_tensor(mode):
    # So that it can be saved for backward, unlike what is computed there.
    def program(session):
        with torch.inference_mode():
            constant = call("w1", features.scale, numbers("x", 3), "a")
        if session.mode == features.LOCAL:
            constant = constant.clone()
        session.backward((leaf("x", 3) * constant).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_result_made_under_inference_mode_is_a_normal_tensor(mode):
    def program(session):
        constant = call("w1", features.infer, leaf("x", 3))
        if session.mode == features.LOCAL:
            constant = leaf("x", 3).detach() * 2
        assert not constant.is_inference()
        session.backward((leaf("x", 3) * constant).sum())

    check(program, mode)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
@ALL_MODES
@on_worker(0)
def test_backward_inside_no_grad(mode, how):
    def program(session):
        y = call("w1", features.tanh_layer, leaf("x", 2, 3), "a")
        loss = call("w2", features.scale, y, "b").sum()
        with torch.no_grad() if how == "no_grad" else torch.inference_mode(False):
            session.backward(loss)

    check(program, mode)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@FEW_MODES
@on_worker(0)
def test_default_device_around_everything(mode, device):
    # It changes where new tensors are made; ours must be where they belong.
    def program(session):
        x = leaf("x", 2, 3)
        features.leaf("local", 2, 3)
        with torch.device(device):
            y = call("w1", features.tanh_layer, x, "a")
            z = call("w1", features.relay, "w2", features.scale, y, "b")
            loss = (z * features.leaf("local", 2, 3)).sum()
            session.backward(loss, torch.ones((), device="cpu", dtype=loss.dtype))

    def local(session):
        features.leaf("x", 2, 3)
        for name, shape in [("local", (2, 3)), ("a", (3, 3)), ("b", (2, 3))]:
            features.leaf(name, *shape)
        program(session)

    expected = features.run_locally(local)
    found = features.run_on_workers(program, mode)
    features.settle()
    features.compare(found, expected)


class _Counting(TorchDispatchMode):
    """Sees all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@ALL_MODES
@on_worker(0)
def test_dispatch_mode_sees_only_what_the_program_does(mode):
    def program(session):
        x = leaf("x", 2, 3)
        is_local = session.mode == features.LOCAL
        with _Counting() as seen:
            y = x * 2
        # In one process it would see the function at work.
        with contextlib.nullcontext() if is_local else seen:
            y = call("w1", features.scale, y, "a")
        note("operations", sorted(seen.names))
        session.backward(y.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_dispatch_mode_around_backward(mode):
    def program(session):
        x = leaf("x", 2, 3)
        loss = call("w1", features.tanh_layer, x.sin(), "a").sum()
        with _Counting() as seen:
            session.backward(loss)
        assert "cos.default" in seen.names

    check(program, mode)


@pytest.mark.parametrize("check_nan", [False, True])
@FEW_MODES
@on_worker(0)
def test_anomaly_mode(mode, check_nan):
    def program(session):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            guard = torch.autograd.detect_anomaly(check_nan=check_nan)
        with guard:
            y = call("w1", features.tanh_layer, leaf("x", 2, 3), "a")
            z = call("w1", features.relay, "w2", features.scale, y, "b")
            session.backward((z * y).sum())

    check(program, mode)


# ------------------------------------------------------------------------------- autocast


@ALL_MODES
@on_worker(0)
def test_autocast_around_calls(mode):
    def program(session):
        x = leaf("x", 2, 3, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call("w1", features.multiply, x, "a")
            here = features.multiply(y, "b")
            z = call("w1", features.relay, "w2", features.multiply, here, "c")
            note("dtypes", [y.dtype, here.dtype, z.dtype])
        session.backward((z.float() * numbers("g", 2, 4, dtype=torch.float32)).sum())

    found = check(program, mode)
    assert found.notes["dtype of a"] == [torch.bfloat16]
    assert found.notes["dtype of c"] == [torch.bfloat16]


@ALL_MODES
@on_worker(0)
def test_autocast_switched_off_inside_a_handler(mode):
    def program(session):
        x = leaf("x", 2, 3, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call("w1", features.multiply_without_autocast, x, "a")
            note("after", call("w1", features.modes_here)[2])
        note("outside", call("w1", features.modes_here)[2])
        session.backward(y.sum())

    found = check(program, mode)
    assert found.notes["dtype of a"] == [torch.float32]
    assert found.notes["after"] == [True] and found.notes["outside"] == [False]


@pytest.mark.parametrize("where", ["w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_autocast_around_backward(mode, where):
    def program(session):
        x = leaf("x", 2, 3, dtype=torch.float32)
        y = call(where, features.product_in_backward, x * 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            session.backward((y * numbers("g", 2, 3, dtype=torch.float32)).sum())

    found = check(program, mode)
    assert found.notes["dtype in backward"] == [torch.bfloat16]


@ALL_MODES
@on_worker(0)
def test_autocast_around_calls_does_not_reach_backward(mode):
    def program(session):
        x = leaf("x", 2, 3, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call("w1", features.product_in_backward, x * 2)
        session.backward(y.sum())

    found = check(program, mode)
    assert found.notes["dtype in backward"] == [torch.float32]


# -------------------------------------------------------------------------- saved tensors


@ALL_MODES
@on_worker(0)
def test_saved_tensors_hooks_around_calls(mode):
    # They see what the program saves here, and nothing of the calls.
    def program(session):
        packed, unpacked = [], []

        def pack(tensor):
            packed.append(tuple(tensor.shape))
            return tensor.detach().clone()

        def unpack(tensor):
            unpacked.append(tuple(tensor.shape))
            return tensor

        x = leaf("x", 2, 3)
        around = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        is_local = session.mode == features.LOCAL
        with around:
            y = (x.sin() * numbers("g", 2, 3)).exp()
        # In one process they would see what the function saves.
        with contextlib.nullcontext() if is_local else around:
            z = call("w1", features.tanh_layer, y, "a")
        session.backward(z.sum())
        note("packed", sorted(packed))
        note("unpacked", sorted(unpacked))

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_save_on_cpu_around_calls(mode):
    def program(session):
        x = leaf("x", 2, 3)
        with torch.autograd.graph.save_on_cpu():
            y = call("w1", features.tanh_layer, x.sin(), "a")
            z = call("w2", features.scale, y.exp(), "b")
            session.backward((z * y).sum())

    check(program, mode)
