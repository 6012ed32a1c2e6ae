"""A program for torch.distributed.rpc that knows nothing of gradwire.

python drop_in_program.py FILE: two workers that meet in FILE; prints what they compute.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class Table:
    def __init__(self) -> None:
        self.rows = torch.ones(2, requires_grad=True)

    def scaled(self, by):
        return self.rows * by

    def refer(self):
        return rpc.RRef(self.rows)


def fail():
    raise KeyError("no such row")


def scale(tensor, by):
    return tensor * by


def show(*what):
    print(*what, flush=True)


def drive() -> None:
    x = torch.ones(2, requires_grad=True)
    show("info", rpc.get_worker_info("worker1"), rpc.get_rpc_timeout())
    y = rpc.rpc_sync("worker1", scale, args=(x, 3))
    show("outside a context", y.tolist(), y.is_leaf, y.requires_grad)
    y.sum().backward()
    show("gradient", x.grad, y.grad.tolist())
    try:
        rpc.rpc_sync("worker1", fail)
    except RuntimeError as error:
        show("error", "no such row" in str(error))
    table = rpc.remote("worker1", Table)
    show("method", table.rpc_sync().scaled(2).tolist())
    rows = table.remote().refer().to_here()
    optimizer = DistributedOptimizer(torch.optim.SGD, [rows], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = (table.rpc_sync().scaled(2) * x).sum()
        dist_autograd.backward(context_id, [loss])
        show("dictionary", dist_autograd.get_gradients(context_id)[x].tolist())
        optimizer.step(context_id)
    show("after a step", rows.to_here().tolist(), x.grad)
    layer = RemoteModule("worker1/cpu", nn.Linear, args=(2, 1))
    with torch.no_grad():
        for parameter in layer.remote_parameters():
            rpc.rpc_sync("worker1", fill, args=(parameter, 0.5))
    show("module", layer(torch.ones(1, 2)).tolist())


def fill(parameter, value):
    with torch.no_grad():
        parameter.local_value().fill_(value)


def run(rank: int, file: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{file}", rpc_timeout=30
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        drive()
        print("served by", rpc.__name__.partition(".")[0], file=sys.stderr)
    rpc.shutdown()


if __name__ == "__main__":
    # A fresh interpreter, as with mp.spawn.
    other = mp.get_context("spawn").Process(target=run, args=(1, sys.argv[1]))
    other.start()
    run(0, sys.argv[1])
    other.join()
    sys.exit(other.exitcode)
