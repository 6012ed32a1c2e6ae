"""Keeping signal handlers from interrupting what must not be left half-way.

A Python signal handler may raise at almost any point of the main thread, and the
program may catch that and go on: Ctrl-C in a notebook is the common case. Code that
moves bytes off a socket and into tables cannot be left in the middle. While the main
thread is inside `shielded()`, handlers are put off until its end, or until the next
wait: waits are made through `interruptible`, inside of which handlers run, and raise,
at once. Nothing is half done while a thread waits. A handler that runs in a wait may make
calls itself, and inside of these it is the same again.

Other threads never run signal handlers and need none of this.
"""

from __future__ import annotations

# What ``signal`` wraps: the wrapper costs more than a whole call.
import _signal  # type: ignore[import-not-found]
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Args = TypeVarTuple("Args")

__all__ = [
    "interruptible",
    "may_be_of_a_signal",
    "shielded",
    "use_this_thread",
    "wait_in_slices",
]

_SLICE_S = 0.05

T = TypeVar("T")

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP")
    if hasattr(signal, name)
)
_main_thread = threading.main_thread().ident


class _Shield:
    """Puts off the Python signal handlers; only the main thread uses it."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_waiting = False
        self._hook = self._on_signal
        # Never emptied: should the hook be left in place, it still finds the handler.
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._hooked: tuple[int, ...] = ()
        # What was found the last time, and which of that have handlers in Python: from one
        # call to the next it rarely changes.
        self._found: tuple[Any, ...] = ()
        self._with_handlers: tuple[int, ...] = ()
        self._put_off: list[int] = []
        # Depths at which handlers that run in a wait have entered it again.
        self._depths_in_handlers: list[int] = []

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth > 1:
            if self._is_waiting:
                self._is_waiting = False
                self._depths_in_handlers.append(self.depth)
            return
        try:
            found = tuple(map(_signal.getsignal, _SIGNALS))
            if found != self._found:
                self._look_at(found)
            self._hooked = self._with_handlers
            for number in self._with_handlers:
                _signal.signal(number, self._hook)
        except BaseException:  # a handler that raised before it was put off
            self._lower()
            raise

    def _look_at(self, found: tuple[Any, ...]) -> None:
        for number, handler in zip(_SIGNALS, found, strict=True):
            # The hook itself is found if an interrupt kept it from being taken away.
            if callable(handler) and handler != self._hook:
                self._handlers[number] = handler
        self._with_handlers = tuple(
            number
            for number, handler in zip(_SIGNALS, found, strict=True)
            if callable(handler)
        )
        self._found = found

    def __exit__(self, *error: object) -> None:
        if self.depth > 1:
            if self._depths_in_handlers and self._depths_in_handlers[-1] == self.depth:
                self._leave_in_handler()
            else:
                self.depth -= 1
        else:
            self._lower()

    def _leave_in_handler(self) -> None:
        self._depths_in_handlers.pop()
        self.depth -= 1
        self._is_waiting = True
        self._run_put_off()

    def _run_put_off(self) -> None:
        while self._put_off:
            number = self._put_off.pop(0)
            self._handlers[number](number, None)

    def _lower(self) -> None:
        # From here on the hook lets everything through, so that whatever a handler
        # raises below, nothing is left broken.
        self.depth = 0
        put_off, self._put_off = self._put_off, []
        hooked, self._hooked = self._hooked, ()
        for number in hooked:
            _signal.signal(number, self._handlers[number])
        for number in put_off:
            self._handlers[number](number, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.depth and not self._is_waiting:
            self._put_off.append(number)
        else:
            self._handlers[number](number, frame)

    def wait(self, function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            if self._put_off:
                self._run_put_off()
            # Not ``return function()``: its result would be on the way out of the try
            # when a signal comes, and the finally be skipped.
            result = function(*args)
        finally:
            self._is_waiting = was_waiting
        return result


class _NoShield:
    """For threads that never run signal handlers: it does nothing, and that in C.

    Functions of Python would be two steps of each call. An integer and an empty string are
    what comes of these; the latter is false, so that errors pass.
    """

    __enter__: Any = staticmethod(int)
    __exit__: Any = staticmethod("".format)


_shield = _Shield()
_no_shield = _NoShield()


def shielded() -> _Shield | _NoShield:
    """A context in which signal handlers are put off; free on other threads."""
    return _shield if threading.get_ident() == _main_thread else _no_shield


def use_this_thread() -> None:
    """In a process that was forked: this thread is the main one, and not in a shield."""
    global _main_thread  # noqa: PLW0603
    _main_thread = threading.get_ident()
    _shield.depth = 0
    _shield._is_waiting = False
    _shield._depths_in_handlers.clear()


def may_be_of_a_signal(error: BaseException) -> bool:
    """Whether a signal handler may have raised what was caught here.

    Then it is for the program that runs on this thread. Otherwise it belongs to whatever
    raised it, such as a module that exits when it is imported.
    """
    return not isinstance(error, Exception) and threading.get_ident() == _main_thread


def wait_in_slices(wait: Callable[[float], bool], limit: float) -> bool:
    """Waits on an event or a condition, which signals can end between two slices.

    Args:
        wait: Waits up to so many seconds and tells whether it was successful.
        limit: When to give up, on the monotonic clock.
    """
    while True:
        left = limit - time.monotonic()
        if wait(max(0.0, min(left, _SLICE_S))):
            return True
        if left <= 0:
            return False
        interruptible(_nothing)


def _nothing() -> None:
    pass


def interruptible(function: Callable[[Unpack[Args]], T], *args: Unpack[Args]) -> T:
    """Calls a function that waits, so that signals end the wait also inside a shield.

    It must be a single C call, such as the acquiring of a lock: Python code, also that
    of `threading`, does not survive being interrupted. For waits on events and
    conditions there is `wait_in_slices`.
    """
    if _shield.depth and threading.get_ident() == _main_thread:
        return _shield.wait(function, *args)
    return function(*args)
