"""Workers as child processes of this one: for notebooks, tests and examples."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire import rpc
from gradwire._config import ROLES_VARIABLE, RpcBackendOptions
from gradwire.errors import (
    DecodeError,
    LaunchError,
    LaunchTimeout,
    PeerLostError,
    UsageError,
)
from gradwire.launch import _child
from gradwire.launch._roles import (
    Worker,
    check_roles,
    format_roles,
    this_worker,
    worker_of,
)
from gradwire.rpc.extension import rebuild

__all__ = ["describe_end", "main", "spawn"]

_GRACE_S = 0.5  # within which workers fail because of each other
_END_S = 3.0  # for a worker that was asked to end
_LOOK_S = 0.5


def spawn(
    function: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    roles: Mapping[str, int] | int,
    args: tuple[Any, ...] = (),
    *,
    options: RpcBackendOptions | None = None,
    timeout: float | None = None,
    start_method: str | None = None,
) -> dict[str, Any]:
    """Starts workers as child processes, runs a function on each, and waits for them.

    Each child is a worker of one group when the function begins: ``init_rpc`` has been
    called, under the name of its role. When the function has returned, the worker goes
    on serving the others until all have; the function may call ``shutdown`` itself.
    Inside, `this_worker` tells who one is.

    Args:
        function: What to run, as ``function(*args)``; or one function for each role. A
            role that has none only serves the others.
        roles: How many workers each role has, such as ``{"ps": 1, "trainer": 3}``; a
            number n stands for ``{"worker": n}``.
        args: Arguments of the function.
        options: Options of all workers; ``init_method`` is set here.
        timeout: Limit in seconds; None for none.
        start_method: See `multiprocessing`; None: ``fork`` in a notebook or at a prompt,
            whose functions a new process could not import, ``spawn`` otherwise. A
            worker that is forked computes with one thread.

    Returns:
        What the function returned on each worker, by name.

    Raises:
        Exception: What the function raised on the first worker that failed; the others
            are ended. Also an instance of `RemoteError`, with the worker's name and
            traceback.
        LaunchError: A worker died.
        LaunchTimeout: The limit came first.
        DecodeError: What a worker returned cannot be rebuilt in this process.
        UsageError: An argument is wrong, or processes cannot be started here.

    Example:
        >>> found = spawn(this_worker, roles={"ps": 1, "trainer": 2})
        >>> {name: worker.rank for name, worker in found.items()}
        {'ps': 0, 'trainer:0': 1, 'trainer:1': 2}
    """
    if isinstance(roles, int) and not isinstance(roles, bool):
        roles = {"worker": roles}
    checked = check_roles(roles)
    functions = _by_role(function, checked)
    _check_settings(args, options, timeout)
    _check_not_a_child()
    method = start_method or ("fork" if _is_interactive() else "spawn")
    if method == "fork":
        _check_can_fork()
    else:
        _check_can_be_imported(functions.values(), method)
    folder = tempfile.mkdtemp(prefix="gradwire-")
    options = replace(
        options or RpcBackendOptions(), init_method=f"file://{folder}/store"
    )
    group = _Group(method)
    try:
        for rank in range(sum(checked.values())):
            worker = worker_of(checked, rank)
            group.start(
                worker,
                format_roles(checked),
                functools.partial(functions[worker.role], *args)
                if worker.role in functions
                else None,
                options,
            )
        return group.collect(timeout)
    finally:
        group.end()
        shutil.rmtree(folder, ignore_errors=True)


def main(
    function: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    roles: Mapping[str, int] | int,
    args: tuple[Any, ...] = (),
    *,
    options: RpcBackendOptions | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """What a program does that runs by itself and under a launcher alike.

    If ``gradwire run`` has started this process, it becomes the worker that it was
    started as, and runs the function of its role. Otherwise it starts the workers
    itself: see `spawn`, also for the arguments.

    Returns:
        What the function returned: on each worker, or on this one only.

    Example:
        >>> if __name__ == "__main__":
        ...     found = main(get_workers, roles={"server": 1, "trainer": 2})
        >>> sorted(found)
        ['server', 'trainer:0', 'trainer:1']
    """
    if ROLES_VARIABLE not in os.environ:
        return spawn(function, roles, args, options=options, timeout=timeout)
    if isinstance(roles, int) and not isinstance(roles, bool):
        roles = {"worker": roles}
    me, wanted = this_worker(), check_roles(roles)
    if me.role not in wanted:
        raise UsageError(
            f"this program has the roles {', '.join(map(repr, wanted))}, but was started "
            f"as {me.role!r}: give 'gradwire run' these roles with --role NAME=COUNT"
        )
    own = _by_role(function, wanted).get(me.role)
    rpc.init_rpc(rpc_backend_options=options)
    value = None if own is None else own(*args)
    if rpc.is_initialized():  # the function may have done it
        rpc.shutdown()
    return {me.name: value}


def _by_role(
    function: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    roles: Mapping[str, int],
) -> dict[str, Callable[..., Any]]:
    functions = (
        dict(function)
        if isinstance(function, Mapping)
        else dict.fromkeys(roles, function)
    )
    for role, one in functions.items():
        if role not in roles:
            raise UsageError(
                f"there is a function for role {role!r}, but the roles are "
                f"{', '.join(map(repr, roles))}"
            )
        if not callable(one):
            raise UsageError(
                f"role {role!r} must be given a function, found {type(one).__name__}"
            )
        if inspect.iscoroutinefunction(one):
            raise UsageError(
                f"the function of role {role!r} is an async def, which nobody would await: "
                "pass a function that calls asyncio.run"
            )
    return functions


def _check_settings(args: object, options: object, timeout: object) -> None:
    if not isinstance(args, (tuple, list)):
        raise UsageError(
            f"args must be a tuple of arguments, found {type(args).__name__}"
        )
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise UsageError(
            f"options must be RpcBackendOptions, found {type(options).__name__}"
        )
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    is_limit = isinstance(timeout, (int, float)) and timeout >= 0  # also refuses NaN
    if timeout is not None and not (is_number and is_limit):
        raise UsageError(
            f"timeout must be a number of seconds or None, found {timeout!r}"
        )


def _is_interactive() -> bool:
    """Whether functions of ``__main__`` exist in this process only."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return path is None or not Path(path).exists()


