"""The agent: one worker's end of everything. It calls, is called, and notices losses.

It is made of parts with one job each, and this module ties them together:

    WorkerPool   threads                   Network     who is there, and connections
    Rounds       what is due by time       Server      running others' requests
    Peer, Link   another worker and the    Departure   graceful shutdown
                 connection to it          Membership  news of who comes and goes

Nothing here is global: a process may hold several agents.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gradwire._config import UNSET_TIMEOUT, RpcBackendOptions, find_secret
from gradwire._ids import WorkerInfo, check_rank, check_worker_name
from gradwire.errors import (
    CallTimeout,
    ConnectError,
    GradwireError,
    NotInitialized,
    RemoteProtocolError,
    TransportError,
)
from gradwire.rpc._allocator import expect_large_blocks
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._context import serving_agent
from gradwire.rpc._exports import exports
from gradwire.rpc._future import Future, Outcome, _refuse_in_event_loop
from gradwire.rpc._interceptors import Note, registered_interceptors
from gradwire.rpc._limits import PeerLimits
from gradwire.rpc._link import Link
from gradwire.rpc._log import log as _log
from gradwire.rpc._membership import Membership
from gradwire.rpc._network import Network
from gradwire.rpc._packing import Packing
from gradwire.rpc._peer import Peer
from gradwire.rpc._pool import WorkerPool
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._remote_exceptions import Description, describe, rebuild
from gradwire.rpc._resending import (
    LOST,
    Resending,
    call_again,
    is_idempotent,
    may_be_sent_again,
)
from gradwire.rpc._rounds import Rounds
from gradwire.rpc._schemes import find_credentials, usable_transports
from gradwire.rpc._serving import (
    INTERNAL_PREFIX,
    POSITIONAL,
    WITH_FUNCTION,
    WITH_KEYWORDS,
    Server,
)
from gradwire.rpc._shutdown import Departure
from gradwire.rpc._signals import interruptible, shielded
from gradwire.rpc._targets import AnyTargets, ExportedTargets, Targets
from gradwire.rpc._turn import (
    LOOK_S,
    about_to_block,
    call_for_help,
    current_turn,
)
from gradwire.transport import Frame
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
    decode_value,
    encode,
    kind_of,
    set_compiler,
    thread_state_is_clean,
    tracked_tensors,
)

__all__ = ["Agent"]

_CALL_OVERHEAD_BYTES = 512  # what the callee holds for a request beside its bytes
_FLOOD = 16  # calls in flight to one peer from which on they are sent in batches
_CLOSE_S = 5.0
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
            self.targets = AnyTargets()
            if options.allowed_modules is not None:
                allowed = AllowedModules(options.allowed_modules, exports.is_own)
                self.serializer = PickleSerializer(allowed.find)
                self.targets = AnyTargets(allowed.find)
                self._find_global = allowed.find
        secret = find_secret(options)
        credentials = find_credentials(options, name)
        transports = usable_transports(options, secret, credentials)
        # From here on there are descriptors to close.
        self.pool = WorkerPool(name, options.num_worker_threads, self._look_soon)
        self.network = Network(
            self.info, world_size, options, secret, transports, self.pool, self
        )
        self.membership = Membership(self.network, self.pool.submit)
        self.departure = Departure(self)
        self.num_started = 0
        self.interceptors = tuple(make(self) for make in registered_interceptors())
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
        self._request_kinds = {_CALL_KIND, *map(kind_of, self._requests)}
        self._server = Server(self, self.interceptors)
        self._rounds = Rounds(self)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards `_closed`: it ends once
        self._closed = False

    def start(self) -> WorkerRecord:
        """Listens and starts the threads; returns what others need to find us."""
        expect_large_blocks()
        try:
            self.pool.start()
            record = self.network.start()
        except BaseException:
            self.pool.close(_CLOSE_S)
            raise
        self._rounds.start()
        return record

    # ----------------------------------------------------------------------- calling

    def call(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Any:
        """Calls a function on another worker and waits for the result."""
        _refuse_in_event_loop()
        compiler = set_compiler(None)  # it must not compile what is below, bit by bit
        call = None
        try:
            with shielded():
                call = self._start_call(to, function, args, kwargs, timeout, False)
                try:
                    self._await_shielded(call, None)
                except BaseException:  # a signal handler raised: nobody waits any more
                    self._give_up(call)
                    raise
            if call.error is not None:
                raise call.error
        except LOST as error:
            if not may_be_sent_again(function, error):
                raise
            deadline = self.deadline(timeout) if call is None else call.deadline
            return call_again(self, to, function, args, kwargs, deadline, error)
        finally:
            set_compiler(compiler)
        if call.notice is not None:
            call.notice()
        return call.value

    def call_async(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future[Any]:
        """Calls a function on another worker; the result comes through a future."""
        if not is_idempotent(function):
            return self._call_async(to, function, args, kwargs, timeout)
        future = Future[Any](executor=self._run_callback)

        def send(timeout: float) -> Future[Any]:
            return self._call_async(to, function, args, kwargs, timeout)

        Resending(self, send, to, timeout, future)
        return future

    def make(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float,
        making: object,
    ) -> Future[None]:
        """Calls a function whose result stays on the other worker.

        Args:
            to: As in `call`; likewise the others.
            function: Likewise.
            args: Likewise.
            kwargs: Likewise.
            timeout: Likewise.
            making: For the interceptor that keeps the result there.
        """
        return self._call_async(to, function, args, kwargs, timeout, making)

    def _call_async(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | list[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
        making: object | None = None,
    ) -> Future[Any]:
        compiler = set_compiler(None)
        try:
            with shielded():
                call = self._start_call(
                    to, function, args, kwargs, timeout, True, making
                )
        finally:
            set_compiler(compiler)
        future = call.future
        if future is None:  # it is done already: the peer was lost meanwhile
            future = Future(outcome=call, executor=self._run_callback)
            future._settle()
        return future

    def _start_call(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | list[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
        is_async: bool,
        making: object | None = None,
    ) -> PendingCall:
        peer = self.network.find(to)
        if not callable(function):
            self.targets.check_callable(function)
        deadline = self.deadline(timeout)
        link = peer.link
        if link is None or peer.fate is not None:
            link = self.network.link_to(peer, deadline)
        target = self.targets.name(function)
        if type(args) is not tuple:
            args = _as_tuple(args)
        if kwargs is not None:
            _check_keywords(kwargs)
        value: tuple[Any, ...]
        if target is None:
            style, value = WITH_FUNCTION, (function, args, kwargs or {})
        elif kwargs:
            style, value = WITH_KEYWORDS, (args, kwargs)
        else:
            style, value = POSITIONAL, args
        message = Call(next(self._ids), deadline, target, style)
        label = target or repr(function)
        notes: dict[str, Note] = {}
        try:
            outgoing = self._encode_call(message, value, peer, label, notes, making)
            cost = outgoing.nbytes + _CALL_OVERHEAD_BYTES
            self._take_credit(peer, cost, deadline, label)
            call = PendingCall(
                message.id, label, deadline, cost, link, self._await, notes
            )
            if is_async:
                call.future = Future(outcome=call, executor=self._run_callback)
            if not label.startswith(INTERNAL_PREFIX):
                self.num_started += 1
            self._send_call(link, peer, call, outgoing)
        except BaseException:
            for note in notes.values():
                note.failed(was_sent=False)
            raise
        return call

    def _take_credit(self, peer: Peer, cost: int, deadline: float, label: str) -> None:
        credits_ = peer.calls.credits
        if serving_agent.get() is not None:
            credits_.force(cost)  # a handler that waited could be waited for itself
        elif not credits_.take(cost, deadline):
            raise CallTimeout(
                f"the call of {label} on worker {peer.info.name!r} waited until its deadline "
                f"for earlier calls: {len(peer.calls)} of them, {credits_.used} bytes, are "
                "not answered (option max_inflight_bytes); it was not sent",
                worker=peer.info.name,
            )

    def _send_call(
        self, link: Link, peer: Peer, call: PendingCall, outgoing: Outgoing
    ) -> None:
        """Enters a call and sends it; if the peer is gone, the call has failed."""
        peer.calls.add(call)
        if call.future is not None and call.deadline:
            self._rounds.note_deadline(call.deadline)
        if peer.fate is not None:
            # It was lost while we prepared: the table was emptied before we entered.
            self._fail_call(peer, call, peer.error())
            return
        # In a flood the peer has enough to do: several calls go in one write, at the
        # latest when somebody waits, when answers come, or when the monitor looks.
        hold = call.future is not None and len(peer.calls) > _FLOOD
        try:
            ticket = link.send(outgoing.head, outgoing.buffers, hold=hold)
        except TransportError:
            self._fail_call(peer, call, self._lost_error(peer))
            return
        except BaseException:
            peer.calls.take(call.id)
            raise
        for note in call.notes.values():
            note.sent()
        if hold:
            self._rounds.look_soon()
        if ticket is not None:
            left = call.deadline - time.monotonic() if call.deadline else None
            # The peer reads at all times, so this ends with its life at the latest.
            if not interruptible(ticket.wait, left):
                ticket.detach()

    def deadline(self, timeout: float) -> float:
        """When a call with this limit ends, on the monotonic clock; 0: never."""
        if timeout == UNSET_TIMEOUT or timeout is None:
            timeout = self.rpc_timeout
        elif not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
            raise TypeError(
                f"timeout must be a number of seconds, not {type(timeout).__name__}"
            )
        if not timeout >= 0:  # written so that it also refuses NaN
            raise ValueError(
                f"timeout must be at least 0 (0: none, -1: the default), found {timeout}"
            )
        return time.monotonic() + timeout if timeout else 0.0

    def _encode_call(
        self,
        message: Call,
        value: Any,
        peer: Peer,
        label: str,
        notes: dict[str, Note],
        making: object | None,
    ) -> Outgoing:
        """Encodes a call with the headers of the interceptors, and keeps their notes."""
        if label.startswith(INTERNAL_PREFIX) or not self.interceptors:
            return encode(message, value, serializer=self.serializer)
        is_grad_enabled = torch.is_grad_enabled()
        packer = self.packing.packer(peer)

        def add_headers(
            tensors: list[torch.Tensor], of_modules: set[int]
        ) -> dict[int, int]:
            headers, flags = {}, {}
            for interceptor in self.interceptors:
                if not (
                    interceptor.sees_all_calls
                    or interceptor in packer.used
                    or making is not None
                ):
                    continue
                note = interceptor.sending_call(
                    peer,
                    message.id,
                    label,
                    tensors,
                    of_modules,
                    is_grad_enabled,
                    making,
                )
                if note is not None:
                    notes[interceptor.name] = note
                    addition = note.addition
                    if addition.flags:
                        flags.update(addition.flags)
                    if addition.header is not None:
                        headers[interceptor.name] = addition.header
            message.headers = headers or None
            return flags

        try:
            return encode(message, value, add_headers, packer, self.serializer)
        except BaseException as error:
            self.packing.discard(error)
            raise

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
            # The ticket is of no interest: whoever sends here gives the tensors away.
            link.send(outgoing.head, outgoing.buffers)
        except TransportError:
            raise self._lost_error(peer) from None

    def run_soon(self, work: Callable[[], None]) -> None:
        """Runs something on a thread of the pool."""
        self.pool.submit(work)

    # ----------------------------------------------------------------------- waiting

    def _await(self, call: PendingCall, timeout_s: float | None) -> bool:
        """Waits for a call; reads the connection itself if nobody else does.

        Returns:
            False if ``timeout_s`` came first. The call's own deadline finishes it.
        """
        with shielded():
            return self._await_shielded(call, timeout_s)

    def _await_shielded(self, call: PendingCall, timeout_s: float | None) -> bool:
        link = call.link
        peer = self.network.peer_of(link)
        limit = call.deadline
        if timeout_s is not None:
            own_limit = time.monotonic() + timeout_s
            limit = min(limit, own_limit) if limit else own_limit
        if peer is not None and not call.done:
            self._read_until(link, peer, call, limit, call.target)
        if not call.done:
            link.waits_elsewhere(+1)
            try:
                self._wait_for_others(call, peer, limit)
            finally:
                link.waits_elsewhere(-1)
        return call.done

    def wait_for(
        self, outcome: Outcome, peer: Peer, what: str, limit: float = 0.0
    ) -> bool:
        """Waits for something that a message of ``peer`` brings.

        Args:
            outcome: What is waited for. Whoever loses the peer must finish it too.
            peer: Whose connection is read meanwhile, if nobody else reads it.
            what: See `Link.read_as_caller`.
            limit: On the monotonic clock, 0 for none but the peer's life.

        Returns:
            False at the limit.
        """
        if outcome.done:
            return True
        link = peer.link
        with shielded():
            if link is not None:
                self._read_until(
                    link, peer, outcome, limit, what, unless_under_way=True
                )
            if not outcome.done:
                if link is not None:
                    link.waits_elsewhere(+1)
                try:
                    left = limit - time.monotonic() if limit else None
                    outcome.block(None if left is None else max(0.0, left))
                finally:
                    if link is not None:
                        link.waits_elsewhere(-1)
        return outcome.done

    def _read_until(
        self,
        link: Link,
        peer: Peer,
        outcome: Outcome,
        limit: float,
        what: str,
        *,
        unless_under_way: bool = False,
    ) -> None:
        """Reads on this thread, before it blocks, if it may; see `Link.read_as_caller`."""
        if link.holds:
            link.flush()
        turn = current_turn()
        in_turn = turn is not None and turn.link is link and not turn.is_over
        if not thread_state_is_clean():
            return
        if in_turn and turn is not None:
            call_for_help()
            link.read_in_turn(
                turn, outcome, limit, what, unless_under_way=unless_under_way
            )
        else:
            about_to_block()
            link.read_as_caller(
                outcome, limit, peer.calls, what, unless_under_way=unless_under_way
            )

    def _wait_for_others(
        self, call: PendingCall, peer: Peer | None, limit: float
    ) -> None:
        """Waits until ``limit`` while other threads read."""
        left = limit - time.monotonic() if limit else None
        while not call.block(None if left is None else max(0.0, left)):
            if peer is None or limit != call.deadline:
                return
            self.expire(peer, call)

    def _give_up(self, call: PendingCall) -> None:
        peer = self.network.peer_of(call.link)
        if peer is not None:
            peer.calls.give_up(call)
        call.drop_notes(has_failed=True)

    def expire(self, peer: Peer, call: PendingCall) -> None:
        """A call has reached its deadline."""
        if peer.calls.give_up(call):
            call.settle(
                None,
                CallTimeout(
                    f"the call of {call.target} on worker {peer.info.name!r} (rank "
                    f"{peer.info.id}) did not return before its deadline; it may still "
                    "run there. Pass timeout= to give it longer (0: no limit)",
                    worker=peer.info.name,
                ),
            )
            self.departure.check()

    def _run_callback(self, callback: Callable[[], None]) -> None:
        turn = current_turn()
        # Not in the middle of a handler that waits: what it has set for its thread, such
        # as no_grad, is not for others, and neither is it to wait for them.
        if self.pool.is_pool_thread and (turn is None or not turn.is_callers):
            self.pool.ensure_follower()
            callback()
        else:
            self.pool.submit(callback)

    def _look_soon(self) -> None:
        self._rounds.look_soon()

    # --------------------------------------------------------------------- receiving

    def is_request(self, frame: Frame) -> bool:
        """See `LinkOwner`."""
        return bool(frame.head) and frame.head[0] in self._request_kinds

    def accept(self, link: Link, frame: Frame) -> Any:
        """See `LinkOwner`."""
        peer = self.network.peer_of(link)
        if peer is None:
            return None  # the peer is lost, or we are closed
        try:
            message, kind = decode_control(frame.head)
            if kind == _CALL_KIND:
                return peer, message, frame
            if kind in _REPLY_KINDS:
                self._on_answer(peer, message, frame)
            elif type(message) in self._requests:
                return peer, message, frame
            elif (handler := self._handlers.get(type(message))) is not None:
                handler(peer, message, frame)
            else:
                self._on_control(link, peer, message)
        except GradwireError as error:
            self.lose(peer, f"it broke the protocol: {error}")
        return None

    def is_slow(self, request: Any) -> bool:
        """See `LinkOwner`."""
        message = request[1]
        return type(message) is Call and self._server.is_slow(message.target)

    def serve(self, link: Link, request: Any) -> None:
        """See `LinkOwner`."""
        peer, message, frame = request
        try:
            if type(message) is Call:
                self._server.serve(link, peer, message, frame)
                return
            self._requests[type(message)](peer, message, frame)
        except GradwireError as error:
            self.lose(peer, f"it broke the protocol: {error}")

    def turn_begins(self, now: float) -> None:
        """See `LinkOwner`."""
        if self._rounds.monitor.due > now + LOOK_S:
            self._rounds.look_soon()

    def _on_answer(self, peer: Peer, message: Message, frame: Frame) -> None:
        call = peer.calls.take(message.id)  # type: ignore[attr-defined]
        if call is None:
            self._drop_answer(peer, message)
            return
        try:
            self._finish_call(peer, call, message, frame)
        except BaseException:
            # A signal handler raised on a caller's thread; the call may be another's.
            self.pool.submit(
                functools.partial(self._finish_call, peer, call, message, frame)
            )
            raise

    def _finish_call(
        self, peer: Peer, call: PendingCall, message: Message, frame: Frame
    ) -> None:
        value, error = self._read_answer(peer, call, message, frame)
        call.settle(value, error)
        self.departure.check()

    def _read_answer(
        self, peer: Peer, call: PendingCall, message: Message, frame: Frame
    ) -> tuple[Any, BaseException | None]:
        """The value or the error that an answer carries."""
        try:
            value, tensors = decode_value(
                message,
                frame.head,
                frame.buffers,
                self.packing.unpacker(peer),
                self.serializer,
            )
            if type(message) is not Reply:
                return None, self.rebuild(value)
            tracked = tracked_tensors(message, tensors) if message.headers else []
            for interceptor in self.interceptors:
                name = interceptor.name
                header = message.headers.get(name) if message.headers else None
                note = call.notes.get(name)
                if header is not None or note is not None:
                    interceptor.received_reply(
                        peer, call.id, call.target, note, header, tracked
                    )
        except Exception as problem:
            self.packing.discard(problem)
            self._drop_answer(peer, message)
            return None, problem
        return value, None

    def describe(self, error: BaseException) -> Description:
        """What others are told of an error that was raised here."""
        return describe(error, self.info.name, is_safe=self.is_safe)

    def rebuild(self, description: Any) -> BaseException:
        """The error that another worker has described."""
        return rebuild(description, is_safe=self.is_safe, find=self._find_global)

    def _drop_answer(self, peer: Peer, message: Message) -> None:
        headers: dict[str, bytes] | None = getattr(message, "headers", None)
        for interceptor in self.interceptors:
            if headers and interceptor.name in headers:
                call_id: int = message.id  # type: ignore[attr-defined]
                interceptor.dropped_reply(peer, call_id, headers[interceptor.name])

    def _on_control(self, link: Link, peer: Peer, message: Message) -> None:
        if type(message) is Heartbeat:
            # Travel time makes samples too small, so the largest is the truest; it may
            # shrink again, slowly, as clocks drift.
            if not link.shares_clock:
                sample = message.sent_at - time.monotonic()
                link.clock_offset = max(link.clock_offset - 1e-3, sample)
        elif type(message) is Goodbye:
            self._on_goodbye(peer, message)
        elif type(message) is Introduction:
            self.network.introduced(peer, message.record.encode())
        else:
            raise RemoteProtocolError(
                f"an unexpected message of type {type(message).__name__} arrived"
            )

    def _on_goodbye(self, peer: Peer, message: Goodbye) -> None:
        if not message.declared_lost:
            self.lose(peer, message.reason or "it shut down", left=True)
            return
        self.lose(
            peer,
            f"it declared this worker ({self.info.name!r}) lost, because {message.reason}; "
            "what the two had of each other is gone. They meet again when one of them "
            "calls rpc.wait_for_worker, or when this worker is started anew",
        )

    # --------------------------------------------------------------- joining and losing

    def peer_joined(self, peer: Peer) -> None:
        """See `NetworkOwner`."""
        self.membership.joined(peer)

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
        if peer is not None and peer.link in (link, None):
            self.lose(peer, reason)
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
        for call in peer.calls.take_all():
            self._settle_from_anywhere(call, peer.error())
        self._server.peer_lost(peer)
        for interceptor in self.interceptors:
            interceptor.peer_lost(peer)
        self.departure.peer_lost()
        self.departure.check()
        peer.is_mourned = True
        if not self.network.is_closing:
            self.membership.lost(peer, reason)

    def _settle_from_anywhere(self, call: PendingCall, error: BaseException) -> None:
        # Futures may run foreign code when they complete: not on the monitor's thread.
        if call.future is None or self.pool.is_pool_thread or self._closed:
            call.settle(None, error)
        else:
            self.pool.submit(lambda: call.settle(None, error))

    def _fail_call(self, peer: Peer, call: PendingCall, error: BaseException) -> None:
        if peer.calls.take(call.id) is not None:
            call.settle(None, error)

    def _lost_error(self, peer: Peer) -> GradwireError:
        if self._closed:
            return NotInitialized(f"worker {self.info.name!r} was shut down meanwhile")
        self.lose(peer, "the connection is closed")
        return peer.error()

    # ----------------------------------------------------------------------------- end

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
            if not call.target.startswith(INTERNAL_PREFIX)
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

    def close(self, reason: str = "it shut down") -> list[str]:
        """Ends the agent: says goodbye, closes everything, joins the threads.

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
        self._server.close(_CLOSE_S)
        stuck = self.pool.close(_CLOSE_S)
        if stuck:
            _log.warning(
                "worker %s is shut down, but %d handlers or callbacks still run: %s",
                self.info.name,
                len(stuck),
                ", ".join(stuck[:8]),
            )
        return stuck


def _as_tuple(args: object) -> tuple[Any, ...]:
    if args is None:
        return ()
    if isinstance(args, (tuple, list)):
        return tuple(args)
    raise TypeError(
        f"args must be a tuple or a list of arguments, not {type(args).__name__}; write "
        "args=(x,) for a single one"
    )


def _check_keywords(kwargs: object) -> None:
    if not isinstance(kwargs, dict) or any(type(k) is not str for k in kwargs):
        raise TypeError(
            f"kwargs must be a dict with names of arguments as keys, found {kwargs!r:.80}"
        )
