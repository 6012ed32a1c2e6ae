"""Values as plain data: exact round trips, and nothing else gets through."""

from __future__ import annotations

import collections
import enum
import math
import pickle
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire._ids import WorkerInfo
from gradwire.errors import DecodeError, EncodeError
from gradwire.wire import (
    PICKLE,
    Body,
    Reply,
    SafeSerializer,
    decode_control,
    decode_value,
    encode,
)
from gradwire.wire._plain import (
    COMPLEX,
    DEVICE,
    DICT,
    FROZENSET,
    INT,
    LIST,
    MAX_DEPTH,
    MAX_ODD_KEYS,
    SET,
    TENSOR,
    TUPLE,
    loads,
)
from loopback import receive

SAFE = SafeSerializer()

relaxed = settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
)


def roundtrip(value: Any) -> Any:
    outgoing = encode(Reply(1), value, serializer=SAFE)
    message, _ = decode_control(outgoing.head)
    buffers = receive(outgoing.buffers)
    found, _ = decode_value(message, outgoing.head, buffers, serializer=SAFE)
    return found


def is_same(left: Any, right: Any) -> bool:
    """Equal, with the same types at every place; NaN is itself, 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, complex):
        return repr(left) == repr(right)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            is_same(a, b) and is_same(left[a], right[b])
            for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(), max_size=20)
    | st.binary(max_size=20)
)
keys = st.integers() | st.text(st.characters(), max_size=5) | st.booleans()
hashable = st.recursive(
    keys | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
others = (
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:1")])
    | st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
    | st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor)
)
values = st.recursive(
    leaves | others,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=20,
)


@relaxed
@given(values)
def test_roundtrip_gives_equal_values_of_equal_types(value):
    assert is_same(roundtrip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        [],
        (),
        ((),),
        [[], ()],
        {},
        {"a": {"b": (1, [2])}},
        {1: 2, "1": 3, (1, 2): 4},
        {torch.float32: torch.float64},
        set(),
        {1, 2},
        frozenset({1}),
        2**63,
        -(2**63) - 1,
        [2**64],
        -(2**4000),
        ["\ud800", "é", "\udcff.txt"],
        [math.inf, -0.0],
        [1j, complex(-0.0, math.inf)],
        torch.Size([2, 3]),
        [torch.Size([])],
        (torch.device("cpu"), torch.int8),
        [True, 1, 1.0],
        [b"", b"\x00"],
        [WorkerInfo("w1", 1)],
    ],
    ids=repr,
)
def test_roundtrip_of_corner_cases(value):
    assert is_same(roundtrip(value), value)


@pytest.mark.parametrize("nest", [list, tuple], ids=["list", "tuple"])
def test_a_tensor_that_is_there_twice_arrives_once(nest):
    tensor = torch.arange(4.0)

    first, (second, third) = roundtrip(nest([tensor, nest([tensor, tensor + 1])]))

    assert first is second
    assert third is not first
    first.add_(1)
    assert torch.equal(second, tensor + 1)


def test_views_that_overlap_share_memory_on_arrival():
    whole = torch.arange(6.0)

    left, right = roundtrip([whole[:4], whole[2:]])
    left.fill_(7.0)

    assert right.tolist() == [7.0, 7.0, 4.0, 5.0]


def test_big_tensors_in_containers_travel_as_buffers():
    big = torch.randn(100_000)

    outgoing = encode(Reply(1), {"w": big}, serializer=SAFE)

    assert [buffer.nbytes for buffer in outgoing.buffers] == [400_000]
    assert torch.equal(roundtrip({"w": big})["w"], big)


def test_parameters_and_leaves_keep_what_they_are():
    parameter = torch.nn.Parameter(torch.ones(2))

    (found,) = roundtrip([parameter])

    assert type(found) is torch.nn.Parameter
    assert found.requires_grad


class Point(NamedTuple):
    x: int


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Subclass(torch.Tensor):
    pass


class Record(msgspec.Struct):
    x: int


class Cunning:
    """Would run code wherever it is pickled or unpickled."""

    def __reduce__(self) -> Any:
        raise AssertionError("somebody pickles")


REFUSED = [
    object(),
    Cunning(),
    Cunning,
    len,
    torch.add,
    lambda: None,
    Point(1),
    Colour.RED,
    Level.LOW,
    Text("a"),
    torch.ones(2).as_subclass(Subclass),
    torch.nn.Linear(1, 1),
    Record(1),
    ValueError("x"),
    collections.OrderedDict(a=1),
    collections.Counter("a"),
    collections.deque([1]),
    range(3),
    slice(1),
    bytearray(b"a"),
    memoryview(b"a"),
    torch.futures.Future(),
    torch.qint8,
    torch.strided,
    iter([1]),
    NotImplemented,
    ...,
]


@pytest.mark.parametrize("thing", REFUSED, ids=lambda thing: type(thing).__name__)
@pytest.mark.parametrize(
    "put", [lambda x: x, lambda x: (1, x), lambda x: [{"k": (x,)}]], ids=["", "t", "l"]
)
def test_anything_else_is_refused_by_the_sender(thing, put):
    with pytest.raises(EncodeError, match=r"cannot send an object of type .*'safe'"):
        encode(Reply(1), put(thing), serializer=SAFE)


def test_refusal_says_where_and_what():
    with pytest.raises(
        EncodeError, match=r"builtins.object \(found at \[1\]\['model'\]\[0\] of"
    ):
        encode(Reply(1), (1, {"model": [object()]}), serializer=SAFE)


def test_unhashable_tricks_with_keys_are_refused():
    class Key:
        def __hash__(self) -> int:
            return 1

    with pytest.raises(EncodeError, match="Key"):
        encode(Reply(1), {Key(): 1}, serializer=SAFE)


def test_depth_is_bounded_when_sending_and_when_reading():
    value: Any = 1
    tree: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
        tree = [0, tree]
    assert roundtrip(value) == value

    with pytest.raises(EncodeError, match=f"more than {MAX_DEPTH} containers"):
        encode(Reply(1), [value], serializer=SAFE)
    with pytest.raises(DecodeError, match=f"more than {MAX_DEPTH} containers"):
        loads(msgspec.msgpack.encode([0, tree]), [])


def colliding(kind: str, k: int) -> Any:
    """Trees of keys that all have the same hash."""
    if kind == "complex":
        return [COMPLEX, -k * 1000003.0, float(k)]
    return [INT, (k * (2**61 - 1)).to_bytes(12, "big")]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["complex", "int"])
@pytest.mark.parametrize("tag", [DICT, SET, FROZENSET])
def test_keys_that_all_have_the_same_hash_are_refused(kind, tag):
    step = 1 + (tag == DICT)
    trees = [item for k in range(60_000) for item in [colliding(kind, k), None][:step]]

    with pytest.raises(DecodeError, match="more than 1000 keys and members"):
        loads(msgspec.msgpack.encode([tag, *trees]), [])


def test_keys_of_several_containers_are_counted_together():
    sets = [[SET, *[colliding("int", k) for k in range(600)]] for _ in range(2)]

    with pytest.raises(DecodeError, match="more than 1000 keys and members"):
        loads(msgspec.msgpack.encode([LIST, *sets]), [])


def test_sender_says_that_there_are_too_many_odd_keys():
    with pytest.raises(EncodeError, match="lists of pairs"):
        roundtrip({(k, k): None for k in range(MAX_ODD_KEYS + 1)})


@pytest.mark.parametrize("kind", [int, str, float, lambda k: str(k).encode()])
def test_many_common_keys_are_fine(kind):
    value = {kind(k): k for k in range(5000)}

    assert roundtrip(value) == value
    assert roundtrip([{*value}]) == [{*value}]


def test_a_list_inside_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(EncodeError, match="inside itself"):
        encode(Reply(1), loop, serializer=SAFE)


MALFORMED = [
    [],
    {},
    {"a": 1},
    [99],
    [99, 1],
    ["0", 1],
    [None],
    [TENSOR],
    [TENSOR, 0],
    [TENSOR, -1],
    [TENSOR, "0"],
    [TENSOR, True],
    [TENSOR, 1, 2],
    [2, 1],  # a key without a value
    [2, [0], 1],  # a key that has no hash
    [3, [0]],
    [4, [2]],
    [6, -1],
    [6, "a"],
    [6, 2**64 - 1],
    [7, 0],
    [7, "float32"],
    [7],
    [8, "no such device"],
    [8, 3],
    [9, 1, 2],
    [9, 1.0],
    [10, 3],
    [10, b"\x01" * 5000],
    [11, "text"],
    [11, b"\xff\xff"],
    [12, "rref", []],
    [12, 1],
    [TUPLE, msgspec.msgpack.Ext(1, b"a")],
    [TUPLE, {"a": 1}],
    [13, "no name", 1],
    [13, 1, 1],
    [13, "w1", -1],
    [13, "w1", "1"],
    msgspec.msgpack.Ext(5, b""),
]


@pytest.mark.parametrize("tree", MALFORMED)
def test_malformed_trees_are_refused(tree):
    with pytest.raises(DecodeError):
        loads(msgspec.msgpack.encode(tree), [])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91", b"\x01\x02", b"\x90" * 9])
def test_bytes_that_are_no_msgpack_are_refused(data):
    with pytest.raises(DecodeError):
        loads(data, [])


def test_error_about_a_device_fits_on_one_line_of_a_log():
    data = msgspec.msgpack.encode([DEVICE, "two\nlines" * 1000])

    with pytest.raises(DecodeError, match="no device of this torch") as caught:
        loads(data, [])

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_deep_bytes_do_not_exhaust_the_stack():
    with pytest.raises(DecodeError):
        loads(b"\x91" * 100_000 + b"\x01", [])


@relaxed
@given(st.binary(max_size=60))
def test_random_bytes_make_plain_data_or_an_error(data):
    try:
        value = loads(data, [torch.ones(1)])
    except DecodeError:
        return
    encode(Reply(1), value, serializer=SAFE)  # whatever it is, it is plain data


# ----------------------------------------------------------------- forms do not mix


def test_a_pickle_is_not_accepted_in_safe_mode():
    head = encode(Reply(1), {"a": 1}, serializer=PICKLE).head
    message, _ = decode_control(head)

    with pytest.raises(DecodeError, match=r"form 2 is not accepted.*'safe'"):
        decode_value(message, head, [], serializer=SAFE)


def test_plain_data_is_not_accepted_in_pickle_mode():
    head = encode(Reply(1), {"a": 1}, serializer=SAFE).head
    message, _ = decode_control(head)

    with pytest.raises(DecodeError, match=r"form 3 is not accepted.*'pickle'"):
        decode_value(message, head, [], serializer=PICKLE)


def test_without_a_serializer_only_simple_values_are_read():
    for serializer in (PICKLE, SAFE):
        head = encode(Reply(1), {"a": 1}, serializer=serializer).head
        message, _ = decode_control(head)
        with pytest.raises(DecodeError, match="tensors and simple values only"):
            decode_value(message, head, [])


@pytest.mark.parametrize("form", [-1, 2, 4, 255, 2**40])
def test_a_pickle_under_another_form_is_not_unpickled(form):
    data = pickle.dumps({"a": 1})
    control = msgspec.msgpack.encode(Reply(1, None, Body(form)))
    head = b"".join(
        [
            bytes([2, 0, 0, 0]),
            len(control).to_bytes(4, "big"),
            len(data).to_bytes(4, "big"),
            control,
            data,
        ]
    )
    message, _ = decode_control(head)

    with pytest.raises(DecodeError):
        decode_value(message, head, [], serializer=SAFE)
