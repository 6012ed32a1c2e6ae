"""For layers above: how to take part in calls, and to send messages of one's own.

A layer derives a class from `Interceptor` and registers it before agents are created.
"""

from __future__ import annotations

from gradwire.rpc._agent import Agent
from gradwire.rpc._api import current_agent
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._context import serving_agent, serving_peer
from gradwire.rpc._exports import for_agents, methods_for_agents
from gradwire.rpc._future import Outcome
from gradwire.rpc._host import find_address, num_cores, rendezvous_host
from gradwire.rpc._interceptors import (
    NOTHING,
    Addition,
    Interceptor,
    Note,
    Scope,
    register_interceptor,
)
from gradwire.rpc._leftovers import Leftovers
from gradwire.rpc._peer import Peer
from gradwire.rpc._remote_exceptions import describe, rebuild
from gradwire.rpc._rref import (
    CUT_OUTSIDE_CONTEXT,
    made_by,
    set_backward,
    start_method,
)
from gradwire.rpc._signals import shielded
from gradwire.rpc._targets import shown_as

__all__ = [
    "CUT_OUTSIDE_CONTEXT",
    "NOTHING",
    "Addition",
    "Agent",
    "Interceptor",
    "Leftovers",
    "Note",
    "Outcome",
    "Peer",
    "PendingCall",
    "Scope",
    "current_agent",
    "describe",
    "find_address",
    "for_agents",
    "made_by",
    "methods_for_agents",
    "num_cores",
    "rebuild",
    "register_interceptor",
    "rendezvous_host",
    "serving_agent",
    "serving_peer",
    "set_backward",
    "shielded",
    "shown_as",
    "start_method",
]
