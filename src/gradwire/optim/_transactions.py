"""Steps in two phases, as the trainer drives them; see `gradwire.optim._protocol`."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradwire.autograd.extension import Attempt, add_note, outside_context
from gradwire.errors import NotRepeatable, PeerLostError
from gradwire.optim._gradients import Source
from gradwire.optim._local import Changes, Saving
from gradwire.optim._owners import collect, combine, raise_failures
from gradwire.optim._protocol import Decision, Ledger, Mark, Vote
from gradwire.optim._shares import Share, calls_to
from gradwire.rpc import Future

__all__ = ["Transactions"]

_log = logging.getLogger("gradwire.optim")

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.05


class Transactions:
    """The steps of one optimizer that are applied on all owners or on none.

    Args:
        every: Number of steps from one snapshot to the next; None: there are none.
    """

    def __init__(self, every: int | None = None) -> None:
        self.ledger = Ledger(every)
        self._last = 0

    def step(self, shares: Sequence[Share], source: Source, changes: Changes) -> None:
        """Makes a step everywhere, or nowhere.

        Raises:
            NotRepeatable: All have decided to make it, and then an owner was lost.
            Exception: Why it could not be made; nobody has made it.
        """
        if len(shares) == 1:
            self._step_alone(shares, source, changes)
            return
        priority = number = self.next_number()
        wait_s = _FIRST_WAIT_S
        while not self._try(
            shares, self.ledger.propose(number), priority, source, changes
        ):
            # Another trainer is at it: it must not be met again in the same step.
            time.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            number = self.next_number()

    def next_number(self) -> int:
        """The number of a new transaction; all trainers together have an order of them."""
        self._last = max(self._last + 1, time.time_ns())
        return self._last

    def _step_alone(
        self, shares: Sequence[Share], source: Source, changes: Changes
    ) -> None:
        """One owner decides by itself, so one request is enough.

        If it is lost before it has answered, the step does not count: should there be
        snapshots, it will be given the state before.
        """
        mark = self.ledger.propose(self.next_number())
        saving = self._saving(mark)

        def arguments(share: Share) -> tuple[Any, ...]:
            return tuple(mark), source.context_id, share.select(changes), saving

        try:
            _, failures = collect(calls_to(shares, "step_alone", arguments))
        except BaseException:  # an interrupt
            _start(shares, lambda local: local.abort(tuple(mark)))
            raise
        raise_failures(failures)
        self._decide(mark, source.attempt)

    def _try(
        self,
        shares: Sequence[Share],
        mark: Mark,
        priority: int,
        source: Source,
        changes: Changes,
    ) -> bool:
        """One transaction; False: it had to give way to another one."""
        saving = self._saving(mark)

        def arguments(share: Share) -> tuple[Any, ...]:
            selected = share.select(changes)
            return tuple(mark), priority, source.context_id, selected, saving

        try:
            answers, failures = collect(calls_to(shares, "prepare", arguments))
        except BaseException:  # an interrupt
            _start(shares, lambda local: local.abort(tuple(mark)))
            raise
        decision = self.ledger.decide(_VOTES[answer] for answer in answers)
        if decision is Decision.COMMIT:
            self._commit(shares, mark, source.attempt)
            return True
        collect(calls_to(shares, "abort", (tuple(mark),)))
        if decision is Decision.ABORT:
            _raise_undone(failures)
        return False

    def _saving(self, mark: Mark) -> Saving | None:
        return Saving(self.ledger.kept) if self.ledger.is_kept(mark) else None

    def _decide(self, mark: Mark, attempt: Attempt | None) -> None:
        self.ledger.commit(mark)
        if attempt is not None:
            attempt.note_applied("optimizer.step()")

    def _commit(
        self, shares: Sequence[Share], mark: Mark, attempt: Attempt | None
    ) -> None:
        self._decide(mark, attempt)
        try:
            _, failures = collect(calls_to(shares, "commit", (tuple(mark),)))
        except BaseException:  # an interrupt; what is decided is done all the same
            _start(shares, lambda local: local.commit(tuple(mark)))
            raise
        if not failures:
            return
        names = ", ".join(repr(name) for name in failures)
        if self.ledger.kept is not None and all(
            isinstance(failure, PeerLostError) for failure in failures.values()
        ):
            # The step counts. Whoever needs that owner next will be told that it is lost.
            _log.warning(
                "step %d was committed, and %s was lost before it could do so; "
                "recover() will bring it there",
                mark.step,
                names,
            )
            return
        raise NotRepeatable(
            f"step {mark.step} of the optimizer was made on all owners but {names}, which "
            "was lost after all had prepared it. There are no snapshots, so its parameters "
            "are gone; begin again from a saved state, and see "
            "DistributedOptimizer(snapshots=...)",
            worker=next(iter(failures)),
        ) from _one_of(failures)


# What `LocalOptimizer.prepare` answers; None stands for an owner that failed.
_VOTES = {True: Vote.PREPARED, False: Vote.BUSY, None: Vote.FAILED}


def _start(shares: Sequence[Share], call: Callable[[Any], Future[Any]]) -> None:
    """Tells all owners something that they may know, without waiting for answers."""
    for share in shares:
        try:
            outside_context(call, share.rref.rpc_async(timeout=0))
        except PeerLostError:
            pass  # there is nothing to tell it any more


def _one_of(failures: dict[str, Exception]) -> Exception:
    return combine(failures) if len(failures) > 1 else next(iter(failures.values()))


def _raise_undone(failures: dict[str, Exception]) -> NoReturn:
    for failure in failures.values():
        add_note(failure, "No owner has made this step: it was undone on all of them.")
    raise_failures(failures)
    raise AssertionError("a step was undone, and nobody has failed")
