"""The thread of ``async def`` targets."""

from __future__ import annotations

import contextvars
import threading
from typing import Any, cast

from gradwire.errors import NotInitialized
from gradwire.rpc._serving import _EventLoop, _Request


class Request:
    """Takes down its answer."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error


async def answer() -> int:
    return 1


def test_loop_that_was_closed_is_not_started_again():
    loop = _EventLoop("test")
    loop.close(1.0)
    before = threading.active_count()
    request: Any = Request()

    loop.run(answer(), contextvars.copy_context(), cast(_Request, request))

    assert isinstance(request.error, NotInitialized)
    assert threading.active_count() == before
