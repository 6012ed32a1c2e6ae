"""The agent: one worker's end of everything. It calls, is called, and notices losses.

It is made of parts with one job each, and this module ties them together:

    WorkerPool   threads                   Network     who is there, and connections
    Rounds       what is due by time       Caller      making calls, waiting for answers
    Peer, Link   another worker and the    Answers     what they carry, and who is told
                 connection to it          Server      running others' requests
                                           Departure   graceful shutdown
                                           Membership  news of who comes and goes

Nothing here is global: a process may hold several agents.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Container
from typing import Any, NoReturn

from gradwire._config import RpcBackendOptions, find_secret
from gradwire._ids import WorkerInfo, check_rank, check_worker_name
from gradwire.errors import (
    ConnectError,
    GradwireError,
    NotInitialized,
    RemoteProtocolError,
    TransportError,
)
from gradwire.rpc._allocator import expect_large_blocks
from gradwire.rpc._answers import Answers
from gradwire.rpc._calling import Caller
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._exports import exports
from gradwire.rpc._interceptors import Interceptor, registered_interceptors
from gradwire.rpc._limits import PeerLimits
from gradwire.rpc._link import Link
from gradwire.rpc._log import log as _log
from gradwire.rpc._membership import Membership, answer
from gradwire.rpc._network import Network
from gradwire.rpc._packing import Packing
from gradwire.rpc._peer import Peer
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._remote_exceptions import Description, describe, rebuild
from gradwire.rpc._rounds import Rounds
from gradwire.rpc._schemes import find_credentials, usable_transports
from gradwire.rpc._serving import (
    INTERNAL_PREFIXES,
    Server,
)
from gradwire.rpc._shutdown import Departure
from gradwire.rpc._signals import shielded
from gradwire.rpc._targets import AnyTargets, ExportedTargets, Targets
from gradwire.rpc._watch import TurnWatch
from gradwire.transport import Frame
from gradwire.transport._forks import keep_from_children
from gradwire.wire import (
    AllowedModules,
    Call,
    Failure,
    Goodbye,
    Heartbeat,
    Introduction,
    Message,
    Outgoing,
    PickleSerializer,
    Reply,
    SafeSerializer,
    Serializer,
    decode_control,
    encode,
    kind_of,
)

__all__ = ["Agent"]

_CLOSE_S = 5.0
_LEAST_CLOSE_S = 0.2  # also if it is late: what need not be given up ends in that time
_REPLY_KINDS = (kind_of(Reply), kind_of(Failure))
_CALL_KIND = kind_of(Call)


class Agent:
    """One worker.

    Args:
        name: Its name.
        rank: Its rank.
        world_size: Size of the group.
        options: See `RpcBackendOptions`.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        options: RpcBackendOptions,
    ) -> None:
        self.info = WorkerInfo(check_worker_name(name), check_rank(rank))
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.limits = PeerLimits(options, name)
        self.is_safe = options.serializer == "safe"
        self._find_global: Callable[[str, str], Any] | None = None
        self.serializer: Serializer
        self.targets: Targets
        if self.is_safe:
            self.serializer = SafeSerializer()
            self.targets = ExportedTargets(exports, name)
        else:
            self.serializer = PickleSerializer()
            self.targets = AnyTargets(name)
            if options.allowed_modules is not None:
                allowed = AllowedModules(options.allowed_modules, exports.is_own)
                self.serializer = PickleSerializer(allowed.find)
                self.targets = AnyTargets(name, allowed.find)
                self._find_global = allowed.find
        secret = find_secret(options)
        credentials = find_credentials(options, name)
        transports = usable_transports(options, secret, credentials)
        # From here on there are descriptors to close.
        self.pool = WorkerPool(name, options.num_worker_threads, self._on_work)
        self.network = Network(
            self.info, world_size, options, secret, transports, self.pool, self
        )
        self.membership = Membership(self.network, self.pool.submit, self._await_word)
        self.departure = Departure(self)
        self.interceptors = tuple(make(self) for make in registered_interceptors())
        self.layers: dict[type[Interceptor], Any] = {
            type(layer): layer for layer in self.interceptors
        }
        self._handlers = {
            message: handler
            for interceptor in self.interceptors
            for message, handler in interceptor.messages.items()
        }
        self._requests = {
            message: handler
            for interceptor in self.interceptors
            for message, handler in interceptor.requests.items()
        }
        self.packing = Packing(self.interceptors)
        self.request_kinds: Container[int] = {_CALL_KIND, *map(kind_of, self._requests)}
        self._server = Server(self, self.interceptors)
        self._rounds = Rounds(self)
        self.watch: TurnWatch = self._rounds.watch
        answers = Answers(self)
        self._on_answer = answers.on_answer
        self._caller = caller = Caller(self, self._rounds, answers.run_callback)
        # What the layers above use, without a step in between that each call would take.
        self.call, self.call_all = caller.call, caller.call_all
        self.begin_call, self.begin_own = caller.begin_call, caller.begin_own
        self.call_async, self.make, self.ask = (
            caller.call_async,
            caller.make,
            caller.ask,
        )
        self.wait_for, self.deadline = caller.wait_for, caller.deadline
        self.expire = caller.expire
        self._lock = threading.Lock()  # guards `_closed`: it ends once
        self._closed = False
        keep_from_children(self)

    def start(self) -> WorkerRecord:
        """Listens and starts the threads; returns what others need to find us."""
        expect_large_blocks()
        try:
            self.pool.start()
            record = self.network.start()
        except BaseException:
            self._rounds.close()
            self.pool.close(_CLOSE_S)
            raise
        self._rounds.start()
        return record

    # ----------------------------------------------------------------------- sending

    def send(self, peer: Peer, outgoing: Outgoing) -> None:
        """Sends a one-way message; never blocks. The memory of tensors is kept alive.

        Args:
            peer: Where it goes; there must have been a connection.
            outgoing: The message.

        Raises:
            PeerLostError: The peer is gone.
        """
        link = peer.link
        if link is None or peer.fate is not None:
            raise peer.error()
        try:
            with shielded():
                # The ticket is of no interest: who sends here gives the tensors away.
                link.send(outgoing.head, outgoing.buffers)
        except TransportError:
            raise self.lost_error(peer) from None

    def run_soon(self, work: Callable[[], None]) -> None:
        """Runs something on a thread of the pool."""
        self.pool.submit(work)

    def _on_work(self) -> None:
        self.turn_begins(time.monotonic())

    # --------------------------------------------------------------------- receiving

    def accept(self, link: Link, frame: Frame) -> Any:
        """See `LinkOwner`."""
        peer = self.network.peer_of(link)
        if peer is None:
            return None  # the peer is lost, or we are closed
        try:
            message, kind = decode_control(frame.head)
            if kind == _CALL_KIND:
                return [peer, message, frame]
            if kind in _REPLY_KINDS:
                callbacks = self._on_answer(peer, message, frame)
                if callbacks is not None:
                    return [peer, callbacks, None]
            elif type(message) in self._requests:
                return [peer, message, frame]
            elif (handler := self._handlers.get(type(message))) is not None:
                work = handler(peer, message, frame)
                if work is not None:
                    return [peer, work, None]
            else:
                self._on_control(link, peer, message)
        except GradwireError as error:
            self.lose(peer, f"it broke the protocol: {error}")
        return None

    def serve(self, link: Link, request: Any) -> None:
        """See `LinkOwner`."""
        peer, message, frame = request
        request.clear()
        try:
            if type(message) is Call:
                self._server.serve(link, peer, message, frame)
                return
            work = message
            if frame is not None:
                work = self._requests[type(message)](peer, message, frame)
            del message, frame
            if work is not None:
                self._server.run_work(work, peer)
        except GradwireError as error:
            self.lose(peer, f"it broke the protocol: {error}")

    def turn_begins(self, now: float) -> None:
        """See `LinkOwner`."""
        if now > self.watch.settled_until:
            self.watch.put_off(now)

    def describe(self, error: BaseException) -> Description:
        """What others are told of an error that was raised here."""
        return describe(error, self.info.name, is_safe=self.is_safe)

    def rebuild(self, description: Any) -> BaseException:
        """The error that another worker has described."""
        return rebuild(description, is_safe=self.is_safe, find=self._find_global)

    def _on_control(self, link: Link, peer: Peer, message: Message) -> None:
        if type(message) is Heartbeat:
            # Travel time makes samples too small, so the largest is the truest; it may
            # shrink again, slowly, as clocks drift.
            if not link.shares_clock:
                sample = message.sent_at - time.monotonic()
                link.clock_offset = max(link.clock_offset - 1e-3, sample)
        elif type(message) is Goodbye:
            self._on_goodbye(link, peer, message)
        elif type(message) is Introduction:
            self.network.introduced(peer, message.record.encode())
        else:
            raise RemoteProtocolError(
                f"an unexpected message of type {type(message).__name__} arrived"
            )

    def _on_goodbye(self, link: Link, peer: Peer, message: Goodbye) -> None:
        """Nothing comes after it; but answers that came before may not be handled yet."""
        if not message.declared_lost:
            peer.says_goodbye = True
            link.end_with(message.reason or "it shut down")
            return
        link.end_with(
            f"it declared this worker ({self.info.name!r}) lost, because {message.reason}; "
            "what the two had of each other is gone. They meet again when one of them "
            "calls rpc.wait_for_worker, or when this worker is started anew",
        )

    # --------------------------------------------------------------- joining and losing

    def peer_joined(self, peer: Peer) -> None:
        """See `NetworkOwner`."""
        self.membership.joined(peer)

    def _await_word(self, peer: Peer, limit: float) -> None:
        """See `Membership`."""
        left = max(0.001, limit - time.monotonic())  # 0 would be for ever
        call = self.call_async(peer.info, answer, timeout=left)
        call._outcome.wait()
        call.value()

    def watch_all(self) -> None:
        """Connects to all members, so that their ends are noticed."""
        for peer in self.network.peers():
            if peer.link is None and peer.is_usable:
                self.pool.submit(functools.partial(self._watch, peer))

    def _watch(self, peer: Peer) -> None:
        try:
            self.network.connect(peer)
        except ConnectError as error:
            self.lose(peer, f"it cannot be reached: {error}")
        except GradwireError:
            pass  # it ends meanwhile, or is too slow to tell

    def link_ended(self, link: Link, reason: str) -> None:
        """See `LinkOwner`."""
        peer = self.network.peer_of(link)
        if link.connection.broke_off:
            with contextlib.suppress(GradwireError):
                link.send(encode(Goodbye(reason, declared_lost=True)).head)
        if peer is not None and peer.link in (link, None):
            self.lose(peer, reason, left=peer.says_goodbye)
        self.network.drop_link(link)

    def lose(self, peer: Peer, reason: str, *, left: bool = False) -> None:
        """Ends everything that depends on a peer. Idempotent."""
        if not peer.end(reason, left=left):
            return
        if not left and not self.network.is_closing:
            _log.warning(
                "worker %s lost worker %s (rank %d): %s",
                self.info.name,
                peer.info.name,
                peer.info.id,
                reason,
            )
        for link, owner in self.network.links():
            if owner is peer:
                self.network.drop_link(link)
        self._fail_all(peer.calls.take_all(), peer)
        self._server.peer_lost(peer)
        for interceptor in self.interceptors:
            interceptor.peer_lost(peer)
        self.departure.peer_lost()
        self.departure.check()
        peer.is_mourned = True
        if not self.network.is_closing:
            self.membership.lost(peer, reason)

    def _fail_all(self, calls: list[PendingCall], peer: Peer) -> None:
        """Ends the calls to a peer that is lost.

        Futures may run foreign code when they complete, which may wait for another one of
        them: each is a piece of work of its own, and whoever just waits comes first.
        """
        works = []
        for call in calls:
            if call.future is None:
                call.settle(None, peer.error())
            else:
                works.append(functools.partial(call.settle, None, peer.error()))
        self.pool.submit(*works)

    def lost_error(self, peer: Peer) -> GradwireError:
        if self._closed:
            return NotInitialized(f"worker {self.info.name!r} was shut down meanwhile")
        self.lose(peer, "the connection is closed")
        return peer.error()

    # ----------------------------------------------------------------------------- end

    @property
    def num_started(self) -> int:
        """How many calls were made; the agent's own do not count."""
        return self._caller.num_started

    @property
    def num_pending(self) -> int:
        """Calls of ours that were not answered yet; the agent's own do not count."""
        return len(self.pending_calls())

    def pending_calls(self) -> list[str]:
        """What was called where and is not answered yet."""
        return [
            f"{call.target} on {peer.info.name!r}"
            for peer in self.network.peers()
            for call in peer.calls.pending()
            if not call.target.startswith(INTERNAL_PREFIXES)
        ]

    @property
    def num_active(self) -> int:
        """Requests of others that we have not answered yet."""
        return self._server.num_active

    def active_requests(self) -> list[str]:
        """What is being run here for others."""
        return self._server.active_requests()

    def debug_info(self) -> dict[str, Any]:
        """Counts of what there is at the moment."""
        links, peers = self.network.links(), self.network.peers()
        counters: dict[str, int] = {}
        for link, _ in links:
            for key, value in link.connection.counters().items():
                counters[key] = counters.get(key, 0) + value
        return {
            "client_active_calls": self.num_pending,
            "server_active_calls": self.num_active,
            "calls_started": self.num_started,
            "calls_served": self._server.num_served,
            "threads": self.pool.num_threads,
            "idle_threads": self.pool.num_idle,
            "connections": len(links),
            "inflight_bytes": sum(p.calls.credits.used for p in peers),
            "workers_lost": sum(not p.is_usable for p in peers),
            "transports": {
                peer.info.name: link.connection.scheme for link, peer in links
            },
            **counters,
            **{k: v for i in self.interceptors for k, v in i.debug_info().items()},
        }

    def abandon(self) -> None:
        """See `keep_from_children`: what belongs to the parent cannot be used here."""

        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotInitialized(
                f"this process was forked from worker {self.info.name!r} and has none of "
                "its connections; what that one holds can be used there only"
            )

        self._closed = self.network.is_closing = True
        own: Any = self
        own.call = own.call_all = own.call_async = own.make = own.ask = refuse
        own.begin_call = own.begin_own = own.wait_for = refuse

    def close(
        self, reason: str = "it shut down", limit: float = float("inf")
    ) -> list[str]:
        """Ends the agent: says goodbye, closes everything, joins the threads.

        Args:
            reason: What others are told.
            limit: Handlers that run are waited for until then, on the monotonic clock,
                or 5 seconds, whichever is less; and a moment in any case.

        Returns:
            Names of threads whose handlers did not end in time.
        """
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        self.network.is_closing = True
        error = NotInitialized(
            f"worker {self.info.name!r} was shut down while the call was in flight"
        )
        # First of all: the others close their ends as soon as we say goodbye, and our
        # calls would seem to fail through their fault.
        for peer in self.network.peers():
            peer.end("this worker was shut down", left=True)
            for call in peer.calls.take_all():
                call.settle(None, error)
        farewell = encode(Goodbye(reason)).head
        for link, _ in self.network.links():
            with contextlib.suppress(GradwireError):
                link.send(farewell)
        for interceptor in self.interceptors:
            interceptor.close()
        self._rounds.close()
        self.network.close()
        self._server.close(_close_s(limit))
        stuck = self.pool.close(_close_s(limit))
        if stuck:
            _log.warning(
                "worker %s is shut down, but %d handlers or callbacks still run: %s",
                self.info.name,
                len(stuck),
                ", ".join(stuck[:8]),
            )
        return stuck


def _close_s(limit: float) -> float:
    return max(_LEAST_CLOSE_S, min(limit - time.monotonic(), _CLOSE_S))
