"""A pass at work on this worker, and the answers that it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from torch import Tensor

from gradwire.autograd._engine import Destination
from gradwire.autograd._passes import Pass
from gradwire.rpc.extension import Outcome

if TYPE_CHECKING:
    from gradwire.autograd._context import Received, Side

__all__ = ["Answer", "Part", "Run"]

_DESTINATIONS = tuple(Destination)

Part: TypeAlias = Callable[[], None]
"""A worker's part of a pass, to be run."""


class Answer(msgspec.Struct, frozen=True):
    """The gradients of one message, with the history that they may have themselves."""

    present: tuple[bool, ...]
    gradients: tuple[Tensor, ...]
    tracked: list[Tensor]
    history: int
    after: tuple[int, int] | None


class Run:
    """A pass at work on this worker. Its side's lock guards it."""

    __slots__ = (
        "autocast",
        "awaited",
        "children",
        "create_graph",
        "destination",
        "failure",
        "limit",
        "part",
        "pass_",
        "recvs",
        "retain",
        "side",
        "task",
        "thread",
        "waiting",
    )

    def __init__(
        self,
        side: Side,
        pass_: Pass,
        recvs: list[Received],
    ) -> None:
        self.side = side
        self.pass_ = pass_
        self.destination = _DESTINATIONS[pass_.kind.destination]
        self.retain = pass_.kind.retain
        self.create_graph = pass_.kind.create_graph
        self.recvs = recvs
        self.task: int | None = None  # the engine's number for our part
        self.thread = 0  # where our part runs, if it begins with tokens only
        self.autocast: list[tuple[str, str]] | None = None
        self.limit = 0.0  # when the starter gives up, 0: never
        self.failure: BaseException | None = None
        self.waiting: dict[int, Outcome] = {}  # sends that the engine waits in
        self.part: Part | None = None  # ours, while it has not begun
        self.awaited: set[int] = set()  # sends whose answers it needs to begin
        self.children = {rank: Outcome() for rank in pass_.told}

    def answered(self, event: int) -> Part | None:
        """A send is answered; returns our part if it can begin now."""
        if self.part is None:
            return None
        self.awaited.discard(event)
        return None if self.awaited else self.take_part()

    def take_part(self) -> Part | None:
        """Our part, if it has not begun: whoever takes it runs it, or drops it."""
        part, self.part = self.part, None
        return part

    def forget(self) -> None:
        """The pass failed, and our part has ended too: the error is raised, or told.

        The error's traceback knows this run; if the run also knew the error, both would
        live until the cyclic collector comes, and the graph with them.
        """
        self.failure = None
        self.children.clear()
        self.waiting.clear()
