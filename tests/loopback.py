"""Sends a value to oneself through the codec, as a transport would move it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gradwire.wire import (
    PICKLE,
    Buffer,
    Outgoing,
    Reply,
    decode_control,
    decode_value,
    encode,
)


def receive(buffers: list[Buffer]) -> list[torch.UntypedStorage]:
    """Fresh storages with the bytes of the buffers, as a transport hands them over."""
    storages = []
    for buffer in buffers:
        storage = torch.UntypedStorage(buffer.nbytes)
        ctypes.memmove(storage.data_ptr(), buffer.address, buffer.nbytes)
        storages.append(storage)
    return storages


def decode(outgoing: Outgoing) -> tuple[Any, list[torch.Tensor]]:
    message, _ = decode_control(outgoing.head)
    buffers = receive(outgoing.buffers)
    return decode_value(message, outgoing.head, buffers, serializer=PICKLE)


def roundtrip(value: Any) -> Any:
    return decode(encode(Reply(1), value))[0]


def raw_bytes(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each element in order, so that NaNs compare by their bits."""
    tensor = tensor.detach()
    size = tensor.itemsize
    start = tensor.data_ptr()
    offsets = [0]
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(length)]
    return [ctypes.string_at(start + o * size, size) for o in offsets]


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(found) is type(expected)
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert found.requires_grad == expected.requires_grad
    assert found.is_leaf
    assert not found._is_view()
    assert not found.is_inference()
    assert raw_bytes(found) == raw_bytes(expected)
