"""Identities: who a worker is, and what its name may look like."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple, NewType

from gradwire.errors import InvalidWorkerName

__all__ = [
    "Incarnation",
    "WorkerInfo",
    "check_worker_name",
    "new_incarnation",
    "role_of",
]

Incarnation = NewType("Incarnation", int)
"""Tells one life of a worker from the next: random, positive, below 2**63."""

MAX_NAME_LENGTH = 128
MAX_RANK = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9_:-]+", re.ASCII)


class WorkerInfo(NamedTuple):
    """Name and rank of a worker, as torch has it.

    Example:
        >>> WorkerInfo("trainer", 0)
        WorkerInfo(id=0, name=trainer)
    """

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __hash__(self) -> int:
        return self.id


def check_worker_name(name: object) -> str:
    """Returns ``name`` if it is a valid worker name, else raises."""
    if not isinstance(name, str):
        raise TypeError(f"a worker name must be a str, not {type(name).__name__}")
    if not name:
        raise InvalidWorkerName("a worker name must be non-empty")
    if len(name) >= MAX_NAME_LENGTH:
        raise InvalidWorkerName(
            f"a worker name must be shorter than {MAX_NAME_LENGTH} characters, "
            f"this one has {len(name)}: {name[:40]!r}..."
        )
    if not _NAME.fullmatch(name):
        raise InvalidWorkerName(
            f"Worker name must match {_NAME.pattern} (ASCII letters, digits, '_', ':', '-'), "
            f"found {name!r}"
        )
    return name


def role_of(name: str) -> str:
    """What workers do that are told apart by a number at the end of their names.

    Example:
        >>> role_of("trainer:3"), role_of("trainer_12"), role_of("ps"), role_of("7")
        ('trainer', 'trainer', 'ps', '7')
    """
    return name.rstrip("0123456789").rstrip(":_-") or name


def check_rank(rank: object) -> int:
    """Returns ``rank`` if it is a valid rank, else raises."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"a rank must be an int, not {type(rank).__name__}")
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"a rank must be between 0 and {MAX_RANK}, found {rank}")
    return rank


def new_incarnation() -> Incarnation:
    """A fresh incarnation number."""
    return Incarnation(secrets.randbelow(2**63 - 1) + 1)
