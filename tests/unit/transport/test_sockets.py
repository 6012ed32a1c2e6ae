"""The channels that socket transports share."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

import probes
from gradwire.transport import _sockets
from gradwire.transport._inproc import channel_pair

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc and passes descriptors"
)


def test_descriptors_that_come_while_the_channel_is_closed_are_closed(monkeypatch):
    before = probes.count_descriptors()
    ours, theirs = channel_pair()
    find = _sockets.descriptors_in

    def find_late(ancillary: Any) -> list[int]:
        found = find(ancillary)
        ours.close()
        return found

    monkeypatch.setattr(_sockets, "descriptors_in", find_late)
    with socket.socket(fileno=theirs.fileno()) as sock:
        socket.send_fds(sock, [b"x"], [sock.fileno()] * 2)
        data = ours.read(100)
        sock.detach()
    theirs.close()

    assert data == b""
    assert probes.count_descriptors() == before
