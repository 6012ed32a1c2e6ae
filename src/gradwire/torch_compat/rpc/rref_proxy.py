"""Methods of values that live elsewhere: ``rref.rpc_sync().method(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.torch_compat._errors import torch_errors
from gradwire.torch_compat.futures import adopt
from gradwire.torch_compat.rpc._calls import remember

if TYPE_CHECKING:
    from gradwire.torch_compat.rpc.rref import RRef

__all__ = ["AsyncProxy", "RemoteProxy", "SyncProxy"]


class SyncProxy:
    """Calls that return results.

    Args:
        rref: The reference.
        proxy: What gradwire makes of it.
        timeout: Of each call.
    """

    def __init__(self, rref: RRef[Any], proxy: Any, timeout: float) -> None:
        self.rref = rref
        self.rpc_timeout = timeout
        self._proxy = proxy

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch_errors():
                return self._call(name, args, kwargs)

        return call

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self._proxy, name)(*args, **kwargs)


class AsyncProxy(SyncProxy):
    """Calls that return futures."""

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return remember(adopt(super()._call(name, args, kwargs)))


class RemoteProxy(SyncProxy):
    """Calls that return references."""

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The call itself cannot fail, so what is not there has to be noticed before.
        getattr(self.rref._get_type(self.rpc_timeout), name)
        made = super()._call(name, args, kwargs)
        made.__class__ = type(self.rref)
        return made
