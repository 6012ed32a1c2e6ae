"""What a type checker says of the results of calls. ``make types`` reads it, nobody runs it.

The result of a call has the type that the caller gets, not the one that is returned on
the way there: a coroutine, or the future of a function with ``async_execution``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from gradwire import rpc
from gradwire.rpc import Future, RRef


def plain(x: Tensor) -> list[Tensor]:
    return [x]


async def coroutine(x: Tensor) -> Tensor:
    return x


@rpc.functions.async_execution
def ours(to: str, x: Tensor) -> Future[Tensor]:
    # Chained: what the next worker's function gives later is what this one gives later.
    return rpc.rpc_async(to, ours, args=(to, x))


@rpc.functions.async_execution
def of_torch() -> torch.futures.Future[int]:
    future = torch.futures.Future[int]()
    future.set_result(1)
    return future


def unknown(x: Any) -> Any:
    return x


def check_results(x: Tensor) -> None:
    assert_type(rpc.rpc_sync("b", plain, args=(x,)), list[Tensor])
    assert_type(rpc.rpc_sync("b", coroutine, args=(x,)), Tensor)
    assert_type(rpc.rpc_sync("b", ours, args=("c", x)), Tensor)
    assert_type(rpc.rpc_sync("b", of_torch), int)
    assert_type(rpc.rpc_sync("b", nn.ReLU), nn.ReLU)
    assert_type(rpc.rpc_sync("b", unknown, args=(x,)), Any)
    assert_type(rpc.rpc_sync("b", "exported name", args=(x,)), Any)


def check_futures(x: Tensor) -> None:
    assert_type(rpc.rpc_async("b", plain, args=(x,)), Future[list[Tensor]])
    assert_type(rpc.rpc_async("b", coroutine, args=(x,)), Future[Tensor])
    assert_type(rpc.rpc_async("b", ours, args=("c", x)), Future[Tensor])
    assert_type(rpc.rpc_async("b", of_torch), Future[int])
    assert_type(rpc.rpc_async("b", "exported name"), Future[Any])


def check_references(x: Tensor) -> None:
    assert_type(rpc.remote("b", plain, args=(x,)), RRef[list[Tensor]])
    assert_type(rpc.remote("b", coroutine, args=(x,)), RRef[Tensor])
    assert_type(rpc.remote("b", ours, args=("c", x)).to_here(), Tensor)
    assert_type(rpc.remote("b", nn.ReLU), RRef[nn.ReLU])
    assert_type(rpc.remote("b", "exported name"), RRef[Any])


async def check_awaiting(x: Tensor) -> None:
    assert_type(await rpc.rpc_async("b", coroutine, args=(x,)), Tensor)
