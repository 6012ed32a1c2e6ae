"""Tests for the begin of a connection: listening, connecting, the handshake's channel.

They are part of `TransportSuite`, which also gets its helpers from here.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod

import pytest

from gradwire.errors import ConnectError
from gradwire.testing._driving import (
    DEFAULTS,
    LIMIT_S,
    MIB,
    both_ways,
    bytes_of,
    pattern,
    raw_buffer,
    receive_frames,
    wait_readable,
)
from gradwire.transport.base import Channel, Connection, Limits, Listener, Transport

__all__ = ["ChannelSuite"]

_labels = itertools.count(1)


class ChannelSuite(ABC):
    """The first half of `TransportSuite`. One instance runs one test."""

    listen_host = ""
    """The host that the transport is told to listen on."""

    _open: list[Channel | Connection | Listener]
    transport: Transport

    @abstractmethod
    def make_transport(self) -> Transport:
        """The transport to test."""

    def setup_method(self) -> None:
        """Called by pytest before each test."""
        self._open = []
        self.transport = self.make_transport()

    def teardown_method(self) -> None:
        """Called by pytest after each test."""
        for endpoint in reversed(self._open):
            endpoint.close()

    # ------------------------------------------------------------------ helpers

    def listen(self) -> Listener:
        """A listener that is closed after the test."""
        label = f"gradwire-suite-{os.getpid()}-{next(_labels)}"
        listener = self.transport.listen(self.listen_host, 0, label)
        self._open.append(listener)
        return listener

    def connect(self, listener: Listener) -> tuple[Channel, Channel]:
        """Both ends of a new channel: who connected, and who was connected to."""
        client = self.transport.connect(listener.address, LIMIT_S)
        self._open.append(client)
        deadline = time.monotonic() + LIMIT_S
        while (server := listener.accept()) is None:
            if not wait_readable(listener) or time.monotonic() > deadline:
                raise TimeoutError("the listener does not accept")
        self._open.append(server)
        self.settle(client, server)
        return client, server

    def settle(self, client: Channel, server: Channel) -> None:  # noqa: B027
        """Brings two new channels to where bytes can pass.

        For transports whose channels have something to exchange before that; the tests
        then move one end at a time.
        """

    def channels(self) -> tuple[Channel, Channel]:
        """Two connected channels."""
        return self.connect(self.listen())

    def pair(
        self, limits: Limits = DEFAULTS, server_limits: Limits | None = None
    ) -> tuple[Connection, Connection]:
        """Two connections: of the one who connected, and of the other."""
        client, server = self.channels()
        return (
            self.upgrade(client, limits),
            self.upgrade(server, server_limits or limits),
        )

    def upgrade(
        self, channel: Channel, limits: Limits = DEFAULTS, leftover: bytes = b""
    ) -> Connection:
        """Turns a channel into a connection, which is closed in its place."""
        connection = channel.upgrade(limits, leftover)
        self._open.remove(channel)
        self._open.append(connection)
        return connection

    @staticmethod
    def read_bytes(channel: Channel, count: int, limit: int = 1 << 16) -> bytes:
        """Reads at least so many bytes from a channel."""
        data = b""
        deadline = time.monotonic() + LIMIT_S
        while len(data) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(data)} of {count} bytes arrived")
            piece = channel.read(limit)
            if piece == b"":
                raise EOFError(f"the channel ended after {len(data)} bytes")
            data += piece or b""
            if piece is None:
                wait_readable(channel)
        return data

    # ------------------------------------------------------ listening, connecting

    def test_transport_is_available(self) -> None:
        """It would make no sense to go on otherwise."""
        assert self.transport.is_available()
        assert self.transport.scheme

    def test_accept_returns_none_if_nobody_knocks(self) -> None:
        """Accepting never blocks."""
        assert self.listen().accept() is None

    def test_listener_is_readable_when_somebody_knocks(self) -> None:
        """That is how the agent learns of it."""
        listener = self.listen()
        assert not wait_readable(listener, timeout_s=0.0)

        self._open.append(self.transport.connect(listener.address, LIMIT_S))

        assert wait_readable(listener)

    def test_listener_accepts_several(self) -> None:
        """Each channel is connected to its own counterpart."""
        listener = self.listen()
        ends = [self.connect(listener) for _ in range(5)]

        for number, (client, _) in enumerate(ends):
            client.write(b"%d" % number)

        found = [self.read_bytes(server, 1) for _, server in ends]
        assert found == [b"0", b"1", b"2", b"3", b"4"]

    def test_two_listeners_have_different_addresses(self) -> None:
        """One process may hold several agents."""
        assert self.listen().address != self.listen().address

    def test_connect_to_closed_address_is_refused(self) -> None:
        """With the error that the agent expects, and at once."""
        listener = self.listen()
        listener.close()

        with pytest.raises(ConnectError):
            self.transport.connect(listener.address, LIMIT_S)

    def test_listener_close_is_idempotent(self) -> None:
        """And whoever has knocked sees the end."""
        listener = self.listen()
        client = self.transport.connect(listener.address, LIMIT_S)
        self._open.append(client)

        listener.close()
        listener.close()

        assert wait_readable(client)
        assert client.read(1) == b""

    # ---------------------------------------------------------------- channels

    def test_channel_carries_bytes_both_ways(self) -> None:
        """As they are, in order."""
        client, server = self.channels()

        client.write(b"first ")
        client.write(b"second")
        server.write(b"answer\0")

        assert self.read_bytes(server, 12) == b"first second"
        assert self.read_bytes(client, 7) == b"answer\0"

    def test_channel_read_returns_none_if_there_is_nothing(self) -> None:
        """Reading never blocks."""
        client, server = self.channels()

        assert client.read(100) is None
        assert server.read(100) is None

    def test_channel_read_takes_no_more_than_its_limit(self) -> None:
        """The rest stays for the next read."""
        client, server = self.channels()
        client.write(b"0123456789")
        wait_readable(server)

        assert server.read(4) == b"0123"
        assert self.read_bytes(server, 6) == b"456789"

    def test_channel_read_returns_empty_at_the_end(self) -> None:
        """After all that was written before."""
        client, server = self.channels()
        client.write(b"last")
        client.close()

        assert self.read_bytes(server, 4) == b"last"
        assert wait_readable(server)
        assert server.read(100) == b""

    def test_channel_close_is_idempotent(self) -> None:
        """Closing is what error paths do, sometimes twice."""
        client, _ = self.channels()

        client.close()
        client.close()

    def test_channel_write_to_one_who_never_reads_fails(self) -> None:
        """With an error of ours, and without blocking."""
        client, _ = self.channels()

        with pytest.raises(ConnectError):
            for _ in range(10_000):
                client.write(bytes(1 << 16))

    def test_channel_says_whose_user_the_peer_is(self) -> None:
        """Where no secret is needed, the kernel or a certificate must vouch for it."""
        needs_secret = self.transport.capabilities.needs_secret

        for channel in self.channels():
            vouched_for = channel.peer_is_same_user or channel.demands_certificate
            assert vouched_for is not needs_secret

    def test_channel_describes_the_peer(self) -> None:
        """For log lines."""
        for channel in self.channels():
            assert channel.peer_description

    # ----------------------------------------------------------------- upgrade

    def test_upgrade_takes_leftover_bytes(self) -> None:
        """What was read behind the handshake belongs to the first frames."""
        client, server = self.channels()
        client.write(b"shake")
        sender = self.upgrade(client)
        for head in (b"first", b"", b"third"):
            sender.send(head)
        data = self.read_bytes(server, len(b"shake") + 20)

        receiver = self.upgrade(server, Limits(), data[5:])

        heads = [frame.head for frame in receive_frames(receiver, 3, sender)]
        assert heads == [b"first", b"", b"third"]

    def test_upgrade_takes_leftover_of_half_a_header(self) -> None:
        """Reads end anywhere."""
        client, server = self.channels()
        client.write(b"shake")
        sender = self.upgrade(client)
        sender.send(b"first")
        data = self.read_bytes(server, 8, limit=8)

        receiver = self.upgrade(server, Limits(), data[5:])

        assert receive_frames(receiver, 1, sender)[0].head == b"first"

    def test_upgrade_takes_leftover_larger_than_any_buffer(self) -> None:
        """Nothing in the interface bounds what was read already."""
        client, server = self.channels()
        sender = self.upgrade(client)
        heads = [bytes([n]) * 30_000 for n in range(20)]
        for head in heads:
            sender.send(head)
        data = b""
        while len(data) < sum(len(head) for head in heads):
            data += self.read_bytes(server, 1)
            sender.flush()

        receiver = self.upgrade(server, Limits(), data)

        found = receive_frames(receiver, len(heads), sender)
        assert [frame.head for frame in found] == heads

    @both_ways
    def test_upgrade_keeps_large_buffer_that_follows_the_handshake(
        self, limits: Limits
    ) -> None:
        """The peer may send a tensor before we have seen its last handshake record."""
        client, server = self.channels()
        server.write(b"welcome")
        sender = self.upgrade(server, limits)
        tensor = pattern(MIB)
        ticket = sender.send(b"head", [raw_buffer(tensor)])
        data = self.read_bytes(client, 7)

        receiver = self.upgrade(client, limits, data[7:])

        (frame,) = receive_frames(receiver, 1, sender)
        assert frame.head == b"head"
        assert bytes_of(frame.buffers[0]) == bytes(tensor.numpy())
        assert ticket is None or ticket.wait(LIMIT_S)

    def test_connection_has_the_scheme_of_its_transport(self) -> None:
        """Debug information shows it."""
        for connection in self.pair():
            assert connection.scheme == self.transport.scheme
