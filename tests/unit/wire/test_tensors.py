from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.errors import EncodeError
from gradwire.wire import (
    INLINE_BYTES,
    PICKLE,
    Reply,
    clean_thread_state,
    decode_control,
    decode_value,
    encode,
    thread_state_is_clean,
)
from gradwire.wire._dtypes import CODE_OF_DTYPE
from loopback import assert_same_tensor, decode, receive, roundtrip

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta:UserWarning",
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:.*quantiz:",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
)

BIG = INLINE_BYTES  # float32 elements: four times what fits inline


class CountsCalls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class RefusesAll(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was dispatched")


def test_all_dtypes_but_quantised_ones_have_codes():
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}

    missing = {str(d) for d in dtypes - CODE_OF_DTYPE.keys()}

    assert missing == {
        "torch.qint8",
        "torch.quint8",
        "torch.qint32",
        "torch.quint4x2",
        "torch.quint2x4",
    }


@pytest.mark.parametrize("num", [6, BIG])
@pytest.mark.parametrize("dtype", CODE_OF_DTYPE, ids=str)
def test_every_dtype_survives(dtype, num):
    tensor = torch.empty(num, dtype=dtype)
    tensor.untyped_storage().copy_(
        torch.randint(0, 2, (tensor.nbytes,), dtype=torch.uint8).untyped_storage()
    )

    assert_same_tensor(roundtrip((tensor,))[0], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.empty(2, 0, 3).transpose(0, 2),
        torch.ones(1, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0).as_strided((1, 3), (99, 2)),
        torch.tensor(1.0).expand(1000, 1000),
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0)[2:7:2],
        torch.arange(24.0).reshape(1, 1, 4, 6).to(memory_format=torch.channels_last),
        torch.arange(4.0 * BIG).reshape(4, BIG).t(),
    ],
    ids=lambda t: f"{tuple(t.shape)}x{t.stride()}",
)
def test_strides_survive(tensor):
    found = roundtrip((tensor,))[0]

    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)
    assert not found._is_view()


def test_expanded_tensor_sends_only_its_memory():
    assert encode(Reply(1), torch.ones(1).expand(1 << 40)).nbytes < 200


def test_slice_sends_only_its_span():
    tensor = torch.arange(1000.0)[500:510]

    found = roundtrip(tensor)

    assert found.untyped_storage().nbytes() == 40
    assert found.storage_offset() == 0


def test_view_with_big_holes_is_sent_compact():
    column = torch.randn(4096, 8)[:, 0]

    outgoing = encode(Reply(1), column)
    found, _ = decode(outgoing)

    assert torch.equal(found, column)
    assert found.is_contiguous()
    assert outgoing.nbytes < column.nbytes + 200
    assert outgoing.tensors[0] is column


def test_view_with_small_holes_keeps_its_strides():
    column = torch.randn(4096, 2)[:, 0]

    assert roundtrip(column).stride() == (2,)


def test_large_tensor_is_a_buffer_of_its_own_memory():
    tensor = torch.randn(BIG)

    outgoing = encode(Reply(1), (tensor,))

    (buffer,) = outgoing.buffers
    assert (buffer.address, buffer.nbytes) == (tensor.data_ptr(), tensor.nbytes)
    assert buffer.owner is tensor
    assert outgoing.nbytes == len(outgoing.head) + tensor.nbytes


def test_received_buffer_is_taken_over_without_a_copy():
    tensor = torch.randn(BIG)
    outgoing = encode(Reply(1), (tensor,))
    storages = receive(outgoing.buffers)
    message, _ = decode_control(outgoing.head)
    (found,), _ = decode_value(message, outgoing.head, storages, serializer=PICKLE)

    assert found.data_ptr() == storages[0].data_ptr()


@pytest.mark.parametrize("num", [8, BIG])
def test_same_tensor_twice_is_one_object(num):
    tensor = torch.randn(num)

    outgoing = encode(Reply(1), (tensor, 1, tensor))
    value, tensors = decode(outgoing)

    assert value[0] is value[2]
    assert len(tensors) == len(outgoing.tensors) == 1