def _check_not_a_child() -> None:
    """A new process imports the script anew, and must not start workers thereby."""
    # As multiprocessing itself does; it would not notice where we fork.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "workers are started while a worker imports this program: put what starts "
            'them below  if __name__ == "__main__":'
        )


def _check_can_fork() -> None:
    """Threads are not copied with a process, and the sockets of two would be the same."""
    if rpc.is_initialized():
        raise UsageError(
            f"this process is worker {rpc.get_worker_info().name!r} itself, and cannot be "
            "copied: call rpc.shutdown() first, or put the functions into a module and "
            'pass start_method="spawn"'
        )


def _check_can_be_imported(
    functions: Iterable[Callable[..., Any]], method: str
) -> None:
    if not _is_interactive():
        return
    for function in functions:
        if getattr(function, "__module__", None) == "__main__":
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(
                f"function {name!r} exists in this notebook or prompt only, and a worker "
                f"that is started with start_method={method!r} cannot import it: put it "
                "into a module, or leave start_method out"
            )


@dataclass
class _Child:
    worker: Worker
    process: Any  # typeshed has no common base for the processes of the contexts
    connection: multiprocessing.connection.Connection
    reports: list[_child.Report] = field(default_factory=list)
    ended_at: float = 0.0  # since then all its reports are here

    @property
    def has_returned(self) -> bool:
        return any(report.error is None for report in self.reports)

    def failure(self) -> Exception | None:
        """Why this worker has failed, if it has."""
        for report in self.reports:
            if report.error is not None:
                error = rebuild(report.error)
                return (
                    error if isinstance(error, Exception) else LaunchError(str(error))
                )
        # What it has said last may still be in the pipe when it has only just ended.
        code = self.process.exitcode if self.ended_at else None
        if code is None or (code == 0 and self.has_returned):
            return None
        return LaunchError(
            f"worker {self.worker.name!r} (process {self.process.pid}) "
            f"{describe_end(code)} before it was done; what it printed may say why",
            worker=self.worker.name,
        )

    @property
    def failed_at(self) -> float:
        """When it said so; one that died without a word comes first."""
        return self.reports[0].at if self.reports else 0.0


