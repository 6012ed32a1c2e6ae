"""Torch's own options classes, and what they mean to gradwire."""

from __future__ import annotations

from typing import Any

import torch

# Torch's own: this module is imported before it takes the place of the other.
from torch._C._distributed_rpc import (
    RpcBackendOptions,
    _TensorPipeRpcBackendOptionsBase,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rpc.options import TensorPipeRpcBackendOptions

import gradwire.rpc
from gradwire.errors import UsageError

__all__ = [
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "_TensorPipeRpcBackendOptionsBase",
    "translate",
]

_CPU = torch.device("cpu")


def translate(options: Any) -> gradwire.rpc.RpcBackendOptions:
    """Options of gradwire that do what these options of torch ask for.

    Names of TensorPipe's transports and channels have no meaning here and are left out.
    ``init_rpc`` waits for the others for as long as torch's does.

    Raises:
        UsageError: They map devices, which gradwire cannot do yet.
    """
    if isinstance(options, gradwire.rpc.RpcBackendOptions):
        return options
    for worker, devices in getattr(options, "device_maps", {}).items():
        if any(one != _CPU for pair in devices.items() for one in pair):
            raise UsageError(
                f"the options map devices for worker {worker!r}: {devices}. gradwire sends "
                "tensors from and to the CPU only for now; leave the device maps out and "
                "move tensors with .cpu() and .to(device)"
            )
    if devices := getattr(options, "devices", []):
        raise UsageError(
            f"the options name devices for RPC: {devices}. gradwire sends tensors from "
            "and to the CPU only for now; leave them out"
        )
    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("rpc_timeout", "init_method", "num_worker_threads")
        if hasattr(options, name)
    }
    limit_s = default_pg_timeout.total_seconds()
    return gradwire.rpc.RpcBackendOptions(init_timeout=limit_s, **given)
