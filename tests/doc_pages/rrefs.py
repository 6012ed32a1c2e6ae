"""What docs/rrefs.md takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradwire import autograd, rpc  # noqa: F401
from gradwire.rpc import RRef

WORKERS = ("alice", "bob", "carol")

x = torch.ones(2, 10, requires_grad=True)
target = torch.zeros(2, 1)
table = {"rows": [1, 2]}
encoder = nn.Linear(10, 1)


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def use(table: RRef[dict[str, list[int]]], model: RRef[Model]) -> Tensor:
    assert table.to_here()["rows"] == [1, 2]
    return model.rpc_sync().forward(torch.ones(2, 10))


def encode(x: Tensor) -> Tensor:
    return encoder(x)


def decode_and_compare(h: RRef[Tensor], target: Tensor) -> Tensor:
    return (h.to_here() - target).square().sum()
