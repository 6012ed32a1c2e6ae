"""Where snapshots of one owner are kept: on disk, or in the memory of another worker.

A place knows bytes and marks, and nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import SnapshotError
from gradwire.optim._protocol import Mark
from gradwire.rpc import RRef, get_worker_info

__all__ = ["DiskPlace", "PeerPlace", "Place", "Shelf"]


class Place(ABC):
    """Keeps the snapshots of one owner. Made by the trainer, and used by the owner."""

    @abstractmethod
    def save(self, mark: Mark, data: bytes, kept: Mark | None) -> None:
        """Keeps a snapshot, so that it survives this process from now on.

        Args:
            mark: The state that it is of.
            data: Its bytes.
            kept: The only other one to be kept.
        """

    @abstractmethod
    def load(self, mark: Mark) -> bytes:
        """The bytes of a snapshot.

        Raises:
            SnapshotError: It is not there.
        """

    @abstractmethod
    def marks(self) -> list[Mark]:
        """Which snapshots there are."""

    @abstractmethod
    def drop_others(self, kept: set[Mark]) -> None:
        """Forgets all snapshots but these."""

    @abstractmethod
    def describe(self, mark: Mark) -> str:
        """Where a snapshot is, for messages."""


class DiskPlace(Place):
    """A file for each snapshot, in a directory of the owner's file system.

    Args:
        directory: Where; it is made if it is not there.
        key: What the names of the files begin with.
    """

    def __init__(self, directory: str, key: str) -> None:
        self._directory = directory
        self._key = key

    def save(self, mark: Mark, data: bytes, kept: Mark | None) -> None:
        """Writes a file of another name, and renames it when it is on the disk."""
        path = self._path_of(mark)
        unfinished = path.with_name(path.name + ".unfinished")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb", opener=_open_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_directory(path.parent)
        self.drop_others({mark} if kept is None else {mark, kept})

    def load(self, mark: Mark) -> bytes:
        """Reads a file."""
        try:
            return self._path_of(mark).read_bytes()
        except FileNotFoundError:
            raise _missing(self, mark, self.marks()) from None

    def marks(self) -> list[Mark]:
        """By the names of the files."""
        pattern = re.compile(re.escape(self._key) + r"\.(\d+)\.(\d+)\.snapshot")
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        found = [match for name in names if (match := pattern.fullmatch(name))]
        return sorted(Mark(int(match[1]), int(match[2])) for match in found)

    def drop_others(self, kept: set[Mark]) -> None:
        """Removes files; also those that a process which died has not finished."""
        doomed = [self._path_of(mark) for mark in self.marks() if mark not in kept]
        doomed += Path(self._directory).glob(f"{self._key}.*.unfinished")
        for path in doomed:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def describe(self, mark: Mark) -> str:
        """The path."""
        return f"file {self._path_of(mark)} of worker {get_worker_info().name!r}"

    def _path_of(self, mark: Mark) -> Path:
        name = f"{self._key}.{mark.step}.{mark.transaction}.snapshot"
        return Path(self._directory) / name


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_directory(path: Path) -> None:
    # A new name is on the disk when its directory is.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Shelf:
    """Snapshots in the memory of a worker, for another one."""

    def __init__(self) -> None:
        # Guards the dictionary; handlers.
        self._lock = threading.Lock()
        self._kept: dict[Mark, Tensor] = {}

    def put(self, mark: Mark, data: Tensor, kept: Mark | None) -> None:
        """Keeps a snapshot, and besides it only one other."""
        with self._lock:
            self._kept[mark] = data
        self.drop_others([mark] if kept is None else [mark, kept])

    def get(self, mark: Mark) -> Tensor | None:
        """A snapshot; None if it is not there."""
        with self._lock:
            return self._kept.get(mark)

    def marks(self) -> list[Mark]:
        """Which snapshots there are."""
        with self._lock:
            return sorted(self._kept)

    def drop_others(self, kept: list[Mark]) -> None:
        """Forgets all snapshots but these."""
        with self._lock:
            for mark in self._kept.keys() - set(kept):
                del self._kept[mark]


class PeerPlace(Place):
    """The memory of another worker, and that of the owner itself.

    The owner's own copy is for states to which all owners go back: then it may be the
    other worker that was lost.

    Args:
        shelf: On the other worker. The trainer has a reference too, so it stays when
            the owner is lost, and goes when the optimizer does.
    """

    def __init__(self, shelf: RRef[Shelf]) -> None:
        self._shelf = shelf
        self._own = Shelf()

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerPlace, (self._shelf,)

    def save(self, mark: Mark, data: bytes, kept: Mark | None) -> None:
        """Sends the snapshot to the other worker."""
        # Tensors are not copied on their way, bytes are.
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._shelf.rpc_sync(timeout=0).put(mark, tensor, kept)
        self._own.put(mark, tensor, kept)

    def load(self, mark: Mark) -> bytes:
        """Our own copy, or that of the other worker."""
        tensor = self._own.get(mark)
        if tensor is None:
            tensor = self._shelf.rpc_sync(timeout=0).get(mark)
        if tensor is None:
            raise _missing(self, mark, self.marks())
        return ctypes.string_at(tensor.data_ptr(), tensor.numel())

    def marks(self) -> list[Mark]:
        """Those that would survive us."""
        found: list[Mark] = self._shelf.rpc_sync(timeout=0).marks()
        return found

    def drop_others(self, kept: set[Mark]) -> None:
        """There and here."""
        self._shelf.rpc_sync(timeout=0).drop_others(list(kept))
        self._own.drop_others(list(kept))

    def describe(self, mark: Mark) -> str:
        """Who has it."""
        return (
            f"the snapshot that worker {self._shelf.owner_name()!r} keeps for worker "
            f"{get_worker_info().name!r}"
        )


def _missing(place: Place, mark: Mark, marks: list[Mark]) -> SnapshotError:
    steps = ", ".join(str(mark.step) for mark in marks) or "none"
    return SnapshotError(
        f"{place.describe(mark)}, of the state after {mark.step} steps, is not there; "
        f"there are snapshots of steps: {steps}"
    )
