"""Calls by worker, profiled if the thread is; what both `api` and references need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gradwire.rpc
from gradwire._ids import WorkerInfo
from gradwire.errors import DeadlineExceeded, TransportError
from gradwire.torch_compat import _core
from gradwire.torch_compat.futures import TorchFuture, adopt
from gradwire.torch_compat.rpc import profiling
from gradwire.torch_compat.rpc.internal import RPCExecMode

__all__ = ["call", "create", "futures_of_thread", "remember", "start"]

futures_of_thread = threading.local()
"""Its ``future_list``, if there is one, gets the calls that `remember` is told of."""


Target = str | int | WorkerInfo
Function = Callable[..., Any]
Arguments = tuple[Any, ...]
Keywords = dict[str, Any] | None


def call(
    to: Target, func: Function, args: Arguments, kwargs: Keywords, timeout: float
) -> Any:
    """Calls a function and waits for its result."""
    if profiling.is_on():
        me, info = _ends(to)
        mode = RPCExecMode.SYNC
        return profiling.call(mode, me, info, func, args, kwargs, timeout).wait()
    return gradwire.rpc.rpc_sync(to, func, args, kwargs, timeout)


def start(
    to: Target, func: Function, args: Arguments, kwargs: Keywords, timeout: float
) -> TorchFuture[Any]:
    """Starts a call; if the worker is not there, that is the future's error."""
    try:
        if profiling.is_on():
            me, info = _ends(to)
            mode = RPCExecMode.ASYNC
            return profiling.call(mode, me, info, func, args, kwargs, timeout)
        return adopt(gradwire.rpc.rpc_async(to, func, args, kwargs, timeout))
    except (TransportError, DeadlineExceeded) as error:
        failed: TorchFuture[Any] = TorchFuture()
        failed.set_exception(error)
        return failed


def create(
    to: Target, func: Function, args: Arguments, kwargs: Keywords, timeout: float
) -> tuple[gradwire.rpc.RRef[Any], TorchFuture[None] | None]:
    """Makes a value elsewhere; also a future that tells when it is in the profile."""
    if profiling.is_on():
        me, info = _ends(to)
        return profiling.call_remote(me, info, func, args, kwargs, timeout)
    return gradwire.rpc.remote(to, func, args, kwargs, timeout), None


def _ends(to: Target) -> tuple[WorkerInfo, WorkerInfo]:
    agent = _core.current_agent()
    return agent.info, _core.find_worker(agent, to)


def remember(future: TorchFuture[Any]) -> TorchFuture[Any]:
    """Adds a call to those that somebody on this thread wants to wait for."""
    if hasattr(futures_of_thread, "future_list"):
        futures_of_thread.future_list.append(future)
    return future
