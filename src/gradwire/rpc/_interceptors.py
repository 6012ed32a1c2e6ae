"""Hooks by which an upper layer takes part in calls, without this layer knowing it.

A layer registers a class; every agent that is created afterwards makes one instance of
it. The instance may add a header to each call and reply, which its namesake on the
other worker gets before the handler runs or the caller sees the value. It may also
bring one-way messages of its own.

    caller                                      callee
    `sending_call` -> Note      -- header -->   `received_call` -> Scope, or
                                                `received_plain`
                                                `Scope.enter_handler`
    `received_reply`, or        <-- header --   `Scope.sending_reply`, or
    `Note.failed`                               `Scope.failed`

Every message that carried a header either arrives or is reported to `dropped_call` or
`dropped_reply` on the worker where its way ended; if that was here, to `Note.failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

if TYPE_CHECKING:
    from gradwire.rpc._agent import Agent
    from gradwire.rpc._calls import PendingCall
    from gradwire.rpc._peer import Peer
    from gradwire.transport import Frame
    from gradwire.wire import Message

    Work = Callable[[], None]
    MessageHandlers = Mapping[type[Message], Callable[[Peer, Any, Frame], Work | None]]

__all__ = [
    "Addition",
    "Interceptor",
    "Note",
    "Scope",
    "register_interceptor",
    "registered_interceptors",
]


LookUp = Callable[[list[Any]], "torch.Tensor | None"]
"""Finds a tensor that is there, by the arguments of a call; else None."""


class Addition(msgspec.Struct, frozen=True, gc=False):
    """What a layer adds to a message: a header, and flags of tensors by index."""

    header: bytes | None = None
    flags: dict[int, int] | None = None


NOTHING = Addition()


class Note:
    """What a layer remembers of a call of ours, until it ends."""

    __slots__ = ("addition", "call")

    def __init__(self, addition: Addition = NOTHING) -> None:
        self.addition = addition
        self.call: PendingCall | None = None
        """Set when the call is about to be sent."""

    def sent(self) -> None:
        """The call is on its way: what is done here does not delay it.

        Its answer may come at the same time, on another thread.
        """

    def failed(self, *, was_sent: bool, error: BaseException | None = None) -> None:
        """No value will come: not sent, raised there, timed out, lost."""


class Scope:
    """What a layer remembers of a call that is served here, until it is answered."""

    __slots__ = ()

    keeps_result = False
    """Whether what the handler returns or raises is for `keep`; the answer is None."""

    def keep(self, value: Any, error: BaseException | None) -> None:
        """The handler has returned a value, or raised."""

    def enter_handler(self) -> AbstractContextManager[None] | None:
        """The handler is about to run, in a `contextvars.Context` of its own.

        Returns:
            A context for what belongs to the thread, if that is needed.
        """
        return None

    def sending_reply(
        self, tensors: list[torch.Tensor], of_modules: set[int]
    ) -> Addition:
        """The result is about to be encoded. See `Interceptor.sending_call`."""
        return NOTHING

    def sending_opaque(self, tensors: list[torch.Tensor]) -> None:
        """As `Interceptor.sending_opaque`, before `sending_reply`."""

    def sent(self) -> None:
        """The result is on its way; as `Note.sent`."""

    def failed(self, error: BaseException | None = None) -> None:
        """The handler raised, or its result could not be sent."""


class Interceptor:
    """Base with hooks that do nothing; override what you need.

    Hooks run on the thread that sends or reads, and must not block. What `sending_call`,
    `received_call`, `sending_reply` and `received_reply` raise fails the call.
    """

    name: str
    """Key of the headers; the same on all workers."""
    sees_all_calls = True
    """Whether it is asked about calls that carry nothing of its own, and their replies."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        # Handlers of messages of the layer's own, which must not block; and of those
        # that may run long: they get a thread, as calls do.
        self.messages: MessageHandlers = {}
        self.requests: MessageHandlers = {}
        # How objects of the layer's own are sent: what goes in their place.
        self.packs: Mapping[type, Callable[[Any, Peer], Any]] = {}

        # Functions of the layer's own, by their names, that hand out tensors which are there:
        # they get the arguments, and give None where it takes more than a look. All peers
        # may call them: see `for_agents`.
        self.lookups: Mapping[str, LookUp] = {}

    def unpack(self, packed: Any, peer: Peer) -> Any:
        """Makes an object of what ``packs`` made of it on the peer."""
        raise NotImplementedError

    def packed_reply(self, peer: Peer) -> Scope:
        """For a reply to a call without a scope of ours, into which we packed something."""
        raise NotImplementedError

    def discarded(self, error: BaseException) -> None:
        """What was packed or unpacked on this thread belongs to a message that failed."""

    def debug_info(self) -> dict[str, Any]:
        """Counts for `gradwire.rpc.get_debug_info`."""
        return {}

    def sending_opaque(
        self, tensors: list[torch.Tensor], is_grad_enabled: bool
    ) -> None:
        """Tensors of subclasses require grad, and leave as pickles, without history.

        Called before `sending_call`.
        """

    def sending_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        tensors: list[torch.Tensor],
        of_modules: set[int],
        is_grad_enabled: bool,
        making: object | None = None,
    ) -> Note | None:
        """A call is about to be encoded.

        Args:
            peer: Where it goes.
            call_id: Its number.
            label: What is called, for messages.
            tensors: The tensors in its arguments.
            of_modules: Ids of those that are parameters of a module in the arguments.
            is_grad_enabled: The caller's grad mode.
            making: The result stays there, and outlives the call: what `Agent.make` was
                given, by the layer that keeps it.
        """
        return None

    def sending_plain(self, peer: Peer, label: str) -> Note | None:
        """As `sending_call`, for a call without tensors, or anything to be packed."""
        return self.sending_call(
            peer, -1, label, [], set(), torch.is_grad_enabled(), None
        )

    def received_reply(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        note: Note | None,
        header: bytes | None,
        tracked: list[torch.Tensor],
        is_clean: bool = False,
    ) -> None:
        """The result arrived; its tensors are decoded, nobody has seen them yet.

        Args:
            peer: Who has answered.
            call_id: The number of the call.
            label: What was called, for messages.
            note: From `sending_call` or `sending_plain`.
            header: What our namesake has added.
            tracked: The tensors whose history is at the peer.
            is_clean: The state of the thread is, as `thread_state_is_clean` says it.
        """

    def dropped_reply(self, peer: Peer, call_id: int, header: bytes) -> None:
        """A result with our header arrived here, and nobody will ever see it."""

    def received_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        header: bytes,
        tracked: list[torch.Tensor],
    ) -> Scope | None:
        """A call arrived; its tensors are decoded, nobody has seen them yet."""
        return None

    def received_plain(self, peer: Peer, call_id: int, label: str) -> Scope | None:
        """As `received_call`, for a call that carries nothing of the layer's own."""
        return None

    def plain_reply(self, peer: Peer, call_id: int, label: str) -> Scope | None:
        """For a reply with tensors, to a call for which there is no scope of ours."""
        return None

    def handing_out(
        self, peer: Peer, header: bytes | None, tensor: torch.Tensor
    ) -> Addition | None:
        """A call has asked for a tensor that is there; it is about to be encoded.

        Instead of `received_call` and `Scope.sending_reply`, if there is nothing more to
        it. What is returned must be changed by nobody.

        Args:
            peer: Who gets it.
            header: Of the call, which may ask for more than this.
            tensor: A tensor or parameter.

        Returns:
            What to add to the reply; None: serve the call as any other.
        """
        return NOTHING if header is None else None

    def not_handed_out(self, header: bytes) -> None:
        """A reply with a header that `handing_out` has given will not be sent."""

    def dropped_call(
        self, peer: Peer, call_id: int, header: bytes, error: BaseException
    ) -> None:
        """A call with our header arrived here, and will not be run."""

    def peer_lost(self, peer: Peer) -> None:
        """The peer is gone; whatever waits for it must not."""

    def close(self) -> None:
        """The agent ends."""


_factories: tuple[type[Interceptor], ...] = ()


def register_interceptor(factory: type[Interceptor]) -> None:
    """Adds a layer to all agents that are created from now on."""
    global _factories  # noqa: PLW0603
    if any(known.name == factory.name for known in _factories):
        raise ValueError(f"an interceptor named {factory.name!r} is registered")
    _factories = (*_factories, factory)


def registered_interceptors() -> tuple[type[Interceptor], ...]:
    """All layers, in the order of their registration."""
    return _factories
