"""Remote procedure calls between the workers of a group.

Example:
    >>> init_rpc("worker0", rank=0, world_size=1)  # here the only one of its group
    >>> rpc_sync("worker0", torch.add, args=(torch.ones(2), 1))
    tensor([2., 2.])
    >>> shutdown()
"""

from __future__ import annotations

from gradwire._config import RpcBackendOptions, TlsOptions
from gradwire._ids import WorkerInfo
from gradwire.rpc import functions
from gradwire.rpc._api import (
    get_debug_info,
    get_rpc_timeout,
    get_worker_info,
    get_workers,
    init_rpc,
    is_initialized,
    on_worker_joined,
    on_worker_lost,
    rpc_async,
    rpc_sync,
    shutdown,
    wait_for_worker,
)
from gradwire.rpc._exports import export
from gradwire.rpc._future import Future
from gradwire.rpc._rref import RRef, remote

__all__ = [
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TlsOptions",
    "WorkerInfo",
    "export",
    "functions",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_workers",
    "init_rpc",
    "is_initialized",
    "on_worker_joined",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_for_worker",
]
