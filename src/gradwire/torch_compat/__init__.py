"""Runs programs that were written for ``torch.distributed.rpc`` on gradwire, unchanged.

After `install`, ``torch.distributed.rpc``, ``torch.distributed.autograd``,
``torch.distributed.optim.DistributedOptimizer`` and ``torch.distributed.nn.RemoteModule``
are gradwire's. What differs from gradwire's own interface is what torch's programs rely
on: outside a context nothing is recorded, errors are also ``RuntimeError``, and options
are torch's classes.

From the command line: ``python -m gradwire.torch_compat train.py --epochs 3``. In a program,
before it imports ``torch.distributed.rpc``:

Example:
    >>> import gradwire.torch_compat
    >>> gradwire.torch_compat.install()
    >>> import torch.distributed.rpc as rpc
    >>> rpc.__name__
    'gradwire.torch_compat.rpc'
"""

from __future__ import annotations

from gradwire.torch_compat._install import install, is_installed

__all__ = ["install", "is_installed"]
