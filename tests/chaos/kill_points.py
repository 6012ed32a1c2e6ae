"""Kills a worker at one chosen message, and looks at the others.

What a worker does to others it does by messages. So "killed at any moment" is a finite
list: before or after each message that it sends, and at each that it gets. The n-th of
them is counted from a moment when nothing is going on.

Where there are no messages yet, in `init_rpc`, calls of functions of the library are counted
instead.

Runs in the workers: `arm` in the victim, the rest in the test process.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gradwire
from gradwire.rpc import _agent, _link
from gradwire.wire import Heartbeat, kind_of

When = Literal["before sending", "after sending", "on receiving", "at call"]
WHENS: tuple[When, ...] = ("before sending", "after sending", "on receiving")

_LIBRARY = os.path.dirname(gradwire.__file__)
_HEARTBEAT = kind_of(Heartbeat)
_MOMENT = struct.Struct("d")


class Point(NamedTuple):
    """Where a worker dies."""

    when: When
    number: int

    def __str__(self) -> str:
        return f"{self.when} message {self.number}"


class _Trap:
    """Counts messages, and kills this process at the chosen one."""

    def __init__(self, point: Point, note: Path) -> None:
        self.point = point
        self._note = note
        self._lock = threading.Lock()
        self._count = 0

    def is_hit(self, head: bytes = b"") -> bool:
        if head and head[0] == _HEARTBEAT:
            return False
        with self._lock:
            self._count += 1
            return self._count == self.point.number

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """See `sys.setprofile`."""
        is_ours = event == "call" and frame.f_code.co_filename.startswith(_LIBRARY)
        if is_ours and self.is_hit():
            self.spring()

    def spring(self) -> None:
        self._note.write_bytes(_MOMENT.pack(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


_trap: _Trap | None = None
_send = _link.Link.send
_accept = _agent.Agent.accept


def arm(point: Point, note: Path) -> None:
    """From now on this worker is doomed; it notes in a file when it dies."""
    global _trap
    _trap = _Trap(point, note)
    if point.when == "at call":
        threading.setprofile(_trap.profile)
        sys.setprofile(_trap.profile)
    elif point.when == "on receiving":
        _agent.Agent.accept = _accept_or_die  # type: ignore[method-assign, assignment]
    else:
        _link.Link.send = _send_or_die  # type: ignore[method-assign, assignment]


def count_calls() -> int:
    """How many calls a trap has seen that was not sprung."""
    assert _trap is not None
    return _trap._count


def disarm() -> None:
    """It may live."""
    threading.setprofile(None)  # type: ignore[arg-type]
    sys.setprofile(None)
    _agent.Agent.accept = _accept  # type: ignore[method-assign]
    _link.Link.send = _send  # type: ignore[method-assign]


def _send_or_die(
    link: _link.Link, head: bytes, buffers: Any = (), *, hold: bool = False
) -> Any:
    trap = _trap
    if trap is None or not trap.is_hit(head):
        return _send(link, head, buffers, hold=hold)
    if trap.point.when == "after sending":
        _send(link, head, buffers)
        link.flush()
    return trap.spring()


def _accept_or_die(agent: _agent.Agent, link: _link.Link, frame: Any) -> Any:
    trap = _trap
    if trap is not None and trap.is_hit(frame.head):
        trap.spring()
    return _accept(agent, link, frame)


def read_moment(note: Path) -> float:
    """When the victim died, on the clock that all processes share."""
    (moment,) = _MOMENT.unpack(note.read_bytes())
    return float(moment)
