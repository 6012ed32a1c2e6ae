"""What users say about snapshots."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire._ids import check_worker_name
from gradwire.optim._places import DiskPlace, PeerPlace, Place, Shelf
from gradwire.rpc import remote

__all__ = ["Snapshots"]

_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@dataclass(frozen=True)
class Snapshots:
    """Where the owners of parameters keep what they must not lose, and how often.

    A snapshot has an owner's parameters and the state of its optimizer. It is made while
    a step is prepared, so a step counts only if it would survive its owners.

    Args:
        directory: A directory of each owner; a restarted owner must find it again.
        peer: The worker that keeps the snapshots of all others in its memory; or for
            each owner the name of the worker that keeps its.
        every: Number of steps from one snapshot to the next. With 1 nothing is lost with
            an owner. With more, all owners go back to the last snapshot then.
        name: Tells optimizers that share a directory apart.
        resume: Go on from the last snapshots in the directory, if there are any. Else it
            is an error if there are some.

    Example:
        >>> snapshots = Snapshots("/var/lib/training", every=10)
        >>> snapshots = Snapshots(peer={"ps0": "ps1", "ps1": "ps0"})
    """

    directory: str | os.PathLike[str] | None = None
    peer: str | Mapping[str, str] | None = None
    every: int = 1
    name: str = "optimizer"
    resume: bool = False

    def __post_init__(self) -> None:
        if (self.directory is None) == (self.peer is None):
            raise ValueError(
                "snapshots need a place: give either a directory or a peer, found "
                f"directory={self.directory!r} and peer={self.peer!r}"
            )
        if isinstance(self.peer, str):
            check_worker_name(self.peer)
        elif self.peer is not None and not isinstance(self.peer, Mapping):
            raise TypeError(
                "peer must be a worker's name, or a dict of names by owner, found "
                f"{type(self.peer).__name__}"
            )
        if self.directory is not None:
            os.fspath(self.directory)
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"every must be an int of at least 1, found {self.every!r}"
            )
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name may have letters, digits, _ and -, and must have some, found "
                f"{self.name!r}"
            )
        if self.resume and self.directory is None:
            raise ValueError(
                "resume needs a directory: what a peer keeps ends with the optimizer"
            )

    def peer_of(self, owner: str) -> str | None:
        """Who keeps the snapshots of an owner; None: they are on disk.

        Raises:
            ValueError: Nobody, or the owner itself.
        """
        if self.peer is None:
            return None
        peer = self.peer if isinstance(self.peer, str) else self.peer.get(owner)
        if peer is None:
            raise ValueError(
                f"Snapshots(peer=...) does not say who keeps those of worker {owner!r}"
            )
        if peer == owner:
            raise ValueError(
                f"worker {owner!r} has parameters and cannot keep its own snapshots, "
                "which have to survive it; name another one: peer={owner: other, ...}"
            )
        return peer

    def make_place(self, owner: str, number: int) -> Place:
        """A place for an owner.

        Args:
            owner: Its name.
            number: Tells the parts of an optimizer apart.
        """
        peer = self.peer_of(owner)
        if peer is not None:
            return PeerPlace(remote(peer, Shelf))
        directory = os.path.abspath(os.fspath(self.directory or ""))
        return DiskPlace(directory, f"{self.name}-{number}-{owner}")
