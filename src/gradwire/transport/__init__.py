"""Transports: frames between two endpoints; nothing here knows what they mean."""

from __future__ import annotations

from gradwire.transport._inproc import channel_pair
from gradwire.transport._registry import (
    get_transport,
    known_transports,
    register_transport,
)
from gradwire.transport.base import (
    Capabilities,
    Channel,
    Connection,
    Frame,
    Limits,
    Listener,
    RawBuffer,
    Ticket,
    Transport,
)

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
    "channel_pair",
    "get_transport",
    "known_transports",
    "register_transport",
]
