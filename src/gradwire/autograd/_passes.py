"""The pass protocol, pure: one worker's view of one context. No threads, no sockets.

*Events.* Every message with a history is an event on both workers: a send on one, a
recv on the other. Each worker numbers its own events; a message is known by the number
of its send. A pass *covers* the events that were recorded on a worker before the pass
began there, and no others.

*Answers.* In a pass, each send that it covers gets exactly one answer: gradients or
"none". It comes from the recv's node, or from `record_recv` if the message is a
*straggler*, which arrived after the pass had begun here. If that consumes the graph, the
straggler is stale: its send is gone. A message that was dropped on its way is dead, which
answers it in all passes.

*Order.* Passes are numbered through the context; on each worker they begin in the order
of their numbers, and one that comes too late is refused. Every message says which pass had
last begun at its sender: the next one will cover it there. A worker that has just come to
the context takes that over.

*Outrunners.* A message may also arrive before a pass, and be sent after it. Then the pass
covers the recv, and not the send. If it consumes the graph, the recv's answer is the last
one, and says so: where it answers nothing, the message is dead from then on.

*The echo.* A worker that is told of a pass tells all whom it knows in the context,
except for the one who told it, its parent. When its own part is over and all whom it
told are done, it tells its parent; the starter has none, for it the pass is over.
Somebody who is told again is done with it, for that edge.

*Failure.* Whoever fails tells its parent and all whom it told. A pass that meets another
one in the same context is refused there, which is a failure of the newcomer. A failed
pass may have consumed the graph on some workers and not on others. So whoever consumed
recvs in it tells their senders that they are dead, and whoever consumed sends tells their
receivers that they are stale. A gradient that reaches something stale makes its own pass
fail, for it would be lost; so does the news that one was sent in vain. (The news comes before
the same worker's word that it is done with a later pass, so never too late.)

Methods take what happened and return what to tell to whom. Everything may come twice,
and messages of different workers in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from gradwire.errors import BackwardFailed

__all__ = [
    "NONE",
    "WAIT",
    "ContextState",
    "Instruction",
    "Pass",
    "PassId",
    "PassKind",
    "TellAbort",
    "TellDead",
    "TellDone",
    "TellNone",
    "TellStale",
    "TellStart",
]

NONE: Final = "none"
"""The answer that brings no gradient."""
WAIT: Final = "wait"
"""There is no answer yet."""


class PassId(NamedTuple):
    """Who started a pass, and its number in the context."""

    starter: int
    number: int


class PassKind(msgspec.Struct, frozen=True, gc=False):
    """What everybody must know of a pass to run its part."""

    destination: int
    retain: bool
    create_graph: bool


class Pass(msgspec.Struct):
    """A pass as one worker sees it, from its begin to its end here.

    Attributes:
        parent: Who told us; None if we started it.
        first: Number of the first event that it covers.
        end: Number of the first event after those.
        everybody_told: Those whom we told.
        told: Those of them who are not done; replaced, and never changed.
        sends: Messages that it consumes, and to whom they went.
        shipped: Senders and numbers of messages that were answered with a gradient.
        is_running: Our own part is not over.
    """

    id: PassId
    kind: PassKind
    parent: int | None
    first: int
    end: int
    everybody_told: Set[int]
    told: Set[int]
    is_running: bool = True
    sends: dict[int, int] = {}
    shipped: set[tuple[int, int]] = set()

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
    """Answer a message of a worker with "none"; with the last answer, if ``is_last``."""

    to: int
    pass_id: PassId
    message: int
    is_last: bool = False


class TellDead(NamedTuple):
    """Tell a worker that its message will be answered in no pass."""

    to: int
    message: int


class TellStale(NamedTuple):
    """Tell a worker that a message that it got from us is gone here."""

    to: int
    message: int


Instruction: TypeAlias = (
    TellStart | TellDone | TellAbort | TellNone | TellDead | TellStale
)


_History: TypeAlias = tuple[int, int] | None


class ContextState:
    """One worker's view of one context.

    Args:
        me: Our rank.
        describe: Makes of an error what others are told, and what is kept.

    Attributes:
        known: The workers that we exchanged messages with in this context.
        events: How many events were recorded here.
        first: The first event of the present chain; those before it were consumed.
        current: The pass that is on here.
        latest: The last pass of each starter that has begun here (or was refused).
        begun: The last pass that has begun here, or of which a newcomer was told.
        last: The last pass that was not over at once, as it was here, also when it is
            over: for those who look why something hangs.
        consumed_by: Number of the last pass that consumed the graph.
        broken: Why no pass can succeed any more: a worker was lost.
    """

    __slots__ = (
        "_aborted",
        "_answers",
        "_dead",
        "_describe",
        "_sends",
        "begun",
        "broken",
        "consumed_by",
        "current",
        "events",
        "first",
        "known",
        "last",
        "latest",
        "me",
    )

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
        self.begun: PassId | None = None
        self.last: Pass | None = None
        self.broken: Any = None
        self.consumed_by = -1
        self._aborted: dict[PassId, Any] = {}
        # By pass and message: the answer, and if it has a history, its sender and number.
        self._answers: dict[PassId, dict[int, tuple[Any, _History]]] = {}
        self._dead: set[int] = set()
        self._sends: dict[int, int] = {}  # of the present chain, and to whom

    # ------------------------------------------------------------------------ events

    def meet(self, worker: int) -> None:
        """A message of this context goes to or comes from a worker."""
        if worker != self.me:
            self.known.add(worker)

    def record_send(self, to: int) -> int:
        """A message with a history leaves; returns its number."""
        event = self.events
        self.events += 1
        self._sends[event] = to
        return event

    def join(self, sender: int, after: PassId | None, consumed: int = -1) -> None:
        """A message arrived; whoever has just come takes over how far its sender is.

        Args:
            sender: Who sent it.
            after: The last pass that had begun there.
            consumed: Number of the last one that consumed the graph.
        """
        if after is None or self.events or not self.known <= {sender}:
            return
        if self.begun is None or after.number > self.begun.number:
            self.begun = after
            self.latest[after.starter] = after.number
            self.consumed_by = max(self.consumed_by, consumed)

    def record_recv(
        self, sender: int, message: int, after: PassId | None
    ) -> tuple[int, bool, list[TellNone]]:
        """A message with a history arrived; call `join` before.

        Args:
            sender: Who sent it.
            message: Its number there.
            after: The last pass that had begun there: it does not cover the message,
                but all later ones will.

        Returns:
            The number of the event; whether its send is consumed; what to answer.
        """
        event = self.events
        self.events += 1
        if not self.latest:
            return event, False, []
        last = -1 if after is None else after.number
        answers = [
            TellNone(sender, PassId(starter, number), message)
            for starter, number in self.latest.items()
            if number > last
        ]
        return event, self.consumed_by > last, answers

    def mark_dead(self, message: int) -> bool:
        """A message of ours will not be answered; True if a pass may wait for that."""
        current = self.current
        is_covered = current is not None and current.covers(message)
        if is_covered or message >= self.first:
            self._dead.add(message)
        return is_covered

    # ------------------------------------------------------------------------- begin

    def start(self, kind: PassKind) -> tuple[Pass, list[Instruction]]:
        """We start a pass.

        Raises:
            BackwardFailed: Another one is on here.
        """
        if self.current is not None:
            raise _busy(self.current.id, self.me)
        number = max(self.latest.values()) + 1 if self.latest else 0
        return self._begin(PassId(self.me, number), kind, None)

    def on_start(
        self, pass_id: PassId, sender: int, kind: PassKind
    ) -> tuple[Pass | None, list[Instruction]]:
        """A worker tells us of a pass; returns it if our part is to begin."""
        self.meet(sender)
        current = self.current
        if current is not None and current.id == pass_id:
            if sender == current.parent:
                return None, []  # the same message again
            return None, [TellDone(sender, pass_id)]
        latest = self.latest.get(pass_id.starter, -1)
        if pass_id.number <= latest:
            cause = self._aborted.get(pass_id)
            if cause is None and pass_id.number < latest:
                # Its starter has started another one since: it is over.
                cause = self._describe(_outdated(pass_id))
            if cause is None:
                return None, [TellDone(sender, pass_id)]
            return None, [TellAbort(sender, pass_id, cause)]
        cause = self.broken
        if current is not None:
            cause = self._describe(_busy(current.id, self.me))
        elif cause is None and self.begun and pass_id.number <= self.begun.number:
            cause = self._describe(_busy(self.begun, self.me))
        if cause is not None:
            dead = self._forget(pass_id, cause)
            return None, [TellAbort(sender, pass_id, cause), *dead]
        return self._begin(pass_id, kind, sender)

    def begin_and_end(self, pass_id: PassId, sender: int) -> bool:
        """A worker tells us of a pass, and brings the answers to all that we have sent.

        As `on_answer` for each of them, `on_start` with a kind that does not retain the
        graph, and `local_end`, if these come to nothing but that the sender is to be
        told that we are done.

        Returns:
            False if there is more to it: nothing was done.
        """
        starter, number = pass_id
        if (
            self.current is not None
            or self.broken is not None
            or self.known != {sender}
            or self._answers
            or self._dead
            or number <= self.latest.get(starter, -1)
            or (self.begun is not None and number <= self.begun.number)
        ):
            return False
        self.latest[starter] = self.consumed_by = number
        self.begun = pass_id
        self.first = self.events
        self._sends = {}
        return True

    def _begin(
        self, pass_id: PassId, kind: PassKind, parent: int | None
    ) -> tuple[Pass, list[Instruction]]:
        told = self.known - {parent}
        current = self.current = Pass(
            pass_id, kind, parent, self.first, self.events, told, told
        )
        self.latest[pass_id.starter] = pass_id.number
        self.begun = pass_id
        self.last = current
        if not kind.retain:
            self.first = self.events
            self.consumed_by = pass_id.number
            current.sends, self._sends = self._sends, {}
        dead = self._prune(current) if self._answers else []
        return current, [*map(TellStart, sorted(told)), *dead]

    def _prune(self, current: Pass) -> list[Instruction]:
        """Drops answers that came early and that nobody will ask for."""
        dropped: list[_History] = []
        for pass_id, early in list(self._answers.items()):
            first = self.first
            if pass_id == current.id:
                first = current.first
            elif pass_id.number <= current.id.number:
                first = self.events  # it will not begin here any more
            for message in [m for m in early if m < first]:
                _, history = early.pop(message)
                dropped.append(history)
            if not early:
                del self._answers[pass_id]
        return _bury(dropped)

    # ----------------------------------------------------------------------- answers

    def on_answer(
        self,
        pass_id: PassId,
        message: int,
        answer: Any,
        is_last: bool = False,
        history: tuple[int, int] | None = None,
    ) -> tuple[bool, list[Instruction]]:
        """An answer arrived; returns whether a send of the current pass may want it.

        Args:
            pass_id: The pass.
            message: What it answers.
            answer: Gradients, or `NONE`.
            is_last: There will be no answer in later passes.
            history: If it is a message with a history itself: its sender and number.
        """
        current = self.current
        is_current = current is not None and current.id == pass_id
        if is_current and current is not None:
            is_kept = current.covers(message)
        else:
            is_kept = pass_id.number > self.latest.get(pass_id.starter, -1)
            is_kept &= message >= self.first
        if is_kept:
            early = self._answers.setdefault(pass_id, {})
            early.setdefault(message, (answer, history))
            return is_current, []
        return is_last and self.mark_dead(message), _bury([history])

    def note_shipped(self, sender: int, message: int) -> None:
        """A message of a worker is answered with a gradient in the current pass."""
        if self.current is not None:
            self.current.shipped.add((sender, message))

    def is_in_vain(self, sender: int, message: int) -> bool:
        """A message turns out to be stale: whether the current pass has lost by it."""
        return self.current is not None and (sender, message) in self.current.shipped

    def take_answer(self, message: int) -> Any:
        """The answer to a send that the current pass covers, or `WAIT`."""
        if message in self._dead:
            return NONE
        current = self.current
        if current is None:
            raise AssertionError("a send asked for its answer outside a pass")
        answer, _ = self._answers.get(current.id, {}).pop(message, (WAIT, None))
        return answer

    def see_answer(self, message: int) -> Any:
        """As `take_answer`, which may still be asked for it afterwards."""
        if message in self._dead:
            return NONE
        if self.current is None:
            return WAIT
        return self._answers.get(self.current.id, {}).get(message, (WAIT, None))[0]

    def is_answered(self, message: int) -> bool:
        """Whether a send of the current pass would not have to wait."""
        if self.current is None or message in self._dead:
            return True
        return message in self._answers.get(self.current.id, ())

    # --------------------------------------------------------------------------- end

    def local_end(self) -> list[Instruction]:
        """Our own part of the current pass is over, and succeeded."""
        current = self.current
        if current is None:
            return []
        current.is_running = False
        return self._end_if_done(current)

    def on_done(self, pass_id: tuple[int, int], sender: int) -> list[Instruction]:
        """Somebody whom we told is done."""
        current = self.current
        if current is None or current.id != pass_id:
            return []
        current.told = current.told - {sender}
        return self._end_if_done(current)

    def _end_if_done(self, current: Pass) -> list[Instruction]:
        if current.is_running or current.told:
            return []
        self.current = None
        dead = self._clean_up(current.id)
        if current.parent is None:
            return dead
        return [TellDone(current.parent, current.id), *dead]

    def _clean_up(self, pass_id: PassId) -> list[Instruction]:
        """Forgets what belongs to a pass; those who answered in vain are told."""
        if self._dead:
            first = self.first if self.current is None else self.current.first
            self._dead = {message for message in self._dead if message >= first}
        answers = self._answers.pop(pass_id, None)
        return _bury([h for _, h in answers.values()]) if answers else []

    def fail(
        self,
        pass_id: PassId,
        cause: Any,
        sender: int | None = None,
        recvs: Iterable[tuple[int, int]] = (),
    ) -> list[Instruction]:
        """A pass failed. It is over here.

        Args:
            pass_id: The pass.
            cause: Why.
            sender: Who told us, if it failed elsewhere.
            recvs: Senders and numbers of the messages whose recvs it covers here.
        """
        current = self.current
        if current is None or current.id != pass_id:
            if pass_id.number > self.latest.get(pass_id.starter, -1):
                # It will not begin here any more. What is sent from now on is none of its.
                if self.begun is None or pass_id.number > self.begun.number:
                    self.begun = pass_id
                return self._forget(pass_id, cause)
            return []
        self.current = None
        dead = self._forget(pass_id, cause)
        if not current.kind.retain:
            dead += _bury(recvs)
            dead += [TellStale(to, event) for event, to in current.sends.items()]
        everybody = set(current.everybody_told)
        if current.parent is not None:
            everybody.add(current.parent)
        everybody.discard(sender)
        return [*(TellAbort(w, pass_id, cause) for w in sorted(everybody)), *dead]

    def lose(self, worker: int, cause: Any) -> list[Instruction]:
        """A worker is gone: its messages will never be answered, so passes fail."""
        if worker not in self.known:
            return []
        self.known.discard(worker)
        self.broken = self.broken or cause
        if self.current is None:
            return []
        return [t for t in self.fail(self.current.id, cause) if t.to != worker]

    def _forget(self, pass_id: PassId, cause: Any) -> list[Instruction]:
        """Makes a pass one that is over, and failed; for each starter the last one."""
        starter, number = pass_id
        if number >= self.latest.get(starter, -1):
            for other in [p for p in self._aborted if p.starter == starter]:
                del self._aborted[other]
            self._aborted[pass_id] = cause
            self.latest[starter] = number
        dead: list[Instruction] = []
        for other in [p for p in self._answers if p.starter == starter]:
            if other.number <= number:
                dead += self._clean_up(other)
        return [*dead, *self._clean_up(pass_id)]


def _bury(messages: Iterable[tuple[int, int] | None]) -> list[Instruction]:
    return [TellDead(*message) for message in messages if message is not None]


def _outdated(pass_id: PassId) -> BackwardFailed:
    return BackwardFailed(
        f"a backward pass that the worker of rank {pass_id.starter} started is over"
    )


def _busy(running: PassId, worker: int) -> BackwardFailed:
    return BackwardFailed(
        "two backward passes of one context met: the one that the worker of rank "
        f"{running.starter} started was still running on the worker of rank {worker}. "
        "Start the next pass when backward() has returned, or use a context for each"
    )
