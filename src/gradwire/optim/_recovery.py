"""Finding out what is left after a loss, and what was left by an earlier program."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import PeerLostError, SnapshotError
from gradwire.optim._local import Look
from gradwire.optim._owners import collect, raise_failures
from gradwire.optim._protocol import Mark
from gradwire.optim._shares import Share, calls_to

__all__ = ["look_at", "refuse_found"]


def look_at(shares: Sequence[Share]) -> list[Look | None]:
    """The state that each owner is in; None for those that are lost.

    Raises:
        Exception: An owner is there and cannot say.
    """
    looks, failures = collect(calls_to(shares, "look"))
    raise_failures(
        {
            owner: failure
            for owner, failure in failures.items()
            if not isinstance(failure, PeerLostError) or failure.about != owner
        }
    )
    return [look and Look(Mark(*look[0]), look[1]) for look in looks]


def refuse_found(
    shares: Sequence[Share], found: Sequence[Sequence[Mark]], *, is_resumed: bool
) -> SnapshotError:
    """Why a program cannot begin with the snapshots that are there."""
    lines = [
        f"worker {share.owner!r}: "
        + (", ".join(str(mark.step) for mark in marks) or "none")
        for share, marks in zip(shares, found, strict=True)
    ]
    if is_resumed:
        text = (
            "there is no state of which all owners have snapshots, so there is nothing to "
            "go on from; remove them, or give another directory"
        )
    else:
        text = (
            "there are snapshots already: Snapshots(resume=True) goes on from them; else "
            "give another directory or name"
        )
    return SnapshotError(f"{text}. Steps that were found, by owner: {'; '.join(lines)}")
