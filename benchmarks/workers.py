"""Worker processes of torch RPC or of gradwire, for benchmarks that compare the two.

A group of workers does what it is asked to, one thing at a time. The functions that it
is asked for get a `Library`, by which the same program runs on both systems.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import rpc as calls

# Torch is imported by the workers only.

LOST_AFTER_S = 600.0  # workers that are stopped must not be taken for lost

_processes: Any = multiprocessing.get_context("spawn")


def start_quickly() -> None:
    """From now on workers are forked from a process that has imported torch already.

    They start sooner, but share its pages: their sizes mean little.
    """
    global _processes
    _processes = multiprocessing.get_context("forkserver")
    _processes.set_forkserver_preload(["torch.distributed.rpc", "gradwire.autograd"])


@dataclass(frozen=True)
class Library:
    """What both systems offer under the same names."""

    name: str
    rpc: Any
    autograd: Any


_library: Library | None = None


def this_library() -> Library:
    """For functions that are called remotely."""
    if _library is None:
        raise AssertionError("not a worker")
    return _library


def init(system: str, rank: int, world: int, store: str) -> Library:
    """Joins a group, as worker ``w<rank>``."""
    if system == "torch":
        from torch.distributed import autograd as torch_autograd
        from torch.distributed import rpc as torch_rpc

        # It warns about its own use of its own process groups.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.*")
        torch_rpc.init_rpc(
            f"w{rank}",
            rank=rank,
            world_size=world,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=store
            ),
        )
        return Library(system, torch_rpc, torch_autograd)
    from gradwire import autograd, rpc

    rpc.init_rpc(
        f"w{rank}",
        rank,
        world,
        rpc.RpcBackendOptions(init_method=store, lost_after=LOST_AFTER_S),
    )
    return Library(system, rpc, autograd)


def _serve(system: str, rank: int, world: int, store: str, pipe: Connection) -> None:
    """A worker: does what comes through the pipe, sleeps in between."""
    global _library
    calls._die_with_parent()
    try:
        import torch

        torch.set_num_threads(1)
        _library = init(system, rank, world, store)
        pipe.send(("ready", None))
        while (order := pipe.recv()) is not None:
            function, args = order
            pipe.send(("result", function(_library, *args)))
        _library.rpc.shutdown()
        pipe.send(("stopped", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


class Group(calls.System):
    """Some workers of one system."""

    def __init__(self, system: str, world: int, folder: str) -> None:
        self.name = f"{system} ({world} workers)"
        self.world = world
        self._is_stopping = False
        self._pipes = []
        self._processes = []
        store = f"file://{folder}/{system}{world}"
        for rank in range(world):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_serve, args=(system, rank, world, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        for rank in range(self.world):
            self._receive(rank, calls.START_S)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ask(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Lets a worker do something."""
        self._pipes[rank].send((function, args))
        return self._receive(rank, calls.SLICE_S)

    def stop(self) -> None:
        self.resume()
        self._is_stopping = True
        try:
            for pipe in self._pipes:
                pipe.send(None)
            for rank in range(self.world):
                self._receive(rank, calls.STOP_S)
        finally:
            self.kill()


@contextlib.contextmanager
def running(system: str, world: int) -> Iterator[Group]:
    """A group of fresh workers; at the end they shut down, or are killed."""
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        group = Group(system, world, folder)
        try:
            group.wait_until_ready()
            yield group
            group.stop()
        finally:
            group.kill()
