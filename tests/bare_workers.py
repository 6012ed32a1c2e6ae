"""Processes that are no workers yet, and how they become some."""

from __future__ import annotations

import socket
from typing import Any

import api_functions as api
from gradwire import rpc

NUM_BARE = 3
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_PROCID")


def leave_at_once():
    if rpc.is_initialized():
        rpc.shutdown(graceful=False)
    api.set_environment(dict.fromkeys((*STORE_VARIABLES, *SLURM_VARIABLES)))


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def join_without_calls(
    rank: int, world_size: int, url: str, name: str = "", **options: Any
) -> None:
    """Makes this process a worker; connections are opened by the first calls."""
    options = {"init_method": url, "init_timeout": 20.0, **options}
    rpc.init_rpc(
        name or f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(**options),
    )


def join(rank: int, world_size: int, url: str, name: str = "", **options: Any) -> str:
    """Makes this process a worker, and returns whom it can call then."""
    join_without_calls(rank, world_size, url, name, **options)
    return "".join(
        f"{rpc.rpc_sync(other, api.worker_name)} " for other in range(world_size)
    )


def join_all(bare, url, world_size=NUM_BARE, join=join, **options):
    """Makes a group of the first processes; what each of them returned."""
    handles = [
        bare.start(rank, join, rank, world_size, url, **options)
        for rank in range(world_size)
    ]
    return [handle.result() for handle in handles]


def leave_all(bare, world_size=NUM_BARE):
    for handle in [bare.start(rank, rpc.shutdown) for rank in range(world_size)]:
        handle.result()
