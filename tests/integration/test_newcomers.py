"""A walk through the README with the mistakes that people make on their first day.

Each message must say what was wrong, where, and what to do next.
"""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functions
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import (
    CallTimeout,
    ConnectError,
    ConnectTimeout,
    EncodeError,
    InvalidWorkerName,
    NotInitialized,
    UnknownContext,
    UnknownWorker,
    UsageError,
)
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


def text_of(kind: type[BaseException], mistake: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        mistake()
    return str(caught.value)


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def join(name: str, rank: int, world_size: int, **options: Any) -> None:
    rpc.init_rpc(name, rank, world_size, rpc.RpcBackendOptions(**options))


# ---------------------------------------------------------------------- before the start


def test_call_before_init(monkeypatch):
    text = text_of(NotInitialized, lambda: rpc.rpc_sync("w1", max, (1, 2)))

    says(text, "Call init_rpc() first")


def test_started_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRADWIRE_NAME"):
        monkeypatch.delenv(name, raising=False)

    says(text_of(UsageError, rpc.init_rpc), "needs a name", "gradwire run")
    says(
        text_of(UsageError, lambda: rpc.init_rpc("w0")),
        "rank is missing",
        "gradwire run or torchrun",
        "rank=",
    )
    says(text_of(InvalidWorkerName, lambda: rpc.init_rpc("my worker")), "'my worker'")


def test_the_other_worker_was_not_started(tmp_path: Path):
    url = f"file://{tmp_path}/store"

    text = text_of(
        ConnectTimeout, lambda: join("w0", 0, 2, init_method=url, init_timeout=0.5)
    )

    says(text, "'w0'", "rank 1 has not joined", "Check that they were started")


def test_rank_0_was_not_started():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}"

    text = text_of(
        ConnectTimeout, lambda: join("w1", 1, 2, init_method=url, init_timeout=0.5)
    )

    says(text, f"127.0.0.1:{port}", "is rank 0 started")


def test_the_port_is_in_use(make_cluster: Callable[..., Cluster]):
    # In a process of its own: torch leaves two descriptors behind.
    process = make_cluster(1)
    process.run(0, rpc.shutdown)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        text = process.run(0, fail_to_join, url)

    says(text, "the port is in use", "choose another port")


def fail_to_join(url: str) -> str:
    return text_of(
        ConnectError, lambda: join("w0", 0, 1, init_method=url, init_timeout=5)
    )


def test_two_workers_have_one_name(make_cluster: Callable[..., Cluster]):
    text = text_of(UsageError, lambda: make_cluster(2, names=["same", "same"]))

    says(text, "'same' is not unique", "ranks 0 and 1", "a name of its own")


# -------------------------------------------------------------------------- first calls


@on_worker(0)
def test_wrong_name():
    text = text_of(UnknownWorker, lambda: rpc.rpc_sync("w-1", max, (1, 2)))

    says(text, "'w-1'", "'w0', 'w1', 'w2', 'w3'", "Did you mean 'w1'?")


@on_worker(0)
def test_lambda_as_function():
    text = text_of(EncodeError, lambda: rpc.rpc_sync("w1", lambda: 1))

    says(text, "lambda", "define it at module level")


@on_worker(0)
def test_function_inside_a_function():
    def inner() -> int:
        return 1

    text = text_of(EncodeError, lambda: rpc.rpc_sync("w1", inner))

    says(text, "local function", "inner", "define it at module level")


@on_worker(0)
def test_function_was_called_instead_of_passed():
    function: Any = max(1, 2)

    text = text_of(TypeError, lambda: rpc.rpc_sync("w1", function))

    says(text, "should be callable", "found int")


@on_worker(0)
def test_single_argument_without_a_tuple():
    args: Any = torch.ones(2)

    text = text_of(TypeError, lambda: rpc.rpc_sync("w1", torch.neg, args))

    says(text, "args must be a tuple", "args=(x,)")


@on_worker(0)
def test_tensor_on_a_device_that_cannot_be_sent():
    x = torch.ones(2, device="meta")

    text = text_of(EncodeError, lambda: rpc.rpc_sync("w1", torch.neg, (x,)))

    says(text, "'meta'", "CPU")


@on_worker(0)
def test_object_that_cannot_be_sent():
    lock = threading.Lock()

    text = text_of(EncodeError, lambda: rpc.rpc_sync("w1", max, (lock, 1)))

    says(text, "lock", "send plain data instead")


@on_worker(0)
def test_call_that_takes_longer_than_its_limit():
    text = text_of(
        CallTimeout, lambda: rpc.rpc_sync("w1", time.sleep, (0.5,), timeout=0.1)
    )

    says(text, "time:sleep", "'w1'", "before its deadline", "Pass timeout=")


@on_worker(0)
def test_error_on_the_other_worker_names_it_and_shows_the_line():
    text = text_of(ZeroDivisionError, lambda: rpc.rpc_sync("w1", divmod, (1, 0)))

    says(text, "worker 'w1'", "ZeroDivisionError", "Traceback")


# ----------------------------------------------------------------------- first backwards


@on_worker(0)
def test_forgotten_context():
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("w1", functions.add, (x, 1)).sum()

    text = text_of(UnknownContext, lambda: autograd.backward(123_456, [loss]))

    says(
        text, "id: 123456", "'w0'", "Pass the id that context() gave", "loss.backward()"
    )
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2))


@on_worker(0)
def test_context_was_not_passed():
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("w1", functions.add, (x, 1)).sum()
    forgotten: Any = [loss]

    text = text_of(TypeError, lambda: autograd.backward(forgotten, [loss]))

    says(text, "its id, an int", "found list", "context() as ctx", "loss.backward()")


@on_worker(0)
def test_reference_outside_a_context_warns_and_says_what_to_do():
    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = rpc.remote("w1", functions.add, (x, 1)).to_here()

    assert not y.requires_grad
    says(str(caught[0].message), "the autograd graph is cut", "autograd.context()")


@on_worker(0)
def test_gradients_are_read_after_the_context():
    with autograd.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        ctx.backward(rpc.rpc_sync("w1", functions.add, (x, 1)).sum())

    text = text_of(UnknownContext, lambda: autograd.get_gradients(ctx))

    says(text, "it was released", "inside the block")


@on_worker(0)
def test_backward_is_called_after_the_context():
    with autograd.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync("w1", functions.add, (x, 1)).sum()

    text = text_of(UnknownContext, lambda: ctx.backward(loss))

    says(text, "call backward and read its gradients inside the block")
