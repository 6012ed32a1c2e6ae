"""Making calls: encoding and sending them, and waiting for their ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from gradwire._config import UNSET_TIMEOUT
from gradwire.errors import (
    CallTimeout,
    EncodeError,
    TransportError,
)
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._context import serving_agent
from gradwire.rpc._future import (
    FOREVER_S,
    Future,
    Outcome,
    _forbidden_loops,
    _refuse_in_event_loop,
)
from gradwire.rpc._interceptors import Note
from gradwire.rpc._link import Link
from gradwire.rpc._peer import Peer
from gradwire.rpc._resending import (
    LOST,
    Comebacks,
    Resending,
    call_again,
    is_idempotent,
    may_be_sent_again,
)
from gradwire.rpc._serving import (
    INTERNAL_PREFIXES,
    POSITIONAL,
    WITH_FUNCTION,
    WITH_KEYWORDS,
)
from gradwire.rpc._signals import interruptible, shielded
from gradwire.rpc._targets import labels, own_names
from gradwire.rpc._waiting import Waiting
from gradwire.transport import Ticket
from gradwire.wire import (
    FLAT_TUPLE,
    PLAIN_TYPES,
    Body,
    Call,
    Outgoing,
    encode,
    plain_body,
    set_compiler,
)

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._rounds import Rounds

__all__ = ["Caller"]

_CALL_OVERHEAD_BYTES = 512  # what the callee holds for a request beside its bytes
_FLOOD = 16  # calls in flight to one peer from which on they are sent in batches


class Caller:
    """Makes the calls of one agent.

    Args:
        agent: Whose calls.
        rounds: Looks at deadlines.
        run_callback: Runs those of futures.
    """

    def __init__(
        self,
        agent: Agent,
        rounds: Rounds,
        run_callback: Callable[[Callable[[], None]], None],
    ) -> None:
        self._agent = agent
        self._network = agent.network
        self._departure = agent.departure
        self._interceptors = agent.interceptors
        self._of_all_calls = [i for i in agent.interceptors if i.sees_all_calls]
        self._packing = agent.packing
        self._serializer = agent.serializer
        self._targets = agent.targets
        self._rounds = rounds
        self._run_callback = run_callback
        self._waiting = Waiting(agent.network, self.expire)
        self._await_answer = self._waiting.wait_for_call
        self.wait_for = self._waiting.wait_for
        self._comebacks = Comebacks(agent)
        self._ids = itertools.count(1)
        self.num_started = 0

    def call(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Any:
        """Calls a function on another worker and waits for the result."""
        if _forbidden_loops:
            _refuse_in_event_loop()
        compiler = set_compiler(None)  # it must not compile what is below, bit by bit
        call = None
        try:
            with shielded():
                call = self._start_call(to, function, args, kwargs, timeout, False)
                try:
                    is_done = self._waiting.wait_for_call_shielded(call, None)
                except BaseException:  # a signal handler raised: nobody waits any more
                    self._give_up(call)
                    raise
            if not is_done:
                raise _timed_out(call, self._network.find(to))
            if call.error is not None:
                failure, call.error = call.error, None
                try:
                    raise failure
                finally:
                    del failure  # see `Outcome.result`
        except LOST as error:
            if not may_be_sent_again(function, error):
                raise
            deadline = self.deadline(timeout) if call is None else call.deadline
            return call_again(self._agent, to, function, args, kwargs, deadline, error)
        finally:
            set_compiler(compiler)
        if call.notice is not None:
            call.notice()
        return call.value

    def ask(
        self, to: object, target: str, label: str, numbers: list[int], timeout: float
    ) -> Any:
        """Calls a function of gradwire's own with some numbers, and waits for the result.

        As `call`, with less to look at: for what is asked often.

        Args:
            to: As in `call`; likewise the timeout.
            target: Name of the function.
            label: What the call is for people; see `shown_as`.
            numbers: Its arguments.
            timeout: Likewise.
        """
        if _forbidden_loops:
            _refuse_in_event_loop()
        compiler = set_compiler(None)
        try:
            with shielded():
                call = self.begin_own(to, target, numbers, timeout, label)
                try:
                    is_done = self._waiting.wait_for_call_shielded(call, None)
                except BaseException:  # as in `call`
                    self._give_up(call)
                    raise
            if not is_done:
                raise _timed_out(call, self._network.find(to))
        finally:
            set_compiler(compiler)
        if call.error is not None:
            failure, call.error = call.error, None
            try:
                raise failure
            finally:
                del failure  # see `Outcome.result`
        if call.notice is not None:
            call.notice()
        return call.value

    def begin_own(
        self,
        to: object,
        target: str,
        values: list[Any],
        timeout: float,
        label: str,
        is_async: bool = False,
    ) -> PendingCall:
        """As `_start_call`, for a function of gradwire's own, with plain values only.

        Raises:
            EncodeError: One of them is too large to be sent as it is.
        """
        peer = self._network.find(to)
        deadline = self.deadline(timeout)
        link = peer.link
        if link is None or peer.fate is not None:
            link = self._network.link_to(peer, deadline)
        body = Body(FLAT_TUPLE, values, [-1] * len(values))
        message = Call(next(self._ids), deadline, target, POSITIONAL, None, body)
        notes: dict[str, Note] = {}
        try:
            outgoing = self._encode_plain(message, peer, target, notes)
        except BaseException:
            self._not_started(None, notes)
            raise
        return self._begin(link, peer, message, label, outgoing, notes, is_async)

    def call_all(self, starts: Iterable[Callable[[Agent], Outcome]]) -> list[Outcome]:
        """Calls functions on several workers, and waits for all results.

        All calls are sent before the first one is waited for. Then this thread reads the
        answers of all workers, if it may; there are no futures.

        Args:
            starts: Each starts a call by `begin_call` or `begin_own`, when those before it are
                on their way.

        Returns:
            What became of each; the error is what it raised, if a call could not be
            started.
        """
        if _forbidden_loops:
            _refuse_in_event_loop()
        compiler = set_compiler(None)
        outcomes: list[Outcome] = []
        calls: list[PendingCall] = []
        try:
            with shielded():
                try:
                    self._begin_all(starts, outcomes, calls)
                    wait = self._waiting.wait_for_call_shielded
                    has_waited = False  # if so, most of the answers have come
                    for call in calls:
                        if call.done:
                            continue
                        if not wait(call, None, has_waited):
                            worker = self._network.find(call.link.worker)
                            call.settle(None, _timed_out(call, worker))
                        has_waited = True
                except BaseException:  # as in `call`
                    for call in calls:
                        self._give_up(call)
                    raise
            if len(calls) != len(outcomes):
                for outcome in outcomes:
                    if not outcome.done:
                        outcome.wait()
        finally:
            set_compiler(compiler)
        for call in calls:
            if call.notice is not None:
                call.notice()
        return outcomes

    def _begin_all(
        self,
        starts: Iterable[Callable[[Agent], Outcome]],
        outcomes: list[Outcome],
        calls: list[PendingCall],
    ) -> None:
        """To `calls` those are added of which this thread reads the answers."""
        for start in starts:
            try:
                outcome = start(self._agent)
            except Exception as error:
                outcome = Outcome()
                outcome.finish(None, error.with_traceback(None))
            outcomes.append(outcome)
            if type(outcome) is PendingCall:
                calls.append(outcome)
                if outcome.deadline:
                    # It is looked at also while this thread waits for another one.
                    self._rounds.note_deadline(outcome.deadline)

    def begin_call(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Outcome:
        """Sends a call, for `call_all`, which alone may use this; see `call`."""
        if is_idempotent(function):  # it may take several calls
            return self.call_async(to, function, args, kwargs, timeout)._outcome
        return self._start_call(to, function, args, kwargs, timeout, False)

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
        name = self._network.find(to).info.name

        def send(args: Any, kwargs: Any, timeout: float) -> Future[Any]:
            return self._call_async(name, function, args, kwargs, timeout)

        deadline = self.deadline(timeout)
        Resending(self._comebacks, send, name, args, kwargs, deadline, future).begin(
            timeout
        )
        return future

    def make(
        self,
        to: object,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...] | None,
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
        call = None
        try:
            with shielded():
                call = self._start_call(
                    to, function, args, kwargs, timeout, True, making
                )
        except BaseException:
            if call is not None:  # a signal handler that was put off has raised
                self._give_up(call)
            raise
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
        if (
            type(function) is FunctionType
            and function in own_names
            and not kwargs
            and making is None
            and type(args) is tuple
            and PLAIN_TYPES.issuperset(map(type, args))
        ):
            own = own_names[function]
            label = labels[own](args)
            try:
                return self.begin_own(to, own, [*args], timeout, label, is_async)
            except EncodeError:
                pass  # as below then
        peer = self._network.find(to)
        if not callable(function):
            self._targets.check_callable(function)
        deadline = self.deadline(timeout)
        link = peer.link
        if link is None or peer.fate is not None:
            link = self._network.link_to(peer, deadline)
        target = self._targets.name(function)
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
        name = label = target or repr(function)
        if name in labels:
            label = labels[name](args)
        notes: dict[str, Note] = {}
        is_internal = name.startswith(INTERNAL_PREFIXES)
        try:
            outgoing = self._encode_call(
                message, value, peer, name, notes, making, is_internal
            )
        except BaseException:
            self._not_started(None, notes)
            raise
        return self._begin(
            link, peer, message, label, outgoing, notes, is_async, not is_internal
        )

    def _begin(  # noqa: PLR0912 - written out: each step costs each call
        self,
        link: Link,
        peer: Peer,
        message: Call,
        label: str,
        outgoing: Outgoing,
        notes: dict[str, Note],
        is_async: bool,
        counts: bool = True,
    ) -> PendingCall:
        """Waits for credit if need be, enters a call that is encoded, and sends it.

        If the peer is gone, the call that is returned has failed.
        """
        call: PendingCall | None = None
        deadline = message.deadline
        try:
            nbytes = outgoing.nbytes if outgoing.buffers else len(outgoing.head)
            cost = nbytes + _CALL_OVERHEAD_BYTES
            credits_ = peer.calls.credits
            if serving_agent.get() is not None:
                credits_.force(cost)  # a handler that waited could be waited for itself
            elif not credits_.take(cost, deadline):
                raise _out_of_credit(label, peer)
            call = PendingCall(
                id=message.id,
                target=label,
                deadline=deadline,
                cost=cost,
                link=link,
                await_answer=self._await_answer,
                notes=notes,
            )
            for note in notes.values():
                note.call = call
            if is_async:
                call.future = Future(outcome=call, executor=self._run_callback)
            if counts:
                self.num_started += 1
            peer.calls.add(call)
            if is_async and deadline:
                self._rounds.note_deadline(deadline)
            if peer.fate is not None:
                # It was lost while we prepared: the table was emptied before we entered.
                self.fail(peer, call, peer.error())
                return call
            # In a flood the peer has enough to do: several calls go in one write, at the
            # latest when somebody waits, when answers come, or by a look (see `_watch`).
            hold = is_async and len(peer.calls) > _FLOOD
            try:
                ticket = link.send(outgoing.head, outgoing.buffers, hold=hold)
            except TransportError:
                self.fail(peer, call, self._agent.lost_error(peer))
                return call
            except BaseException:
                peer.calls.take(call.id)
                raise
            call.is_sent = True
            for note in call.notes.values():
                note.sent()
            if hold:
                self._rounds.watch.look_soon()
            if ticket is not None:
                _await_written(ticket, deadline)
        except BaseException:
            self._not_started(call, notes)
            raise
        return call

    def _not_started(self, call: PendingCall | None, notes: dict[str, Note]) -> None:
        """Starting a call has failed, or was interrupted."""
        if call is not None and call.is_sent:
            self._give_up(call)
            return
        for note in notes.values():
            note.failed(was_sent=False)

    def deadline(self, timeout: float) -> float:
        """When a call with this limit ends, on the monotonic clock; 0: never."""
        if timeout is UNSET_TIMEOUT:  # as mostly
            timeout = self._agent.rpc_timeout
            if 0 < timeout < FOREVER_S:
                return time.monotonic() + timeout
        if type(timeout) is int and timeout == 0:
            return 0.0
        if timeout == UNSET_TIMEOUT or timeout is None:
            timeout = self._agent.rpc_timeout
        elif not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
            raise TypeError(
                f"timeout must be a number of seconds, not {type(timeout).__name__}"
            )
        if not timeout >= 0:  # written so that it also refuses NaN
            raise ValueError(
                f"timeout must be at least 0 (0: none, -1: the default), found {timeout}"
            )
        return time.monotonic() + float(timeout) if 0 < timeout < FOREVER_S else 0.0

    def _encode_call(
        self,
        message: Call,
        value: Any,
        peer: Peer,
        label: str,
        notes: dict[str, Note],
        making: object | None,
        is_internal: bool,
    ) -> Outgoing:
        """Encodes a call with the headers of the interceptors, and keeps their notes."""
        if is_internal or not self._interceptors:
            return encode(message, value, serializer=self._serializer)
        if making is None and (body := plain_body(value)) is not None:
            message.body = body
            return self._encode_plain(message, peer, label, notes)
        is_grad_enabled = torch.is_grad_enabled()
        packer = self._packing.packer(peer)

        def add_headers(
            tensors: list[torch.Tensor], of_modules: set[int]
        ) -> dict[int, int]:
            headers, flags = {}, {}
            for interceptor in self._interceptors:
                if packer.opaque:
                    interceptor.sending_opaque(packer.opaque, is_grad_enabled)
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
            return encode(message, value, add_headers, packer, self._serializer)
        except BaseException as error:
            self._packing.discard(error)
            raise

    def _encode_plain(
        self, message: Call, peer: Peer, label: str, notes: dict[str, Note]
    ) -> Outgoing:
        """As `_encode_call`, for a message whose body is there, and has nothing to pack."""
        for interceptor in self._of_all_calls:
            note = interceptor.sending_plain(peer, label)
            if note is not None:
                notes[interceptor.name] = note
                header = note.addition.header
                if header is not None:
                    message.headers = message.headers or {}
                    message.headers[interceptor.name] = header
        return encode(message)

    def _give_up(self, call: PendingCall) -> None:
        peer = self._network.peer_of(call.link)
        # Whoever has taken it out of the table, to read its answer perhaps, needs its notes.
        if peer is not None and peer.calls.give_up(call):
            call.fail_notes()

    def expire(self, peer: Peer, call: PendingCall) -> None:
        """A call has reached its deadline."""
        if peer.calls.give_up(call):
            call.settle(None, _timed_out(call, peer))
            self._departure.check()

    def fail(self, peer: Peer, call: PendingCall, error: BaseException) -> None:
        if peer.calls.take(call.id) is not None:
            call.settle(None, error)


def _await_written(ticket: Ticket, deadline: float) -> None:
    """Waits until the memory of a message has been read, or copies it at the deadline."""
    left = deadline - time.monotonic() if deadline else None
    is_written = False
    try:
        # The peer reads at all times, so this ends with its life at the latest.
        is_written = interruptible(ticket.wait, left)
    finally:
        if not is_written:
            ticket.detach()


def _out_of_credit(label: str, peer: Peer) -> CallTimeout:
    calls = peer.calls
    return CallTimeout(
        f"the call of {label} on worker {peer.info.name!r} waited until its deadline "
        f"for earlier calls: {len(calls)} of them, {calls.credits.used} bytes, are "
        "not answered (option max_inflight_bytes); it was not sent",
        worker=peer.info.name,
    )


def _timed_out(call: PendingCall, peer: Peer) -> CallTimeout:
    return CallTimeout(
        f"the call of {call.target} on worker {peer.info.name!r} (rank {peer.info.id}) did "
        "not return before its deadline; it may still run there. Pass timeout= to give it "
        "longer (0: no limit)",
        worker=peer.info.name,
    )


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
