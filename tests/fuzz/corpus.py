"""Sound messages of every sort, made by the real encoder."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch

import gradwire.autograd  # noqa: F401 - its messages and headers
from gradwire.autograd import _messages as passes
from gradwire.rpc import _rref_parts as rrefs
from gradwire.rpc._rref_table import RefId
from gradwire.wire import (
    Call,
    Failure,
    Goodbye,
    Heartbeat,
    Introduction,
    Message,
    Outgoing,
    Reply,
    encode,
)

_VALUE, _FORK = RefId(1, 77, 2), RefId(3, 88, 4)


def with_raw_buffers(outgoing: Outgoing) -> list[bytes]:
    return [ctypes.string_at(b.address, b.nbytes) for b in outgoing.buffers]


@cache
def make_messages() -> list[Outgoing]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some layouts experimental
        values = _make_values()
        messages = [
            outgoing
            for value in values
            for outgoing in (
                encode(Call(1, 0.0, "torch:add", 0), value),
                encode(Reply(2, _headers()), value),
            )
        ]
    return messages + [encode(message) for message in _make_bare()]


def _headers() -> dict[str, bytes]:
    header = passes.CallHeader(1, 5, 6, 7, (0, 1), [("cpu", "bfloat16")], 2)
    packed = [rrefs.Packed(0, _VALUE, _FORK, 5, 9)]
    return {
        "autograd": passes.encode_header(header),
        "rref": rrefs.encode_header(packed),
    }


def _make_values() -> list[object]:
    small = torch.ones(2, 3, dtype=torch.bfloat16)
    large = torch.arange(2500, dtype=torch.float32)
    eye = torch.eye(3)
    base = torch.arange(12.0)
    return [
        (1, 2.5, None, True, "text", b"bytes", -(2**63)),
        (torch.ones(4), 2, "x", None),
        torch.ones(6).view(2, 3).t(),
        (base[2:7], base[5:], base.view(3, 4).t()),
        torch.nn.Parameter(torch.ones(2)),
        (large, small),
        [large, {"key": [small, (1, 2)]}],
        eye.to_sparse(),
        (eye.to_sparse_csr(), eye.to_sparse_csc()),
        (
            torch.eye(4).to_sparse_bsr((2, 2)),
            torch.eye(4).to_sparse_bsc((2, 2)),
        ),
        torch.zeros(0, 5),
        torch.ones(1).expand(1000, 3),
        torch.ones(3, dtype=torch.complex64),
        (),
    ]


def _make_bare() -> list[Message]:
    return [
        Heartbeat(12.5),
        Goodbye("so long"),
        Introduction('{"name":"a","rank":1}'),
        Call(9),
        Failure(3),
        passes.PassStart(1, 2, 0, 1, 1, False, True, [("cpu", "bfloat16")]),
        passes.Gradient(1, 2, 0, 1, 5, (True, False), True, -1, (0, 1)),
        passes.GradientAndStart(1, 2, 0, 1, 5, (True,), False, 3, None, 1, True, False),
        passes.Gradients(
            1, 2, 0, 1, [(5, (True,)), (6, ())], False, (1, True, False, None)
        ),
        passes.PassDone(1, 2, 0, 1),
        passes.PassAbort(1, 2, 0, 1),
        passes.Dead(1, 2, 3),
        passes.Stale(1, 2, [3, 4]),
        passes.Release(2, [1, 3], 9, (1, 2)),
        rrefs.ForkRequest(_VALUE, _FORK, 9),
        rrefs.Forked(_FORK, True),
        rrefs.Arrived([_FORK, _VALUE]),
        rrefs.Deleted([(_VALUE, _FORK, False)]),
    ]
