"""Round trips of random values, and heads that were tampered with."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gradwire.errors import DecodeError, ProtocolError
from gradwire.wire import (
    PICKLE,
    Call,
    Heartbeat,
    Reply,
    decode_control,
    decode_small,
    decode_value,
    describe_small,
    encode,
    encode_small,
    encode_tensors,
    plain_body,
)
from gradwire.wire._dtypes import CODE_OF_DTYPE
from gradwire.wire._tensors import INLINE_BYTES
from loopback import assert_same_tensor, decode, raw_bytes, receive, roundtrip

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning"
)

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)

plain_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(), max_size=40)
    | st.binary(max_size=40)
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def _filled(nbytes: int, seed: int) -> torch.UntypedStorage:
    # Random bits: NaNs with payloads, denormals and negative zeros come for free.
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return random.untyped_storage()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any shape, any non-negative strides, on a storage of random bits."""
    dtype = draw(st.sampled_from(list(CODE_OF_DTYPE)))
    shape = draw(shapes)
    if draw(st.booleans()):
        strides = torch.empty(shape).stride()
    else:
        strides = draw(
            st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)).map(
                tuple
            )
        )
    offset = draw(st.integers(0, 5))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    nbytes = (offset + max(last, 0) + 1) * dtype.itemsize
    storage = _filled(nbytes, draw(st.integers(0, 1000)))
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def _same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(found, expected)
        return found.stride() == expected.stride()
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            _same(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, float):
        both_nan = math.isnan(found) and math.isnan(expected)
        return both_nan or struct.pack("d", found) == struct.pack("d", expected)
    return bool(found == expected)


@relaxed
@given(st.lists(plain_values | tensors(), max_size=5).map(tuple))
def test_flat_tuple_round_trip(value):
    assert _same(roundtrip(value), value)


@relaxed
@given(plain_values | tensors())
def test_single_value_round_trip(value):
    assert _same(roundtrip(value), value)


