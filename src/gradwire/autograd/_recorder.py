"""Recording: what this layer adds to calls and replies, and makes of those that arrive.

Whether a call is recorded is decided by the caller's grad mode. Outside any context a
call that is recorded is a context of its own.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gradwire.autograd._autocast import apply_autocast, autocast_state
from gradwire.autograd._averaged import watch_wrappers
from gradwire.autograd._context import (
    ContextName,
    Leaving,
    Side,
    active_context,
    current_handler,
    is_of_leaves,
    leaving,
)
from gradwire.autograd._cuts import (
    CutNote,
    CutScope,
    cut,
    cut_call,
    cut_reply,
    is_cut_outside_context,
    records_without_context,
)
from gradwire.autograd._exchange import Exchange
from gradwire.autograd._messages import (
    CONTEXT_KEEPS_GRAD,
    CUT,
    MESSAGE_HAS_HISTORY,
    NOT_RECORDED,
    CallHeader,
    Dead,
    Gradient,
    GradientAndStart,
    Gradients,
    PassAbort,
    PassDone,
    PassStart,
    Release,
    ReplyHeader,
    Stale,
    decode_header,
    encode_header,
    key_of_call,
)
from gradwire.autograd._torch_private import (
    NO_TASK,
    TaskWatch,
    any_autocast,
    current_task,
    has_tangent,
    is_anything_special,
)
from gradwire.errors import EncodeError, GradwireError, RemoteProtocolError
from gradwire.rpc.extension import (
    NOTHING,
    Addition,
    Agent,
    Interceptor,
    Note,
    Peer,
    Scope,
)
from gradwire.wire import TRACKED

__all__ = ["Recorder"]

_TRACKED_LEAF = {0: TRACKED}


class Recorder(Interceptor):
    """Takes part in the calls of one agent."""

    name = "autograd"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.exchange = exchange = Exchange(agent)
        self._watch = watch_wrappers()
        self.messages = {
            Gradient: exchange.on_gradient,
            PassDone: exchange.on_done,
            PassAbort: exchange.on_abort,
            Dead: exchange.on_dead,
            Stale: exchange.on_stale,
            Release: exchange.releases.on_release,
        }
        self.requests = {
            PassStart: exchange.on_start,
            GradientAndStart: exchange.on_gradient_and_start,
            Gradients: exchange.on_gradients,
        }

    # ------------------------------------------------------------------- as the caller

    def sending_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        tensors: list[Tensor],
        of_modules: set[int],
        is_grad_enabled: bool,
        making: object | None = None,
    ) -> Note | None:
        """See `Interceptor`."""
        exchange = self.exchange
        name = active_context.get()
        is_cut = making is not None or is_cut_outside_context(label)
        if (
            name is None
            and is_grad_enabled
            and not is_anything_special()
            # What is made brings no tensors back that would have to be cut there.
            and (not is_cut or making is not None)
        ):
            for tensor in tensors:
                if tensor.requires_grad:
                    break
            else:
                return None  # as most calls are, and that should cost nothing
        if has_tangent(tensors):
            raise EncodeError(
                "forward-mode differentiation does not go through calls: a tensor in the "
                "arguments has a tangent. Use reverse mode, or send "
                "torch.autograd.forward_ad.unpack_dual(tensor).primal"
            )
        tracked = _tracked(tensors, of_modules) if is_grad_enabled else {}
        records = is_grad_enabled and bool(tracked or is_cut)
        side = None if name is None else self._find_side(name, records)
        if side is not None and side.run is not None:
            exchange.leftovers.work_off()  # of a backward that has failed just now
        autocast = autocast_state()
        if side is None and is_grad_enabled and is_cut:
            is_reference = making is not None
            return cut_call(
                label, tensors, of_modules, autocast, is_reference=is_reference
            )
        if side is None and is_grad_enabled and not tracked and autocast is None:
            return None
        header = CallHeader(0 if is_grad_enabled else NOT_RECORDED, autocast=autocast)
        note = _CallNote(exchange, side)
        history = leaving([tensors[i] for i in tracked])
        if history:
            header.flags |= MESSAGE_HAS_HISTORY
        if side is not None:
            exchange.tell_held(side)  # what comes back must not be older than it
            side.describe_call(peer.info.id, header)
            if history:
                note.event, header.after = side.announce_send(peer.info.id, history)
                header.message = note.event
                exchange.unfinished.add(note)
            side.calls[note] = current_handler.get()
        elif history:
            note.begin_own(label, peer.info.id, call_id, history)
        flags = tracked if is_grad_enabled else cut(tensors)
        note.addition = Addition(encode_header(header), flags)
        return note

    def sending_plain(self, peer: Peer, label: str) -> Note | None:
        """See `Interceptor`: as `sending_call`, where there is nothing to track."""
        exchange = self.exchange
        name = active_context.get()
        side = None if name is None else exchange.registry.find(name)
        autocast = autocast_state() if any_autocast() else None
        flags = 0 if torch.is_grad_enabled() else NOT_RECORDED
        if side is not None:
            if side.run is not None:  # as in `sending_call`
                exchange.leftovers.work_off()
                exchange.tell_held(side)
            if flags or autocast is not None:
                header = CallHeader(flags, autocast=autocast)
                side.describe_call(peer.info.id, header)
                addition = Addition(encode_header(header))
            else:
                addition = side.introduce(peer.info.id)
            note = _PlainNote(side, addition)
            side.calls[note] = current_handler.get()
            return note
        if not flags:
            if is_cut_outside_context(label):
                if name is not None:
                    exchange.refuse_if_broken(name)
                return cut_call(label, [], set(), autocast, is_reference=False)
            if autocast is None:
                return None
        header = CallHeader(flags, autocast=autocast)
        return _PlainNote(None, Addition(encode_header(header)))

    def sending_opaque(self, tensors: list[Tensor], is_grad_enabled: bool) -> None:
        """See `Interceptor`."""
        if is_grad_enabled and (
            active_context.get() is not None or records_without_context()
        ):
            raise _without_history(tensors[0])

    def _find_side(self, name: ContextName, records: bool) -> Side | None:
        side = self.exchange.registry.find(name)
        if side is None and records:
            self.exchange.refuse_if_broken(name)
        return side

    def received_reply(  # noqa: PLR0912 - written out: each step costs each call
        self,
        peer: Peer,
        call_id: int,
        label: str,
        note: Note | None,
        header: bytes | None,
        tracked: list[Tensor],
        is_clean: bool = False,
    ) -> None:
        """See `Interceptor`."""
        exchange = self.exchange
        side = made_in = None
        if isinstance(note, _PlainNote):
            if exchange.unfinished and note in exchange.unfinished:
                note.sent()  # the answer was faster than the thread that calls
            side, made_in = note.side, note.made_in
            if side is not None:
                side.calls.pop(note, None)
        elif isinstance(note, CutNote):
            note.answered(label, header)
            return
        elif note is not None:
            raise AssertionError("a note of another layer")
        if header is None:
            if side is not None and side.is_implicit:
                exchange.releases.end(side)  # nothing came back that could lead there
            return
        reply: ReplyHeader = decode_header(ReplyHeader, header)
        if reply.message == CUT:
            return
        lease = None
        if reply.key is None:
            name = exchange.name_of_call(call_id)
            if side is None:
                side = exchange.registry.add_call(
                    name, call_label(label, self.agent.info.name), is_caller=True
                )
            lease = exchange.releases.lease(name)
        if side is None or side.is_released:
            if reply.key is not None:
                exchange.refuse_if_broken(ContextName(reply.key, reply.incarnation))
            return  # the context was left meanwhile: plain values
        answers = side.record_recv(
            peer.info.id,
            reply.message,
            reply.after,
            tracked,
            lease=lease,
            made_in=made_in,
            function=label,
            may_wait=reply.is_of_leaves,
            is_clean=is_clean,
        )
        if answers:
            exchange.telling.perform(side, None, answers)

    def dropped_reply(self, peer: Peer, call_id: int, header: bytes) -> None:
        """See `Interceptor`."""
        reply: ReplyHeader = decode_header(ReplyHeader, header)
        if reply.message == CUT:
            return
        if reply.key is None:
            name = self.exchange.name_of_call(call_id)
            self.exchange.releases.tell_callee(peer.info.id, name)
        else:
            name = ContextName(reply.key, reply.incarnation)
            self.exchange.telling.dead(peer.info.id, name, reply.message)

    # ------------------------------------------------------------------- as the callee

    def received_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        header: bytes,
        tracked: list[Tensor],
    ) -> Scope:
        """See `Interceptor`."""
        exchange = self.exchange
        if exchange.unfinished:
            exchange.finish_sends()
        call: CallHeader = decode_header(CallHeader, header)
        if call.key is not None:
            name = ContextName(call.key, call.incarnation)
            scope = self._enter_context(peer, call_id, label, header, name, call)
            if scope.side is None:
                return scope
        elif call.flags & NOT_RECORDED:
            return CutScope(label, call)
        else:
            name = ContextName(key_of_call(peer.info.id, call_id), peer.incarnation)
            scope = _CallScope(exchange, peer, name, label, call)
            if call.flags & MESSAGE_HAS_HISTORY:
                scope.side = exchange.registry.add_call(
                    name,
                    call_label(label, peer.info.name),
                    is_caller=False,
                    peer=peer,
                )
                scope.side.is_serving = True
        if call.flags & MESSAGE_HAS_HISTORY and scope.side:
            answers = scope.side.record_recv(
                peer.info.id,
                call.message,
                call.after,
                tracked,
                is_request=True,
                function=label,
            )
            if answers:
                exchange.telling.perform(scope.side, None, answers)
        if peer.fate is not None:
            # Its loss was noticed while this call of its waited for a thread: those who
            # were told of it did not see this context yet, and nobody else would end it.
            exchange.peer_lost(peer)
        return scope

    def received_plain(self, peer: Peer, call_id: int, label: str) -> None:
        """See `Interceptor`: a call that came without a history."""
        if self.exchange.unfinished:
            self.exchange.finish_sends()

    def plain_reply(self, peer: Peer, call_id: int, label: str) -> Scope:
        """See `Interceptor`."""
        return _PlainScope(self.exchange, peer, call_id, label)

    def _enter_context(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        header: bytes,
        name: ContextName,
        call: CallHeader,
    ) -> _CallScope:
        """The scope of a call in a context; without a side if that is over here."""
        exchange = self.exchange
        scope = _CallScope(exchange, peer, name, label, call)
        into_grad = bool(call.flags & CONTEXT_KEEPS_GRAD)
        try:
            side = exchange.registry.join(name, "", into_grad, peer)
            if side is None and call.flags & MESSAGE_HAS_HISTORY:
                exchange.refuse_if_broken(name)
        except GradwireError as error:
            self.dropped_call(peer, call_id, header, error)
            raise
        scope.side = side
        if side is None:
            scope.records = False  # plain values
            return scope
        side.into_grad = into_grad
        with side.lock:
            side.join(peer.info.id, call.after, call.consumed)
            scope.arrival = side.num_requests
            side.num_requests += 1
        return scope

    def handing_out(
        self, peer: Peer, header: bytes | None, tensor: Tensor
    ) -> Addition | None:
        """See `Interceptor`. In a context a leaf may leave without a node."""
        exchange = self.exchange
        if exchange.unfinished:
            exchange.finish_sends()
        requires_grad = tensor.requires_grad
        if header is None:
            return None if requires_grad else NOTHING
        try:
            call: CallHeader = decode_header(CallHeader, header)
        except RemoteProtocolError:
            return None  # of which the long way tells
        key, flags = call.key, call.flags
        if key is None:
            return None if requires_grad else NOTHING
        if not requires_grad or tensor.grad_fn is not None:
            return None
        if flags and flags != CONTEXT_KEEPS_GRAD:
            return None
        into_grad = bool(flags)
        side = exchange.registry.find(call)
        if side is None:
            name = ContextName(key, call.incarnation)
            try:
                side = exchange.registry.join(name, "", into_grad, peer)
            except GradwireError:
                return None
        if side is None or side.is_released:
            return None
        side.into_grad = into_grad
        sent = side.hand_out(peer.info.id, tensor, call.after, call.consumed)
        if peer.fate is not None:
            exchange.peer_lost(peer)  # as in `received_call`
        if sent is None:
            return None
        event, after = sent
        reply = ReplyHeader(event, after, key, call.incarnation, True)
        return Addition(encode_header(reply), _TRACKED_LEAF)

    def not_handed_out(self, header: bytes) -> None:
        """See `Interceptor`."""
        reply: ReplyHeader = decode_header(ReplyHeader, header)
        if reply.key is not None:
            side = self.exchange.registry.find(
                ContextName(reply.key, reply.incarnation)
            )
            if side is not None:
                self.exchange.mark_dead(side, reply.message)

    def dropped_call(
        self, peer: Peer, call_id: int, header: bytes, error: BaseException
    ) -> None:
        """See `Interceptor`."""
        call: CallHeader = decode_header(CallHeader, header)
        # A call that is a context of its own has failed, and its context with it.
        if call.key is not None and call.flags & MESSAGE_HAS_HISTORY:
            name = ContextName(call.key, call.incarnation)
            self.exchange.telling.dead(peer.info.id, name, call.message)

    def peer_lost(self, peer: Peer) -> None:
        """See `Interceptor`."""
        self.exchange.peer_lost(peer)

    def close(self) -> None:
        """See `Interceptor`."""
        self._watch.remove()
        self.exchange.close()


class _PlainNote(Note):
    """A call of ours without a history: the context that its answer belongs to, if any."""

    __slots__ = ("made_in", "side")

    def __init__(self, side: Side | None, addition: Addition = NOTHING) -> None:
        # As `Note` does, written out: each call in a context makes one.
        self.addition = addition
        self.call = None
        self.side = side
        is_made_in_backward = current_task() != NO_TASK
        self.made_in = TaskWatch() if is_made_in_backward else None

    def failed(self, *, was_sent: bool, error: BaseException | None = None) -> None:
        """See `Note`."""
        if self.side is not None:
            self.side.calls.pop(self, None)


class _CallNote(_PlainNote):
    """A call of ours that may have a history: its place in a context, until it ends.

    The caller's side of a call that is a context of its own is made while the call is on
    its way, or when its answer comes, whichever is first.
    """

    __slots__ = ("_exchange", "_lock", "_own", "event")

    def __init__(self, exchange: Exchange, side: Side | None) -> None:
        super().__init__(side)
        self._exchange = exchange
        self._own: tuple[str, int, int, Leaving] | None = None
        # Guards that and the side: the thread that calls, and the one that reads the answer.
        self._lock = threading.Lock()
        self.event = -1

    def begin_own(self, label: str, peer: int, call_id: int, tensors: Leaving) -> None:
        """The call is a context of its own, and these are its first message."""
        self._own = label, peer, call_id, tensors
        if peer == self._exchange.me:
            self.sent()  # both ends are one side, whose first event this is
        else:
            self._exchange.unfinished.add(self)

    def sent(self) -> None:
        """See `Note`."""
        if self._own is None and self.event < 0:
            return  # it has no history; or its answer was faster, and has seen to it
        with self._lock:
            if self._own is not None:
                self._make_side(*self._own)
                self._own = None
            elif self.side is not None and self.event >= 0:
                self.side.finish_sends()
        self._exchange.unfinished.discard(self)

    def _make_side(self, label: str, peer: int, call_id: int, tensors: Leaving) -> None:
        exchange = self._exchange
        name = exchange.name_of_call(call_id)
        label = call_label(label, exchange.agent.info.name)
        self.side = exchange.registry.add_call(name, label, is_caller=True)
        self.side.calls[self] = None
        self.side.record_send(peer, tensors)

    def failed(self, *, was_sent: bool, error: BaseException | None = None) -> None:
        """See `Note`."""
        with self._lock:
            self._own = None
            side = self.side
        if side is not None and was_sent and not side.is_implicit:
            side.finish_sends()
        self._exchange.unfinished.discard(self)
        if side is None:
            return
        side.calls.pop(self, None)
        if side.is_implicit:
            self._exchange.releases.end(side)
        elif not was_sent and self.event >= 0:
            self._exchange.mark_dead(side, self.event)


def _without_history(tensor: Tensor) -> EncodeError:
    return EncodeError(
        f"a tensor of class {type(tensor).__qualname__}, a subclass of torch.Tensor, "
        "requires grad, and tensors of subclasses are sent without their history: its "
        "gradient would be lost. Send tensor.as_subclass(torch.Tensor), or detach() it"
    )


class _PlainScope(Scope):
    """A call that came without a history, and will mostly go without one."""

    __slots__ = ("_call_id", "_exchange", "_label", "_peer", "_scope")

    def __init__(
        self, exchange: Exchange, peer: Peer, call_id: int, label: str
    ) -> None:
        self._exchange = exchange
        self._peer = peer
        self._call_id = call_id
        self._label = label
        self._scope: _CallScope | None = None

    def sending_reply(self, tensors: list[Tensor], of_modules: set[int]) -> Addition:
        """See `Scope`."""
        for tensor in tensors:
            if tensor.requires_grad:
                break
        else:
            return NOTHING
        peer = self._peer
        name = ContextName(key_of_call(peer.info.id, self._call_id), peer.incarnation)
        self._scope = _CallScope(self._exchange, peer, name, self._label, None)
        return self._scope.sending_reply(tensors, of_modules)

    def sending_opaque(self, tensors: list[Tensor]) -> None:
        """See `Scope`."""
        raise _without_history(tensors[0])

    def sent(self) -> None:
        """See `Scope`."""
        if self._scope is not None:
            self._scope.sent()

    def failed(self, error: BaseException | None = None) -> None:
        """See `Scope`."""
        if self._scope is not None:
            self._scope.failed(error)


class _CallScope(Scope):
    """A call that is served here: the context that its handler and its reply are in."""

    __slots__ = (
        "_autocast",
        "_event",
        "_exchange",
        "_flags",
        "_is_implicit",
        "_label",
        "_name",
        "_peer",
        "arrival",
        "records",
        "side",
    )

    def __init__(
        self,
        exchange: Exchange,
        peer: Peer,
        name: ContextName,
        label: str,
        call: CallHeader | None,
    ) -> None:
        self._exchange = exchange
        self._peer = peer
        self._name = name
        self._label = label
        self._event = -1
        self._autocast = call.autocast if call is not None else None
        self._is_implicit = call is None or call.key is None
        self._flags = 0 if call is None else call.flags
        self.records = not self._flags & NOT_RECORDED
        self.arrival = 0  # a call that is a context of its own has one request
        self.side: Side | None = None

    def enter_handler(self) -> AbstractContextManager[None] | None:
        """See `Scope`."""
        # In one that is broken as well: what would be recorded in it is refused then.
        if not self._is_implicit and (
            self.side is not None or self._exchange.is_broken(self._name)
        ):
            active_context.set(self._name)
            current_handler.set(self)
        return apply_autocast(self._autocast) if self._autocast else None

    def sending_reply(self, tensors: list[Tensor], of_modules: set[int]) -> Addition:
        """See `Scope`."""
        side = self.side
        if not self.records or (side is not None and side.is_released):
            self._refuse_to_lose(tensors, of_modules)
            return cut_reply(tensors, self._label, self._flags)
        tracked = _tracked(tensors, of_modules)
        if not tracked:
            self.failed()  # nothing goes back that could lead here
            return NOTHING
        if side is None:
            side = self.side = self._exchange.registry.add_call(
                self._name,
                call_label(self._label, self._peer.info.name),
                is_caller=self._peer.info.id == self._exchange.me,
                peer=self._peer,
            )
        side.is_serving = False
        history = leaving([tensors[i] for i in tracked])
        self._event, after = side.announce_send(
            self._peer.info.id, history, self.arrival
        )
        self._exchange.unfinished.add(self)
        header = ReplyHeader(self._event, after, is_of_leaves=is_of_leaves(history))
        if not self._is_implicit:
            header.key, header.incarnation = self._name
        return Addition(encode_header(header), tracked)

    def sent(self) -> None:
        """See `Scope`."""
        if self._event >= 0 and self.side is not None:
            self.side.finish_sends()
            self._exchange.unfinished.discard(self)

    def sending_opaque(self, tensors: list[Tensor]) -> None:
        """See `Scope`."""
        if self.records:
            raise _without_history(tensors[0])

    def _refuse_to_lose(self, tensors: list[Tensor], of_modules: set[int]) -> None:
        """Raises if the caller counts on a history in a context that was dropped here.

        The caller may not know yet of the worker that was lost.
        """
        if self._is_implicit or self._flags & NOT_RECORDED:
            return
        if _tracked(tensors, of_modules):
            self._exchange.refuse_if_broken(self._name)

    def failed(self, error: BaseException | None = None) -> None:
        """See `Scope`."""
        self._exchange.unfinished.discard(self)
        side = self.side
        if side is None:
            return
        side.is_serving = False
        if self._is_implicit:
            # A call to oneself has one side; the caller's part of it ends it.
            if not side.holds_weakly:
                self._exchange.releases.end(side)
        elif self._event >= 0:
            self._exchange.mark_dead(side, self._event)


def _tracked(tensors: list[Tensor], of_modules: set[int]) -> dict[int, int]:
    """The tensors whose history goes on here, by index.

    Parameters of a module that is sent arrive as parameters of its copy.
    """
    return {
        index: TRACKED
        for index, tensor in enumerate(tensors)
        if tensor.requires_grad and id(tensor) not in of_modules
    }


def call_label(function: str, caller: str) -> str:
    return f"the call of {function} by worker {caller!r}"
