"""Hooks by which an upper layer takes part in calls, without this layer knowing it.

An interceptor may add a header to each call and reply, which its namesake on the other
worker reads before the handler runs or the caller gets the value. It is told when a
message that carried its header was dropped, and when a peer is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from gradwire._ids import WorkerInfo

__all__ = ["Interceptor", "register_interceptor", "registered_interceptors"]


class Interceptor:
    """Base with hooks that do nothing; override what you need.

    `outgoing` runs on the thread that sends, before the message is encoded; `incoming`
    on the thread that decodes. Neither may block. What they raise fails the call.
    """

    name: str
    """Key of the header; the same on all workers."""

    def outgoing(
        self, peer: WorkerInfo, is_reply: bool, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """The header for a message, None for none."""
        return None

    def incoming(
        self,
        peer: WorkerInfo,
        is_reply: bool,
        header: bytes | None,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """A message arrived; its tensors are decoded, nobody has seen them yet."""

    def around_handler(
        self, peer: WorkerInfo, header: bytes | None
    ) -> AbstractContextManager[None]:
        """A context in which the handler of a call runs."""
        return contextlib.nullcontext()

    def dropped(self, peer: WorkerInfo, header: bytes) -> None:
        """A message with our header arrived here, and nobody will ever see it."""

    def peer_lost(self, peer: WorkerInfo) -> None:
        """The peer is gone; whatever waits for it must not."""


_interceptors: tuple[Interceptor, ...] = ()


def register_interceptor(interceptor: Interceptor) -> None:
    """Adds an interceptor for all agents that are created from now on."""
    global _interceptors  # noqa: PLW0603
    if any(i.name == interceptor.name for i in _interceptors):
        raise ValueError(f"an interceptor named {interceptor.name!r} is registered")
    _interceptors = (*_interceptors, interceptor)


def registered_interceptors() -> tuple[Interceptor, ...]:
    """All interceptors, in the order of their registration."""
    return _interceptors
