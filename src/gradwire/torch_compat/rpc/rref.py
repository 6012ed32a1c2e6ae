"""Remote references, as programs for torch use them."""

from __future__ import annotations

import threading
from typing import Any, Generic, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import gradwire.rpc
from gradwire.errors import DeadlineExceeded, NotInitialized, UsageError
from gradwire.torch_compat import _core
from gradwire.torch_compat._errors import torch_errors
from gradwire.torch_compat.futures import TorchFuture, adopt
from gradwire.torch_compat.rpc import _calls
from gradwire.torch_compat.rpc._agent_view import WorkerInfo
from gradwire.torch_compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.torch_compat.rpc.rref_proxy import AsyncProxy, RemoteProxy, SyncProxy

__all__ = ["RRef", "adopt_reference"]

T = TypeVar("T")


class RRef(gradwire.rpc.RRef[T], Generic[T]):
    """A reference to a value that lives on one worker, with torch's texts and errors."""

    __slots__ = ()  # none of its own: see `adopt_reference`

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if not _core.is_worker():
            raise NotInitialized(
                "Current RPC agent is not set! Did you initialize the RPC framework (by "
                "calling `rpc.init_rpc`)?"
            )
        super().__init__(value, type_hint)

    def owner(self) -> WorkerInfo:
        """The worker that the value lives on."""
        return WorkerInfo(*super().owner())

    def local_value(self) -> T:
        """The value itself, on its owner."""
        if not self.is_owner():
            rref, fork = _core.reference_ids(self)
            me = WorkerInfo(*_core.agent_of(self).info)
            raise UsageError(
                f"For UserRRef(rref_id={_show(rref)}, fork_id={_show(fork)}), can't call "
                f"localValue() on user {me}. Call it on owner {self.owner()}"
            )
        with torch_errors():
            return super().local_value()

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the value; on its owner the value itself."""
        with torch_errors(_core.function_of(self)):
            self._check("Cannot call to_here() on it after deletion.")
            return super().to_here(timeout)

    def _check(self, complaint: str) -> None:
        error = _core.creation_error(self)
        if isinstance(error, DeadlineExceeded):
            raise UsageError(
                "RRef creation via rpc.remote() timed out, and it is possible that the "
                f"RRef on the owner node does not exist: {error}"
            )
        # Where it has an error of its own, that is what the caller gets.
        if error is None and not self.is_owner() and _core.is_over(self):
            raise UsageError(f"{self} has been deleted. {complaint}")

    def backward(
        self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False
    ) -> None:
        """Runs a backward pass from the value, on its owner."""
        if dist_autograd_ctx_id == -1 and not self.is_owner():
            raise UsageError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: a pass over "
                "several workers needs a context"
            )
        with torch_errors():
            super().backward(dist_autograd_ctx_id, retain_graph)

    # -------------------------------------------------------------------------- calls

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Calls methods of the value where it lives."""
        return SyncProxy(self, super().rpc_sync(timeout), timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`; calls return futures."""
        return AsyncProxy(self, super().rpc_async(timeout), timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`; calls return references."""
        return RemoteProxy(self, super().remote(timeout), timeout)

    # -------------------------------------------------------------------------- others

    def _get_type(
        self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
    ) -> Any:
        """The type of the value, or a future of it; the owner answers once."""
        with _type_lock:
            future = _types.get(self)
        if future is None or future.has_failed():
            # Not under the lock: on the owner this waits until there is a value.
            asked = self._ask_type(timeout)
            with _type_lock:
                future = _types.get(self)
                if future is None or future.has_failed():
                    future = _types[self] = asked
            if future is asked:
                asked.add_done_callback(self._forget_failed_type)
        return future.wait() if blocking else future

    def _forget_failed_type(self, future: Any) -> None:
        # An error refers to the frames that it has passed, and these to the reference.
        if future.has_failed():
            with _type_lock:
                if _types.get(self) is future:
                    del _types[self]

    def _ask_type(self, timeout: float) -> TorchFuture[Any]:
        if not self.is_owner():
            arguments = (self,)
            owner = self.owner()
            return _calls.start(owner, _rref_typeof_on_owner, arguments, None, timeout)
        future: TorchFuture[Any] = TorchFuture()
        future.set_result(_rref_typeof_on_owner(self))
        return future

    def _get_future(self) -> TorchFuture[Any]:
        """Completes when the value is made, or cannot be."""
        return adopt(super()._get_future())

    def _set_profiling_future(self, future: Any) -> None:
        _profiling_futures[self] = future

    def _get_profiling_future(self) -> Any:
        return _profiling_futures[self]

    def _serialize(self) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        self._check("Cannot call fork an UserRRef after deletion.")
        super().__reduce__()

    def __repr__(self) -> str:
        rref, fork = _core.reference_ids(self)
        if fork is None:
            return f"OwnerRRef({_show(rref)})"
        return f"UserRRef(RRefId = {_show(rref)}, ForkId = {_show(fork)})"


# Guards the types of references; never held while somebody is asked.
_type_lock = threading.Lock()
_types: WeakKeyDictionary[RRef[Any], TorchFuture[Any]] = WeakKeyDictionary()
_profiling_futures: WeakKeyDictionary[RRef[Any], Any] = WeakKeyDictionary()


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> type:
    return type(rref.local_value())


def _show(number: Any) -> str:
    return f"GloballyUniqueId(created_on={number[0]}, local_id={number[-1]})"


def adopt_reference(rref: gradwire.rpc.RRef[T]) -> RRef[T]:
    """The same reference, as torch's programs know it."""
    rref.__class__ = RRef
    return cast("RRef[T]", rref)
