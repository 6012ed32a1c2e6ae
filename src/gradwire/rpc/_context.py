"""Who serves the current call, if this code runs inside a handler."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._peer import Peer

__all__ = ["serving_agent", "serving_peer"]

serving_agent: contextvars.ContextVar[Agent | None] = contextvars.ContextVar(
    "gradwire_serving_agent", default=None
)
"""The agent whose handler runs here. Calls made inside handlers never wait for credit."""

serving_peer: contextvars.ContextVar[Peer | None] = contextvars.ContextVar(
    "gradwire_serving_peer", default=None
)
"""Whose call it is. Set only where that decides what may be done: in safe mode."""
