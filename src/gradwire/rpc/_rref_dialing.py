"""Connecting to the owners of values, and not again and again to one that is dead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from gradwire.errors import GradwireError
from gradwire.rpc._turn import about_to_block

if TYPE_CHECKING:
    from gradwire.rpc._network import Network
    from gradwire.rpc._peer import Peer

__all__ = ["OwnerDialer"]

_NOT_AGAIN_S = 1.0


class _Failure(NamedTuple):
    owner: Peer
    until: float  # when it may be tried again, on the monotonic clock
    error: GradwireError


class OwnerDialer:
    """Opens connections to owners.

    There may be thousands of references to the values of one worker. If it cannot be
    reached, the next ones of them are told so at once.

    Args:
        network: The workers.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._last: _Failure | None = None  # replaced as a whole, by any thread

    def connect(self, owner: Peer) -> None:
        """Opens the connection to an owner, if there is none.

        Raises:
            GradwireError: It cannot be reached, or could not a moment ago.
        """
        if owner.link is None:
            last = self._last
            if last is not None and last.owner is owner:
                if time.monotonic() < last.until:
                    raise last.error
                self._last = None
            about_to_block()  # nobody else reads what this thread has its turn at
        try:
            self._network.connect(owner)
        except GradwireError as error:
            until = time.monotonic() + _NOT_AGAIN_S
            self._last = _Failure(owner, until, error.with_traceback(None))
            raise
