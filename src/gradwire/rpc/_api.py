"""The functions that users call; thin. Holds the one current agent of the process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gradwire._config import UNSET_TIMEOUT, RpcBackendOptions
from gradwire._ids import WorkerInfo, check_worker_name
from gradwire.errors import ConnectError, NotInitialized, UsageError
from gradwire.rpc._agent import Agent
from gradwire.rpc._context import serving_agent
from gradwire.rpc._future import Future
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._rendezvous import Rendezvous
from gradwire.rpc._signals import shielded
from gradwire.rpc._store import open_store

__all__ = [
    "current_agent",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

T = TypeVar("T")


class _Session(NamedTuple):
    agent: Agent
    rendezvous: Rendezvous
    store: object  # kept: on rank 0 it is the server of all others


# Guards the beginning and the end of `_session`; calls only read it.
_lock = threading.Lock()
_session: _Session | None = None
_is_starting = False


def init_rpc(
    name: str,
    rank: int | None = None,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    backend: None = None,
) -> None:
    """Makes this process a worker, and waits until all workers of the group are there.

    Args:
        name: Name of this worker, unique in the group.
        rank: Its rank; taken from ``RANK`` if the environment has it, as with torchrun.
        world_size: Number of workers; likewise from ``WORLD_SIZE``.
        rpc_backend_options: See `RpcBackendOptions`.
        backend: For code that was written for torch; only None is accepted.

    Raises:
        UsageError: RPC is initialised already, or the name or rank is taken.
        ConnectTimeout: Workers are missing; the message names them.
        ConnectError: The rendezvous store or an address cannot be used.

    Example:
        >>> init_rpc("worker0", rank=0, world_size=1)
        >>> rpc_sync("worker0", max, args=(1, 2))
        2
        >>> shutdown()
    """
    global _session, _is_starting  # noqa: PLW0603
    check_worker_name(name)
    options = (
        RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    )
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, not "
            f"{type(options).__name__}"
        )
    if backend is not None:
        raise TypeError(
            f"gradwire has one backend of its own; backend must be None, found {backend!r}"
        )
    with _lock:
        if _session is not None or _is_starting:
            raise UsageError(
                "RPC is already initialized in this process; call shutdown() first"
            )
        _is_starting = True
    try:
        session = _begin(name, rank, world_size, options)
        with _lock:
            _session = session
    finally:
        _is_starting = False


def _begin(
    name: str, rank: int | None, world_size: int | None, options: RpcBackendOptions
) -> _Session:
    deadline = time.monotonic() + options.init_timeout
    store, rank, world_size = open_store(options, rank, world_size)
    agent = Agent(name, rank, world_size, options)

    def contact(other: WorkerRecord) -> bool:
        if other.rank == rank or other.name == name:
            return agent.network.probe(other)
        return agent.network.contact(other)

    try:
        with shielded():
            record = agent.start()
        while True:
            left = max(0.001, deadline - time.monotonic())
            rendezvous = Rendezvous(store, record, world_size, left, contact)
            try:
                agent.network.set_members(rendezvous.join())
                return _Session(agent, rendezvous, store)
            except ConnectError:
                # The store went away while we waited: it may be one of an earlier group
                # on its way out, and the one that we want comes after it.
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            del store, rendezvous
            again = dataclasses.replace(options, init_timeout=left)
            store, _, _ = open_store(again, rank, world_size)
    except BaseException:
        agent.close("its init_rpc failed")
        raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this worker.

    Args:
        graceful: Wait until all workers have called `shutdown` and nothing is in flight
            anywhere. Otherwise leave at once: calls in flight fail.
        timeout: Limit for the graceful part in seconds. 0: as long as the others live.

    Raises:
        NotInitialized: There is nothing to end.
        ShutdownTimeout: The limit came first; this worker is shut down all the same.
    """
    global _session  # noqa: PLW0603
    session = _session
    if session is None:
        raise NotInitialized("RPC has not been initialized. Call init_rpc() first.")
    if not isinstance(timeout, (int, float)) or timeout < 0:
        raise ValueError(f"timeout must be at least 0 seconds, found {timeout!r}")
    with shielded():
        try:
            # While everybody waits in here, the store still answers.
            session.rendezvous.leave()
            if graceful:
                session.agent.departure.wait(timeout)
        finally:
            with _lock:
                if _session is session:
                    _session = None
            session.agent.close()


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> T:
    """Calls ``func(*args, **kwargs)`` on another worker and returns its result.

    Args:
        to: Name, rank or `WorkerInfo` of the worker.
        func: A function that the worker can import: a module-level function, a class, a
            torch operator, or a bound method of something that can be pickled.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Deadline of the call in seconds; 0: as long as the worker lives; -1: the
            default of the options.

    Raises:
        CallTimeout: The deadline passed.
        PeerLostError: The worker died, or stopped answering.
        RemoteError: ``func`` raised; the error is also an instance of the class that it
            raised, and carries the worker's name and traceback.

    Example:
        >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    result: T = current_agent().call(to, func, args, kwargs, timeout)
    return result


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[T]:
    """Like `rpc_sync`, but returns a `Future` of the result at once.

    The arguments are captured: they may be changed as soon as this returns.

    Example:
        >>> future = rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
        >>> future.wait()
        tensor([2., 2.])
    """
    return current_agent().call_async(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and rank of a worker of the group, by default of this one."""
    agent = current_agent()
    return agent.info if worker_name is None else agent.network.find(worker_name).info


def get_rpc_timeout() -> float:
    """The default deadline of calls, in seconds."""
    return current_agent().rpc_timeout


def get_debug_info() -> dict[str, Any]:
    """Counts of what is there: calls in flight, threads, connections, bytes, buffers."""
    return current_agent().debug_info()


def is_initialized() -> bool:
    """Whether this process is a worker now."""
    return _session is not None


def current_agent() -> Agent:
    """The agent that serves the current handler, else the one of the process."""
    agent = serving_agent.get()
    if agent is not None:
        return agent
    session = _session
    if session is None:
        raise NotInitialized(
            "RPC has not been initialized. Call init_rpc() first; after shutdown() no call "
            "is possible."
        )
    return session.agent


# The compiler need not look inside: it breaks the graph at a call. (What its decorator
# sets, without the seconds that it takes to import.)
rpc_sync._torchdynamo_disable = True  # type: ignore[attr-defined]
rpc_async._torchdynamo_disable = True  # type: ignore[attr-defined]
