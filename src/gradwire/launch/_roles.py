"""Roles: which worker does what. The ranks are dealt out in the order of the roles.

With ``ps=1, trainer=3`` rank 0 is ``ps``, ranks 1 to 3 are ``trainer:0`` to ``trainer:2``.
Names follow from roles and rank alone, so nobody has to ask anybody.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradwire._config import ROLES_VARIABLE
from gradwire._ids import check_worker_name
from gradwire.errors import UsageError

__all__ = ["Worker", "check_roles", "format_roles", "parse_roles", "worker_of"]


@dataclass(frozen=True)
class Worker:
    """Who a worker is.

    Attributes:
        name: Its name: that of the role, with a number if the role has several workers.
        role: Its role.
        index: Its number in the role.
        rank: Its rank.
        world_size: How many workers there are.

    Example:
        >>> Worker("trainer:1", "trainer", 1, 2, 4).name
        'trainer:1'
    """

    name: str
    role: str
    index: int
    rank: int
    world_size: int


def check_roles(roles: object) -> dict[str, int]:
    """Roles with their numbers of workers, or a clear error."""
    if not isinstance(roles, Mapping) or not roles:
        raise UsageError(
            "roles must be a dict of names and numbers of workers, such as "
            f"{{'ps': 1, 'trainer': 3}}, found {roles!r:.80}"
        )
    for name, count in roles.items():
        check_worker_name(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(
                f"role {name!r} must have at least 1 worker, found {count!r}"
            )
        if name[-1].isdigit():
            raise UsageError(
                f"the name of a role must not end with a digit, found {name!r}: the workers "
                "of a role are told apart by numbers"
            )
        check_worker_name(_name_of(name, count - 1, count))
    return dict(roles)


def parse_roles(texts: Iterable[str]) -> dict[str, int]:
    """Reads roles as they are given to a command: ``ps=1``, ``trainer=3``."""
    roles: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not count.isdecimal():
            raise UsageError(
                f"a role is given as NAME=COUNT, such as trainer=3, found {text!r}"
            )
        if name in roles:
            raise UsageError(f"role {name!r} is given twice")
        roles[name] = int(count)
    return check_roles(roles)


def format_roles(roles: Mapping[str, int]) -> str:
    """The roles as the environment of workers carries them."""
    return ",".join(f"{name}={count}" for name, count in roles.items())


def worker_of(roles: Mapping[str, int], rank: int) -> Worker:
    """The worker that has a rank."""
    world_size = sum(roles.values())
    index = rank
    for role, count in roles.items():
        if 0 <= index < count:
            return Worker(_name_of(role, index, count), role, index, rank, world_size)
        index -= count
    raise UsageError(
        f"the roles {format_roles(roles)} have {world_size} workers, so there is no rank "
        f"{rank}; is the number of processes that of the roles?"
    )


def _name_of(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}:{index}"


def this_worker() -> Worker:
    """Who this process is, inside a program that ``gradwire run`` has started.

    Raises:
        UsageError: It was started in another way.

    Example:
        >>> spawn(this_worker, roles={"ps": 1, "trainer": 2})["trainer:1"]
        Worker(name='trainer:1', role='trainer', index=1, rank=2, world_size=3)
    """
    roles, rank = os.environ.get(ROLES_VARIABLE), os.environ.get("RANK", "")
    if not roles or not rank.isdecimal():
        raise UsageError(
            "this process has no role: it was started neither by 'gradwire run' nor by "
            "launch.spawn; start it with 'gradwire run --role NAME=COUNT script.py'"
        )
    return worker_of(parse_roles(roles.split(",")), int(rank))
