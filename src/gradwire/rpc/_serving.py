"""Running the requests of other workers: decode, run, answer.

Whatever goes wrong here becomes an answer; the agent itself goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gradwire.errors import (
    CallTimeout,
    DecodeError,
    EncodeError,
    GradwireError,
    LimitExceeded,
    NotInitialized,
    RemoteProtocolError,
    TransportError,
    UsageError,
)
from gradwire.rpc import _future
from gradwire.rpc._context import serving_agent, serving_peer
from gradwire.rpc._event_loop import EventLoop, Target
from gradwire.rpc._host import num_cores
from gradwire.rpc._interceptors import Interceptor, Scope
from gradwire.rpc._link import Link
from gradwire.rpc._log import log as _log
from gradwire.rpc._lookups import Lookups
from gradwire.rpc._packing import PeerPacker
from gradwire.rpc._peer import Peer
from gradwire.rpc._targets import own_functions
from gradwire.rpc._torch_modes import Modes
from gradwire.rpc._turn import (
    about_to_block,
    about_to_compute,
    let_others_read,
    this_thread,
)
from gradwire.rpc.functions import ASYNC_ATTRIBUTE
from gradwire.transport import Frame
from gradwire.wire import (
    Call,
    Failure,
    Outgoing,
    Reply,
    decode_value,
    encode,
    tracked_tensors,
)

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent

__all__ = ["Server"]

INTERNAL_PREFIXES = ("gradwire.rpc._shutdown:", "gradwire.rpc._membership:")
"""Begins of the names of functions that agents call for themselves."""

_SLOW_S = 500e-6
# Whoever takes over needs a core: of two, the caller or another worker has one.
_BUSY_S = 120e-6 if num_cores() > 2 else _SLOW_S
_BUSY_WORK_S = 1e-3
_QUICK_S = 50e-6
_SLOW_TIMES = 3

_LATER = frozenset((types.CoroutineType, Target, _future.Later))

POSITIONAL, WITH_KEYWORDS, WITH_FUNCTION = range(3)
"""What the value of a call is; see `gradwire.wire.Call`."""


class Server:
    """Serves calls for one agent."""

    def __init__(self, agent: Agent, interceptors: tuple[Interceptor, ...]) -> None:
        self._agent = agent
        self._departure = agent.departure
        self._interceptors = interceptors
        self.of_all_calls = tuple(i for i in interceptors if i.sees_all_calls)
        self._loop = EventLoop(agent.info.name, agent.pool.submit)
        # Guards the next two, and `Peer.held`; every thread that serves.
        self._lock = threading.Lock()
        self._active: set[_Request] = set()
        self._num_run = 0
        self._max_bytes = agent.limits.nbytes
        self._max_calls = agent.limits.calls
        self._lookups = Lookups(interceptors, agent.limits.calls)
        # The functions that took long the last time. Written without a lock: of two values
        # at the same time, either is good enough.
        self._long: dict[str | None, _Long] = {}
        self._times_busy_for: dict[int, int] = {}  # by worker: with other work

    @property
    def num_active(self) -> int:
        """Requests that are not answered yet."""
        return len(self._active)

    @property
    def num_served(self) -> int:
        """Requests that were answered."""
        return self._num_run + self._lookups.num_served

    def active_requests(self) -> list[str]:
        """What is being run here, and for whom."""
        with self._lock:
            active = list(self._active)
        return [f"{r.target or 'a function'} for {r.peer.info.name!r}" for r in active]

    def peer_lost(self, peer: Peer) -> None:
        """Nobody waits any more for values that a lost worker has asked for.

        Handlers that run go on, and count; but what would come by a future may never.
        """
        with self._lock:
            self._active = {
                r for r in self._active if r.peer is not peer or not r.is_waiting
            }

    def serve(  # noqa: PLR0912, PLR0915 - written out: each step costs each call
        self, link: Link, peer: Peer, call: Call, frame: Frame
    ) -> None:
        """Runs a call and answers it, on a thread of the pool.

        Args:
            link: Where the call came from and the answer goes.
            peer: Who calls.
            call: The call.
            frame: Its frame.
        """
        target, style = call.target, call.style
        look_up = self._lookups.by_target.get(target)
        if look_up is not None and self._lookups.serve(
            look_up, link, peer, call, frame
        ):
            return
        long = self._long.get(target)
        if long is not None:
            long.make_way()
        agent = self._agent
        counts = target is None or not target.startswith(INTERNAL_PREFIXES)
        nbytes = len(frame.head)
        for storage in frame.buffers:
            nbytes += storage.nbytes()
        request = _Request(self, link, peer, call.id, target, counts, nbytes)
        held = peer.held
        with self._lock:
            if counts:
                self._active.add(request)
            held.calls += 1
            held.nbytes += nbytes
        interceptors, of_all_calls = self._interceptors, self.of_all_calls
        if not counts:
            interceptors = of_all_calls = ()
        num_queued = link.connection.num_queued
        if held.nbytes > self._max_bytes or held.calls + num_queued > self._max_calls:
            over = agent.limits.over_requests(held, num_queued, peer.info.name)
            if over is not None and peer.info.id != agent.info.id:
                self._refuse(request, interceptors, call, over, num_queued)
                return
        deadline = call.deadline - link.clock_offset if call.deadline else 0.0
        if deadline and time.monotonic() >= deadline:
            late = CallTimeout(
                f"the deadline of a call to {target or 'a function'} had passed "
                f"when worker {agent.info.name!r} came to it; it was not run",
                worker=agent.info.name,
            )
            self._drop(interceptors, peer, call, late)
            request.fail(late)
            return
        try:
            # First of all: what may not be called must not even be decoded.
            function = own_functions.get(target) if style == POSITIONAL else None
            if function is None:
                function = self._find(peer, call)
            value, tensors = decode_value(
                call,
                frame.head,
                frame.buffers,
                peer.unpack or agent.packing.unpacker(peer),
                agent.serializer,
            )
            if function is None:
                function, args, kwargs = value
            elif style == POSITIONAL and type(value) is tuple:
                args, kwargs = value, {}
            else:
                args, kwargs = self._unpack(call, value)
            del value
        except BaseException as error:  # also of a module that exits when imported
            self._drop(interceptors, peer, call, error)
            request.fail(error)
            return
        try:
            headers = call.headers
            tracked = tracked_tensors(call, tensors) if headers and tensors else []
            del tensors
            request.label = label = target or repr(function)
            for interceptor in interceptors if headers else of_all_calls:
                header = headers.get(interceptor.name) if headers else None
                if header is not None:
                    scope = interceptor.received_call(
                        peer, call.id, label, header, tracked
                    )
                elif interceptor.sees_all_calls:
                    scope = interceptor.received_plain(peer, call.id, label)
                else:
                    continue
                if scope is not None:
                    request.add_scope(interceptor.name, scope)
            del tracked
        except BaseException as error:
            request.fail(error)
            return
        frame.buffers.clear()  # the arguments alone keep their memory now
        context = contextvars.copy_context()
        # That clock costs something: only where it may turn out that it matters.
        before_s = 0.0 if long is None else time.thread_time()
        start = time.perf_counter()
        try:
            result = context.run(self._run, request, function, args, kwargs)
        except BaseException as error:
            del args, kwargs
            request.fail(error)
            return
        finally:
            if this_thread.unread is not None:
                let_others_read()
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)  # a handler switched it off and went away
        took_s = time.perf_counter() - start
        request.was_quick = took_s < _QUICK_S
        if took_s > _BUSY_S:
            self._long.setdefault(target, _Long()).note(took_s, before_s)
        elif long is not None:
            self._long.pop(target, None)
        # The arguments die before the answer goes: memory that the caller lent is then
        # returned in the same write.
        del args, kwargs
        if type(result) in _LATER or hasattr(function, ASYNC_ATTRIBUTE):
            self._answer_later(request, function, result, context)
        else:
            request.succeed(result)

    def _answer_later(
        self,
        request: _Request,
        function: Callable[..., Any],
        result: Any,
        context: contextvars.Context,
    ) -> None:
        if type(result) is types.CoroutineType:
            result = Target(result, Modes(is_grad_enabled=True))
        if type(result) is Target:
            self._loop.run(result, context, request)
        elif type(result) is _future.Later:
            request.succeed_later(result.future, function)
        else:
            request.succeed_later(result, function)

    def run_work(self, work: Callable[[], None], peer: Peer) -> None:
        """Runs what a message has set off that is no call."""
        rank = peer.info.id
        times = self._times_busy_for.get(rank, 0)
        if times >= _SLOW_TIMES:
            about_to_compute()
        before_s = time.thread_time()
        try:
            work()
        finally:
            let_others_read()
        is_busy = time.thread_time() - before_s > _BUSY_WORK_S
        self._times_busy_for[rank] = times + 1 if is_busy else 0

    def _drop(
        self,
        interceptors: tuple[Interceptor, ...],
        peer: Peer,
        call: Call,
        error: BaseException,
    ) -> None:
        self._agent.packing.discard(error)
        for interceptor in interceptors:
            if call.headers and interceptor.name in call.headers:
                header = call.headers[interceptor.name]
                # If that is malformed as well, there is nothing to tell.
                with contextlib.suppress(RemoteProtocolError):
                    interceptor.dropped_call(peer, call.id, header, error)

    def _refuse(
        self,
        request: _Request,
        interceptors: tuple[Interceptor, ...],
        call: Call,
        over: LimitExceeded,
        num_queued: int,
    ) -> None:
        """Answers a request that is over a limit of its peer."""
        if num_queued > 2 * self._max_calls:
            reason = f"it goes on asking, and reads no answers: {over}"
            self._agent.lose(request.peer, reason)
            self.finished(request)
            return
        self._drop(interceptors, request.peer, call, over)
        request.fail(over)

    def _find(self, peer: Peer, call: Call) -> Callable[..., Any] | None:
        """The function that a call is about; None if the value has it."""
        if call.target is not None and call.style in (POSITIONAL, WITH_KEYWORDS):
            return self._agent.targets.find(call.target, peer)
        if self._agent.is_safe or call.style != WITH_FUNCTION:
            raise DecodeError(
                f"a call of style {call.style} {'without' if call.target is None else 'with'}"
                " the name of a function arrived; with serializer='safe' functions are "
                "called by name"
            )
        return None

    def _unpack(self, call: Call, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if call.style == POSITIONAL:
            args, kwargs = value, {}
        else:
            args, kwargs = value
        if type(args) is not tuple or type(kwargs) is not dict:
            raise DecodeError("a call with malformed arguments arrived")
        return args, kwargs

    def _run(
        self,
        request: _Request,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        serving_agent.set(self._agent)
        serving_peer.set(request.peer)
        managers: list[contextlib.AbstractContextManager[None]] | None = None
        for _, scope in request.scopes:
            manager = scope.enter_handler()
            if manager is not None:
                managers = [*(managers or ()), manager]
        if managers is None:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager)
            result = function(*args, **kwargs)
            if type(result) is types.CoroutineType:
                # Its steps run elsewhere, and later: they take along what is set here.
                result = Target(result, Modes(is_grad_enabled=True))
            return result

    def finished(self, request: _Request) -> None:
        """A request was answered."""
        held = request.peer.held
        with self._lock:
            held.calls -= 1
            held.nbytes -= request.nbytes
            if not request.counts:
                return
            self._active.discard(request)
            self._num_run += 1
        if self._departure.reports:
            self._departure.check()

    def close(self, timeout_s: float) -> None:
        """Ends the event loop of coroutine targets, if one was needed."""
        self._loop.close(timeout_s)


class _Long:
    """A function that took long the last time: how often in a row it did."""

    __slots__ = ("_times_busy", "_times_slow")

    def __init__(self) -> None:
        self._times_slow = self._times_busy = 0

    def make_way(self) -> None:
        """Lets others go on, before something that takes so long that they should.

        Once or twice proves nothing: the thread may have been kept from running.
        """
        if self._times_slow >= _SLOW_TIMES:
            about_to_block()
        elif self._times_busy >= _SLOW_TIMES:
            about_to_compute()

    def note(self, took_s: float, before_s: float) -> None:
        """It took long again.

        Args:
            took_s: How long.
            before_s: The thread's time when it began; 0 if it was not suspected then.
        """
        self._times_slow = self._times_slow + 1 if took_s > _SLOW_S else 0
        # Busy by the processor's time: one that was kept from running need not make way.
        is_busy = before_s and time.thread_time() - before_s > _BUSY_S
        self._times_busy = self._times_busy + 1 if is_busy else 0


class _Request(msgspec.Struct, eq=False):
    """The answer to one call, which is sent exactly once.

    Attributes:
        label: Of what is called, for interceptors.
        is_waiting: For a future: no thread is held.
    """

    _server: Server
    _link: Link
    peer: Peer
    _id: int
    target: str | None
    counts: bool
    nbytes: int
    label: str = ""
    is_waiting: bool = False
    was_quick: bool = False
    scopes: list[tuple[str, Scope]] = []
    _keeper: Scope | None = None

    def add_scope(self, name: str, scope: Scope) -> None:
        self.scopes.append((name, scope))
        if scope.keeps_result:
            self._keeper = scope

    def _add_plain_scopes(self) -> None:
        """Asks those who see all calls, and had nothing to remember of this one."""
        known = {name for name, _ in self.scopes}
        for interceptor in self._server.of_all_calls:
            if interceptor.name not in known:
                scope = interceptor.plain_reply(self.peer, self._id, self.label)
                if scope is not None:
                    self.add_scope(interceptor.name, scope)

    def _add_headers(
        self,
        reply: Reply,
        packer: PeerPacker,
        tensors: list[torch.Tensor],
        of_modules: set[int],
    ) -> dict[int, int]:
        if self.counts and (tensors or packer.opaque):
            self._add_plain_scopes()
        for interceptor in packer.used:
            if all(interceptor.name != name for name, _ in self.scopes):
                scope = interceptor.packed_reply(self.peer)
                self.scopes.append((interceptor.name, scope))
        headers, flags = {}, {}
        for name, scope in self.scopes:
            if packer.opaque:
                scope.sending_opaque(packer.opaque)
            addition = scope.sending_reply(tensors, of_modules)
            if addition.flags:
                flags.update(addition.flags)
            if addition.header is not None:
                headers[name] = addition.header
        reply.headers = headers or None
        return flags

    def succeed(self, value: Any) -> None:
        if self._keeper is not None:
            self._keep(value, None)
            value = None
            turn = this_thread.turn
            if turn is not None and turn.link is self._link and not turn.is_callers:
                # The caller goes on already, and may wait for what it asks next.
                self._link.put_off(turn, functools.partial(self.succeed, None))
                return
        reply = Reply(self._id)
        try:
            if value is None:  # as of many functions: needs no body
                for name, scope in self.scopes:
                    header = scope.sending_reply([], set()).header
                    if header is not None:
                        reply.headers = {**(reply.headers or {}), name: header}
                outgoing = encode(reply)
            else:
                packer = self._server._agent.packing.packer(self.peer)
                add_headers = functools.partial(self._add_headers, reply, packer)
                outgoing = encode(
                    reply, value, add_headers, packer, self._server._agent.serializer
                )
        except BaseException as error:
            self._server._agent.packing.discard(error)
            self.fail(error)
            return
        del value
        self._send(outgoing)

    def _keep(self, value: Any, error: BaseException | None) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.keep(value, error)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, NotInitialized) and self._server._agent.network.is_closing:
            # The function has not failed: we end, and so did a call that it waited for.
            # Our goodbye tells that to the caller, who may then try elsewhere.
            self._fail_scopes(error)
            error.with_traceback(None)
            self._server.finished(self)
            return
        if self._keeper is not None:
            self._keep(None, error)
            error.with_traceback(None)
            self.succeed(None)
            return
        self._fail_scopes(error)
        worker = self._server._agent.info.name
        _log.debug("worker %s: a call failed", worker, exc_info=error)
        try:
            outgoing = self._encode_failure(error)
        except BaseException as problem:
            text = f"an error of type {type(error).__name__} that cannot be described"
            note = EncodeError(f"{text}: {problem}", worker=worker)
            outgoing = self._encode_failure(note)
        finally:
            # A traceback holds the handler's frame, and that its tensors.
            error.with_traceback(None)
        self._send(outgoing)

    def _encode_failure(self, error: BaseException) -> Outgoing:
        agent = self._server._agent
        description = agent.describe(error)
        return encode(Failure(self._id), description, serializer=agent.serializer)

    def _fail_scopes(self, error: BaseException) -> None:
        scopes, self.scopes = self.scopes, []
        for _, scope in scopes:
            scope.failed(error)

    def succeed_later(self, future: Any, function: Callable[..., Any]) -> None:
        """Answers when a future completes. No thread is held until then."""
        if not isinstance(future, torch._C.Future):
            self.fail(
                UsageError(
                    "Functions decorated with @rpc.functions.async_execution must return "
                    f"a torch.futures.Future object, but {function.__module__}."
                    f"{function.__qualname__} returned {type(future).__module__}."
                    f"{type(future).__qualname__}"
                )
            )
            return
        self.is_waiting = True
        future.add_done_callback(self._on_future)
        if self.peer.fate is not None:
            self._server.peer_lost(self.peer)

    def _on_future(self, future: Any) -> None:
        try:
            value = future.wait()  # it is done: this only unwraps or raises
        except BaseException as error:
            self.fail(error)
        else:
            self.succeed(value)

    def _send(self, outgoing: Outgoing) -> None:
        link, ticket = self._link, None
        try:
            turn = this_thread.turn
            # More requests follow in this turn: their answers leave together, unless that
            # takes longer than a write does.
            hold = (
                self.was_quick
                and turn is not None
                and turn.link is link
                and bool(turn.rest or turn.put_off)
            )
            try:
                ticket = link.send(outgoing.head, outgoing.buffers, hold=hold)
            except TransportError:
                _log.debug(
                    "the caller is gone; the answer to call %d is dropped", self._id
                )
            except GradwireError as error:  # over a limit
                self._fail_scopes(error)
                refusal = self._encode_failure(error)
                with contextlib.suppress(TransportError):
                    link.send(refusal.head)
            for _, scope in self.scopes:
                scope.sent()
            if ticket is not None:
                # The user's tensor may change as soon as the handler is over.
                about_to_block()
                if not ticket.wait(self._server._agent.options.lost_after):
                    ticket.detach()
        finally:
            self._server.finished(self)
