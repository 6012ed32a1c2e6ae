"""Features of torch's autograd, used on either side of a call, against one process."""

from __future__ import annotations

import warnings

import pytest
import torch

import autograd_features as features
from autograd_features import (
    ALL_MODES,
    FEW_MODES,
    call,
    check,
    leaf,
    note,
    numbers,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


# -------------------------------------------------------------------- in-place operations


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


# ---------------------------------------------------------------------------------- views


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


# ----------------------------------------------------------------------- sparse gradients


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


# ----------------------------------------------------------------- parameters and modules


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


# ----------------------------------------------------------------------- custom Functions


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


# ----------------------------------------------------- gradients that do not go to leaves


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


# -------------------------------------------------------------------- memory of gradients


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
