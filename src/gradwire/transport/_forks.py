"""What the children of this process must not keep open.

A child that was made by ``fork``, such as a worker of a DataLoader, has copies of all
descriptors. While it lives, others would not see that a connection has ended when this
process dies, and its addresses would stay taken. So the child closes them first of all:
without a word to the other end, which is still the parent's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Protocol

__all__ = ["keep_from_children"]


class Abandoned(Protocol):
    """Something that holds descriptors."""

    def abandon(self) -> None:
        """Closes them, in a child that has just begun.

        Must take no lock: threads that the child does not have may hold it for ever. What
        is closed here must not be closed again: the number may be another's by then.
        """


_held: weakref.WeakSet[socket.socket | Abandoned] = weakref.WeakSet()


def keep_from_children(holder: socket.socket | Abandoned) -> None:
    """Has children close a socket, or abandon whatever it is; holds it weakly."""
    _held.add(holder)


def _abandon_all() -> None:
    for holder in list(_held):
        with contextlib.suppress(OSError):
            if isinstance(holder, socket.socket):
                fileno = holder.detach()
                if fileno >= 0:
                    os.close(fileno)
            else:
                holder.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
