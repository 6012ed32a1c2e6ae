"""What an agent makes of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gradwire.rpc._agent import Agent
from gradwire.transport import Frame
from gradwire.wire import Call


def test_request_is_emptied_before_it_is_served():
    """Whoever has read it may hold it for as long as it is served."""
    seen: list[Any] = []
    request: list[Any] = []

    def serve(*args: Any) -> None:
        seen.append((*args, list(request)))

    agent: Any = SimpleNamespace(_server=SimpleNamespace(serve=serve))
    call, frame = Call(1), Frame(b"", [])
    request += ["peer", call, frame]

    Agent.serve(agent, "link", request)  # type: ignore[arg-type]

    assert seen == [("link", "peer", call, frame, [])]
