"""Calls between workers: whom one can call, what one can call, and what travels."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import api_functions as api
import functions
from cluster import Cluster
from gradwire import rpc
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

SMALL, BIG = 8, 1 << 18  # elements; of four bytes each, BIG goes through shared memory
SIZES = pytest.mark.parametrize("size", [SMALL, 40_000, BIG])


@pytest.fixture(scope="module")
def tcp_cluster():
    """Two workers that use TCP although they are on one host."""
    options = {"transports": ("tcp",), "advertise_address": "127.0.0.1"}
    with Cluster(2, options, secret="open sesame") as made:
        yield made


@pytest.fixture(params=["unix", "tcp"])
def both(request, cluster, tcp_cluster):
    """A cluster on each of the transports."""
    return cluster if request.param == "unix" else tcp_cluster


# ------------------------------------------------------------------------- destinations


@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)], ids=repr)
@on_worker(0)
def test_destination_may_be_name_rank_or_info(to):
    assert rpc.rpc_sync(to, api.worker_name) == "w1"


@pytest.mark.parametrize("to", ["w0", 0], ids=repr)
@on_worker(0)
def test_destination_may_be_oneself(to):
    assert rpc.rpc_sync(to, api.worker_name) == "w0"
    assert rpc.rpc_async(to, functions.get_pid).wait() == functions.get_pid()


@on_worker(0)
def test_call_to_oneself_gives_a_copy():
    value = [torch.zeros(SMALL)]

    result = rpc.rpc_sync("w0", functions.echo, args=(value,))
    result[0].fill_(1)

    assert result is not value
    assert torch.equal(value[0], torch.zeros(SMALL))


@on_worker(0)
def test_call_to_a_subclass_of_str_works():
    class Name(str):
        pass

    assert rpc.rpc_sync(Name("w1"), api.worker_name) == "w1"


@on_worker(0)
def test_call_passes_through_several_workers():
    route = ["w1", "w2", "w0", "w3"]

    assert rpc.rpc_sync(route[0], api.run_along, args=(route[1:], api.worker_name)) == (
        "w3"
    )


@on_worker(0)
def test_calls_from_many_threads_get_their_own_answers():
    wrong = []

    def work(number):
        for i in range(40):
            value = (number, i)
            if rpc.rpc_sync(f"w{i % 4}", functions.echo, args=(value,)) != value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(api.LIMIT_S)

    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# ---------------------------------------------------------------------------- arguments


@on_worker(0)
def test_args_and_kwargs_arrive():
    result = rpc.rpc_sync("w1", functions.echo, args=(1, "two"), kwargs={"three": [3]})

    assert result == ((1, "two"), {"three": [3]})


@on_worker(0)
def test_args_may_be_left_out():
    assert rpc.rpc_sync("w1", functions.echo) == ((), {})


@on_worker(0)
def test_args_may_be_a_list():
    args: Any = [1, 2]

    assert rpc.rpc_sync("w1", functions.add, args=args) == 3


@on_worker(0)
def test_kwargs_alone_arrive():
    assert rpc.rpc_sync("w1", functions.add, kwargs={"a": 1, "b": 2}) == 3


@on_worker(0)
def test_rpc_async_takes_the_same_arguments():
    future = rpc.rpc_async(1, functions.echo, args=(1,), kwargs={"b": 2}, timeout=30)

    assert future.wait() == ((1,), {"b": 2})


# ------------------------------------------------------------------------------ targets

X, Y = torch.tensor([[1.0, -2.0], [3.0, -4.0]]), torch.tensor([[2.0, 2.0], [0.5, 1.0]])

OPERATORS = {
    "torch.add": (torch.add, (X, Y), {"alpha": 3}),
    "torch.matmul": (torch.matmul, (X, Y), {}),
    "torch.relu": (torch.relu, (X,), {}),
    "F.relu": (F.relu, (X,), {}),
    "F.linear": (F.linear, (X, Y), {}),
    "F.softmax": (F.softmax, (X,), {"dim": 1}),
    "torch.linalg.norm": (torch.linalg.norm, (X,), {}),
    "torch.special.exp2": (torch.special.exp2, (X,), {}),
    "torch.fft.fft": (torch.fft.fft, (X,), {}),
    "ops overload": (torch.ops.aten.mul.Tensor, (X, Y), {}),
    "ops packet": (torch.ops.aten.mul, (X, Y), {}),
    "method of Tensor": (torch.Tensor.sub, (X, Y), {}),
    "bound method of a tensor": (X.add, (Y,), {}),
    "factory": (torch.full, ((2, 2), 7.0), {}),
}


@pytest.mark.parametrize("name", OPERATORS)
@on_worker(0)
def test_torch_operator_can_be_called(name):
    function, args, kwargs = OPERATORS[name]

    result = rpc.rpc_sync("w1", function, args=args, kwargs=kwargs)

    torch.testing.assert_close(result, function(*args, **kwargs), rtol=0, atol=0)


CALLABLES: dict[str, tuple[Any, ...]] = {
    "builtin": (max, (1, 2), 2),
    "function of a C module": (math.sqrt, (9,), 3.0),
    "operator": (operator.add, (1, 2), 3),
    "builtin class": (list, ("ab",), ["a", "b"]),
    "method of a builtin class": (str.upper, ("a",), "A"),
    "class": (api.Point, (1, 2), api.Point(1, 2)),
    "bound method": (api.Point(1, 2).shifted, (1,), api.Point(2, 2)),
    "plain method": (api.Point.shifted, (api.Point(1, 2), 1), api.Point(2, 2)),
    "class method": (api.Point.origin, (), api.Point(0, 0)),
    "static method": (
        api.Point.distance,
        (api.Point(1, 2), api.Point(3, 3)),
        3,
    ),
    "callable object": (api.Point(1, 2), (3,), api.Point(3, 6)),
    "partial": (functools.partial(functions.add, 1), (2,), 3),
}


@pytest.mark.parametrize("name", CALLABLES)
@on_worker(0)
def test_callable_can_be_called(name):
    function, args, expected = CALLABLES[name]

    assert rpc.rpc_sync("w1", function, args=args) == expected


@on_worker(0)
def test_module_can_be_called():
    module = torch.nn.Linear(3, 2)
    x = torch.ones(1, 3)

    result = rpc.rpc_sync("w1", module, args=(x,))

    torch.testing.assert_close(result, module(x))


def define_in_main(text):
    exec(text, vars(sys.modules["__main__"]))


def call_main(to, name, *args):
    function = getattr(sys.modules["__main__"], name)
    assert function.__module__ == "__main__"
    return rpc.rpc_sync(to, function, args=args)


def test_function_of_the_main_module_is_the_callees_own(cluster):
    for rank, sign in [(0, "-"), (1, "+")]:
        cluster.run(rank, define_in_main, f"def signed(x): return '{sign}' + x")

    assert cluster.run(0, call_main, "w1", "signed", "x") == "+x"


def test_class_of_the_main_module_travels(cluster):
    text = "class Box:\n    def __init__(self, x): self.x = x"
    for rank in (0, 1):
        cluster.run(rank, define_in_main, text)

    assert cluster.run(0, fetch_from_main_class, "w1") == 5


def fetch_from_main_class(to):
    return call_main(to, "Box", 5).x


# ------------------------------------------------------------------------------ tensors


def make_tensor(kind):
    """One tensor of each sort, by name."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    dtype = getattr(torch, kind, None)
    if isinstance(dtype, torch.dtype):
        return base.to(dtype)
    return {
        "transposed": base.t(),
        "every second": base[:, ::2],
        "with offset": base[1:, 2:],
        "expanded": torch.arange(3.0).expand(5, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "conjugated": torch.complex(base, -base).conj(),
        "negated": torch.complex(base, -base).conj().imag,
        "big transposed": torch.arange(BIG).reshape(512, 512).t(),
        "big": torch.arange(BIG),
        "leaf": base.clone().requires_grad_(),
        "sparse": (base % 3).to_sparse(),
        "sparse csr": (base % 3).to_sparse_csr(),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
    }[kind]


KINDS = [
    *["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"],
    *["bool", "uint8", "int8", "int16", "int64"],
    *["transposed", "every second", "with offset", "expanded", "scalar", "empty"],
    *["conjugated", "negated", "big", "big transposed", "leaf", "sparse"],
    *["sparse csr", "nan"],
]


def assert_equal(found, expected):
    assert found.dtype is expected.dtype
    assert found.layout is expected.layout
    assert found.shape == expected.shape
    assert found.requires_grad == expected.requires_grad
    if expected.layout is not torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    assert torch.equal(bits(found), bits(expected))


def bits(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@on_worker(0)
def test_tensor_survives_the_round_trip(kind):
    tensor = make_tensor(kind)

    assert_equal(rpc.rpc_sync("w1", functions.echo, args=(tensor,)), tensor)


@on_worker(0, fixture="both")
def test_tensors_inside_a_structure_arrive():
    value = {"a": [torch.ones(2), (torch.zeros(BIG), "text")], "b": {1: torch.eye(3)}}

    result = rpc.rpc_sync("w1", functions.echo, args=(value,))

    assert torch.equal(result["a"][0], torch.ones(2))
    assert torch.equal(result["a"][1][0], torch.zeros(BIG))
    assert result["a"][1][1] == "text"
    assert torch.equal(result["b"][1], torch.eye(3))


@on_worker(0)
def test_big_tensor_goes_through_shared_memory():
    before = rpc.get_debug_info()["bytes_sent"]

    result = rpc.rpc_sync("w1", functions.echo, args=(torch.ones(BIG),))

    info = rpc.get_debug_info()
    assert api.total(result) == BIG
    assert info["transports"]["w1"] == "unix"
    assert info["segments"] >= 1
    assert info["segments_borrowed"] >= 1  # the result lives on memory of w1
    assert info["bytes_sent"] - before < result.nbytes // 10


@on_worker(0, fixture="tcp_cluster")
def test_big_tensor_goes_through_the_stream_over_tcp():
    before = rpc.get_debug_info()["bytes_sent"]

    result = rpc.rpc_sync("w1", functions.echo, args=(torch.ones(BIG),))

    info = rpc.get_debug_info()
    assert api.total(result) == BIG
    assert info["transports"]["w1"] == "tcp"
    assert info["bytes_sent"] - before > result.nbytes


@SIZES
@on_worker(0, fixture="both")
def test_argument_has_a_storage_of_its_own(size):
    assert (
        rpc.rpc_sync("w1", api.describe_tensor, args=(torch.ones(size),))
        == api.ORDINARY
    )


@SIZES
@on_worker(0, fixture="both")
def test_result_has_a_storage_of_its_own(size):
    result = rpc.rpc_sync("w1", torch.ones, args=(size,))

    assert api.describe_tensor(result) == api.ORDINARY


@SIZES
@on_worker(0, fixture="both")
def test_argument_can_be_written_to(size):
    tensor = torch.ones(size)

    result = rpc.rpc_sync("w1", api.fill, args=(tensor, 2))

    assert api.total(result) == 2 * size
    assert api.total(tensor) == size  # the caller's own is another one


@SIZES
@on_worker(0, fixture="both")
def test_result_can_be_written_to(size):
    rpc.rpc_sync("w1", api.keep, args=("result", torch.ones(size)))
    first = rpc.rpc_sync("w1", api.take_kept, args=("result",))

    first.mul_(3)

    assert api.total(first) == 3 * size


@SIZES
@on_worker(0, fixture="both")
def test_argument_that_is_kept_is_independent_of_the_callers(size):
    tensor = torch.ones(size)
    rpc.rpc_sync("w1", api.keep, args=("kept", tensor))

    tensor.fill_(7)
    for _ in range(3):  # would use the memory again, if it were free
        rpc.rpc_sync("w1", functions.echo, args=(tensor,))

    kept = rpc.rpc_sync("w1", api.take_kept, args=("kept",))
    assert api.total(kept) == size


@SIZES
@on_worker(0, fixture="both")
def test_argument_can_be_changed_in_place_under_autograd(size):
    result, gradient = rpc.rpc_sync(
        "w1", api.scale_in_place, args=(torch.ones(size), 2.0)
    )

    assert api.total(result) == 2 * size
    assert gradient == size


@SIZES
@on_worker(0, fixture="both")
def test_result_can_be_changed_in_place_under_autograd(size):
    result = rpc.rpc_sync("w1", torch.ones, args=(size,))

    scaled, gradient = api.scale_in_place(result, 2.0)

    assert api.total(scaled) == 2 * size
    assert gradient == size


@SIZES
@on_worker(0, fixture="both")
def test_argument_may_be_changed_as_soon_as_rpc_async_returns(size):
    tensor = torch.empty(size)
    futures = []

    for value in range(12):
        tensor.fill_(value)
        futures.append(rpc.rpc_async("w1", api.total, args=(tensor,)))
    tensor.fill_(-1)

    assert [future.wait() for future in futures] == [n * size for n in range(12)]


@on_worker(0, fixture="both")
def test_views_of_one_storage_arrive_sharing_it():
    base = torch.zeros(BIG)

    first, second = rpc.rpc_sync("w1", functions.echo, args=(base, base[10:20]))[0]
    first.fill_(1)

    assert api.total(second) == 10


@on_worker(0)
def test_parameters_of_a_module_arrive_as_parameters():
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    expected = {"weight": ("Parameter", True), "bias": ("Parameter", False)}

    assert rpc.rpc_sync("w1", api.describe_module, args=(module,)) == expected
    copy = rpc.rpc_sync("w1", functions.echo, args=(module,))
    assert api.describe_module(copy) == expected
    assert torch.equal(copy.weight, module.weight)


@on_worker(0)
def test_quantised_tensor_is_refused_with_a_clear_error():
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

    with pytest.raises(Exception, match=r"quanti[sz]ed") as caught:
        rpc.rpc_sync("w1", functions.echo, args=(tensor,))

    assert type(caught.value).__name__ == "EncodeError"


# ------------------------------------------------------------ modes of the calling thread

MODES: dict[str, Any] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "meta device": lambda: torch.device("meta"),
    "none": contextlib.nullcontext,
}


@SIZES
@pytest.mark.parametrize("mode", MODES)
@on_worker(0)
def test_result_is_an_ordinary_tensor_whatever_the_callers_mode(mode, size):
    with MODES[mode]():
        results = [
            rpc.rpc_sync("w1", torch.ones, args=(size,)),
            rpc.rpc_async("w1", torch.ones, args=(size,)).wait(),
        ]

    for result in results:
        assert api.describe_tensor(result) == api.ORDINARY
        result.requires_grad_()
        (result * 2).sum().backward()
        assert result.grad is not None
        assert api.total(result.grad) == 2 * size


@pytest.mark.parametrize("mode", MODES)
@on_worker(0)
def test_mode_of_the_caller_does_not_reach_the_callee(mode):
    tensor = torch.ones(SMALL)

    with MODES[mode]():
        description = rpc.rpc_sync("w1", api.describe_tensor, args=(tensor,))
        enabled = rpc.rpc_sync("w1", api.is_grad_enabled)

    assert description == api.ORDINARY
    assert enabled is True


@on_worker(0)
def test_inference_tensor_arrives_as_an_ordinary_one():
    with torch.inference_mode():
        tensor = torch.ones(SMALL)

    assert rpc.rpc_sync("w1", api.describe_tensor, args=(tensor,)) == (api.ORDINARY)


@on_worker(0)
def test_handler_that_switches_grad_off_does_not_change_the_next_one():
    for _ in range(20):
        rpc.rpc_sync("w1", api.switch_grad_off)
        assert rpc.rpc_sync("w1", api.is_grad_enabled) is True
        with pytest.raises(ValueError, match="with grad mode off"):
            rpc.rpc_sync("w1", api.switch_grad_off_and_fail)
        assert rpc.rpc_sync("w1", api.is_grad_enabled) is True
