"""The pass protocol, pure: one worker's view of one context. No threads, no sockets.

*Events.* Every message with a history is an event on both workers: a send on one, a
recv on the other. Each worker numbers its own events; a message is known by the number
of its send. A pass *covers* the events that were recorded on a worker before the pass
began there, and no others.

*Answers.* In a pass, each send that it covers gets exactly one answer: gradients or
"none". It comes from the recv's node, or, if the recv was recorded after the pass had
begun there, at once, from `ContextState.record_recv`. A message that was dropped on its
way is dead, which answers it in all passes.

*The echo.* A worker that hears of a pass for the first time tells all whom it knows in
the context, except for the one it heard it from, its parent. When its own part is over
and all whom it told are done, it tells its parent; if it has none, it is the starter,
and the pass is over. Somebody who hears of it again is done with it, for that edge.

*Failure.* Whoever fails tells its parent and all whom it told. A pass that meets another
one in the same context is refused there, which is a failure of the newcomer.

Methods take what happened and return what to tell to whom. Everything may come twice,
and messages of different workers in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from gradwire.errors import BackwardFailed

__all__ = [
    "NONE",
    "WAIT",
    "ContextState",
    "Instruction",
    "Pass",
    "PassId",
    "TellAbort",
    "TellDone",
    "TellNone",
    "TellStart",
]

NONE: Final = "none"
"""The answer that brings no gradient."""
WAIT: Final = "wait"
"""There is no answer yet."""


class PassId(NamedTuple):
    """Who started a pass, and the how-manieth of this starter in this context it is."""

    starter: int
    number: int


@dataclass(slots=True)
class Pass:
    """A pass as one worker sees it, from its begin to its end here.

    Attributes:
        parent: Who told us; None if we started it.
        first: Number of the first event that it covers.
        end: Number of the first event after those.
        told: Those whom we told and who are not done.
        is_running: Our own part is not over.
    """

    id: PassId
    parent: int | None
    first: int
    end: int
    told: set[int] = field(default_factory=set)
    everybody_told: frozenset[int] = frozenset()
    is_running: bool = True

    def covers(self, event: int) -> bool:
        """Whether an event belongs to this pass."""
        return self.first <= event < self.end


class TellStart(NamedTuple):
    """Tell a worker that the pass begins."""

    to: int


class TellDone(NamedTuple):
    """Tell a worker that we and all whom we told are done."""

    to: int
    pass_id: PassId


class TellAbort(NamedTuple):
    """Tell a worker that the pass failed, and why, in whatever form we were told."""

    to: int
    pass_id: PassId
    cause: Any


class TellNone(NamedTuple):
    """Answer a message of a worker with "none"."""

    to: int
    pass_id: PassId
    message: int


Instruction: TypeAlias = TellStart | TellDone | TellAbort | TellNone


class ContextState:
    """One worker's view of one context.

    Args:
        me: Our rank.
        describe: Makes of an error what others are told, and what is kept.

    Attributes:
        me: Our rank.
        known: The workers that we exchanged messages with in this context.
        events: How many events were recorded here.
        first: The first event of the present chain; those before it were consumed.
        current: The pass that is on here.
        latest: The last pass of each starter that has begun here (or was refused).
        latest_begun: The last pass that has begun here.
        broken: Why no pass can succeed any more: a worker of the context was lost.
    """

    def __init__(
        self, me: int, describe: Callable[[BackwardFailed], Any] = lambda error: error
    ) -> None:
        self.me = me
        self._describe = describe
        self.known: set[int] = set()
        self.events = 0
        self.first = 0
        self.current: Pass | None = None
        self.latest: dict[int, int] = {}
        self.latest_begun: PassId | None = None
        self.broken: Any = None
        self._aborted: dict[PassId, Any] = {}
        self._answers: dict[PassId, dict[int, Any]] = {}
        self._dead: set[int] = set()

    # ------------------------------------------------------------------------ events

    def meet(self, worker: int) -> None:
        """A message of this context goes to or comes from a worker."""
        if worker != self.me:
            self.known.add(worker)

    def record_send(self) -> int:
        """A message with a history leaves; returns its number."""
        event = self.events
        self.events += 1
        return event

    def record_recv(
        self, sender: int, message: int, after: PassId | None
    ) -> tuple[int, list[TellNone]]:
        """A message with a history arrived; returns the number of the event.

        Args:
            sender: Who sent it.
            message: Its number there.
            after: The last pass that had begun there: it does not cover the message.
        """
        event = self.events
        self.events += 1
        answers = [
            TellNone(sender, PassId(starter, number), message)
            for starter, number in self.latest.items()
            if (starter, number) != after
        ]
        return event, answers

    def mark_dead(self, message: int) -> bool:
        """A message of ours was dropped on its way; True if that answers the pass."""
        self._dead.add(message)
        return self.current is not None and self.current.covers(message)

    # ------------------------------------------------------------------------- begin

    def start(self, retain: bool) -> tuple[Pass, list[Instruction]]:
        """We start a pass.

        Raises:
            BackwardFailed: Another one is on here.
        """
        if self.current is not None:
            raise _busy(self.current.id, self.me)
        number = self.latest.get(self.me, -1) + 1
        return self._begin(PassId(self.me, number), None, retain)

    def on_start(
        self, pass_id: PassId, sender: int, retain: bool
    ) -> tuple[Pass | None, list[Instruction]]:
        """A worker tells us of a pass; returns it if our part is to begin."""
        self.meet(sender)
        current = self.current
        if current is not None and current.id == pass_id:
            if sender == current.parent:
                return None, []  # the same message again
            return None, [TellDone(sender, pass_id)]
        if pass_id.number <= self.latest.get(pass_id.starter, -1):
            if (cause := self._aborted.get(pass_id)) is not None:
                return None, [TellAbort(sender, pass_id, cause)]
            return None, [TellDone(sender, pass_id)]
        cause = self.broken
        if current is not None:
            cause = self._describe(_busy(current.id, self.me))
        if cause is not None:
            self._forget(pass_id, cause)
            return None, [TellAbort(sender, pass_id, cause)]
        return self._begin(pass_id, sender, retain)

    def _begin(
        self, pass_id: PassId, parent: int | None, retain: bool
    ) -> tuple[Pass, list[Instruction]]:
        told = self.known - {parent}
        self.current = Pass(
            pass_id, parent, self.first, self.events, told, frozenset(told)
        )
        self.latest[pass_id.starter] = pass_id.number
        self.latest_begun = pass_id
        if not retain:
            self.first = self.events
        # Answers that came before us may be for events that we do not cover.
        early = self._answers.get(pass_id, {})
        for message in [m for m in early if not self.current.covers(m)]:
            del early[message]
        return self.current, [TellStart(worker) for worker in sorted(told)]

    # ----------------------------------------------------------------------- answers

    def on_answer(self, pass_id: PassId, message: int, answer: Any) -> bool:
        """An answer arrived; returns whether a send of the current pass may want it."""
        current = self.current
        if current is not None and current.id == pass_id:
            if not current.covers(message):
                return False
        elif pass_id.number <= self.latest.get(pass_id.starter, -1):
            return False  # the pass is over
        self._answers.setdefault(pass_id, {}).setdefault(message, answer)
        return current is not None and current.id == pass_id

    def take_answer(self, message: int) -> Any:
        """The answer to a send that the current pass covers, or `WAIT`."""
        if message in self._dead:
            return NONE
        current = self.current
        if current is None:
            raise AssertionError("a send asked for its answer outside a pass")
        return self._answers.get(current.id, {}).pop(message, WAIT)

    # --------------------------------------------------------------------------- end

    def local_end(self) -> list[Instruction]:
        """Our own part of the current pass is over, and succeeded."""
        if self.current is None:
            return []
        self.current.is_running = False
        return self._end_if_done()

    def on_done(self, pass_id: PassId, sender: int) -> list[Instruction]:
        """Somebody whom we told is done."""
        current = self.current
        if current is None or current.id != pass_id:
            return []
        current.told.discard(sender)
        return self._end_if_done()

    def _end_if_done(self) -> list[Instruction]:
        current = self.current
        if current is None or current.is_running or current.told:
            return []
        self.current = None
        self._answers.pop(current.id, None)
        if current.parent is None:
            return []
        return [TellDone(current.parent, current.id)]

    def fail(
        self, pass_id: PassId, cause: Any, sender: int | None = None
    ) -> list[Instruction]:
        """A pass failed, here or (``sender``) elsewhere. It is over here."""
        current = self.current
        if current is None or current.id != pass_id:
            if pass_id.number > self.latest.get(pass_id.starter, -1):
                self._forget(pass_id, cause)
            return []
        self.current = None
        self._forget(pass_id, cause)
        everybody = set(current.everybody_told)
        if current.parent is not None:
            everybody.add(current.parent)
        everybody.discard(sender)
        return [TellAbort(worker, pass_id, cause) for worker in sorted(everybody)]

    def lose(self, worker: int, cause: Any) -> list[Instruction]:
        """A worker is gone: its messages will never be answered, so passes fail."""
        if worker not in self.known:
            return []
        self.known.discard(worker)
        self.broken = self.broken or cause
        if self.current is None:
            return []
        return [t for t in self.fail(self.current.id, cause) if t.to != worker]

    def _forget(self, pass_id: PassId, cause: Any) -> None:
        """Makes a pass one that is over, and failed; for each starter the last one."""
        for other in [p for p in self._aborted if p.starter == pass_id.starter]:
            del self._aborted[other]
        self._aborted[pass_id] = cause
        self.latest[pass_id.starter] = pass_id.number
        self._answers.pop(pass_id, None)


def _busy(running: PassId, worker: int) -> BackwardFailed:
    return BackwardFailed(
        "two backward passes of one context met: the one that the worker of rank "
        f"{running.starter} started was still running on the worker of rank {worker}. "
        "Start the next pass when backward() has returned, or use a context for each"
    )
