"""Metadata that does not fit the memory is refused before any memory is touched."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import DecodeError
from gradwire.wire import (
    PICKLE,
    Body,
    Call,
    Reply,
    TensorMeta,
    decode_control,
    decode_small,
    decode_value,
    encode,
)
from gradwire.wire._messages import FLAT_TUPLE, PICKLED, SINGLE

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta:UserWarning"
)

FLOAT, DOUBLE, LONG = 1, 2, 9
MAX = 2**63 - 1


def _head(body: Body, inline: bytes = b"", payload: bytes = b"") -> bytes:
    head = bytearray(encode(Reply(1, None, body)).head)
    head[8:12] = len(payload).to_bytes(4, "big")
    return bytes(head) + payload + inline


def _decode(body: Body, inline: bytes = b"", buffers=(), payload: bytes = b""):
    head = _head(body, inline, payload)
    message, _ = decode_control(head)
    assert isinstance(message, Reply)
    small = None
    if message.body is not None and not buffers:
        small = decode_small(message.body, head)
    value, tensors = decode_value(message, head, list(buffers), serializer=PICKLE)
    assert small is None or torch.equal(small[0], value)
    return value, tensors


def _one(meta: TensorMeta, nbytes: int = 16) -> Body:
    return Body(SINGLE, [None], [0], [meta], [nbytes])


def test_the_frame_of_these_tests_is_sound():
    value, _ = _decode(_one(TensorMeta(FLOAT, (4,), storage=0)), bytes(16))

    assert value.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta(FLOAT, (5,), storage=0),
        TensorMeta(FLOAT, (4,), offset=1, storage=0),
        TensorMeta(FLOAT, (4,), (2,), storage=0),
        TensorMeta(FLOAT, (2, 2), (4, 1), storage=0),
        TensorMeta(FLOAT, (2, 2), (1,), storage=0),
        TensorMeta(FLOAT, (2,), (1, 1), storage=0),
        TensorMeta(FLOAT, (), offset=4, storage=0),
        TensorMeta(FLOAT, (0,), offset=5, storage=0),
        TensorMeta(DOUBLE, (4,), storage=0),
        TensorMeta(FLOAT, (MAX,), storage=0),
        TensorMeta(FLOAT, (2**32, 2**32), storage=0),
        TensorMeta(FLOAT, (2**31, 2**33), storage=0),
        TensorMeta(FLOAT, (2**40, 2**40), (0, 0), storage=0),
        TensorMeta(FLOAT, (0, MAX, MAX), storage=0),
        TensorMeta(FLOAT, (2,), (MAX,), storage=0),
        TensorMeta(FLOAT, (1,), offset=MAX, storage=0),
        TensorMeta(FLOAT, (4,), storage=1),
        TensorMeta(FLOAT, (4,), storage=-1),
        TensorMeta(FLOAT, (4,), storage=-2),
        TensorMeta(0, (4,), storage=0),
        TensorMeta(999, (4,), storage=0),
        TensorMeta(FLOAT, (4,), storage=0, flags=64),
        TensorMeta(FLOAT, (4,), storage=0, layout=9),
        TensorMeta(FLOAT, (4,), storage=0, layout=-1),
        TensorMeta(LONG, (2,), storage=0, flags=1),
        TensorMeta(LONG, (2,), storage=0, flags=3),
        TensorMeta(FLOAT, (4,), storage=0, layout=1),
        TensorMeta(FLOAT, (4,), storage=0, layout=1, parts=(0, 0)),
        TensorMeta(FLOAT, (4,), storage=0, layout=2, parts=(0, 0, 0)),
    ],
    ids=str,
)
def test_tensor_outside_of_its_storage_is_refused(meta):
    with pytest.raises(DecodeError):
        _decode(_one(meta), bytes(16))


@pytest.mark.timeout(10)
def test_product_of_very_many_sizes_is_not_computed():
    with pytest.raises(DecodeError, match="beyond 64 bits"):
        _decode(_one(TensorMeta(FLOAT, (MAX,) * 200_000, storage=0)), bytes(16))


@pytest.mark.timeout(10)
def test_product_of_very_many_sizes_of_a_repeated_number_is_not_computed():
    meta = TensorMeta(FLOAT, (MAX,) * 200_000, (0,) * 200_000, storage=0)

    with pytest.raises(DecodeError, match="beyond 64 bits"):
        _decode(_one(meta, nbytes=4), bytes(4))


@pytest.mark.parametrize(
    ("shape", "strides", "nbytes"),
    [
        ((2, 3), (0,), 4),
        ((2,), (0, 0), 4),
        ((2, 3), (0, 0), 3),
        ((2**32, 2**32), (0, 0), 4),
    ],
)
def test_malformed_repeated_number_is_refused(shape, strides, nbytes):
    meta = TensorMeta(FLOAT, shape, strides, storage=0)

    with pytest.raises(DecodeError):
        _decode(_one(meta, nbytes=nbytes), bytes(nbytes))


def test_repeated_number_without_elements_needs_no_element():
    meta = TensorMeta(FLOAT, (2, 0), (0, 0), storage=0)
    value, _ = _decode(_one(meta, nbytes=4), bytes(4))

    assert value.shape == (2, 0)


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta(FLOAT, (-1,), storage=0),
        TensorMeta(FLOAT, (2,), (-1,), storage=0),
        TensorMeta(FLOAT, (2,), offset=-1, storage=0),
        TensorMeta(FLOAT, (2**63,), storage=0),
        TensorMeta(FLOAT, (4,), storage=0, layout=1, parts=(-1, -1)),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_with_the_control_part(meta):
    with pytest.raises(DecodeError, match="control part"):
        decode_control(_head(_one(meta), bytes(16)))


@pytest.mark.parametrize("nbytes", [0, 8, 15, 17, 32])
def test_inline_bytes_must_be_as_announced(nbytes):
    with pytest.raises(DecodeError, match="16 bytes of inline"):
        _decode(_one(TensorMeta(FLOAT, (4,), storage=0)), bytes(nbytes))


@pytest.mark.parametrize("sizes", [[], [4], [1 << 16], [1 << 17, 1 << 17]])
def test_buffers_must_be_as_announced(sizes):
    body = _one(TensorMeta(FLOAT, (1 << 15,), storage=0), nbytes=1 << 17)
    buffers = [torch.UntypedStorage(size) for size in sizes]

    with pytest.raises(DecodeError):
        _decode(body, buffers=buffers)


@pytest.mark.parametrize("storages", [[MAX], [2**40] * 3])
def test_announced_memory_is_not_allocated(storages):
    with pytest.raises(DecodeError):
        _decode(Body(FLAT_TUPLE, [], [], [], storages))


def _sparse_body(layout, shape, indices, plain=None, flags=0):
    tensors = [torch.tensor(indices)]
    if plain is not None:
        tensors.append(torch.tensor(plain))
    tensors.append(torch.ones(tensors[-1].shape[-1]))
    metas = []
    inline = b""
    for number, tensor in enumerate(tensors):
        code = FLOAT if tensor.is_floating_point() else LONG
        metas.append(TensorMeta(code, tuple(tensor.shape), storage=number))
        inline += bytes(tensor.untyped_storage())
    storages = [tensor.nbytes for tensor in tensors]
    parts = tuple(range(len(tensors)))
    metas.append(
        TensorMeta(FLOAT, shape, layout=layout, parts=parts, flags=flags),
    )
    return Body(SINGLE, [None], [len(tensors)], metas, storages), inline


def test_the_sparse_frame_of_these_tests_is_sound():
    assert _decode(*_sparse_body(1, (3,), [[0, 2]]))[0].to_dense().tolist() == [1, 0, 1]
    assert _decode(*_sparse_body(2, (2, 3), [0, 1, 2], [0, 2]))[0].sum() == 2


@pytest.mark.parametrize(
    "arguments",
    [
        (1, (3,), [[0, 3]]),
        (1, (3,), [[-1, 0]]),
        (1, (3, 3), [[0, 1]]),
        (1, (3,), [[2, 0]], None, 4),
        (1, (MAX, MAX), [[0, 1], [0, 1]]),
        (2, (2, 3), [0, 1, 9], [0, 2]),
        (2, (2, 3), [0, 1, 2], [0, 3]),
        (2, (2, 3), [0, 2, 1], [0, 2]),
        (2, (9, 3), [0, 1, 2], [0, 2]),
        (3, (2, 2), [0, 1, 2], [0, 7]),
        (4, (2, 3), [0, 1, 2], [0, 2]),
    ],
    ids=str,
)
def test_sparse_indices_outside_of_the_shape_are_refused(arguments):
    with pytest.raises(DecodeError):
        _decode(*_sparse_body(*arguments))


@pytest.mark.parametrize("layout", [1, 2])
def test_sparse_indices_without_memory_of_their_own_are_refused(layout):
    # Torch would look at every one of them.
    count = 1 << 40
    shape = (1, count) if layout == 1 else (count,)
    indices = TensorMeta(LONG, shape, (0,) * len(shape), storage=0)
    values = TensorMeta(FLOAT, (count,), (0,), storage=1)
    parts = (0, 1) if layout == 1 else (0, 0, 1)
    sparse = TensorMeta(FLOAT, (5,) * len(shape), layout=layout, parts=parts)
    body = Body(SINGLE, [None], [2], [indices, values, sparse], [8, 4])

    with pytest.raises(DecodeError, match="more elements than there is memory"):
        _decode(body, bytes(12))


@pytest.mark.parametrize("layout", [4, 5])
@pytest.mark.parametrize("block", [(0, 2), (2, 0), (0, 0)])
def test_sparse_blocks_without_elements_are_refused(layout, block):
    # Torch would divide by their sizes when the tensor is used, and end the process.
    ends = TensorMeta(LONG, (3,), storage=0)
    others = TensorMeta(LONG, (2,), storage=1)
    values = TensorMeta(FLOAT, (2, *block), storage=2)
    sparse = TensorMeta(FLOAT, (4, 4), layout=layout, parts=(0, 1, 2))
    body = Body(SINGLE, [None], [3], [ends, others, values, sparse], [24, 16, 0])
    inline = b"".join(n.to_bytes(8, "little") for n in (0, 1, 2, 0, 1))

    with pytest.raises(DecodeError, match="its blocks are empty"):
        _decode(body, inline)


def test_sparse_indices_of_another_dtype_are_refused():
    # Torch would make a larger copy of them.
    indices = TensorMeta(8, (1, 2), storage=0)
    values = TensorMeta(FLOAT, (2,), storage=1)
    sparse = TensorMeta(FLOAT, (5,), layout=1, parts=(0, 1))
    body = Body(SINGLE, [None], [2], [indices, values, sparse], [8, 8])

    with pytest.raises(DecodeError, match=r"dtype torch\.int32"):
        _decode(body, bytes(16))


@pytest.mark.parametrize(
    "body",
    [
        Body(9, [1], [-1]),
        Body(-1, [1], [-1]),
        Body(SINGLE, [], []),
        Body(SINGLE, [1, 2], [-1, -1]),
        Body(SINGLE, [None], [0]),
        Body(FLAT_TUPLE, [None], [5]),
        Body(FLAT_TUPLE, [None], [-2]),
        Body(FLAT_TUPLE, [1, 2], [-1]),
        Body(FLAT_TUPLE, [1], [-1, -1]),
        Body(FLAT_TUPLE, [[1]], [-1]),
        Body(FLAT_TUPLE, [{"a": 1}], [-1]),
        Body(PICKLED),
    ],
    ids=str,
)
def test_malformed_body_is_refused(body):
    with pytest.raises(DecodeError):
        _decode(body)


def test_plain_body_must_not_have_a_payload():
    with pytest.raises(DecodeError, match="no payload"):
        _decode(Body(SINGLE, [1], [-1]), payload=b"x")


def test_deeply_nested_control_is_refused():
    control = b"\x96\x01\x00\xc0\x00\xc0\x95\x01" + b"\x91" * 100_000 + b"\xc0"
    head = b"\x01\x00\x00\x00" + len(control).to_bytes(4, "big") + bytes(4) + control

    with pytest.raises(DecodeError):
        decode_control(head)


def test_lengths_beyond_the_head_are_refused():
    head = bytearray(encode(Call(1)).head)
    head[4:8] = b"\xff" * 4

    with pytest.raises(DecodeError, match="should fit"):
        decode_control(bytes(head))
