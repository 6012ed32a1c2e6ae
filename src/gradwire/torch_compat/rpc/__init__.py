"""What ``torch.distributed.rpc`` is while the drop-in is installed."""

from __future__ import annotations

import logging
import numbers
from typing import Any

import torch
from torch._C._distributed_c10d import Store

import gradwire.torch_compat.autograd as dist_autograd
from gradwire.errors import UsageError
from gradwire.torch_compat import _core
from gradwire.torch_compat._errors import torch_errors
from gradwire.torch_compat.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
)
from gradwire.torch_compat.rpc._agent_view import (
    RpcAgent,
    WorkerInfo,
    enable_gil_profiling,
)
from gradwire.torch_compat.rpc.api import (
    AllGatherStates,
    RRef,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    method_factory,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from gradwire.torch_compat.rpc.backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from gradwire.torch_compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _TensorPipeRpcBackendOptionsBase,
)
from gradwire.torch_compat.rpc.server_process_global_profiler import (
    _server_process_global_profile,
)

__all__ = [
    "AllGatherStates",
    "BackendType",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "method_factory",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

# Names without a promise that torch's own programs and tests use all the same.
_PRIVATE = (
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _reset_current_rpc_agent,
    _server_process_global_profile,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _TensorPipeRpcBackendOptionsBase,
    _wait_all,
)

_log = logging.getLogger("gradwire.torch_compat")

PyRRef = RRef
TensorPipeAgent = RpcAgent
_is_tensorpipe_available = True
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS


def is_available() -> bool:
    """Always true."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker, and waits until all workers of the group are there.

    Args:
        name: Name of this worker, unique in the group.
        backend: ``BackendType.TENSORPIPE``, which is gradwire, or a registered one.
        rank: Its rank.
        world_size: Number of workers.
        rpc_backend_options: Options of torch's classes.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(
        rpc_backend_options, RpcBackendOptions
    ):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    if backend is None and rpc_backend_options is not None:
        backend = _infer_backend(rpc_backend_options)
    if backend is None:
        backend = BackendType.TENSORPIPE
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    if rank >= 0:
        dist_autograd._init(rank)
        # What a profile finds on this worker is marked with its rank.
        torch._C._distributed_rpc._set_profiler_node_id(rank)
    _init_rpc_backend(backend, None, name, rank, world_size, rpc_backend_options)


def _infer_backend(given: Any) -> BackendType:
    for candidate in BackendType:
        if isinstance(given, type(construct_rpc_backend_options(candidate))):
            if candidate is not BackendType.TENSORPIPE:
                _log.warning(
                    "no backend was given; %s is used, to which the options belong",
                    candidate,
                )
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _init_rpc_backend(
    backend: BackendType | None = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Starts a backend; without a store, workers meet where the options say."""
    backend = BackendType.TENSORPIPE if backend is None else backend
    _check(backend, BackendType, "backend")
    _check(store, (Store, type(None)), "store")
    _check(name, str, "name")
    _check(rank, numbers.Integral, "rank")
    _check(world_size, (numbers.Integral, type(None)), "world_size")
    _check(rpc_backend_options, RpcBackendOptions, "rpc_backend_options")
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized")
    with torch_errors():
        agent = backend_registry.init_backend(
            backend,
            store=store,
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=rpc_backend_options,
        )
    api._init_rpc_states(agent)


def _check(value: Any, expected: Any, name: str) -> None:
    if not isinstance(value, expected):
        raise RuntimeError(
            f"Argument {name} must be of type {expected} but got type {type(value)}"
        )


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of references, under torch's names."""
    return _core.reference_counts()


def _get_debug_info() -> dict[str, Any]:
    """Counts of all there is on this worker."""
    info: dict[str, Any] = dict(_rref_context_get_debug_info())
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update(dist_autograd._get_debug_info())
    return info
