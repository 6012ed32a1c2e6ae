"""Small functions that workers run for tests.

Workers find them by name, so they stand here and not in closures. Nothing sleeps: what
has to block waits for an event that another call sets, with a limit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from typing import Any, NoReturn

LIMIT_S = 30.0

# Created by whichever side comes first: the one that waits or the one that sets.
_events: defaultdict[str, threading.Event] = defaultdict(threading.Event)
_events_lock = threading.Lock()  # guards _events; touched by handlers on any thread


def echo(*args: Any, **kwargs: Any) -> Any:
    """Its one argument, or all of them if there are more."""
    return args[0] if len(args) == 1 and not kwargs else (args, kwargs)


def add(a: Any, b: Any) -> Any:
    return a + b


def get_pid() -> int:
    return os.getpid()


def get_thread_name() -> str:
    return threading.current_thread().name


def raise_value_error(text: str = "bad value") -> NoReturn:
    raise ValueError(text)


class Unpicklable(Exception):
    """An error that cannot be pickled, because it holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable(text: str = "held") -> NoReturn:
    raise Unpicklable(text)


def return_unpicklable() -> Any:
    return threading.Lock()


def get_event(name: str) -> threading.Event:
    """The event of this name in this process."""
    with _events_lock:
        return _events[name]


def block_until_set(name: str, limit_s: float = LIMIT_S) -> str:
    """Blocks the handler until some other call sets the event of this name."""
    get_event(f"{name}:entered").set()
    if not get_event(name).wait(limit_s):
        raise TimeoutError(f"nobody set event {name!r} within {limit_s} s")
    return name


def wait_until_blocked(name: str, limit_s: float = LIMIT_S) -> None:
    """Returns when a call of `block_until_set` with this name has begun here."""
    if not get_event(f"{name}:entered").wait(limit_s):
        raise TimeoutError(f"nobody blocked on event {name!r} within {limit_s} s")


def set_event(name: str) -> None:
    get_event(name).set()


def forget_events() -> None:
    """For tests that share workers and want to use a name again."""
    with _events_lock:
        _events.clear()


def exit_process(code: int = 3) -> NoReturn:
    os._exit(code)


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
