"""Who reads a connection, and that nothing that came is left lying."""

from __future__ import annotations

import queue
import socket
from typing import Any

from gradwire.rpc._link import Link
from gradwire.rpc._pool import WorkerPool
from gradwire.transport import Frame, Limits
from gradwire.transport._stream import StreamConnection

LIMIT_S = 10.0


class Owner:
    """Takes down what comes."""

    def __init__(self) -> None:
        self.heads: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def is_request(self, frame: Frame) -> bool:
        return True

    def accept(self, link: Link, frame: Frame) -> Any:
        self.heads.put(bytes(frame.head))

    def is_slow(self, request: Any) -> bool:
        return False

    def serve(self, link: Link, request: Any) -> None:
        raise AssertionError("there are no requests")

    def turn_begins(self) -> None:
        pass

    def link_ended(self, link: Link, reason: str) -> None:
        pass


def test_frames_that_came_with_the_handshake_are_read_at_once():
    """They are in memory already, so the poller never tells of them."""
    sender, receiver = socket.socketpair()
    peer = StreamConnection("test", sender, Limits())
    peer.send(b"early")
    leftover = receiver.recv(1 << 16)
    pool = WorkerPool("test", 1, lambda: None)
    pool.start()
    owner = Owner()
    link = Link(StreamConnection("test", receiver, Limits(), leftover), pool, owner)
    try:
        link.start()

        assert owner.heads.get(timeout=LIMIT_S) == b"early"
        peer.send(b"later")
        assert owner.heads.get(timeout=LIMIT_S) == b"later"
    finally:
        link.close()
        peer.close()
        pool.close(LIMIT_S)
