"""Snapshots as bytes: what one owner has, with a checksum, safe to read.

A file is a line that says what it is, the SHA-256 of the rest, and the rest, as
``torch.save`` writes it. It is read with ``weights_only=True``: nothing in it is run.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.errors import SnapshotError

__all__ = ["Content", "check_readable", "pack", "unpack"]

_MAGIC = b"gradwire snapshot 1\n"
_DIGEST_BYTES = 32


class Content(NamedTuple):
    """What one owner has of a state."""

    parameters: list[Tensor]
    state: dict[Any, Any]
    """That of the optimizer; parameters are numbered."""
    options: list[dict[str, Any]]
    """Hyperparameters of each group."""
    optimizer: str
    """Name of its class."""


def pack(content: Content) -> bytes:
    """The bytes of a snapshot."""
    buffer = io.BytesIO()
    torch.save(content._asdict(), buffer)
    data = buffer.getvalue()
    return b"".join((_MAGIC, hashlib.sha256(data).digest(), data))


def unpack(packed: bytes, where: str) -> Content:
    """A snapshot from its bytes.

    Args:
        packed: What `pack` made.
        where: Where they come from, for messages.

    Raises:
        SnapshotError: They are damaged, or something else.
    """
    view = memoryview(packed)
    start = len(_MAGIC) + _DIGEST_BYTES
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise SnapshotError(
            f"{where} is not a snapshot of this version: expected it to begin with "
            f"{_MAGIC!r}, found {bytes(view[: len(_MAGIC)])!r}"
        )
    data = view[start:]
    if hashlib.sha256(data).digest() != bytes(view[len(_MAGIC) : start]):
        raise SnapshotError(
            f"{where} is damaged: its checksum is not that of its content"
        )
    try:
        return Content(**torch.load(io.BytesIO(data), weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, TypeError, EOFError) as error:
        raise SnapshotError(f"{where} cannot be read: {error}") from error


def check_readable(packed: bytes, optimizer: str) -> None:
    """Raises now what would else be raised when the snapshot is needed.

    Raises:
        SnapshotError: It holds something that cannot be read safely.
    """
    try:
        unpack(packed, "the snapshot")
    except SnapshotError as error:
        raise SnapshotError(
            f"the state of {optimizer} cannot be kept in snapshots, which may hold tensors "
            f"and plain values only: {error}"
        ) from error
