"""What the collector sends in the middle of a write: finalisers run anywhere."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from typing import Any

from gradwire.transport._stream import StreamConnection
from gradwire.transport.base import Frame, Limits

LARGE = 1 << 20


class _Socket:
    """Runs something in its first write, as the collector would."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.during_write: Callable[[], object] | None = None

    def send(self, data: Any) -> int:
        function, self.during_write = self.during_write, None
        if function is not None:
            function()
        return self._sock.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def receive(connection: StreamConnection, sender: StreamConnection) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < 2:
        sender.flush()
        frames += connection.receive()
    return frames


def test_large_frame_is_sent_from_inside_a_write():
    here, there = socket.socketpair(socket.AF_UNIX)
    odd: Any = _Socket(here)
    sender = StreamConnection("unix", odd, Limits(), shares_memory=True)
    receiver = StreamConnection("unix", there, Limits(), shares_memory=True)
    memory = ctypes.create_string_buffer(b"x" * LARGE, LARGE)
    buffer = (ctypes.addressof(memory), LARGE, memory)
    tickets: list[Any] = []
    odd.during_write = lambda: tickets.append(sender.send(b"inner", [buffer]))

    sender.send(b"outer")
    ctypes.memset(memory, 0, LARGE)  # it was captured
    outer, inner = receive(receiver, sender)

    assert tickets == [None]
    assert (outer.head, inner.head) == (b"outer", b"inner")
    assert bytes(inner.buffers[0]) == b"x" * LARGE
    assert sender.writer == 0
    sender.close()
    receiver.close()
