"""Memory that runs out, logs that cannot be written, and a store that goes away."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import functions
from gradwire import autograd, rpc
from gradwire.errors import ConnectError, ConnectTimeout, PeerLostError
from gradwire.rpc import _api
from on_worker import on_worker
from strangers import read_to_end, stranger

LIMIT_S = 20.0

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(sys.platform != "linux", reason="uses /dev/full and /proc"),
]


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=LIMIT_S)


# ---------------------------------------------------------------------- out of memory


def raise_memory_error() -> NoReturn:
    raise MemoryError("the handler ran out of memory")


def ask_for_too_much() -> int:
    return len(bytearray(1 << 60))


async def ask_for_too_much_later() -> int:
    return ask_for_too_much()


def return_something_whose_pickle_does_not_fit() -> Any:
    return HasNoRoom()


class HasNoRoom:
    def __reduce__(self) -> NoReturn:
        raise MemoryError("no room for a pickle")


class BackwardWithoutMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise MemoryError("the backward ran out of memory")


def double(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = BackwardWithoutMemory.apply(tensor)
    return result


@pytest.mark.parametrize(
    "function",
    [raise_memory_error, ask_for_too_much, ask_for_too_much_later],
    ids=lambda function: function.__name__,
)
@on_worker(0)
def test_memory_error_of_a_handler_arrives_and_the_worker_lives_on(function):
    pid = call("w1", functions.get_pid)

    with pytest.raises(MemoryError) as caught:
        call("w1", function)

    assert caught.value.worker == "w1"  # type: ignore[attr-defined]
    assert call("w1", functions.get_pid) == pid


@on_worker(0)
def test_memory_error_in_a_reply_arrives_and_the_worker_lives_on():
    with pytest.raises(Exception, match="no room for a pickle"):
        call("w1", return_something_whose_pickle_does_not_fit)

    assert call("w1", functions.add, 1, 2) == 3


@on_worker(0)
def test_memory_error_behind_a_reference_arrives():
    reference: rpc.RRef[Any] = rpc.remote("w1", raise_memory_error, timeout=LIMIT_S)

    with pytest.raises(MemoryError, match="ran out of memory"):
        reference.to_here(LIMIT_S)

    assert call("w1", functions.add, 1, 2) == 3


@on_worker(0)
def test_memory_error_in_a_backward_ends_the_pass_and_the_next_works():
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = call("w1", double, tensor).sum()
        with pytest.raises(MemoryError, match="the backward ran out of memory"):
            autograd.backward(context, [loss])

    with autograd.context() as context:
        loss = call("w1", torch.mul, tensor, 3.0).sum()
        autograd.backward(context, [loss])
        found = autograd.get_gradients(context)[tensor]
    assert torch.equal(found, torch.full((2,), 3.0))


# -------------------------------------------------------------------- a full disk


class Broken(logging.Handler):
    """What a handler must not do: lets the error out to whoever logs."""

    def emit(self, record: logging.LogRecord) -> NoReturn:
        _num_logged.append(record.levelno)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Counted(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        _num_logged.append(record.levelno)
        super().emit(record)


_num_logged: list[int] = []


def fill_the_disk(kind: str) -> None:
    """From now on nothing that this worker logs, or writes to stderr, can be written."""
    sys.stderr = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    logger = logging.getLogger("gradwire")
    logger.setLevel(logging.DEBUG)
    # Line by line, so that every one of them fails, not only the last.
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    logger.addHandler(Broken() if kind == "broken" else Counted(full))


def count_logged() -> int:
    return len(_num_logged)


def address_of_this_worker() -> Any:
    agent = _api.current_agent()
    return agent.network.find(agent.info.name).record


@pytest.mark.parametrize("kind", ["stream", "broken"])
def test_worker_whose_log_is_full_goes_on(make_cluster, kind):
    workers = make_cluster(3, {"lost_after": 5.0})
    for rank in range(2):
        workers.run(rank, fill_the_disk, kind)

    # What is logged here: failing calls, strangers, callbacks that fail, a lost worker.
    for rank in range(2):
        with pytest.raises(ValueError, match="bad value"):
            workers.run(rank, call, f"w{1 - rank}", functions.raise_value_error)
        with pytest.raises(TypeError):
            workers.run(rank, call, f"w{1 - rank}", functions.add, 1, None)
    with stranger(workers.run(1, address_of_this_worker)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_to_end(sock) == b""
    workers.kill(2, signal.SIGKILL)
    with pytest.raises((PeerLostError, ConnectError)):
        workers.run(0, call, "w2", functions.add, 1, 2)

    assert workers.run(0, call, "w1", functions.add, 1, 2) == 3
    assert workers.run(1, call, "w0", functions.add, 1, 2) == 3
    assert workers.run(0, call, "w1", count_logged) > 0
    workers.close(graceful=True)


# ------------------------------------------------------------------------ a lost store


def find_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def shut_down_with(timeout: float) -> bool:
    rpc.shutdown(timeout=timeout)
    return rpc.is_initialized()


def test_workers_go_on_without_the_worker_that_serves_the_store(make_cluster):
    workers = make_cluster(
        3, {"init_timeout": LIMIT_S}, init_method=f"tcp://127.0.0.1:{find_port()}"
    )
    workers.kill(0, signal.SIGKILL)

    tensor = torch.arange(100_000)
    assert torch.equal(workers.run(1, call, "w2", torch.add, tensor, 1), tensor + 1)
    assert workers.run(2, call, "w1", functions.add, 1, 2) == 3
    with pytest.raises((PeerLostError, ConnectError), match="w0"):
        workers.run(1, call, "w0", functions.add, 1, 2)

    ends = [workers.start(rank, shut_down_with, 10.0) for rank in (1, 2)]
    assert [end.result() for end in ends] == [False, False]


def test_workers_go_on_without_the_file_of_the_store(make_cluster, tmp_path: Path):
    place = tmp_path / "store"
    workers = make_cluster(3, {"init_timeout": 1.0}, init_method=f"file://{place}")
    place.unlink()

    assert workers.run(0, call, "w1", functions.add, 1, 2) == 3
    assert workers.run(2, call, "w0", functions.add, 1, 2) == 3
    # Nobody comes back through a store that has forgotten the others, and that is said.
    workers.kill(2, signal.SIGKILL)
    with pytest.raises(ConnectTimeout, match="ranks 0, 1 have not joined"):
        workers.restart(2)
    workers.wait_dead(2)
    assert workers.run(1, call, "w0", functions.add, 1, 2) == 3

    ends = [workers.start(rank, shut_down_with, 10.0) for rank in (0, 1)]
    assert [end.result() for end in ends] == [False, False]
