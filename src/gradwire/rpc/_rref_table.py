"""Who holds references to what: one worker's view, pure. No threads, no sockets.

A value lives on its *owner*. Every reference on another worker is a *fork* with an id of
its own, and the owner knows all forks of a value: when the last one is gone, so is the
value (unless the owner's program holds it). A fork has a *parent*, who sent it.

    from the owner to W     the owner enters the fork as it sends it; W has it at once
    from V to W             W asks the owner to enter it; when that is done, W tells V
    from V to the owner     no fork is needed; the owner tells V that it arrived

Until it is told, V's own fork stays, even if the program has dropped it. So the owner
always knows one fork more than it needs, never one too few, in whatever order messages of
different workers come. A fork that the program has dropped is deleted at the owner as soon
as it is confirmed and its children have arrived.

Methods take what happened and return what to tell to whom.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = [
    "AskFork",
    "Instruction",
    "RefId",
    "RefTable",
    "TellArrived",
    "TellDelete",
    "TellForked",
    "User",
]


class RefId(NamedTuple):
    """Id of a value or of a fork, unique in the group."""

    created_on: int
    incarnation: int
    local_id: int


class AskFork(NamedTuple):
    """Ask the owner to enter a fork of ours."""

    to: int
    rref: RefId
    fork: RefId


class TellForked(NamedTuple):
    """Tell a worker that its fork is entered, or that there is no such value."""

    to: int
    fork: RefId
    is_known: bool


class TellArrived(NamedTuple):
    """Tell a parent that its child has arrived."""

    to: int
    fork: RefId


class TellDelete(NamedTuple):
    """Tell the owner that a fork is gone; maybe the call that makes its value as well."""

    to: int
    rref: RefId
    fork: RefId
    is_given_up: bool = False


Instruction: TypeAlias = AskFork | TellForked | TellArrived | TellDelete


@dataclass(slots=True)
class User:
    """A fork that this worker holds.

    Attributes:
        parent: Who is waiting to hear that it has arrived.
        is_confirmed: The owner knows it.
        is_dropped: The program does not need it any more.
        is_given_up: The call that makes the value, which we made, has failed.
        num_children: How many forks of it are on their way.
    """

    rref: RefId
    owner: int
    parent: int | None = None
    is_confirmed: bool = False
    is_dropped: bool = False
    is_given_up: bool = False
    num_children: int = 0


class RefTable:
    """One worker's references.

    Attributes:
        forks: Values of ours that others hold: for each its forks, with their holders.
        held: How many of these forks each holder has.
        users: Forks that we hold.
        children: Forks of those that are on their way: the parent fork, and to whom.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self.forks: dict[RefId, dict[RefId, int]] = {}
        self.held: dict[int, int] = {}
        self.users: dict[RefId, User] = {}
        self.children: dict[RefId, tuple[RefId, int]] = {}

    # --------------------------------------------------------------------- as the owner

    def add_fork(self, rref: RefId, fork: RefId, holder: int) -> None:
        """A worker holds a fork of a value of ours, or is about to."""
        forks = self.forks.setdefault(rref, {})
        if fork not in forks:
            forks[fork] = holder
            self.held[holder] = self.held.get(holder, 0) + 1

    def on_fork_request(
        self, rref: RefId, fork: RefId, holder: int, is_known: bool
    ) -> list[Instruction]:
        """A worker was given a fork by another user.

        Args:
            rref: The value.
            fork: The fork.
            holder: The worker.
            is_known: The value is here, or the call that makes it may still come.
        """
        if is_known:
            self.add_fork(rref, fork, holder)
        return [TellForked(holder, fork, is_known)]

    def remove_fork(self, rref: RefId, fork: RefId) -> bool:
        """A fork is gone; returns whether it was the last one."""
        forks = self.forks.get(rref)
        if forks is None:
            return False
        holder = forks.pop(fork, None)
        if holder is not None:
            self.held[holder] -= 1
            if not self.held[holder]:
                del self.held[holder]
        if forks:
            return False
        del self.forks[rref]
        return True

    # ----------------------------------------------------------------------- as a user

    def create(self, rref: RefId, fork: RefId, owner: int) -> None:
        """We asked a worker to make a value, and hold the first fork of it."""
        self.users[fork] = User(rref, owner)

    def send(self, fork: RefId, child: RefId, to: int) -> None:
        """A child of a fork leaves to a worker."""
        self.users[fork].num_children += 1
        self.children[child] = fork, to

    def arrive(
        self, rref: RefId, fork: RefId, owner: int, parent: int
    ) -> list[Instruction]:
        """A reference came; the owner itself only answers for it."""
        if owner == self.me:
            if parent != self.me:
                return [TellArrived(parent, fork)]
            self.remove_fork(rref, fork)  # it was sent to ourselves
            return []
        if parent == owner:
            self.users[fork] = User(rref, owner, is_confirmed=True)
            return []
        self.users[fork] = User(rref, owner, parent)
        return [AskFork(owner, rref, fork)]

    def confirm(self, fork: RefId) -> list[Instruction]:
        """The owner knows a fork of ours."""
        user = self.users.get(fork)
        if user is None or user.is_confirmed:
            return []
        user.is_confirmed = True
        arrived = self._tell_parent(user, fork)
        return [*arrived, *self._end_if_over(fork, user)]

    def fail(self, fork: RefId) -> list[Instruction]:
        """The owner does not know a fork of ours, and never will."""
        user = self.users.pop(fork, None)
        return [] if user is None else self._tell_parent(user, fork)

    def give_up(self, fork: RefId) -> list[Instruction]:
        """The call failed that should make a value; the owner may know it all the same.

        Children that are on their way still find it, or what is left of it.
        """
        user = self.users.get(fork)
        if user is None:
            return []
        user.is_confirmed = user.is_dropped = user.is_given_up = True
        return self._end_if_over(fork, user)

    def on_arrived(self, child: RefId) -> list[Instruction]:
        """A child of one of our forks has arrived, or will never."""
        fork, _ = self.children.pop(child, (None, None))
        user = None if fork is None else self.users.get(fork)
        if fork is None or user is None:
            return []
        user.num_children -= 1
        return self._end_if_over(fork, user)

    def drop(self, fork: RefId) -> list[Instruction]:
        """The program does not need a fork any more."""
        user = self.users.get(fork)
        if user is None:
            return []
        user.is_dropped = True
        return self._end_if_over(fork, user)

    def _tell_parent(self, user: User, fork: RefId) -> list[Instruction]:
        parent, user.parent = user.parent, None
        return [] if parent is None else [TellArrived(parent, fork)]

    def _end_if_over(self, fork: RefId, user: User) -> list[Instruction]:
        if not user.is_dropped or not user.is_confirmed or user.num_children:
            return []
        del self.users[fork]
        return [TellDelete(user.owner, user.rref, fork, user.is_given_up)]

    # --------------------------------------------------------------------------- losses

    def lose(self, worker: int) -> tuple[list[RefId], list[RefId], list[Instruction]]:
        """A worker is gone.

        Returns:
            Values of ours that nobody holds any more; forks of ours whose owner it was;
            what to tell.
        """
        free = [
            rref
            for rref, forks in list(self.forks.items())
            for fork, holder in list(forks.items())
            if holder == worker and self.remove_fork(rref, fork)
        ]
        orphans = [f for f, user in self.users.items() if user.owner == worker]
        instructions: list[Instruction] = []
        for fork in orphans:
            instructions += self.fail(fork)
        for child, (_, to) in list(self.children.items()):
            if to == worker:
                instructions += self.on_arrived(child)
        return free, orphans, _without(worker, instructions)

    def counts(self) -> dict[str, int]:
        """What there is; all zero when nothing is referred to."""
        users = self.users.values()
        return {
            "owner_rrefs": len(self.forks),
            "forks": sum(map(len, self.forks.values())),
            "user_rrefs": len(users),
            "pending_users": sum(not user.is_confirmed for user in users),
            "pending_children": len(self.children),
        }


def _without(worker: int, instructions: Iterable[Instruction]) -> list[Instruction]:
    return [instruction for instruction in instructions if instruction.to != worker]
