"""The thread of ``async def`` targets."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

from gradwire.errors import NotInitialized
from gradwire.rpc._event_loop import EventLoop


class Request:
    """Takes down its answer."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def succeed(self, value: Any) -> None:
        self.value = value

    def fail(self, error: BaseException) -> None:
        self.error = error


async def answer() -> int:
    return 1


def test_loop_that_was_closed_is_not_started_again():
    loop = EventLoop("test", lambda work: work())
    loop.close(1.0)
    before = threading.active_count()
    request = Request()

    loop.run(answer(), contextvars.copy_context(), request)

    assert isinstance(request.error, NotInitialized)
    assert threading.active_count() == before