@pytest.mark.parametrize("num", [64, BIG])
def test_overlapping_views_share_memory(num):
    base = torch.randn(num)

    left, whole, right = roundtrip((base[: num // 2 + 1], base, base[num // 2 :]))
    whole.zero_()

    assert not left.any() and not right.any()
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_identical_views_share_memory():
    base = torch.randn(4)

    one, other = roundtrip((base, base.detach()))
    one.fill_(5.0)

    assert one is not other
    assert other.tolist() == [5.0] * 4


def test_disjoint_views_do_not_share_or_drag_the_gap():
    base = torch.randn(1 << 20)

    outgoing = encode(Reply(1), (base[:4], base[-4:]))
    (first, last), _ = decode(outgoing)

    assert outgoing.nbytes < 300
    assert first.untyped_storage().nbytes() == last.untyped_storage().nbytes() == 16


def test_mixed_dtype_views_share_memory():
    base = torch.zeros(64, dtype=torch.uint8)
    numbers = base[16:48].view(torch.complex128)

    octets, found = roundtrip((base[19:40], numbers))
    found.fill_(complex(1, 1))

    assert (
        octets.tolist() == numbers.fill_(complex(1, 1)).view(torch.uint8)[3:24].tolist()
    )


def test_view_chain_makes_one_cluster():
    base = torch.zeros(100)

    parts = roundtrip([base[i * 10 : i * 10 + 11] for i in range(9)])
    for number, part in enumerate(parts):
        part[-1] = number

    assert [part[0].item() for part in parts[1:]] == list(range(8))


def test_foreign_memory_at_an_odd_address_is_sent():
    memory = bytearray(range(64))
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=1)

    first, second = roundtrip((whole[2:10], whole[4:20]))

    assert first.tolist() == list(range(3, 11))
    assert second.tolist() == list(range(5, 21))


def test_conjugated_and_negated_tensors_are_resolved():
    base = torch.randn(4, dtype=torch.complex64)

    conj, neg = roundtrip((base.conj(), base.conj().imag))

    assert not conj.is_conj() and not neg.is_neg()
    assert torch.equal(conj, base.conj())
    assert torch.equal(neg, base.conj().imag)


def test_zero_tensor_without_memory_is_sent():
    assert roundtrip(torch._efficientzerotensor(3)).tolist() == [0.0] * 3


def test_tensor_that_requires_grad_arrives_as_leaf():
    leaf = torch.randn(3, requires_grad=True)

    for found in roundtrip((leaf, leaf * 2)):
        assert found.is_leaf and found.requires_grad


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("num", [3, BIG])
def test_parameter_arrives_as_parameter(requires_grad, num):
    parameter = torch.nn.Parameter(torch.randn(num), requires_grad)

    outgoing = encode(Reply(1), (parameter,))
    (found,), tensors = decode(outgoing)

    assert outgoing.tensors[0] is parameter
    assert tensors[0] is found
    assert_same_tensor(found, parameter)


@pytest.mark.parametrize("num", [3, BIG])
def test_received_tensor_can_be_changed_in_place_under_autograd(num):
    found = roundtrip((torch.ones(num),))[0]
    weight = torch.ones(num, requires_grad=True)

    found.mul_(weight)
    found.sum().backward()

    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(num))


def test_received_tensor_can_be_resized():
    assert roundtrip(torch.ones(3)).resize_(100).shape == (100,)


def test_received_tensor_does_not_alias_the_sent_one():
    tensor = torch.ones(3)

    roundtrip(tensor).zero_()

    assert tensor.tolist() == [1.0] * 3


def test_inference_tensor_can_be_sent():
    with torch.inference_mode():
        tensor = torch.randn(4, 5)
        holes = torch.randn(4096, 8)[:, 1]

    assert_same_tensor(roundtrip(tensor), tensor)
    assert_same_tensor(roundtrip(tensor.t()), tensor.t())
    assert_same_tensor(roundtrip(holes), holes)


def _sparse(layout):
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 4, 5, 0]])
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 2))
    return dense.to_sparse(layout=layout)


@pytest.mark.parametrize(
    "layout",
    [
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    ],
    ids=str,
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_sparse_tensor_survives(layout, requires_grad):
    tensor = _sparse(layout).requires_grad_(requires_grad)

    value, _ = decode(encode(Reply(1), (tensor, {"again": tensor})))

    found = value[0]
    assert found.layout is layout
    assert found.requires_grad == requires_grad and found.is_leaf
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert value[1]["again"] is found


@pytest.mark.parametrize("coalesce", [True, False])
def test_sparse_coo_keeps_duplicates_and_coalesced_flag(coalesce):
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[1, 0, 1], [0, 2, 0]]),
        torch.randn(3, 5),
        (2, 3, 5),
        check_invariants=True,
    )
    tensor = tensor.coalesce() if coalesce else tensor

    found = roundtrip((tensor,))[0]

    assert found.is_coalesced() == coalesce
    assert torch.equal(found._indices(), tensor._indices())
    assert torch.equal(found._values(), tensor._values())
    assert found.shape == tensor.shape


