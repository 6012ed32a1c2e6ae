"""The answers to an agent's calls: what they carry, and who is told."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradwire.errors import DecodeError, RemoteProtocolError
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._future import DEEPEST
from gradwire.rpc._peer import Peer
from gradwire.rpc._signals import may_be_of_a_signal
from gradwire.rpc._turn import current_turn
from gradwire.transport import Frame
from gradwire.wire import (
    NO_VALUE,
    Message,
    Reply,
    decode_small,
    decode_value,
    is_bare,
    tracked_tensors,
)

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = ["Answers"]

_NO_HEADERS: Mapping[str, bytes] = {}


class _Local(threading.local):
    """What a thread has to do with callbacks."""

    depth = 0  # of callbacks that are run by callbacks
    put_off: list[Callable[[], None]] | None = None  # until an answer is handled


class Answers:
    """Takes the answers to the calls of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pool = agent.pool
        self._departure = agent.departure
        self._interceptors = agent.interceptors
        self._by_name = {i.name: i for i in agent.interceptors}
        self._packing = agent.packing
        self._serializer = agent.serializer
        self._local = _Local()

    def on_answer(
        self, peer: Peer, message: Message, frame: Frame
    ) -> Callable[[], None] | None:
        """An answer came; returns the callbacks that are to be run, if there are any.

        They may do anything: the answer has to count as handled before.
        """
        call = peer.calls.take(message.id)  # type: ignore[attr-defined]
        if call is None:
            self._drop_answer(peer, message)
            return None
        if call.future is None:
            self._finish_call(peer, call, message, frame)
            return None
        # What it carries may call when it is rebuilt, and read another answer meanwhile.
        before = self._local.put_off
        put_off = self._local.put_off = []
        try:
            self._finish_call(peer, call, message, frame)
        except BaseException:
            self._pool.submit(*put_off)
            raise
        finally:
            self._local.put_off = before
        return functools.partial(self._run_all, put_off) if put_off else None

    def _run_all(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            self.run_callback(callback)

    def _finish_call(
        self, peer: Peer, call: PendingCall, message: Message, frame: Frame
    ) -> None:
        try:
            if (
                type(message) is Reply
                and message.body is None
                and not (message.headers or call.notes or frame.buffers)
                and is_bare(frame.head)
            ):
                call.settle(None, None)  # as of most functions without a result
            else:
                call.settle(*self._read_answer(peer, call, message, frame))
        except BaseException:
            # A signal handler raised on a caller's thread; the call may be another's.
            again = functools.partial(self._finish_call, peer, call, message, frame)
            self._pool.submit(again)
            raise
        if self._departure.reports:
            self._departure.check()

    def _read_answer(
        self, peer: Peer, call: PendingCall, message: Message, frame: Frame
    ) -> tuple[Any, BaseException | None]:
        """The value or the error that an answer carries."""
        try:
            small = None
            if (
                type(message) is Reply
                and (body := message.body) is not None
                and body.tensors
                and not frame.buffers
            ):
                small = decode_small(body, frame.head)
            if small is not None:
                value, tracked = small
            else:
                value, tensors = decode_value(
                    message,
                    frame.head,
                    frame.buffers,
                    peer.unpack or self._packing.unpacker(peer),
                    self._serializer,
                )
                if type(message) is not Reply:
                    return None, self._agent.rebuild(value)
                if value is NO_VALUE:
                    value = None  # see `_Request.succeed`
                has_any = bool(message.headers and tensors)
                tracked = tracked_tensors(message, tensors) if has_any else []
            headers = message.headers or _NO_HEADERS  # type: ignore[attr-defined]
            notes = call.notes
            if not headers and not notes:
                return value, None  # nothing for anybody else
            for name, interceptor in self._by_name.items():
                if name in headers or name in notes:
                    interceptor.received_reply(
                        peer,
                        call.id,
                        call.target,
                        notes.get(name),
                        headers.get(name),
                        tracked,
                        small is not None,
                    )
        except BaseException as problem:
            if may_be_of_a_signal(problem):
                raise
            self._packing.discard(problem)
            self._drop_answer(peer, message)
            if not isinstance(problem, Exception):
                # Not as it is: it would end the program that asked, which did nothing.
                name = f"{type(problem).__name__}: {problem}"
                text = f"the answer to {call.target} cannot be rebuilt here ({name})"
                return None, DecodeError(text, worker=peer.info.name)
            return None, problem
        return value, None

    def _drop_answer(self, peer: Peer, message: Message) -> None:
        headers: dict[str, bytes] | None = getattr(message, "headers", None)
        for interceptor in self._interceptors:
            if headers and interceptor.name in headers:
                call_id: int = message.id  # type: ignore[attr-defined]
                with contextlib.suppress(RemoteProtocolError):  # as in `Server._drop`
                    interceptor.dropped_reply(peer, call_id, headers[interceptor.name])

    def run_callback(self, callback: Callable[[], None]) -> None:
        """Runs a callback of a future, here or on another thread of the pool."""
        turn = current_turn()
        local = self._local
        # Not in the middle of a handler that waits: what it has set for its thread, such
        # as no_grad, is not for others, and neither is it to wait for them. Nor at the end
        # of a long chain of futures, each of which completes the next one.
        if (
            not self._pool.is_pool_thread
            or (turn is not None and turn.is_callers)
            or local.depth >= DEEPEST
        ):
            self._pool.submit(callback)
        elif local.put_off is not None:
            local.put_off.append(callback)
        else:
            self._pool.ensure_follower()
            local.depth += 1
            try:
                callback()
            finally:
                local.depth -= 1
