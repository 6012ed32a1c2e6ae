"""How values travel that are more than a few tensors and numbers: a choice per worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradwire.wire import _pickle, _plain
from gradwire.wire._functions import find_global
from gradwire.wire._messages import PICKLED, PLAIN

if TYPE_CHECKING:
    from gradwire.wire._pickle import Packer
    from gradwire.wire._tensors import TensorTable

__all__ = ["PICKLE", "PickleSerializer", "SafeSerializer", "Serializer"]


class Serializer(ABC):
    """Makes bytes of values, and values of bytes that others made the same way.

    Attributes:
        name: As in `RpcBackendOptions.serializer`.
        form: The form of bodies that it makes; it reads no others.
        is_safe: Whether what arrives may come from somebody who is not trusted.
    """

    name: str
    form: int
    is_safe: bool

    @abstractmethod
    def dumps(self, value: object, table: TensorTable, packer: Packer | None) -> bytes:
        """Encodes a value; its tensors go to the table."""

    @abstractmethod
    def loads(
        self,
        data: bytes,
        tensors: list[torch.Tensor],
        unpack: Callable[[Any], Any] | None,
    ) -> Any:
        """Rebuilds a value."""


class PickleSerializer(Serializer):
    """Anything that can be pickled, between workers that trust each other.

    Args:
        find: Finds a global of a pickle, or refuses it.
    """

    name = "pickle"
    form = PICKLED
    is_safe = False

    def __init__(self, find: Callable[[str, str], Any] = find_global) -> None:
        self.find = find

    def dumps(self, value: object, table: TensorTable, packer: Packer | None) -> bytes:
        """See `Serializer`."""
        return _pickle.dumps(value, table, packer)

    def loads(
        self,
        data: bytes,
        tensors: list[torch.Tensor],
        unpack: Callable[[Any], Any] | None,
    ) -> Any:
        """See `Serializer`."""
        return _pickle.loads(data, tensors, unpack, self.find)


class SafeSerializer(Serializer):
    """Tensors and plain data: nothing that arrives is ever unpickled."""

    name = "safe"
    form = PLAIN
    is_safe = True

    def dumps(self, value: object, table: TensorTable, packer: Packer | None) -> bytes:
        """See `Serializer`."""
        return _plain.dumps(value, table, packer)

    def loads(
        self,
        data: bytes,
        tensors: list[torch.Tensor],
        unpack: Callable[[Any], Any] | None,
    ) -> Any:
        """See `Serializer`."""
        return _plain.loads(data, tensors, unpack)


PICKLE = PickleSerializer()
