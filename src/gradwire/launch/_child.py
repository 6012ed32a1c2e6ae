"""What runs in a worker that `spawn` has started."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradwire import rpc
from gradwire._config import NAME_VARIABLE, ROLES_VARIABLE, RpcBackendOptions
from gradwire.launch._roles import Worker
from gradwire.rpc.extension import describe

__all__ = ["Report", "end_after", "run"]


class Report(NamedTuple):
    """How a worker's function ended."""

    value: Any
    error: Any  # see `describe`; None if there is a value
    at: float  # on the clock that all processes of a host share


def run(
    connection: multiprocessing.connection.Connection,
    worker: Worker,
    roles: str,
    function: Callable[[], Any] | None,
    options: RpcBackendOptions,
    is_forked: bool,
) -> None:
    """Is this worker: joins the group, runs the function, serves until all are done."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_after(parent.join)
    os.environ.update(
        {
            ROLES_VARIABLE: roles,
            NAME_VARIABLE: worker.name,
            "RANK": str(worker.rank),
            "WORLD_SIZE": str(worker.world_size),
        }
    )
    if is_forked:
        # It would wait for ever for the other threads of the parent's pool: they were
        # not copied.
        torch.set_num_threads(1)
    try:
        rpc.init_rpc(worker.name, worker.rank, worker.world_size, options)
        value = None if function is None else function()
        if rpc.is_initialized():  # the function may have done it
            rpc.shutdown()
        _send(connection, Report(value, None, time.monotonic()))
    except BaseException as error:
        with contextlib.suppress(Exception):
            description = describe(error, worker.name)
            _send(connection, Report(None, description, time.monotonic()))
        if rpc.is_initialized():
            rpc.shutdown(graceful=False)
        sys.exit(1)
    finally:
        connection.close()


def _send(connection: multiprocessing.connection.Connection, report: Report) -> None:
    # Not by ``connection.send``: torch would lend the memory of tensors to the parent,
    # and this process is about to end.
    connection.send_bytes(pickle.dumps(report))


def end_after(wait_for_parent: Callable[[], object]) -> None:
    """Ends this process with its parent: one that is killed cannot end its children."""

    def watch() -> None:
        wait_for_parent()
        os._exit(1)

    threading.Thread(target=watch, name="gradwire-parent-watch", daemon=True).start()