@relaxed
@given(
    st.recursive(
        plain_values | tensors(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_nested_round_trip(value):
    assert _same(roundtrip(value), value)


@relaxed
@given(tensors())
def test_tensor_that_goes_alone_is_the_same_bytes_as_on_the_long_way(tensor):
    small = describe_small(tensor)
    if small is None:
        assume(False)
        return

    head = encode_small(Reply(7, {"layer": b"header"}), small)

    expected = encode(Reply(7, {"layer": b"header"}), tensor)
    assert (head, expected.buffers) == (expected.head, [])


@pytest.mark.parametrize("make", [torch.Tensor.detach, torch.nn.Parameter])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_flags_of_a_tensor_that_goes_alone_are_those_of_the_long_way(
    make, requires_grad
):
    tensor = make(torch.arange(6.0).reshape(2, 3)).requires_grad_(requires_grad)
    small = describe_small(tensor)
    assert small is not None

    assert encode_small(Reply(7), small) == encode(Reply(7), tensor).head


def _assert_same_bytes_as_on_the_long_way(value: tuple[torch.Tensor, ...]) -> None:
    outgoing = encode_tensors(Reply(7, {"layer": b"header"}), value)
    if outgoing is None:
        assume(False)
        return
    expected = encode(Reply(7, {"layer": b"header"}), value)
    assert (outgoing.head, outgoing.buffers) == (expected.head, [])
    assert list(map(id, outgoing.tensors)) == list(map(id, value))


@relaxed
@given(st.lists(tensors(), min_size=1, max_size=3).map(tuple))
def test_tensors_that_go_alone_are_the_same_bytes_as_on_the_long_way(value):
    _assert_same_bytes_as_on_the_long_way(value)


_OF_ONE_STORAGE = torch.arange(40.0)
_SIMPLE = torch.full((2, 3), 0.5)
_LARGEST = torch.arange(INLINE_BYTES, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        (_SIMPLE,),
        (_LARGEST, _SIMPLE, torch.ones(4096)),
        tuple(_OF_ONE_STORAGE.view(5, 8)),
        (_OF_ONE_STORAGE[8:], _OF_ONE_STORAGE[:8]),
        (torch.tensor(True), torch.ones(3, requires_grad=True)),
    ],
)
def test_short_way_of_tensors_is_taken(value):
    assert encode_tensors(Reply(7), value) is not None
    _assert_same_bytes_as_on_the_long_way(value)


@pytest.mark.parametrize(
    "value",
    [
        (_SIMPLE, _SIMPLE),
        (_OF_ONE_STORAGE[:9], _OF_ONE_STORAGE[8:]),
        (_SIMPLE, torch.arange(INLINE_BYTES + 1, dtype=torch.int32).to(torch.uint8)),
        (_SIMPLE, torch.nn.Parameter(torch.ones(2))),
        (_SIMPLE, _SIMPLE.t()),
        (_SIMPLE, torch.tensor(0.5).expand(4)),
        (_SIMPLE, torch.ones(3, 0)),
        (_SIMPLE, torch.eye(3).to_sparse()),
        (_SIMPLE, torch.ones(3, dtype=torch.complex64)),
        (_SIMPLE, torch._neg_view(torch.ones(3))),
        (_SIMPLE, 3.0),
    ],
)
def test_short_way_of_tensors_is_not_taken(value):
    assert encode_tensors(Reply(7), value) is None


def test_tensors_take_the_long_way_in_a_mode_and_where_there_is_no_body():
    with torch.inference_mode():
        assert encode_tensors(Reply(7), (_SIMPLE,)) is None
    assert encode_tensors(Heartbeat(0.0), (_SIMPLE,)) is None


@relaxed
@given(st.lists(plain_values | tensors(), max_size=5).map(tuple))
def test_plain_arguments_are_the_same_bytes_as_on_the_long_way(value):
    body = plain_body(value)
    expected = encode(Call(7, 0.0, "module:name"), value)

    if body is None:
        found: Any = decode_control(expected.head)[0]
        assert found.body.form == PICKLE.form or found.body.tensors
    else:
        message = Call(7, 0.0, "module:name", 0, None, body)
        assert encode(message).head == expected.head


class Number(int):
    """Not a plain value: its class must arrive as well."""


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", Number(3), [1]])
def test_values_that_are_not_quite_plain_are_no_plain_arguments(value):
    assert plain_body((1, value)) is None


@st.composite
def views_of_one_storage(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Views of one storage, of several dtypes; some overlap, some do not."""
    size = draw(st.sampled_from([96, 480, 40_000]))
    base = torch.zeros(0, dtype=torch.uint8).set_(_filled(size, 7), 0, (size,), (1,))
    views = []
    for _ in range(draw(st.integers(2, 5))):
        dtype = draw(
            st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128])
        )
        total = size // dtype.itemsize
        start = draw(st.integers(0, total - 1))
        step = draw(st.integers(1, 3))
        count = draw(st.integers(1, (total - start + step - 1) // step))
        view = base.view(dtype).as_strided((count,), (step,), start)
        views.append(view)
    return views, base


def _touched(view: torch.Tensor, base: torch.Tensor) -> set[int]:
    start = view.data_ptr() - base.data_ptr()
    step = view.stride(0) * view.itemsize
    return {
        start + i * step + byte
        for i in range(view.numel())
        for byte in range(view.itemsize)
    }


@settings(deadline=None, max_examples=60)
@given(views_of_one_storage())
def test_views_that_share_bytes_share_them_after_arrival(made):
    views, base = made
    touched = [_touched(view, base) for view in views]

    found = roundtrip(views)

    for one, other in zip(found, views, strict=True):
        assert raw_bytes(one) == raw_bytes(other)
    for writer, view in enumerate(views):
        # The same write on both sides must be seen by the same readers.
        view.fill_(writer + 1)
        found[writer].fill_(writer + 1)
        for reader in range(len(views)):
            if touched[writer] & touched[reader]:
                assert raw_bytes(found[reader]) == raw_bytes(views[reader])


@settings(deadline=None, max_examples=60)
@given(views_of_one_storage())
def test_message_is_never_larger_than_what_its_views_need(made):
    views, _ = made
    spans = sum((v.numel() - 1) * v.stride(0) * v.itemsize + v.itemsize for v in views)

    outgoing = encode(Reply(1), views)

    assert outgoing.nbytes <= spans + 16 * len(views) + 600


SAMPLES = [
    encode(Call(3, 1.0, "torch:add"), (torch.ones(4), 2, "x", None)),
    encode(Call(3, 1.0, "torch:add"), (torch.ones(6).view(2, 3).t(),)),
    encode(Reply(3, {"h": b"1"}), torch.nn.Parameter(torch.ones(2))),
    encode(Reply(3), (torch.ones(8000), torch.eye(3).to_sparse())),
]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_tampered_head_raises_only_our_errors(data):
    outgoing = data.draw(st.sampled_from(SAMPLES))
    head = bytearray(outgoing.head)
    small = None
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(head) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            head[position] = data.draw(st.integers(0, 255))
        elif action == "cut" and len(head) > 1:
            del head[position]
        else:
            head[position:position] = data.draw(st.binary(max_size=3))
    try:
        message, _ = decode_control(bytes(head))
        body = getattr(message, "body", None)
        if body is not None and not outgoing.buffers:
            small = decode_small(body, bytes(head))
        value, tensors = decode_value(
            message, bytes(head), receive(outgoing.buffers), serializer=PICKLE
        )
    except (DecodeError, ProtocolError):
        assert small is None
        return
    if small is not None:
        assert_same_tensor(small[0], value)
    for tensor in tensors:
        parts = [tensor._values()] if tensor.is_sparse else [tensor]
        for part in parts:
            storage = part.untyped_storage().nbytes()
            assert part.numel() == 0 or _end(part) <= storage


def _end(tensor: torch.Tensor) -> int:
    last = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_random_head_raises_only_our_errors(head):
    try:
        message, _ = decode_control(head)
        decode_value(message, head, [], serializer=PICKLE)
    except (DecodeError, ProtocolError):
        pass


def test_samples_are_sound():
    for outgoing in SAMPLES:
        decode(outgoing)
