"""Puts our modules in the places of torch's."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from gradwire.torch_compat import _children, _core, _graph, _serving
from gradwire.torch_compat.rpc.rref import RRef

__all__ = ["install", "is_installed"]

_OURS = "gradwire.torch_compat"

MODULES = {
    "torch.distributed.rpc": f"{_OURS}.rpc",
    "torch.distributed.rpc.api": f"{_OURS}.rpc.api",
    "torch.distributed.rpc.backend_registry": f"{_OURS}.rpc.backend_registry",
    "torch.distributed.rpc.constants": f"{_OURS}.rpc.constants",
    "torch.distributed.rpc.functions": f"{_OURS}.rpc.functions",
    "torch.distributed.rpc.internal": f"{_OURS}.rpc.internal",
    "torch.distributed.rpc.options": f"{_OURS}.rpc.options",
    "torch.distributed.rpc.rref_proxy": f"{_OURS}.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": (
        f"{_OURS}.rpc.server_process_global_profiler"
    ),
    "torch.distributed.autograd": f"{_OURS}.autograd",
    "torch.distributed.optim.optimizer": f"{_OURS}.optimizer",
    "torch.distributed.nn.api.remote_module": f"{_OURS}.remote_module",
}
"""Torch's modules, and what takes their places."""

NAMES = {
    ("torch.distributed.optim", "DistributedOptimizer"): f"{_OURS}.optimizer",
    ("torch.distributed.nn", "RemoteModule"): f"{_OURS}.remote_module",
    ("torch.jit", "script"): f"{_OURS}.remote_module",
    # Looks for tensors behind references in what a module returns.
    ("torch.nn.parallel.distributed", "RRef"): f"{_OURS}.rpc.rref",
    ("torch.futures", "collect_all"): f"{_OURS}.futures",
    ("torch.futures", "wait_all"): f"{_OURS}.futures",
    ("torch.autograd.profiler_legacy", "profile"): f"{_OURS}.rpc.profiling",
}
"""Names in modules of torch's that stay, and where ours come from."""

_is_installed = False


def install() -> None:
    """Makes torch's names for RPC and distributed autograd mean gradwire.

    Call it before other modules import these names: what was imported earlier keeps its
    meaning. Processes that this one starts with ``multiprocessing`` have it too. Calling
    it again does nothing.

    Example:
        >>> install()
        >>> import torch.distributed.rpc
        >>> torch.distributed.rpc.__name__
        'gradwire.torch_compat.rpc'
    """
    global _is_installed  # noqa: PLW0603
    if _is_installed:
        return
    # The parents first, so that torch's own modules are complete before we replace any.
    for name in ("torch.distributed.nn", "torch.distributed.optim"):
        importlib.import_module(name)
    replacements = {
        theirs: importlib.import_module(ours) for theirs, ours in MODULES.items()
    }
    names = {
        (place, name): getattr(importlib.import_module(ours), name)
        for (place, name), ours in NAMES.items()
    }
    for theirs, module in replacements.items():
        _replace_module(theirs, module)
    for (place, name), value in names.items():
        setattr(importlib.import_module(place), name, value)
    _core.use_reference_class(RRef)
    _core.record_in_contexts_only()
    _graph.use_torch_names()
    _serving.watch_handlers()
    _children.install_in_children(install)
    _is_installed = True


def is_installed() -> bool:
    """Whether `install` was called in this process.

    Example:
        >>> is_installed()
        False
        >>> install()
        >>> is_installed()
        True
    """
    return _is_installed


def _replace_module(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    sys.modules[name] = module
    setattr(importlib.import_module(parent), child, module)
