from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from gradwire.errors import DecodeError, EncodeError, RemoteProtocolError
from gradwire.wire import (
    NO_VALUE,
    PICKLE,
    TRACKED,
    Call,
    Failure,
    Goodbye,
    Heartbeat,
    Message,
    Outgoing,
    Reply,
    _codec,
    _rebuild,
    decode_control,
    decode_small,
    decode_value,
    encode,
    kind_of,
    peek_kind,
    register_message,
    tracked_tensors,
)
from loopback import assert_same_tensor

GOLDEN = {
    "call": (
        lambda: Call(7, 1.5, "torch:add"),
        (torch.tensor([1.0, -2.0]), 3),
        "010000000000002c00000000"
        "9607cb3ff8000000000000a9746f7263683a61646400c0"
        "950192c0039200ff9198019102c000000000909108"
        "0000803f000000c0",
    ),
    "call with keywords": (
        lambda: Call(7, 1.5, "torch:add", 1, {"ctx": b"\x01"}),
        ((), {"a": 1}),
        "010000000000002400000018"
        "9607cb3ff8000000000000a9746f7263683a6164640181a3637478c401019502909090"
        "908005950d00000000000000297d948c0161944b017386942e",
    ),
    "reply": (
        lambda: Reply(7),
        torch.tensor([1, 2], dtype=torch.int16),
        "0200000000000016000000009307c0950091c091009198079102c00000000090910401000200",
    ),
    "reply none": (
        lambda: Reply(7),
        None,
        "020000000000000b000000009307c0950091c091ff9090",
    ),
    "failure": (
        lambda: Failure(7),
        "no",
        "030000000000000c000000009207950091a26e6f91ff9090",
    ),
    "heartbeat": (
        lambda: Heartbeat(2.5),
        NO_VALUE,
        "040000000000000a0000000091cb4004000000000000",
    ),
    "goodbye": (
        lambda: Goodbye("bye"),
        NO_VALUE,
        "05000000000000060000000092a3627965c2",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_head_is_written(name):
    make, value, head = GOLDEN[name]

    outgoing = encode(make(), value)

    assert outgoing.head.hex() == head
    assert outgoing.buffers == []
    assert outgoing.nbytes == len(head) // 2


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_head_is_read(name):
    make, value, text = GOLDEN[name]
    head = bytes.fromhex(text)
    expected = make()
    encode(expected, value)

    message, kind = decode_control(head)
    found, _ = decode_value(message, head, [], serializer=PICKLE)

    assert message == expected
    assert kind == peek_kind(head) == kind_of(type(expected))
    _assert_equal(found, value)


def _assert_equal(found, value):
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(found, value)
    elif isinstance(value, tuple):
        for one, other in zip(found, value, strict=True):
            _assert_equal(one, other)
    else:
        assert found == value


def _head_with(message: Message, control: bytes) -> bytes:
    return (
        bytes([kind_of(type(message)), 0, 0, 0])
        + len(control).to_bytes(4, "big")
        + bytes(4)
        + control
    )


def test_control_tolerates_fields_of_a_newer_version():
    control = msgspec.msgpack.encode(["bye", False, 1, {"new": True}])

    message, _ = decode_control(_head_with(Goodbye(), control))

    assert message == Goodbye("bye")


def test_control_tolerates_missing_fields_of_an_older_version():
    message, _ = decode_control(_head_with(Call(1), msgspec.msgpack.encode([5])))

    assert message == Call(5)


def test_unknown_kind_is_a_protocol_error_that_lists_the_known_ones():
    with pytest.raises(RemoteProtocolError, match=r"kind 250.*1 \(Call\)"):
        decode_control(bytes([250]) + bytes(11))


@pytest.mark.parametrize("length", range(13))
def test_truncated_head_is_refused(length):
    head = encode(Goodbye("bye")).head[:length]

    with pytest.raises(DecodeError):
        decode_control(head)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_reserved_bytes_must_be_zero(position):
    head = bytearray(encode(Goodbye("bye")).head)
    head[position] = 1

    with pytest.raises(DecodeError, match="should be 0"):
        decode_control(bytes(head))


def test_peek_kind_of_empty_head_is_refused():
    with pytest.raises(DecodeError, match="empty"):
        peek_kind(b"")


def test_register_message_refuses_a_taken_kind():
    class Other(Message, array_like=True):
        pass

    with pytest.raises(ValueError, match=r"kind 1 belongs to .*Call"):
        register_message(1, Other)


def test_register_message_refuses_a_registered_class():
    with pytest.raises(ValueError, match="registered already, as kind 2"):
        register_message(200, Reply)


@pytest.mark.parametrize("kind", [0, 256, -1])
def test_register_message_refuses_numbers_out_of_range(kind):
    class Other(Message, array_like=True):
        pass

    with pytest.raises(ValueError, match="must be 1 to 255"):
        register_message(kind, Other)


def test_encode_refuses_an_unregistered_class():
    class Other(Message, array_like=True):
        pass

    with pytest.raises(ValueError, match="not registered"):
        encode(Other())


def test_encode_refuses_a_value_for_a_message_without_body():
    with pytest.raises(EncodeError, match="cannot carry a value"):
        encode(Heartbeat(1.0), 5)


def test_message_without_body_has_no_value():
    head = encode(Call(1)).head
    message, _ = decode_control(head)

    assert decode_value(message, head, []) == (NO_VALUE, [])


def test_message_without_body_refuses_buffers():
    head = encode(Call(1)).head
    message, _ = decode_control(head)

    with pytest.raises(DecodeError, match="1 buffers"):
        decode_value(message, head, [torch.UntypedStorage(4)])


def test_bad_field_of_a_message_is_an_encode_error():
    with pytest.raises(EncodeError, match="Goodbye"):
        encode(Goodbye("\ud800"))


_ROW = torch.arange(8.0)
_OTHERS = [torch.full((size,), 0.5) for size in range(2, 7)]

SIMPLE_VALUES: dict[str, Any] = {
    "tensor": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(3),
    "leaf": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "both": (torch.ones(2), torch.nn.Parameter(torch.zeros(3)), 7, "text"),
    "repeated number": torch.tensor(0.5).expand(32, 256),
    "repeated, many times": torch.tensor(0.5).expand(1 << 20, 1 << 20),
    "repeated and not": (torch.ones(3), torch.tensor(2).expand(2, 2)),
    "one twice": (_ROW, 7, _OTHERS[0], _ROW),
    "four, and one twice": (*_OTHERS[:4], _OTHERS[1]),
    "five": tuple(_OTHERS),
    "sharing": (_OTHERS[0], _ROW[4:], _OTHERS[1], _ROW[:5]),
    "sharing, from the same start": (_ROW, _ROW[:4]),
    "next to each other": (_ROW[4:], _ROW[:4]),
}


@pytest.mark.parametrize("name", SIMPLE_VALUES)
def test_short_and_long_way_make_the_same_bytes(name, monkeypatch):
    value = SIMPLE_VALUES[name]
    short = encode(Reply(7), value)
    monkeypatch.setattr(_codec, "_encode_small", lambda *_: None)
    long = encode(Reply(7), value)

    assert short.head == long.head
    assert len(short.tensors) == len(long.tensors)


@pytest.mark.parametrize(
    "name",
    [
        "both",
        "repeated number",
        "one twice",
        "four, and one twice",
        "next to each other",
    ],
)
def test_short_way_is_taken(name, monkeypatch):
    monkeypatch.setattr(_codec, "_encode_with_value", None)

    encode(Reply(7), SIMPLE_VALUES[name])


@pytest.mark.parametrize("name", SIMPLE_VALUES)
def test_both_ways_rebuild_the_same(name, monkeypatch):
    head = encode(Reply(7), SIMPLE_VALUES[name]).head
    message, _ = decode_control(head)
    _, short = decode_value(message, head, [])
    monkeypatch.setattr(_rebuild, "_rebuild_small", lambda *_: None)
    _, long = decode_value(message, head, [])

    for one, other in zip(short, long, strict=True):
        assert type(one) is type(other)
        assert (one.shape, one.stride(), one.dtype) == (
            other.shape,
            other.stride(),
            other.dtype,
        )
        assert one.requires_grad == other.requires_grad
        first = (0,) * one.dim()
        assert one.dim() == 0 or one[first] == other[first]
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def decode_both_ways(outgoing: Outgoing) -> tuple[Any, Any]:
    """What `decode_small` makes, and what it should be: value and tracked tensors."""
    message, _ = decode_control(outgoing.head)
    assert isinstance(message, Reply)
    assert message.body is not None
    small = decode_small(message.body, outgoing.head)
    value, tensors = decode_value(message, outgoing.head, [])
    return small, (value, tracked_tensors(message, tensors))


@pytest.mark.parametrize("flags", [None, 0, TRACKED])
@pytest.mark.parametrize(
    "name", ["tensor", "scalar", "leaf", "parameter", "frozen parameter"]
)
def test_small_tensor_is_rebuilt_the_same_on_its_own_way(name, flags):
    changes = None if flags is None else {0: flags}
    outgoing = encode(Reply(7), SIMPLE_VALUES[name], lambda *_: changes)

    small, (tensor, tracked) = decode_both_ways(outgoing)

    assert_same_tensor(small[0], tensor)
    assert len(small[1]) == len(tracked)
    assert all(found is small[0] for found in small[1])


@pytest.mark.parametrize(
    "value",
    [
        7,
        (torch.ones(2),),
        (torch.ones(2), 7),
        SIMPLE_VALUES["repeated number"],
        torch.ones(2, 3).t(),
        torch.empty(0),
        torch.eye(2).to_sparse(),
    ],
    ids=str,
)
def test_what_is_no_small_ordinary_tensor_is_left_to_the_long_way(value):
    small, _ = decode_both_ways(encode(Reply(7), value))

    assert small is None


def test_small_tensor_is_left_to_the_long_way_in_a_mode():
    outgoing = encode(Reply(7), torch.ones(2))

    with torch.inference_mode():
        small, (tensor, _) = decode_both_ways(outgoing)

    assert small is None
    assert not tensor.is_inference()


def test_repeated_number_is_rebuilt_the_short_way(monkeypatch):
    head = encode(Reply(7), SIMPLE_VALUES["repeated number"]).head
    message, _ = decode_control(head)
    monkeypatch.setattr(_rebuild, "_locate", None)

    value, _ = decode_value(message, head, [])

    assert value.stride() == (0, 0)
    assert torch.equal(value, SIMPLE_VALUES["repeated number"])


@pytest.mark.parametrize("refs", [[0, 1, 2], [2, 1, 0], [0, 0, 1], [0, -1, 1], [1, 2]])
def test_elements_are_where_they_are_referred_to(refs):
    tensors = [torch.full((2,), float(number)) for number in range(3)]
    message = Reply(7)
    head = encode(message, tuple(tensors)).head
    assert message.body is not None
    message.body.plain, message.body.refs = ["in between"] * len(refs), refs

    value, _ = decode_value(message, head, [])

    expected = ["in between" if ref < 0 else tensors[ref] for ref in refs]
    assert str(value) == str(tuple(expected))


@pytest.mark.parametrize("refs", [[0], [0, 1, 2], [0, 2]])
def test_elements_that_are_not_there_are_refused(refs):
    message = Reply(7)
    head = encode(message, (torch.ones(2), torch.zeros(3))).head
    assert message.body is not None
    message.body.refs = refs

    with pytest.raises(DecodeError):
        decode_value(message, head, [])


def test_plain_values_are_decoded_in_whatever_state_the_thread_is(monkeypatch):
    """There is nothing to make that it could have an effect on."""
    value = (1, "text", None, 2.5)
    head, with_tensor = encode(Reply(7), value).head, encode(Reply(7), torch.ones(2))
    message, _ = decode_control(head)
    monkeypatch.setattr(_codec, "clean_thread_state", None)
    with torch.inference_mode():
        assert decode_value(message, head, []) == (value, [])

        message, _ = decode_control(with_tensor.head)
        with pytest.raises(TypeError):  # that state has one
            decode_value(message, with_tensor.head, [])


@pytest.mark.parametrize("value", [(), (1, "text"), 3.5])
def test_plain_values_have_no_memory(value):
    head = encode(Reply(7), value).head
    message, _ = decode_control(head + b"x")

    with pytest.raises(DecodeError, match="inline"):
        decode_value(message, head + b"x", [])
    with pytest.raises(DecodeError, match="1 buffers"):
        decode_value(message, head, [torch.UntypedStorage(4)])