def test_batched_csr_survives():
    tensor = torch.stack([torch.eye(3), torch.eye(3) * 2]).to_sparse_csr()

    assert torch.equal(roundtrip(tensor).to_dense(), tensor.to_dense())


def test_sparse_with_repeated_memory_survives():
    indices = torch.tensor([[2]]).expand(1, 4)
    values = torch.ones(1).expand(4)
    tensor = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)

    assert torch.equal(roundtrip(tensor).to_dense(), torch.tensor([0.0, 0.0, 4.0]))


def test_sparse_gradient_of_an_embedding_survives():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None

    assert torch.equal(roundtrip(gradient).to_dense(), gradient.to_dense())


def test_sparse_beside_strided_tensors():
    strided = torch.randn(3)

    sparse, first, second = roundtrip((_sparse(torch.sparse_coo), strided, strided[1:]))
    first.zero_()

    assert sparse.is_sparse
    assert second.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(3, device="meta"), ["'meta'", "no data"]),
        (
            lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
            ["torch.qint8", "dequantize()"],
        ),
        (lambda: torch.randn(3, 4).to_mkldnn(), ["_mkldnn", "to_dense()"]),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            ["nested", "unbind()"],
        ),
    ],
    ids=["meta", "quantised", "mkldnn", "nested"],
)
@pytest.mark.parametrize("wrap", [tuple, list])
def test_unsupported_tensor_is_refused_with_the_remedy(make, words, wrap):
    with pytest.raises(EncodeError) as caught:
        encode(Reply(1), wrap([make()]))

    assert all(word in str(caught.value) for word in words)


def test_tensor_inside_a_transform_is_refused():
    def send(x):
        with pytest.raises(EncodeError, match="outside of the transform"):
            encode(Reply(1), (x,))
        return x

    torch.vmap(send)(torch.ones(2, 3))


@pytest.mark.parametrize(
    "enter",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        CountsCalls,
        RefusesAll,
    ],
    ids=["inference", "no_grad", "device", "function mode", "dispatch mode"],
)
@pytest.mark.parametrize("num", [6, BIG])
def test_modes_of_the_thread_do_not_matter(enter, num):
    base = torch.randn(num, requires_grad=True)
    holes = torch.randn(4096, 8, requires_grad=True)[:, 1]
    sparse = _sparse(torch.sparse_coo)
    parameter = torch.nn.Parameter(torch.ones(2))
    expected = (base, base * 2, holes, parameter)
    value = (*expected, base.detach().to(torch.complex64).conj(), [sparse])

    with enter() as mode:
        outgoing = encode(Reply(1), value)
        # The storages come from the transport, which is not what is tested here.
        with clean_thread_state():
            storages = receive(outgoing.buffers)
        message, _ = decode_control(outgoing.head)
        found, _ = decode_value(message, outgoing.head, storages, serializer=PICKLE)
        if isinstance(mode, CountsCalls):
            assert mode.calls == 0

    for one, other in zip(found, expected, strict=False):
        assert_same_tensor(one, other)
    assert torch.equal(found[-1][0].to_dense(), sparse.to_dense())
    assert not found[-1][0].is_inference()


@pytest.mark.parametrize(
    "enter",
    [torch.inference_mode, lambda: torch.device("meta"), CountsCalls, RefusesAll],
)
def test_clean_thread_state_steps_out_and_back_in(enter):
    assert thread_state_is_clean()
    with enter():
        assert not thread_state_is_clean()
        with clean_thread_state():
            assert thread_state_is_clean()
            assert torch.empty(1).device.type == "cpu"
        assert not thread_state_is_clean()
    assert thread_state_is_clean()


def test_clean_thread_state_restores_several_modes_in_order():
    outer, inner = CountsCalls(), CountsCalls()
    with outer, torch.device("meta"), inner:
        outer.calls = inner.calls = 0
        with clean_thread_state():
            torch.ones(1)
        assert outer.calls == inner.calls == 0
        assert torch.ones(1).device.type == "meta"
        assert outer.calls and inner.calls


def test_decoding_under_no_grad_keeps_requires_grad():
    outgoing = encode(Reply(1), (torch.ones(2, requires_grad=True),))

    with torch.no_grad():
        (found,), _ = decode(outgoing)

    assert found.requires_grad
