"""Defaults, under torch's names."""

from __future__ import annotations

from datetime import timedelta

from gradwire._config import UNSET_TIMEOUT, RpcBackendOptions

__all__: list[str] = []

_defaults = RpcBackendOptions()

DEFAULT_RPC_TIMEOUT_SEC: float = _defaults.rpc_timeout
DEFAULT_INIT_METHOD: str = _defaults.init_method
DEFAULT_NUM_WORKER_THREADS: int = _defaults.num_worker_threads
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT
