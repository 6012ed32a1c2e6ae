"""In which order the engine runs wire nodes where their graph leaves it a choice."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.autograd._functions import (
    CHAIN_END,
    apply_recv,
    apply_send,
    urgency_of_reply,
    urgency_of_request,
)


class Message:
    """Takes down when the engine comes to its node."""

    def __init__(self, order: list[str], urgency: int = 0, name: str = "wait") -> None:
        self.urgency = urgency
        self._order = order
        self._name = name

    def await_gradients(self) -> list[None]:
        self._order.append(self._name)
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


def test_engine_waits_for_replies_before_requests():
    order: list[str] = []
    x = leaf()
    urgencies = {
        "early reply": urgency_of_reply(0),
        "early request": urgency_of_request(1),
        "late request": urgency_of_request(2),
        "late reply": urgency_of_reply(1),
        "request in a large context": urgency_of_request(10**6),
    }
    tokens = [
        apply_send(Message(order, u, name), x * 1) for name, u in urgencies.items()
    ]

    torch.autograd.backward(tokens, [torch.zeros(())] * len(tokens))

    assert order == [
        "late reply",
        "early reply",
        "request in a large context",
        "late request",
        "early request",
    ]
