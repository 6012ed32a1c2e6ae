"""Distributed autograd for PyTorch: calls between workers, and backward through them.

- `gradwire.rpc`: remote calls, futures, references, groups.
- `gradwire.autograd`: backward through calls, with or without a context.
- `gradwire.optim`: optimizers for parameters on other workers.
- `gradwire.nn`: modules on other workers.
- `gradwire.launch`: workers as child processes.
- `gradwire.errors`: the tree of errors.

`gradwire.torch_compat`, which replaces torch's own RPC, is imported by itself.

Examples in docstrings run on ``worker0`` of two workers, with torch and the names of
gradwire imported.

Example:
    >>> x = torch.ones(2, requires_grad=True)
    >>> loss = rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
    >>> loss.backward()
    >>> x.grad
    tensor([3., 3.])
"""

from __future__ import annotations

from gradwire import autograd, errors, launch, nn, optim, rpc

__all__ = ["autograd", "errors", "launch", "nn", "optim", "rpc"]
