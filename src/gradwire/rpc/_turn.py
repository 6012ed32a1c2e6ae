"""A pool thread's turn at a connection, and how it ends early.

A thread that has read requests serves them itself while it keeps the right to read that
connection: for short functions nothing else is needed, no other thread is woken, and
answers to several requests leave in one write. But while it serves, nobody reads this
connection. So a turn is given up, and the connection armed for other threads,

1. before its thread blocks in one of our own waits (a nested call, a future), except for
   one that this very connection will end: then the thread goes on reading,
2. before it runs a function that is known to take long,
3. by a look (see `_watch`), if one request takes more than `LONGEST_TURN_S`.

What the turn had read but not begun then goes to the pool's queue, where the same rules
decide when more threads are woken. So whatever a handler does, it delays others by some
milliseconds at most, and short functions are served by few threads, which do not
fight for the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.rpc._link import Link

__all__ = [
    "LONGEST_TURN_S",
    "LOOK_S",
    "Turn",
    "about_to_block",
    "about_to_compute",
    "call_for_help",
    "current_turn",
    "forget_turn",
    "leave_unread",
    "let_others_read",
    "set_helper",
    "set_turn",
    "this_thread",
]

LONGEST_TURN_S = 0.02
"""More than a few of the interpreter's switch intervals: a thread that only waits for the
interpreter lock, or was not given a core, must not be taken for one that blocks."""
LOOK_S = 0.01
"""When to look whether something is stuck, if nothing shows that it is not."""


class _Local(threading.local):
    """What a thread has; defaults, since to ask for what is not there costs more.

    Each call asks for the turn, and sets it: that needs no function.
    """

    turn: Turn | None = None
    call_for_help: Callable[[], None] | None = None
    resign: Callable[[], None] | None = None
    unread: set[Link] | None = None


this_thread = _Local()


class Turn:
    """One thread's turn. Its `Link` guards the fields, all but ``rest``."""

    __slots__ = (
        "has_blocked",
        "is_callers",
        "is_over",
        "link",
        "put_off",
        "rest",
        "serving_since",
        "siblings",
        "thread",
    )

    def __init__(self, link: Link, *, is_callers: bool = False) -> None:
        self.link = link
        self.thread = threading.get_ident()
        self.is_callers = is_callers  # its thread waits in the middle of something else
        self.is_over = False
        self.has_blocked = False  # its thread has called `about_to_block`
        self.serving_since = 0.0  # 0: it reads or waits, which never takes long
        # Frames that were read and not handled, the next one last. Both the turn's thread
        # and whoever ends the turn take from it.
        self.rest: list[Any] = []
        # What nobody waits for, and so comes after what was asked for meanwhile; likewise.
        self.put_off: list[Callable[[], None]] = []
        # All turns of a thread that goes from connection to connection; see `_round`.
        self.siblings: Sequence[Turn] = ()


def current_turn() -> Turn | None:
    """The turn of the current thread."""
    return this_thread.turn


def set_turn(turn: Turn | None) -> None:
    """Begins or ends the turn of the current thread."""
    this_thread.turn = turn


def forget_turn() -> None:
    """The current thread has no turn, and nobody to help, in a process that was forked."""
    this_thread.turn = this_thread.call_for_help = this_thread.resign = (
        this_thread.unread
    ) = None


def leave_unread(link: Link) -> None:
    """The current thread has waited at a connection, and is likely to be back very soon.

    Nobody reads there until it is, or calls `let_others_read`, or a look has come.
    """
    unread = this_thread.unread
    if unread is None:
        this_thread.unread = {link}
    else:
        unread.add(link)


def let_others_read() -> None:
    """To be called before the current thread sleeps: it will not be back so soon."""
    unread = this_thread.unread
    if unread is not None:
        this_thread.unread = None
        for link in unread:
            link.read_by_others()


def set_helper(helper: Callable[[], None], resign: Callable[[], None]) -> None:
    """What the current thread does so that others go on.

    Args:
        helper: Before it waits for one connection, and reads it.
        resign: Before it does something else that takes its time.
    """
    this_thread.call_for_help, this_thread.resign = helper, resign


def call_for_help() -> None:
    """To be called before a wait during which this thread goes on reading."""
    helper = this_thread.call_for_help
    if helper is not None:
        helper()


def about_to_compute() -> None:
    """To be called before something that takes long, and keeps the turn, but only one."""
    turn = this_thread.turn
    if turn is not None and turn.siblings and not turn.is_callers:
        for sibling in turn.siblings:
            if sibling is not turn:
                sibling.link.end_turn(sibling)
    resign = this_thread.resign
    if resign is not None:
        resign()


def about_to_block() -> None:
    """To be called before any other wait that may last."""
    turn = this_thread.turn
    if turn is not None:
        if turn.has_blocked:
            return  # it is over, and its thread leads no more until it is back
        turn.link.end_turn(turn)
        for sibling in turn.siblings:
            sibling.link.end_turn(sibling)
    resign = this_thread.resign
    if resign is not None:
        resign()
    if turn is not None:
        turn.has_blocked = True
