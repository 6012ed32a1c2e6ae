"""Raw memory: copies between addresses, and views of an address for system calls."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["copy", "read", "view", "view_of_storage"]

_memmove = ctypes.memmove  # releases the interpreter lock, as large copies should


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes`` from one address to another, without the interpreter lock."""
    _memmove(destination, source, nbytes)


def read(address: int, nbytes: int) -> bytes:
    """A copy of raw memory."""
    return ctypes.string_at(address, nbytes)


def view(address: int, nbytes: int) -> memoryview:
    """A writable view of raw memory. The caller keeps the memory alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def view_of_storage(storage: torch.UntypedStorage) -> memoryview:
    """A writable view of a storage's memory. The caller keeps the storage alive."""
    return view(storage.data_ptr(), storage.nbytes())
