"""The one pickler: everything of a value that is not a tensor of the table.

Tensors are taken out by ``reducer_override``, which the C pickler only asks about objects
that it cannot handle by itself. (``persistent_id`` is asked about every single int.)
The pickle has a call of ``tensor_at(index)`` in the place of each tensor; the unpickler
gives that name its own meaning, the table of the message at hand.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradwire.errors import DecodeError, EncodeError, GradwireError
from gradwire.wire._functions import find_global

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gradwire.wire._tensors import TensorTable

__all__ = ["Packer", "dumps", "loads"]

_PROTOCOL = 5
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter


class Packer(Protocol):
    """Objects that mean something to a layer above travel in a form that it gives them."""

    @property
    def types(self) -> Collection[type]:
        """Classes whose instances it packs; not those of subclasses."""

    def pack(self, obj: Any) -> Any:
        """What is sent in the place of an object."""

    def goes_without_history(self, tensor: torch.Tensor) -> None:
        """A tensor that requires grad is pickled as any object: it is of a subclass."""


def dumps(value: object, table: TensorTable, packer: Packer | None = None) -> bytes:
    """Pickles a value; its tensors go to the table, some objects to the packer.

    Raises:
        EncodeError: If something in the value cannot be sent.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, table, packer)
    try:
        pickler.dump(value)
    except GradwireError:
        raise
    except Exception as error:
        raise _explain(value, pickler.last, error) from error
    return file.getvalue()


def loads(
    data: bytes,
    tensors: list[torch.Tensor],
    unpack: Callable[[Any], Any] | None = None,
    find: Callable[[str, str], Any] = find_global,
) -> Any:
    """Rebuilds what ``dumps`` made, with these tensors in their places.

    Args:
        data: The pickle.
        tensors: The tensors.
        unpack: Makes an object of what a packer made of it.
        find: Finds a global, or refuses it.

    Raises:
        DecodeError: If the value cannot be rebuilt on this worker.
    """
    try:
        return _Unpickler(io.BytesIO(data), tensors, unpack, find).load()
    except GradwireError:
        raise
    except Exception as error:
        raise DecodeError(
            "a value that arrived cannot be unpickled on this worker "
            f"({type(error).__name__}: {error}). The classes in it must be importable "
            "here, in the version that the sender has"
        ) from error


def tensor_at(index: int) -> torch.Tensor:
    """Stands for a tensor in a pickle; has a meaning only while ``loads`` runs."""
    raise DecodeError(
        f"tensor {index} belongs to a message of gradwire and cannot be unpickled elsewhere"
    )


def unpack(packed: Any) -> Any:
    """Stands for an object that was packed; as `tensor_at`."""
    raise DecodeError("what was packed for a message cannot be unpickled elsewhere")


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, table: TensorTable, packer: Packer | None
    ) -> None:
        super().__init__(file, _PROTOCOL)
        self._table = table
        self._packer = packer
        self._packed_types = () if packer is None else packer.types
        # The object that was looked at last: if pickling fails, mostly the culprit.
        self.last: object = None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _Tensor or kind is _Parameter:
            return tensor_at, (self._table.add(obj),)
        self.last = obj
        if kind in self._packed_types and self._packer is not None:
            return unpack, (self._packer.pack(obj),)
        if isinstance(obj, torch.nn.Module):
            # Its parameters arrive as such; one that is sent by itself may not.
            self._table.of_modules.update(map(id, obj._parameters.values()))
        elif (
            isinstance(obj, _Tensor)
            and obj.requires_grad
            and id(obj) not in self._table.of_modules
            and self._packer is not None
        ):
            self._packer.goes_without_history(obj)
        if isinstance(obj, torch.futures.Future):
            raise EncodeError(
                "futures cannot be sent; wait for it and send the result, or return it "
                "from a function that is marked as asynchronous"
            )
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        tensors: list[torch.Tensor],
        unpack: Callable[[Any], Any] | None,
        find: Callable[[str, str], Any],
    ) -> None:
        super().__init__(file)
        self._find = find
        self._tensors = tensors
        self._unpack = unpack

    def find_class(self, module: str, name: str) -> Any:
        # Every global of a pickle comes through here.
        if module == __name__ and name == "tensor_at":
            return self._tensors.__getitem__
        if module == __name__ and name == "unpack" and self._unpack is not None:
            return self._unpack
        return self._find(module, name)


def _explain(value: object, culprit: object, error: Exception) -> EncodeError:
    if isinstance(culprit, FunctionType) and "<" in culprit.__qualname__:
        what = "a lambda" if culprit.__name__ == "<lambda>" else "a local function"
        return EncodeError(
            f"cannot send {what}, {culprit.__module__}.{culprit.__qualname__}: functions "
            "travel by name; define it at module level"
        )
    if isinstance(error, RecursionError):
        return EncodeError(
            f"cannot send a value of type {_type_name(value)}: it is nested too deeply"
        )
    if culprit is None:
        culprit = value
    kind = culprit if isinstance(culprit, type) else type(culprit)
    if "<locals>" in kind.__qualname__:
        remedy = "its class is local to a function; define it at module level"
    else:
        remedy = (
            "send plain data instead, or give its class a __reduce__ or __getstate__ "
            "that leaves out what cannot be sent"
        )
    return EncodeError(
        f"cannot send a value of type {_type_name(value)}: pickling failed at an object of "
        f"type {_type_name(culprit)} ({type(error).__name__}: {error}); {remedy}"
    )


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
