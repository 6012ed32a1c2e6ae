"""Who serves the current call, if this code runs inside a handler."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = ["serving_agent"]

serving_agent: contextvars.ContextVar[Agent | None] = contextvars.ContextVar(
    "gradwire_serving_agent", default=None
)
"""The agent whose handler runs here. Calls made inside handlers never wait for credit."""
