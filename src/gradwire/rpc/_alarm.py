"""An alarm that can be put off without waking anybody."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from gradwire.transport._forks import keep_from_children

__all__ = ["Alarm", "make_alarm"]

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("first", _Time))


class Alarm:
    """A timer of the kernel, as a descriptor that becomes readable.

    A thread that sleeps until some time has to wake up to learn that it may sleep on, and
    to take the interpreter lock from those who work. One thread at a time may set this.

    Args:
        library: The C library.
        fileno: The timer, which `close` closes.
    """

    def __init__(self, library: Any, fileno: int) -> None:
        self._fileno = fileno
        # Made once: it is set under a lock, where nothing should be made that could set
        # off the cyclic collector, and by that finalisers of the program.
        self._setting = _Setting()
        self._first = self._setting.first  # the same memory
        self._at_setting = ctypes.byref(self._setting)
        self._set_time = library.timerfd_settime
        self._set_time.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(_Setting),
            ctypes.c_void_p,
        ]
        keep_from_children(self)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fileno

    def set(self, when: float) -> None:
        """Lets it ring at that time, on the monotonic clock, and not before."""
        first = self._first
        first.seconds = seconds = int(when)
        first.nanoseconds = int((when - seconds) * 1e9)
        self._set_time(self._fileno, _ABSOLUTE, self._at_setting, None)

    def stop(self) -> None:
        """Ends the ringing."""
        with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile
            os.read(self._fileno, 8)

    def close(self) -> None:
        """Closes the descriptor."""
        fileno, self._fileno = self._fileno, -1
        if fileno >= 0:
            os.close(fileno)

    def abandon(self) -> None:
        """See `keep_from_children`."""
        self.close()


def make_alarm() -> Alarm | None:
    """An alarm; None where there is nothing of the kind."""
    try:
        library = ctypes.PyDLL(None)  # what does not wait need not let go of the lock
        create = library.timerfd_create
    except (OSError, TypeError, AttributeError):
        return None
    fileno = create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return Alarm(library, fileno) if fileno >= 0 else None
