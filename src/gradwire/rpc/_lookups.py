"""Handing out tensors that are there already: the short way to serve a call.

A worker that holds parameters is asked for them again and again. No code of the program
runs for that, nothing waits, and the answer is a small tensor: so there is no need of a
request that can be waited for, of a `contextvars.Context`, of scopes or of a serializer.
Whatever is not that simple is left to `gradwire.rpc._serving`, which comes to the same.
"""

from __future__ import annotations

import operator
import sys
import time
from typing import TYPE_CHECKING

from gradwire.errors import GradwireError, TransportError
from gradwire.rpc._interceptors import NOTHING, Interceptor, LookUp
from gradwire.rpc._log import log as _log
from gradwire.rpc._turn import current_turn
from gradwire.wire import (
    FLAT_TUPLE,
    Call,
    Reply,
    describe_small,
    encode_small,
    is_bare,
    thread_state_is_clean,
)

if TYPE_CHECKING:
    from gradwire.rpc._link import Link
    from gradwire.rpc._peer import Peer
    from gradwire.transport import Frame

__all__ = ["Lookups"]


class Lookups:
    """Serves what the interceptors of an agent look up.

    Args:
        interceptors: Theirs are the `Interceptor.lookups`.
        max_calls: How many requests a peer may have open.

    Attributes:
        by_target: What is looked up, by the names of the functions.
    """

    def __init__(self, interceptors: tuple[Interceptor, ...], max_calls: float) -> None:
        self._interceptors = [i for i in interceptors if i.sees_all_calls]
        self._names = {i.name for i in self._interceptors}
        self._max_calls = max_calls
        self.by_target: dict[str | None, LookUp] = {
            target: look_up
            for interceptor in interceptors
            for target, look_up in interceptor.lookups.items()
        }
        # Each call that is answered takes one number: any thread may, without a lock.
        self._numbers = iter(range(sys.maxsize))

    @property
    def num_served(self) -> int:
        """How many calls were answered."""
        return sys.maxsize - operator.length_hint(self._numbers)

    def serve(  # noqa: PLR0912 - written out: each step costs each call
        self, look_up: LookUp, link: Link, peer: Peer, call: Call, frame: Frame
    ) -> bool:
        """Answers a call, if that is simple; False if it is not.

        Args:
            look_up: What ``by_target`` has for its target.
            link: Where it came from.
            peer: Who calls.
            call: The call.
            frame: Its frame.
        """
        body = call.body
        if body is None or body.form != FLAT_TUPLE or body.tensors or frame.buffers:
            return False
        if call.style:  # anything but positional arguments
            return False
        refs = body.refs
        if not len(refs) == refs.count(-1) == len(body.plain) or not is_bare(
            frame.head
        ):
            return False  # there is more in it, or it is malformed
        if peer.held.calls + link.connection.num_queued >= self._max_calls:
            return False
        turn = current_turn()
        if turn is not None and turn.link is not link:
            turn = None
        if call.deadline:
            now = turn.serving_since if turn is not None else time.monotonic()
            if now >= call.deadline - link.clock_offset:
                return False
        tensor = look_up(body.plain)
        if tensor is None or not thread_state_is_clean():
            return False
        small = describe_small(tensor)
        if small is None:
            return False
        given = call.headers or {}
        if not self._names.issuperset(given):
            return False  # there is something in it for others
        headers: dict[str, bytes] | None = None
        for interceptor in self._interceptors:
            header = given.get(interceptor.name)
            addition = interceptor.handing_out(peer, header, tensor)
            if addition is None:
                self._take_back(headers)
                return False
            if addition is NOTHING:
                continue
            if addition.flags:
                small[2].flags = addition.flags[0]
            if addition.header is not None:
                headers = headers or {}
                headers[interceptor.name] = addition.header
        head = encode_small(Reply(call.id, headers), small)
        try:
            # As in `_serving`: answers to what was read together leave together.
            link.send(head, hold=turn is not None and bool(turn.rest))
        except TransportError:
            _log.debug("the caller is gone; the answer to call %d is dropped", call.id)
        except GradwireError:  # over a limit, of which the long way tells
            self._take_back(headers)
            return False
        next(self._numbers)
        return True

    def _take_back(self, headers: dict[str, bytes] | None) -> None:
        for interceptor in self._interceptors:
            if headers and interceptor.name in headers:
                interceptor.not_handed_out(headers[interceptor.name])
