"""Features of torch's autograd, used on either side of a call, against one process."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autograd_features as features
from autograd_features import (
    DICT,
    IN_CONTEXT,
    INTO_GRAD,
    MODES,
    call,
    check,
    leaf,
    note,
    numbers,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

ALL_MODES = pytest.mark.parametrize("mode", MODES)
FEW_MODES = pytest.mark.parametrize("mode", features.TWO_MODES)
GRAD_MODES = pytest.mark.parametrize("mode", INTO_GRAD)
CONTEXT_MODES = pytest.mark.parametrize("mode", IN_CONTEXT)


# ---------------------------------------------------------------- in-place operations


@ALL_MODES
@on_worker(0)
def test_argument_changed_in_place_on_callee(mode):
    def program(session):
        x = leaf("x", 3, 2)
        y = call("w1", features.change_in_place, x * 2, "a")
        session.backward((y * x).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_leaf_argument_changed_in_place_on_callee(mode):
    # What arrives is no leaf, so that torch allows it.
    def program(session):
        x = leaf("x", 3, 2)
        if session.mode == features.LOCAL:
            y = features.change_in_place(x.clone(), "a")
        else:
            y = call("w1", features.change_in_place, x, "a")
        session.backward(y.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_result_changed_in_place_on_caller(mode):
    def program(session):
        y = call("w1", features.tanh_layer, leaf("x", 2, 3), "a")
        y.mul_(leaf("factor", 2, 3))
        y[0, 1:] = 0.5
        y.t()[2].exp_()
        session.backward((y * y).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_constant_overwritten_with_tracked_values(mode):
    # The target arrives without a history and gets one from the source.
    def program(session):
        target = call("w1", features.overwrite, numbers("target", 3), leaf("x", 3))
        target[0] *= 2
        session.backward((target * target).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_sent_tensor_changed_afterwards(mode):
    def program(session):
        z = leaf("x", 3) * 2
        y = call("w1", features.scale, z, "a")
        z.mul_(5).sin_()
        session.backward((y + z).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_received_tensor_detached_in_place(mode):
    def program(session):
        y = call("w1", features.scale, leaf("x", 3), "a")
        z = y * 2
        y.detach_()
        session.backward((z * y).sum())

    check(program, mode)


@pytest.mark.parametrize("where", ["caller", "callee"])
@ALL_MODES
@on_worker(0)
def test_change_of_a_saved_tensor_is_found(mode, where):
    def change(x):
        y = call("w1", features.scale, x, "a")
        return features.square_then_change(y)

    def program(session):
        x = leaf("x", 3)
        square = features.square_then_change
        y = change(x) if where == "caller" else call("w1", square, x)
        text = features.error_text(RuntimeError, session.backward, y.sum())
        assert "modified by an inplace operation" in text
        if where == "callee" and session.mode != features.LOCAL:
            assert "w1" in text

    check(program, mode)


# ------------------------------------------------------------------------------- views


@FEW_MODES
@on_worker(0)
def test_views_sent(mode):
    def program(session):
        x = leaf("x", 4, 4)
        base = x.sin()
        views = [base[1], base.t()[2], base[:, ::2], base.diagonal(), base.view(2, 8)]
        parts = [call("w1", features.scale, v, f"a{i}") for i, v in enumerate(views)]
        session.backward(torch.stack([part.sum() for part in parts]).prod())

    check(program, mode, exact=False)


@pytest.mark.parametrize("of", ["leaf", "computed"])
@ALL_MODES
@on_worker(0)
def test_two_views_of_one_storage_sent(mode, of):
    def program(session):
        x = leaf("x", 4)
        base = x if of == "leaf" else x * 2
        first, second = base[:2], base[1:3]
        session.backward(call("w1", features.weigh, first, second, "a"))

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_two_leaves_of_one_storage_sent(mode):
    def program(session):
        memory = numbers("memory", 4)
        first = leaf("first", data=memory[:2])
        second = leaf("second", data=memory[2:])
        session.backward(call("w1", features.weigh, first, second, "a"))

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_views_returned(mode):
    def program(session):
        parts = call("w1", features.rows, leaf("x", 3, 3), "a")
        parts[0].mul_(2)
        note("strides", [part.stride() for part in parts[:2]])
        session.backward(sum((part * part).sum() for part in parts))

    check(program, mode, exact=False)


@ALL_MODES
@on_worker(0)
def test_tensor_and_its_view_returned_share_no_memory(mode):
    def program(session):
        whole, part = call("w1", features.whole_and_part, leaf("x", 3))
        part.zero_()
        note("whole", whole)
        session.backward((whole * whole).sum() + part.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_views_of_received_tensors(mode):
    def program(session):
        y = call("w1", features.scale, leaf("x", 2, 3), "a")
        pieces = [y[0], y.view(-1)[2:5], y.expand(2, 2, 3)]
        more = call("w2", features.scale, pieces[1], "b")
        session.backward(pieces[0].prod() + more.sum() + pieces[2].exp().sum())

    check(program, mode, exact=False)


# ---------------------------------------------------------------------- sparse gradients


@ALL_MODES
@on_worker(0)
def test_sparse_gradient_on_callee(mode):
    def program(session):
        indices = torch.tensor([0, 3, 3])
        y = call("w1", features.embed, indices, "table")
        session.backward((y * leaf("x", 3, 3)).sum())

    found = check(program, mode)
    gradient = found.gradients["table"]
    assert gradient is not None and gradient.is_sparse


@ALL_MODES
@on_worker(0)
def test_sparse_gradient_on_caller(mode):
    def program(session):
        rows = features.embed(torch.tensor([[1, 4], [1, 1]]), "table")
        session.backward(call("w1", features.scale, rows, "a").sum())

    found = check(program, mode)
    gradient = found.gradients["table"]
    assert gradient is not None and gradient.is_sparse


@ALL_MODES
@on_worker(0)
def test_sparse_gradient_travels(mode):
    # The table itself is sent, so that its gradient comes back sparse.
    def program(session):
        y = call("w1", features.embed_in, torch.tensor([2, 2, 0]), leaf("table", 5, 3))
        session.backward((y * y).sum())

    found = check(program, mode)
    gradient = found.gradients["table"]
    assert gradient is not None and gradient.is_sparse


@pytest.mark.parametrize("where", ["w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_sparse_and_dense_gradient_in_one_pass(mode, where):
    def program(session):
        y = call(where, features.embed, torch.tensor([0, 2]), "table", dense=True)
        session.backward((y * leaf("x", 2, 3)).sum())

    check(program, mode)


@pytest.mark.parametrize("order", ["sd", "ds", "ss", "sds", "dsd", "dss"])
@FEW_MODES
@on_worker(0)
def test_sparse_and_dense_gradients_of_several_passes(mode, order):
    def program(session):
        x = leaf("x", 3)
        for number, kind in enumerate(order):
            if kind == "s":
                indices = torch.tensor([number, 3])
                y = call("w1", features.embed, indices, "table") * x
            else:
                y = call("w1", features.sum_of_table, "table") * x
            session.backward(y.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_sparse_gradient_is_added_to_what_the_wire_brings(mode):
    # One leaf, sent twice: one gradient comes back sparse, one dense.
    def program(session):
        table = leaf("table", 5, 3)
        y = call("w1", features.embed_in, torch.tensor([4, 0]), table)
        z = call("w2", features.scale, table, "a")
        session.backward(y.sum() + z.sum())

    check(program, mode)


# --------------------------------------------------------------- parameters and modules


@ALL_MODES
@on_worker(0)
def test_parameters_as_arguments(mode):
    def program(session):
        weight = leaf("weight", 3, 2, parameter=True)
        bias = leaf("bias", 2, parameter=True)
        y = call("w1", features.use_parameter, numbers("x", 4, 3), weight, bias)
        session.backward((y * bias).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_parameter_arrives_with_its_history(mode):
    def program(session):
        weight = leaf("weight", 3, parameter=True)
        frozen = torch.nn.Parameter(numbers("frozen", 3), requires_grad=False)
        note("here", call("w1", features.describe, weight, frozen, weight * 2))

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_parameters_of_a_module_arrive_as_leaves_of_the_copy(mode):
    def program(session):
        module = features.make_linear("ours", 3, 2)
        for key, parameter in module.named_parameters():
            features.adopt(f"ours.{key}", parameter)
        y = call("w1", features.run_module, module, leaf("x", 2, 3), "copy")
        session.backward((y * y).sum())

    found = check(program, mode)
    assert found.gradients["ours.weight"] is None
    assert found.gradients["copy.weight"] is not None


@ALL_MODES
@on_worker(0)
def test_module_returned(mode):
    def program(session):
        module = call("w1", features.make_linear, "theirs", 3, 2)
        y = features.run_module(module, leaf("x", 2, 3), "copy")
        session.backward(call("w2", features.scale, y, "a").sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_parameter_returned(mode):
    def program(session):
        weight = call("w1", features.get_parameter, "weight", 3)
        note("leaf", features.describe(weight + 0))
        session.backward((weight * weight * leaf("x", 3)).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_parameter_returned_twice_and_passed_on(mode):
    def program(session):
        got = call("w1", features.get_twice, "weight", 3)
        assert got["once"] is got["again"]
        y = call("w2", features.scale, got["once"], "a")
        session.backward((y * got["again"]).sum())

    check(program, mode)


# ----------------------------------------------------------------------- checkpointing


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


# ---------------------------------------------------------------------------- compiled


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


# ------------------------------------------------------------------- grad mode and modes


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


# --------------------------------------------------------------------------- autocast


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


# ------------------------------------------------------------------------ saved tensors


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


# ----------------------------------------------------------------- custom Functions


@pytest.mark.parametrize("kind", ["triple", "sparing"])
@pytest.mark.parametrize("where", ["w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_custom_function(mode, where, kind):
    def program(session):
        first, second = call(where, getattr(features, kind), leaf("x", 3).sin())
        y = call("w2", features.scale, first, "a")
        session.backward((y * second).sum())

    check(program, mode)


@pytest.mark.parametrize("kind", ["triple", "sparing"])
@pytest.mark.parametrize("where", ["w0", "w1"])
@FEW_MODES
@on_worker(0)
def test_custom_function_with_an_unused_output(mode, where, kind):
    def program(session):
        _, second = call(where, getattr(features, kind), leaf("x", 3).sin())
        session.backward(second.sum())

    found = check(program, mode)
    assert found.notes[kind] == [[kind == "sparing", False]]


@pytest.mark.parametrize("kind", ["triple", "sparing"])
@ALL_MODES
@on_worker(0)
def test_custom_function_behind_an_unused_call(mode, kind):
    # The documented difference: a pass over a context runs also what its loss does not
    # reach, with missing gradients, which a Function may turn into zeros.
    def program(session):
        call("w1", getattr(features, kind), leaf("x", 3) * 1)
        session.backward(call("w1", features.scale, leaf("used", 3), "a").sum())

    found = features.run_on_workers(program, mode).gradients
    features.settle()
    features.assert_same(found["used"], numbers("a", 3), "used")
    gets_zeros = mode != features.BARE and kind == "triple"
    zeros = torch.zeros(3, dtype=torch.float64)
    features.assert_same(found["x"], zeros if gets_zeros else None, "unused")


@pytest.mark.parametrize("where", ["w0", "w1"])
@ALL_MODES
@on_worker(0)
def test_calls_inside_forward_and_backward_of_a_function(mode, where):
    def program(session):
        y = call(where, features.by_call, leaf("x", 3) * 2, "w2")
        session.backward((call("w1", features.scale, y, "a") * y).sum())

    check(program, mode)


# ---------------------------------------------------------------- shapes, sizes and types


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128],
    ids=str,
)
@FEW_MODES
@on_worker(0)
def test_dtypes(mode, dtype):
    def program(session):
        y = call("w1", features.scale, leaf("x", 3, dtype=dtype), "a")
        y = y * numbers("g", 3, dtype=dtype)
        session.backward(torch.view_as_real(y).sum() if dtype.is_complex else y.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_complex_conjugates_and_parts(mode):
    def program(session):
        x = leaf("x", 3, dtype=torch.complex128)
        y = call("w1", features.scale, x.conj(), "a")
        z = call("w1", features.scale, y.imag, "b")
        session.backward((z * call("w2", features.scale, y.real, "c")).sum())

    check(program, mode)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)], ids=str)
@FEW_MODES
@on_worker(0)
def test_shapes(mode, shape):
    def program(session):
        x = leaf("x", *shape)
        y = call("w1", features.scale, x * 2, "a")
        z = call("w1", features.relay, "w2", features.scale, y, "b")
        session.backward((z * y).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_tensors_that_go_through_shared_memory(mode):
    def program(session):
        x = leaf("x", 1 << 17)  # 1 MiB
        y = call("w1", features.scale, x * 2, "a")
        z = call("w1", features.relay, "w2", features.scale, y, "b")
        z.mul_(2)
        session.backward((z * y).sum())

    check(program, mode)


@pytest.mark.parametrize("size", [3, 1 << 17])
@ALL_MODES
@on_worker(0)
def test_expanded_tensors_and_gradients(mode, size):
    # The gradient of a sum is expanded too.
    def program(session):
        x = leaf("x", 1)
        y = call("w1", features.scale, x.expand(size), "a")
        z = call("w1", features.scale, leaf("y", size), "b")
        session.backward(y.sum() + z.sum())

    check(program, mode)


# ------------------------------------------------- gradients that do not go to leaves


@pytest.mark.parametrize("retain_graph", [False, True])
@ALL_MODES
@on_worker(0)
def test_gradient_with_respect_to_a_received_tensor(mode, retain_graph):
    # The engine stops there; whoever sent it must not wait.
    def program(session):
        x = leaf("x", 3)
        y = call("w1", features.scale, x * 2, "a")
        z = call("w1", features.scale, y.sin(), "b")
        (gradient,) = session.grad(z.sum(), y, retain_graph=retain_graph)
        note("gradient", gradient)
        if not retain_graph:
            z = call("w1", features.scale, x * 2, "c")
        session.backward(z.sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_gradient_with_respect_to_sent_and_to_other_tensors(mode):
    def program(session):
        x = leaf("x", 3)
        sent = x * 2
        y = call("w1", features.relay, "w2", features.scale, sent, "a")
        between = y * sent
        z = call("w1", features.scale, between, "b")
        for gradient in session.grad(z.sum(), [sent, between, y, x]):
            note("gradient", gradient)

    check(program, mode)


@pytest.mark.parametrize("into", ["leaf", "received", "sent"])
@pytest.mark.parametrize("mode", [features.BARE, features.PLAIN])
@on_worker(0)
def test_backward_into_chosen_tensors(mode, into):
    def program(session):
        x, other = leaf("x", 3), leaf("other", 3)
        sent = x * other
        y = call("w1", features.scale, sent, "a")
        z = call("w1", features.scale, y, "b")
        target = {"leaf": x, "received": y, "sent": sent}[into]
        if into != "leaf":
            target.retain_grad()
        torch.autograd.backward(z.sum(), inputs=[target])
        note("gradient", target.grad)

    found = check(program, mode)
    assert found.gradients["other"] is None and found.gradients["a"] is None


@pytest.mark.parametrize("mode", [features.BARE, features.PLAIN])
@on_worker(0)
def test_gradient_edges_as_roots_and_inputs(mode):
    def program(session):
        x = leaf("x", 3)
        y = call("w1", features.scale, x * 2, "a")
        z = call("w2", features.scale, y, "b")
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in (y, z)]
        note(
            "gradient",
            torch.autograd.grad(z.sum(), [edges[0]], retain_graph=True)[0],
        )
        torch.autograd.backward([edges[1]], [numbers("seed", 3)])

    check(program, mode)


@pytest.mark.parametrize("kind", ["coo", "csr"])
@ALL_MODES
@on_worker(0)
def test_sparse_leaf_is_sent(mode, kind):
    def program(session):
        dense = torch.eye(3, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch is not done yet
            data = dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()
            y = call("w1", torch.mv, leaf("x", data=data), numbers("v", 3))
        session.backward((y * y).sum())

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_engine_without_threads(mode):
    def program(session):
        with torch.autograd.set_multithreading_enabled(False):
            y = call("w1", features.relay, "w2", features.scale, leaf("x", 3), "a")
            session.backward(call("w1", features.scale, y, "b").sum())

    check(program, mode)


@FEW_MODES
@on_worker(0)
def test_saved_tensors_may_be_changed_where_torch_allows_it(mode):
    def program(session):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = call("w1", features.scale, leaf("x", 3), "a")
            z = y * y
            y.mul_(3)
            session.backward((z + y).sum())

    check(program, mode, has_cycles=True)


@ALL_MODES
@on_worker(0)
def test_handler_runs_backwards_of_its_own(mode):
    def program(session):
        y = call("w1", features.descend_inside, leaf("x", 3) * 2, "a")
        session.backward(y.sum())

    check(program, mode)


@pytest.mark.parametrize("route", ["one hop", "there and back"])
@ALL_MODES
@on_worker(0)
def test_received_tensor_is_the_root(mode, route):
    # With nothing in between, the node of the message is the first that runs.
    def program(session):
        x = leaf("x", 3)
        for number in range(5):
            if route == "one hop":
                y = call("w1", features.scale, x, f"a{number}")
            else:
                y = call("w1", features.relay, "w0", features.scale, x, f"a{number}")
            note("gradient", session.grad(y, x, numbers("v", 3), retain_graph=True)[0])
            session.backward(y, numbers("w", 3))

    check(program, mode, exact=False)


# ------------------------------------------------------------------ memory of gradients


@pytest.mark.parametrize("num_passes", [1, 2])
@ALL_MODES
@on_worker(0)
def test_gradients_of_several_leaves_do_not_share_memory(mode, num_passes):
    # Torch hands one tensor on to all terms of a sum.
    def program(session):
        x = features.add_leaf(leaf("x", 3), "y")
        z = call("w1", features.add_leaf, x, "a", "b")
        for _ in range(num_passes):
            session.backward((z * 3).sum(), retain_graph=True)

    check(program, mode)


@ALL_MODES
@on_worker(0)
def test_gradients_have_the_layout_of_their_leaves(mode):
    def program(session):
        turned = leaf("turned", data=numbers("turned", 4, 3).t())
        image = numbers("image", 2, 3, 4, 5).to(memory_format=torch.channels_last)
        image = leaf("image", data=image)
        y = call("w1", features.scale, turned, "a").sum()
        z = call("w1", features.scale, image * 2, "b").sum()
        session.backward(y + z)

    found = check(program, mode)
    assert found.strides["turned"] == (1, 3)
    assert found.strides["image"] == (60, 1, 15, 3)
