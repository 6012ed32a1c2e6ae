"""What runs inside a worker process of a test cluster.

The other half is cluster.py, which forks the process and talks to it through a pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leaks
import namespaces

READY = 0
"""Call id of the reply that says how ``init_rpc`` went."""

HEALTH_S = 5.0

_before_init: leaks.Snapshot | None = None
_setup: Settings | None = None


class WorkerFailure(Exception):
    """Stands for an exception of a worker that cannot be pickled."""


class LeftBehind(Exception):
    """A worker still had threads or sockets after its shutdown."""


@dataclass(frozen=True)
class Settings:
    name: str
    rank: int
    world_size: int
    options: dict[str, Any]
    stacks: Path
    namespace: str | None = None
    # A function and its arguments, to be called before `init_rpc`.
    first: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call:
    # Pickled apart, so that a function that cannot be found is the failure of its call.
    call_id: int
    body: bytes


@dataclass(frozen=True)
class Reply:
    call_id: int
    value: Any = None
    error: BaseException | None = None
    error_text: str = ""


class _Leave(BaseException):
    """Ends the command loop after the reply to the current call."""


def serve(connection: multiprocessing.connection.Connection, setup: Settings) -> None:
    # Out of the terminal's group: Ctrl-C is for the test process, which closes us.
    os.setpgid(0, 0)
    threading.Thread(
        target=_exit_with_test_process, name="harness-watch", daemon=True
    ).start()
    # Ignored until the handler is there: the test process may ask as soon as it sees
    # the file, and the default of this signal is to kill.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Never closed: a worker that hangs on its way out can still say where.
    stacks = setup.stacks.open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        if setup.namespace is not None:
            namespaces.enter(setup.namespace)
        _initialise(setup)
    except BaseException as error:
        _send(connection, _failure(READY, error))
        return
    _send(connection, Reply(READY))
    _answer_calls(connection)


def _exit_with_test_process() -> None:
    # The fork server is our parent and lives on while we do, so its death is no signal.
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _initialise(setup: Settings) -> None:
    import torch

    torch.set_num_threads(1)
    # What the fork server has imported is no garbage: looking at it takes half a second.
    gc.freeze()
    global _before_init, _setup
    _before_init, _setup = _look_at_sockets_and_threads(), setup
    if setup.first:
        setup.first[0](*setup.first[1:])
    _join(setup)


def _join(setup: Settings) -> None:
    rpc = importlib.import_module("gradwire.rpc")
    rpc.init_rpc(
        setup.name,
        rank=setup.rank,
        world_size=setup.world_size,
        rpc_backend_options=rpc.RpcBackendOptions(**setup.options),
    )


def _look_at_sockets_and_threads() -> leaks.Snapshot:
    found = leaks.take_snapshot()
    sockets = {
        fd: target
        for fd, target in found.descriptors.items()
        if target.startswith("socket:")
    }
    return leaks.Snapshot(found.threads, frozenset(), sockets)


def _answer_calls(connection: multiprocessing.connection.Connection) -> None:
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        leaving = False
        try:
            function, args, kwargs = pickle.loads(call.body)
            reply = pickle.dumps(Reply(call.call_id, function(*args, **kwargs)))
        except _Leave:
            leaving = True
            reply = pickle.dumps(Reply(call.call_id))
        except BaseException as error:
            reply = pickle.dumps(_failure(call.call_id, error))
        with contextlib.suppress(OSError):
            connection.send_bytes(reply)
        if leaving:
            return


def _send(connection: multiprocessing.connection.Connection, reply: Reply) -> None:
    connection.send_bytes(pickle.dumps(reply))


def _failure(call_id: int, error: BaseException) -> Reply:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = WorkerFailure(f"{type(error).__qualname__}: {error}")
    return Reply(call_id, error=error, error_text=text)


def shut_down(graceful: bool, timeout: float) -> None:
    rpc = importlib.import_module("gradwire.rpc")
    errors = importlib.import_module("gradwire.errors")
    # The test may have shut this worker down itself.
    with contextlib.suppress(errors.NotInitialized):
        rpc.shutdown(graceful=graceful, timeout=timeout)
    if _before_init is not None:
        left = leaks.find_leaks(_before_init, _look_at_sockets_and_threads)
        if left:
            raise LeftBehind("left behind after shutdown: " + "; ".join(left))
    raise _Leave


def rejoin() -> None:
    """Leaves at once, and comes back under the same name, in the same process."""
    rpc = importlib.import_module("gradwire.rpc")
    rpc.shutdown(graceful=False)
    assert _setup is not None
    _join(_setup)


def cut_connections() -> None:
    """Ends the connections to other workers as if the network or the kernel did."""
    assert _before_init is not None
    num_cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not target.startswith("socket:") or (
                int(entry) in _before_init.descriptors
            ):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as twin:
                is_listener = twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                # A pair has no names: it is the connection of the worker to itself.
                if not is_listener and (twin.getsockname() or twin.getpeername()):
                    twin.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        except OSError:
            continue
    assert num_cut, "there was no connection to cut"


def call_neighbour(name: str) -> str:
    rpc = importlib.import_module("gradwire.rpc")
    result: str = rpc.rpc_sync(name, str, args=(name,), timeout=HEALTH_S)
    return result
