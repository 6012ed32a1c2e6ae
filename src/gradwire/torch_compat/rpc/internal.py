"""Pickling of calls, modes of calls and names for profiles, under torch's names."""

from __future__ import annotations

import copyreg
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.torch_compat._pickling import pickle_value, unpickle_value

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function is called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call, as it is pickled."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """The text and the type of an exception."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Turns values into bytes and a list of tensors, as messages do."""

    def __init__(self) -> None:
        self._reducers: set[type] = set()

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Pickles instances of a class in its own way, in calls too; the first counts."""
        if obj_class not in self._reducers:
            self._reducers.add(obj_class)
            copyreg.pickle(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """The bytes and the tensors of a value."""
        return pickle_value(obj)

    def deserialize(self, binary_data: bytes, tensor_table: list[Tensor]) -> Any:
        """The value that these were made from."""
        return unpickle_value(binary_data, tensor_table)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[Tensor]]:
    """The bytes and the tensors of a value."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Tensor]) -> Any:
    """The value that these were made from."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode,
    func_name: str,
    current_worker_name: str,
    dst_worker_name: str,
) -> str:
    """What a call is called in a profile."""
    return (
        f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
    )
