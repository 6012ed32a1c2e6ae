"""What a transport is: the interface between the agent and whatever moves the bytes.

A transport moves *frames* between two endpoints and knows nothing of messages. A frame
is a head (bytes) and any number of raw buffers (memory of tensors).

The life of a connection:

1. One side listens, the other connects. Both get a `Channel`: a plain byte stream that
   carries the handshake and nothing else.
2. When both sides trust each other, each turns its channel into a `Connection` with
   `Channel.upgrade`; from then on there are only frames.

Every endpoint has a file descriptor that becomes readable when there is something to
do, so that one set of threads can serve all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from gradwire.transport._tls_credentials import TlsCredentials

__all__ = [
    "Capabilities",
    "Channel",
    "Connection",
    "Frame",
    "Limits",
    "Listener",
    "RawBuffer",
    "Ticket",
    "Transport",
]

RawBuffer = tuple[int, int, object]
"""Memory to send: address, number of bytes, and an object that keeps it alive."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame that arrived. Its buffers are fresh, writable and nobody else's."""

    head: bytes
    buffers: list[torch.UntypedStorage]


@dataclass(frozen=True)
class Limits:
    """How much one connection may make us hold.

    Attributes:
        shares_memory: Whether tensors may arrive in memory that the peer can still write.
    """

    shares_memory: bool = True
    max_head_bytes: int = 1 << 30
    max_frame_bytes: int = 1 << 36
    shared_memory_min_bytes: int = 128 << 10
    shared_memory_keep_bytes: int = 512 << 20


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; callers branch on this, never on the class."""

    crosses_hosts: bool
    needs_secret: bool
    """Whether nothing but a secret tells who the peer is: no user, no certificate."""
    shared_memory: bool
    needs_certificate: bool = False
    """Whether it works only as `Transport.with_credentials` returns it."""
    encrypts: bool = False
    """Whether nobody on the way can read or change what is sent."""


class Ticket(ABC):
    """The sender's memory is still needed: wait before it may change."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Waits until the memory is no longer needed; False if the limit came first."""

    @abstractmethod
    def detach(self) -> None:
        """Copies what was not sent yet, so that the memory is free at once."""


class Connection(ABC):
    """Frames, both ways, after the handshake.

    `send` and `flush` may be called by any thread. `receive` is called by one thread
    at a time; the caller sees to that.
    """

    scheme: str

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor to poll."""

    @abstractmethod
    def send(
        self, head: bytes, buffers: Sequence[RawBuffer] = (), *, hold: bool = False
    ) -> Ticket | None:
        """Sends a frame or queues what the peer does not take yet; never blocks.

        After it the caller must look at `num_queued` and arrange for `flush`.

        Args:
            head: The head.
            buffers: Memory to send.
            hold: Only queue it; `flush` will be called soon.

        Returns:
            None if the memory of ``buffers`` may change at once, else a ticket.

        Raises:
            LocalProtocolError: The frame is over the limits; nothing was sent.
            ClosedError: The connection is closed.
        """

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """How many parts of frames wait for `flush`."""

    @abstractmethod
    def flush(self) -> bool:
        """Writes what it can without blocking; False if something is left."""

    @abstractmethod
    def receive(self) -> list[Frame]:
        """Reads the frames that are there, without blocking.

        `is_drained` tells afterwards whether all was read, `end` why the stream ended.

        Raises:
            RemoteProtocolError: The peer sent something that is no frame.
        """

    writer = 0
    """The thread that writes at this moment, if any, and cannot be waited for by itself."""
    is_drained: bool
    """Nothing more can be read until the descriptor is readable again; after `receive`, and
    at the beginning, when frames may have come with the last of the handshake."""
    bytes_received: int
    """How many there were so far, those of frames that are not complete too."""
    end: str | None
    """Why nothing will ever come again, or None."""
    broke_off = False
    """It is not the peer that has ended it: it should be told why."""

    def shed(self) -> None:  # noqa: B027 - most have nothing to shed
        """Something long begins: keep no memory only because it may be used again."""

    @abstractmethod
    def housekeeping(self, now: float) -> None:
        """Returns borrowed memory to the peer, drops what was unused for long.

        Called every now and then by one thread of the agent.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connection and wakes whoever holds a ticket. Idempotent."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Bytes and buffers, for debugging: ``bytes_sent``, ``segments``, ..."""


class Channel(ABC):
    """A byte stream for the handshake; non-blocking."""

    wants_write: bool = False
    """After `read` returned None: poll for writing as well, the channel has to write."""
    demands_certificate: bool = False
    """Whether no byte gets through from a peer without a certificate that we trust."""

    def objection_to(self, name: str) -> str | None:
        """Why the peer is not the worker of this name; None if it may be.

        Called when the peer has said who it is. Only certificates know better.
        """
        return None

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor to poll."""

    @abstractmethod
    def read(self, limit: int) -> bytes | None:
        """Up to ``limit`` bytes; None if there are none yet; b"" at the end.

        Raises:
            HandshakeRefused: The peer's certificate is not good enough, or it says that
                ours is not.
            RemoteProtocolError: The peer does not speak what the channel speaks.
        """

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Writes the few bytes of a handshake record.

        Raises:
            ConnectError: They could not be written whole.
        """

    @property
    @abstractmethod
    def peer_is_same_user(self) -> bool:
        """Whether the kernel vouches that the peer runs as the same user."""

    @property
    @abstractmethod
    def peer_description(self) -> str:
        """Who connects, for log lines: a process id or an address."""

    @abstractmethod
    def upgrade(self, limits: Limits, leftover: bytes) -> Connection:
        """Turns the channel into a connection; the channel must not be used any more.

        Args:
            limits: The limits of the connection.
            leftover: Bytes that were read but belong to the first frames.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the channel. Idempotent."""


class Listener(ABC):
    """Accepts channels."""

    address: str
    """What `Transport.connect` of another worker needs."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when somebody knocks."""

    @abstractmethod
    def accept(self) -> Channel | None:
        """The next channel, or None if nobody knocks; never blocks.

        Raises:
            OSError: The system lacks something, such as descriptors.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops listening. Idempotent."""


class Transport(ABC):
    """One way to move bytes. Instances are stateless and live in the registry."""

    scheme: str
    capabilities: Capabilities

    def with_credentials(self, credentials: TlsCredentials) -> Transport:
        """This transport, for an agent that proves who it is by a certificate.

        Only transports whose `Capabilities.needs_certificate` is set are asked.
        """
        raise AssertionError(f"transport {self.scheme!r} uses no certificates")

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this platform has what the transport needs."""

    @abstractmethod
    def listen(self, host: str, port: int, label: str) -> Listener:
        """Starts to listen.

        Args:
            host: Address to bind to; only for transports that cross hosts.
            port: Port to bind to, 0 for any; likewise.
            label: Name that makes local addresses unique.

        Raises:
            ConnectError: The address cannot be used.
        """

    @abstractmethod
    def connect(self, address: str, timeout_s: float) -> Channel:
        """Connects to a listener's address; blocks at most ``timeout_s``.

        Raises:
            ConnectError: Nobody listens there, or not in time.
        """
