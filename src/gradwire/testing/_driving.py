"""Driving connections from one thread: waiting, exchanging frames, comparing bytes."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Protocol

import pytest
import torch

from gradwire.transport.base import Connection, Frame, Limits, RawBuffer, Ticket

__all__ = [
    "Exchange",
    "both_ways",
    "bytes_of",
    "fill",
    "pattern",
    "raw_buffer",
    "receive_frames",
    "wait_readable",
]

LIMIT_S = 30.0
LOOK_S = 0.02
MIB = 1 << 20

DEFAULTS = Limits()
# Nothing is large enough for shared memory: buffers travel in the stream.
IN_STREAM = Limits(shared_memory_min_bytes=1 << 62)
# Everything is large enough for it, where the transport has it.
IN_MEMORY = Limits(shared_memory_min_bytes=1)
both_ways = pytest.mark.parametrize(
    "limits", [IN_STREAM, IN_MEMORY], ids=["in_stream", "in_memory"]
)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(*endpoints: _HasFileno, timeout_s: float = LIMIT_S) -> bool:
    """Waits until one of the endpoints can be read; False at the limit."""
    with selectors.DefaultSelector() as selector:
        for endpoint in endpoints:
            selector.register(endpoint.fileno(), selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def raw_buffer(tensor: torch.Tensor) -> RawBuffer:
    """The memory of a contiguous tensor, for `Connection.send`."""
    return tensor.data_ptr(), tensor.nbytes, tensor


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    """A copy of what is in a received buffer."""
    if not storage.nbytes():
        return b""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return bytes(flat.numpy().tobytes())


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes that differ along the way and between seeds."""
    numbers = torch.arange(seed, seed + (nbytes + 7) // 8, dtype=torch.int64)
    return (numbers * 0x9E3779B97F4A7C1).view(torch.uint8)[:nbytes].clone()


class Exchange:
    """Moves frames between connections until something has happened.

    Attributes:
        frames: What each connection has received, in the order of the arguments.
    """

    def __init__(self, *connections: Connection) -> None:
        self._connections = connections
        self.frames: list[list[Frame]] = [[] for _ in connections]

    def step(self) -> None:
        """Writes and reads as much as is possible now."""
        for connection, frames in zip(self._connections, self.frames, strict=True):
            connection.flush()
            frames.extend(connection.receive())
            while not connection.is_drained and connection.end is None:
                frames.extend(connection.receive())

    def until(self, condition: Callable[[], bool]) -> None:
        """Goes on until the condition holds.

        Raises:
            TimeoutError: It did not come to that.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.step()
            if condition():
                return
            if time.monotonic() > deadline:
                counts = [len(frames) for frames in self.frames]
                raise TimeoutError(f"the frames that arrived until the limit: {counts}")
            queued = any(c.num_queued for c in self._connections)
            live = [c for c in self._connections if c.end is None]
            wait_readable(*live, timeout_s=0.0 if queued else LOOK_S)


def receive_frames(
    receiver: Connection, count: int, *others: Connection
) -> list[Frame]:
    """Waits for so many frames, while the others write what they have queued."""
    exchange = Exchange(receiver, *others)
    exchange.until(lambda: len(exchange.frames[0]) >= count)
    return exchange.frames[0]


def fill(connection: Connection, tensor: torch.Tensor) -> tuple[int, Ticket]:
    """Sends frames until the peer takes no more.

    Returns:
        How many frames that took, and the ticket of the last one, which still waits.
    """
    for count in range(1, 1000):
        ticket = connection.send(b"", [raw_buffer(tensor)])
        if ticket is not None and not ticket.wait(0.0):
            return count, ticket
    raise AssertionError("the connection takes any number of bytes that nobody reads")