def describe_end(code: int) -> str:
    """What the exit code of a process says."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class _Group:
    """The child processes."""

    def __init__(self, method: str) -> None:
        self._context = multiprocessing.get_context(method)
        self._is_forking = method == "fork"
        self._children: list[_Child] = []

    def start(
        self,
        worker: Worker,
        roles: str,
        function: Callable[[], Any] | None,
        options: RpcBackendOptions,
    ) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_child.run,
            args=(theirs, worker, roles, function, options, self._is_forking),
            name=worker.name,
            # A daemon could not have children, which data loaders are.
            daemon=False,
        )
        try:
            with _one_thread_each():
                process.start()
        except BaseException as error:
            ours.close()
            # What pickle raises for functions without a name, and for locks and the like.
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                raise UsageError(
                    f"what worker {worker.name!r} is to run cannot be sent to a new "
                    f"process: {error}; define the function at module level, and let its "
                    "arguments be plain data"
                ) from error
            raise
        finally:
            theirs.close()
        self._children.append(_Child(worker, process, ours))

    def collect(self, timeout: float | None) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            failed = [child for child in self._children if child.failure() is not None]
            if failed:
                self._listen(time.monotonic() + _GRACE_S, until_all=True)
                raise self._first_failure()
            alive = [child for child in self._children if not child.ended_at]
            if not alive:
                return {
                    child.worker.name: report.value
                    for child in self._children
                    for report in child.reports
                }
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(repr(child.worker.name) for child in alive)
                raise LaunchTimeout(
                    f"workers {names} were not done within {timeout} s; they are ended now"
                )
            self._listen(min(deadline or float("inf"), time.monotonic() + _LOOK_S))

    def _first_failure(self) -> Exception:
        """The failure that is most likely the cause of the others."""
        failed = [
            (isinstance(error, PeerLostError), child.failed_at, index, error)
            for index, child in enumerate(self._children)
            if (error := child.failure()) is not None
        ]
        return min(failed, key=lambda f: f[:3])[3]

    def _listen(self, deadline: float, *, until_all: bool = False) -> None:
        """Reads what the workers report, for a while."""
        while True:
            open_ = {c.connection: c for c in self._children if not c.connection.closed}
            running = {c.process.sentinel: c for c in self._children if not c.ended_at}
            left = deadline - time.monotonic()
            if not (open_ or running) or left <= 0:
                return
            ready = multiprocessing.connection.wait([*open_, *running], left)
            for one in ready:
                if one in open_:
                    _read(open_[one])
                else:
                    child = running[one]
                    child.process.join()
                    while not child.connection.closed:
                        _read(child)  # its last words, up to the end of the pipe
                    child.ended_at = time.monotonic()
            if ready and not until_all:
                return

    def end(self) -> None:
        """Ends all who still run; asks first."""
        for child in self._children:
            if child.process.is_alive():
                child.process.terminate()
        deadline = time.monotonic() + _END_S
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.connection.close()
            child.process.close()


def _read(child: _Child) -> None:
    try:
        data = child.connection.recv_bytes()
    except (EOFError, OSError):
        child.connection.close()
        return
    try:
        child.reports.append(pickle.loads(data))
    except Exception as error:
        name = child.worker.name
        raise DecodeError(
            f"what worker {name!r} returned cannot be unpickled here "
            f"({type(error).__name__}: {error}); return plain data",
            worker=name,
        ) from error


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers that share a machine fight for its cores, unless the user has a plan."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
