"""In which order the engine runs wire nodes where their graph leaves it a choice."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.autograd._functions import CHAIN_END, apply_recv, apply_send


class Message:
    """Takes down when the engine comes to its node."""

    event = 0

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def await_gradients(self) -> list[None]:
        self._order.append("wait")
        return [None]

    def ship(self, gradients: Any) -> None:
        self._order.append("ship")


def leaf() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    for _ in range(10):
        x.sin()  # so that the nodes of the test are not the first ones of its thread
    return x


def test_engine_computes_before_it_waits():
    order: list[str] = []
    x = leaf()
    y = x.cos()
    y.register_hook(lambda _: order.append("compute"))
    token = apply_send(Message(order), x * 1)

    torch.autograd.backward([y, token], [torch.ones(2), torch.zeros(())])

    assert order == ["compute", "wait"]


def test_engine_ships_before_it_computes():
    order: list[str] = []
    x = leaf()
    received, _ = apply_recv(Message(order), [torch.ones(2)], False, CHAIN_END)
    y = x.cos()
    z = y.sin()
    y.register_hook(lambda _: order.append("compute"))

    torch.autograd.backward([received, z], [torch.ones(2), torch.ones(2)])

    assert order == ["ship", "compute"]
