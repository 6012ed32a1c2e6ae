"""News of workers that come and go: who hears of them, and who waits for them.

The news are told one after the other, in the order in which they came, on a thread of the
pool: a worker that is lost and comes back is never told of in the wrong order.

Who waits for a worker wants to hear of it. A connection does not show that it can be called:
it may have declared us lost while we were stopped or cut off, and we have not read that yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire._ids import WorkerInfo, role_of
from gradwire.errors import (
    CallTimeout,
    ConnectTimeout,
    GradwireError,
    NotInitialized,
)
from gradwire.rpc._exports import for_agents
from gradwire.rpc._log import log as _log
from gradwire.rpc._network import Network
from gradwire.rpc._peer import Peer
from gradwire.rpc._signals import may_be_of_a_signal, wait_in_slices
from gradwire.rpc._turn import about_to_block

__all__ = ["Membership", "Subscription", "answer"]

_LOOK_AGAIN_S = 0.25  # a worker that is there but cannot be reached yet


@for_agents
def answer() -> None:
    """Called by who wants to know whether it is heard here."""


class Subscription:
    """What `on_worker_lost` and `on_worker_joined` return."""

    def __init__(
        self, callbacks: list[Callable[..., None]], callback: Callable[..., None]
    ) -> None:
        self._callbacks = callbacks
        self._callback = callback

    def remove(self) -> None:
        """The callback is not called any more; one that runs now ends. Idempotent."""
        # By identity: two subscriptions of one function are two.
        for index, callback in enumerate(self._callbacks):
            if callback is self._callback:
                del self._callbacks[index]
                return


class Membership:
    """Tells of the workers that come and go.

    Args:
        network: Knows who is there.
        submit: Runs something on a thread of the pool.
        await_word: Calls `answer` on a connected worker, and returns when it has done so.
            Raises what a call raises; at the limit, on the monotonic clock, `CallTimeout`.
    """

    def __init__(
        self,
        network: Network,
        submit: Callable[[Callable[[], None]], None],
        await_word: Callable[[Peer, float], None],
    ) -> None:
        self._network = network
        self._submit = submit
        self._await_word = await_word
        # Guards all below, and is notified when somebody has come or gone.
        self._changed = threading.Condition()
        self._on_lost: list[Callable[..., None]] = []
        self._on_joined: list[Callable[..., None]] = []
        self._news: deque[tuple[list[Callable[..., None]], tuple[Any, ...]]] = deque()
        self._is_telling = False
        self._version = 0

    def on_lost(self, callback: Callable[[WorkerInfo, str], None]) -> Subscription:
        """Has ``callback(info, reason)`` called for each worker that is lost or leaves."""
        return self._subscribe(self._on_lost, callback)

    def on_joined(self, callback: Callable[[WorkerInfo], None]) -> Subscription:
        """Has ``callback(info)`` called for each worker that joins or comes back."""
        return self._subscribe(self._on_joined, callback)

    def _subscribe(
        self, callbacks: list[Callable[..., None]], callback: Callable[..., None]
    ) -> Subscription:
        if not callable(callback):
            raise TypeError(
                f"a callback must be callable, found {type(callback).__name__}"
            )

        def own(*args: Any) -> None:
            callback(*args)

        with self._changed:
            callbacks.append(own)
        return Subscription(callbacks, own)

    # --------------------------------------------------------------------------- telling

    def lost(self, peer: Peer, reason: str) -> None:
        """A worker is lost, or has left."""
        self._tell(self._on_lost, peer.info, reason)

    def joined(self, peer: Peer) -> None:
        """A worker has come, and can be called."""
        self._tell(self._on_joined, peer.info)

    def _tell(self, callbacks: list[Callable[..., None]], *args: Any) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
            if not callbacks:
                return
            self._news.append((callbacks, args))
            if self._is_telling:
                return
            self._is_telling = True
        self._submit(self._tell_all)

    def _tell_all(self) -> None:
        while True:
            with self._changed:
                if not self._news:
                    self._is_telling = False
                    return
                callbacks, args = self._news.popleft()
                due = list(callbacks)
            for callback in due:
                try:
                    callback(*args)
                except BaseException as error:
                    if may_be_of_a_signal(error):
                        with self._changed:
                            self._is_telling = False  # others go on with the news
                        raise
                    _log.exception("a callback for workers that come and go failed")

    # --------------------------------------------------------------------------- waiting

    def wait_for(
        self,
        name: str,
        timeout_s: float,
        *,
        or_role: bool,
        given_up: threading.Event | None = None,
    ) -> WorkerInfo:
        """Waits until a worker can be called.

        One that is lost may only have been cut off: it is sought as well.

        Args:
            name: Its name.
            timeout_s: Limit.
            or_role: Another worker of the same role serves as well.
            given_up: Set by another thread to end the wait early.

        Raises:
            ConnectTimeout: Nobody came in time, or before it was given up.
        """
        deadline = time.monotonic() + timeout_s
        problem = "it is not there"
        while True:
            version = self._version
            if self._network.is_closing:
                raise NotInitialized(
                    f"this worker was shut down while it waited for worker {name!r}"
                )
            for peer in self._candidates(name, or_role):
                if not peer.is_usable:
                    problem = str(peer.error())
                    self._network.seek_again(peer)
                    continue
                limit = deadline
                if given_up is not None:  # to look at it again; the dialling goes on
                    limit = min(limit, time.monotonic() + _LOOK_AGAIN_S)
                try:
                    self._network.connect(peer, limit)
                    # Even if there is no time left: one that hears us answers in no time.
                    self._await_word(peer, max(limit, time.monotonic() + _LOOK_AGAIN_S))
                except CallTimeout:
                    problem = "it is connected, but does not answer"
                except GradwireError as error:
                    problem = str(error)
                else:
                    return peer.info
            if given_up is not None and given_up.is_set():
                raise ConnectTimeout(
                    f"worker {name!r} is not waited for any more: {problem}",
                    worker=name,
                )
            if time.monotonic() >= deadline:
                raise ConnectTimeout(
                    f"worker {name!r}{' or another of its role' if or_role else ''} was "
                    f"waited for {timeout_s:.1f} s: {problem}",
                    worker=name,
                )
            about_to_block()
            self._wait_for_news(version, deadline)

    def _candidates(self, name: str, or_role: bool) -> list[Peer]:
        """Workers that may serve: the one of that name first, those that are lost last."""
        found = [
            peer
            for peer in self._network.peers()
            if (peer.is_usable or peer.may_be_met_again)
            and (
                peer.info.name == name
                or (or_role and role_of(peer.info.name) == role_of(name))
            )
        ]
        return sorted(found, key=lambda p: (not p.is_usable, p.info.name != name))

    def _wait_for_news(self, version: int, deadline: float) -> None:
        def wait(timeout_s: float) -> bool:
            with self._changed:
                return self._changed.wait_for(
                    lambda: self._version != version, timeout_s
                )

        wait_in_slices(wait, min(deadline, time.monotonic() + _LOOK_AGAIN_S))
