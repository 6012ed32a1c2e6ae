"""What test_drop_in.py plays on groups of workers that use the drop-in.

A part is a function that each worker of a group calls with its rank, between `init_rpc`
and a graceful shutdown.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

import gradwire.torch_compat
from gradwire.errors import DecodeError, OwnerLost, PeerLostError, TransportError
from gradwire.rpc.functions import async_execution

CALL_S = 30
SHORT_S = 0.2

gate = threading.Event()


def play(part: Callable[[int], None], rank: int, size: int, file: str) -> None:
    gradwire.torch_compat.install()
    rpc = torch_rpc()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{file}", rpc_timeout=CALL_S
    )
    rpc.init_rpc(f"worker{rank}", None, rank, size, options)
    part(rank)
    rpc.shutdown()


def torch_rpc() -> Any:
    return importlib.import_module("torch.distributed.rpc")


def on_first(part: Callable[[], None]) -> Callable[[int], None]:
    """Only the first worker does something."""

    @functools.wraps(part)
    def play_part(rank: int) -> None:
        if rank == 0:
            part()

    return play_part


def raised_by(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


# ------------------------------------------------------------------- what workers run


def wait_for_gate() -> list[int]:
    assert gate.wait(CALL_S)
    return []


def open_gate() -> None:
    gate.set()


def fail(error: Exception) -> None:
    raise error


def raise_stop() -> None:
    next(iter([]))


def raise_tagged() -> None:
    raise Tagged("the words")


@async_execution
def answer_later() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(7)
    return future


def fail_without_stderr(error: Exception) -> NoReturn:
    """Fails, and nobody can be told on the standard error."""
    sys.stderr = io.StringIO()
    sys.stderr.close()
    raise error


class Tagged(Exception):
    """One that no class can be derived from without more ado."""

    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, (ValueError("cannot be read"),)


# ------------------------------------------------------------------------------- parts


@on_first
def futures_of_a_generator() -> None:
    rpc = torch_rpc()

    def start() -> Any:  # torch says that it takes lists only
        return (rpc.rpc_async("worker1", max, (i, 1)) for i in range(3))

    assert torch.futures.wait_all(start()) == [1, 1, 2]
    assert [f.wait() for f in torch.futures.collect_all(start()).wait()] == [1, 1, 2]


@on_first
def errors_of_calls() -> None:
    rpc = torch_rpc()
    key = KeyError("k")
    future = rpc.rpc_async("worker1", fail, (key,))
    collected = torch.futures.collect_all([future])
    for wait in (collected.wait, collected.value, collected.then(_value).wait):
        error = raised_by(wait)
        assert isinstance(error, RuntimeError), error
        assert isinstance(error, KeyError), error
    kept = rpc.rpc_async("worker1", fail, (ValueError("kept"),))
    error = raised_by(torch.futures.collect_all([kept]).wait)
    assert isinstance(error, ValueError)
    sums = [rpc.rpc_async("worker1", max, (i, 1)) for i in range(3)]
    assert [f.wait() for f in torch.futures.collect_all(sums).wait()] == [1, 1, 2]
    for call in (rpc.rpc_sync, lambda *to: rpc.rpc_async(*to).wait()):
        error = raised_by(call, "worker1", raise_stop)
        assert isinstance(error, StopIteration), error
        assert isinstance(error, RuntimeError), error
        assert "the words" in str(raised_by(call, "worker1", raise_tagged))
        missing = raised_by(call, "worker1", open, ("/no/such/file",))
        assert isinstance(missing, FileNotFoundError)
        assert missing.filename == "/no/such/file"
        assert "'/no/such/file'" in str(missing)


@on_first
def errors_that_cannot_be_shown() -> None:
    rpc = torch_rpc()
    error = raised_by(rpc.rpc_sync, "worker1", fail_without_stderr, (KeyError("k"),))
    assert isinstance(error, KeyError), error


@on_first
def errors_of_operators() -> None:
    rpc = torch_rpc()
    ways = (
        rpc.rpc_sync,
        lambda *to: rpc.rpc_async(*to).wait(),
        lambda *to: rpc.remote(*to).to_here(),
    )
    for way in ways:
        error = raised_by(way, "worker1", torch.mul, (torch.ones(2),))
        assert isinstance(error, RuntimeError), error
        assert isinstance(error, TypeError), error
        assert "failed to match any schema" in str(error)
        error = raised_by(way, "worker0", torch.mul, (torch.ones(2),))
        assert isinstance(error, RuntimeError), error
        own = raised_by(way, "worker1", fail)
        assert isinstance(own, TypeError), own
        assert "schema" not in str(own)


def _value(future: torch.futures.Future[Any]) -> Any:
    return future.value()


@on_first
def errors_of_creations() -> None:
    rpc = torch_rpc()
    rref = rpc.remote("worker1", str, (Unreadable(),))
    for _ in range(3):
        error = raised_by(rref.to_here)
        assert isinstance(error, DecodeError), error
        assert "cannot be read" in str(error)


@on_first
def devices() -> None:
    modules = importlib.import_module("torch.distributed.nn")
    error = raised_by(modules.RemoteModule, "worker1/nothing", nn.Identity)
    assert isinstance(error, RuntimeError), error
    assert "worker1/nothing" in str(error)
    error = raised_by(modules.RemoteModule, "worker1/cpu/0", nn.Identity)
    assert isinstance(error, ValueError)


@on_first
def types_of_values() -> None:
    rpc = torch_rpc()
    rref = rpc.remote("worker1", wait_for_gate)
    error = raised_by(rref._get_type, SHORT_S)
    assert "RPC ran for more than" in str(error)
    rpc.rpc_sync("worker1", open_gate)
    assert rref._get_type() is list
    assert rref._get_type(blocking=False).wait() is list


@on_first
def types_of_several_values() -> None:
    rpc = torch_rpc()
    pending = rpc.remote("worker0", wait_for_gate)
    is_asked = threading.Event()
    ask = rpc.RRef._ask_type

    def ask_loudly(self: Any, timeout: float) -> Any:
        is_asked.set()
        return ask(self, timeout)

    with mock.patch.object(rpc.RRef, "_ask_type", ask_loudly):
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(pending._get_type()))
        thread.start()
        assert is_asked.wait(CALL_S)
        assert rpc.RRef(1)._get_type() is int
        gate.set()
        thread.join(CALL_S)
    assert found == [list]


@on_first
def values_in_a_profile() -> None:
    rpc = torch_rpc()
    with torch.autograd.profiler_legacy.profile():
        assert rpc.remote("worker1", answer_later).to_here() == 7
        assert rpc.remote("worker1", max, (1, 2)).to_here() == 2


@on_first
def tables_of_a_profile() -> None:
    rpc = torch_rpc()
    with torch.autograd.profiler_legacy.profile(with_flops=True) as found:
        rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
    name = "rpc_sync#aten::add(worker0 -> worker1)"
    assert [e.count for e in found.key_averages() if e.key == name] == [1]
    assert "rpc_sync#" in found.table()


@on_first
def names() -> None:
    rpc = torch_rpc()
    found: dict[str, Any] = {}
    exec("from torch.distributed.rpc import *", found)
    assert isinstance(found["AllGatherStates"]().gathered_objects, dict)
    is_owner = found["method_factory"]("is_owner", "Whether it is.")
    assert is_owner(rpc.RRef(1)) is True
    assert is_owner.__doc__ == "Whether it is."
    worker = rpc.get_worker_info("worker1")
    for to in ("worker1", 1, worker):
        assert rpc.api._to_worker_info(to) == worker
    assert isinstance(raised_by(rpc.api._to_worker_info, 1.5), ValueError)


@on_first
def values_of_a_lost_worker() -> None:
    rpc = torch_rpc()
    modules = importlib.import_module("torch.distributed.nn")
    module = modules.RemoteModule("worker1", nn.Linear, (2, 2))
    rref = rpc.remote("worker1", torch.ones, (2,))
    assert rref.to_here().tolist() == [1, 1]
    end(rpc, "worker1")
    error = raised_by(rref.to_here)
    assert isinstance(error, OwnerLost), error
    assert isinstance(error, RuntimeError)
    for call in (
        module.remote_parameters,
        functools.partial(modules.RemoteModule, "worker1", nn.Linear, (2, 2)),
        lambda: module.forward_async(torch.ones(2)).wait(),
    ):
        error = raised_by(call)
        assert isinstance(error, PeerLostError), error
        assert isinstance(error, RuntimeError), error


def losing(victim: int, rank: int) -> None:
    """One of three workers ends, on the word of another; the last knows neither."""
    rpc = torch_rpc()
    if rank == victim:
        threading.Event().wait(CALL_S)
        raise AssertionError("this worker should have ended")
    if rank == 1:
        end(rpc, f"worker{victim}")
    error = raised_by(rpc.api._all_gather, rank)
    assert isinstance(error, TransportError), error
    assert isinstance(error, RuntimeError), error
    assert f"worker{victim}" in str(error)


def end(rpc: Any, worker: str) -> None:
    error = raised_by(rpc.rpc_sync, worker, os._exit, (0,))
    assert isinstance(error, PeerLostError), error
