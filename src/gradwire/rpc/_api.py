"""The functions that users call; thin. Holds the one current agent of the process."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from gradwire._config import UNSET_TIMEOUT, RpcBackendOptions, find_name
from gradwire._ids import WorkerInfo, check_worker_name
from gradwire.errors import ConnectError, NotInitialized, UsageError
from gradwire.rpc._agent import Agent
from gradwire.rpc._context import serving_agent
from gradwire.rpc._exports import for_agents
from gradwire.rpc._future import FOREVER_S, Eventually, Future
from gradwire.rpc._membership import Subscription
from gradwire.rpc._open_group import MAX_SIZE, OpenGroup, claim_rank
from gradwire.rpc._records import WorkerRecord
from gradwire.rpc._rendezvous import Rendezvous
from gradwire.rpc._schemes import find_credentials
from gradwire.rpc._signals import shielded, use_this_thread
from gradwire.rpc._spin import SpinGauge
from gradwire.rpc._store import (
    OPEN,
    note_kind,
    open_store,
    open_store_of_open_group,
)
from gradwire.rpc._turn import forget_turn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "current_agent",
    "get_debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_workers",
    "init_rpc",
    "is_initialized",
    "on_worker_joined",
    "on_worker_lost",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "start_worker",
    "wait_for_worker",
]

T = TypeVar("T")


class _Session(NamedTuple):
    agent: Agent
    rendezvous: Rendezvous | OpenGroup
    store: object  # kept: on rank 0 it is the server of all others


# Guards the beginning and the end of `_session`; calls only read it.
_lock = threading.Lock()
_session: _Session | None = None
_is_starting = False
# In a process that was forked: what it must not end, such as the server of a store.
_parents: list[_Session] = []


def _begin_as_a_child() -> None:
    """A process that was forked is no worker, whatever its parent is."""
    global _lock, _session, _is_starting
    if _session is not None:
        _parents.append(_session)
    _lock, _session, _is_starting = threading.Lock(), None, False
    serving_agent.set(None)
    forget_turn()
    use_this_thread()
    SpinGauge._is_taken = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_a_child)


def init_rpc(
    name: str | None = None,
    rank: int | None = None,
    world_size: int | Literal["open"] | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    backend: None = None,
) -> None:
    """Makes this process a worker, and waits until all workers of the group are there.

    Args:
        name: Name of this worker, unique in the group. None: the one that the launcher
            has given it.
        rank: Its rank; taken from ``RANK`` if the environment has it, as with torchrun.
        world_size: Number of workers; likewise from ``WORLD_SIZE``. ``"open"``: the group
            has no size. Workers join and leave at any time, nobody is waited for, and
            who gives no rank gets one.
        rpc_backend_options: See `RpcBackendOptions`.
        backend: For code that was written for torch; only None is accepted.

    Raises:
        UsageError: RPC is initialised already, the name or rank is taken, or the
            certificate for TLS is not one that other workers would accept.
        ConnectTimeout: Workers are missing; the message tells their ranks.
        ConnectError: The rendezvous store or an address cannot be used.

    Example:
        >>> init_rpc("worker0", rank=0, world_size=1)
        >>> rpc_sync("worker0", max, args=(1, 2))
        2
        >>> shutdown()
    """
    name = check_worker_name(find_name(name))
    options = (
        RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    )
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of "
            "gradwire.rpc.RpcBackendOptions, found one of "
            f"{type(options).__module__}.{type(options).__qualname__}"
        )
    if backend is not None:
        raise TypeError(
            f"gradwire has one backend of its own; backend must be None, found {backend!r}"
        )
    start_worker(name, rank, world_size, options)


def start_worker(
    name: str,
    rank: int | None,
    world_size: int | str | None,
    options: RpcBackendOptions,
    store: Store | None = None,
) -> None:
    """Like `init_rpc`; without a store, workers meet where the options say."""
    global _session, _is_starting  # noqa: PLW0603
    with _lock:
        if _session is not None or _is_starting:
            raise UsageError(
                "RPC is already initialized in this process; call shutdown() first"
            )
        _is_starting = True
    try:
        find_credentials(options, name, quiet=True)  # before anybody waits for us
        if isinstance(world_size, str):
            session = _begin_open(name, rank, world_size, options, store)
        else:
            session = _begin(name, rank, world_size, options, store)
        with _lock:
            _session = session
    finally:
        _is_starting = False


def _begin(
    name: str,
    rank: int | None,
    world_size: int | None,
    options: RpcBackendOptions,
    given: Store | None,
) -> _Session:
    deadline = time.monotonic() + options.init_timeout
    if given is None:
        store, rank, world_size = open_store(options, rank, world_size)
    elif rank is None or world_size is None:
        raise UsageError("rank and world_size must be given together with a store")
    else:
        store = given
    agent = Agent(name, rank, world_size, options)

    def contact(other: WorkerRecord) -> bool:
        if other.rank == rank or other.name == name:
            return agent.network.probe(other, deadline)
        return agent.network.contact(other, deadline)

    try:
        with shielded():
            record = agent.start()
        while True:
            left = max(0.001, deadline - time.monotonic())
            rendezvous = Rendezvous(
                store, record, world_size, left, contact, agent.run_soon
            )
            try:
                note_kind(store, is_open=False, timeout_s=left)
                agent.network.set_members(rendezvous.join())
                return _Session(agent, rendezvous, store)
            except ConnectError:
                # The store went away while we waited: it may be one of an earlier group
                # on its way out, and the one that we want comes after it.
                left = deadline - time.monotonic()
                if left <= 0 or given is not None:
                    raise
            del store, rendezvous
            again = dataclasses.replace(options, init_timeout=left)
            store, _, _ = open_store(again, rank, world_size)
    except BaseException:
        agent.close("its init_rpc failed")
        raise


def _begin_open(
    name: str,
    rank: int | None,
    world_size: str,
    options: RpcBackendOptions,
    store: Store | None,
) -> _Session:
    if world_size != OPEN:
        raise UsageError(
            f"world_size must be a number of workers or {OPEN!r}, found {world_size!r}"
        )
    limit = options.init_timeout
    deadline = time.monotonic() + limit
    if store is None:
        store, rank = open_store_of_open_group(options, rank)
    note_kind(store, is_open=True, timeout_s=limit)
    rank = claim_rank(store, name, rank, limit)
    agent = Agent(name, rank, MAX_SIZE, options)
    try:
        with shielded():
            record = agent.start()
        left = max(0.001, deadline - time.monotonic())
        group = OpenGroup(store, record, agent.network, left, agent.run_soon)
        group.join()
    except BaseException:
        agent.close("its init_rpc failed")
        raise
    return _Session(agent, group, store)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this worker.

    Args:
        graceful: Wait until all workers have called `shutdown` and nothing is in flight
            anywhere; in an open group, until nothing of this worker is in flight.
            Otherwise leave at once: calls in flight fail.
        timeout: Limit in seconds for leaving gracefully; a second more may pass until
            what runs here is given up. 0: as long as the others live.

    Raises:
        NotInitialized: There is nothing to end.
        UsageError: A handler of this worker asks for it; it would wait for itself.
        ShutdownTimeout: The limit came first; this worker is shut down all the same.

    Example:
        >>> init_rpc("worker0", rank=0, world_size=1)
        >>> shutdown()
        >>> is_initialized()
        False
    """
    global _session  # noqa: PLW0603
    session = _session
    if session is None:
        raise NotInitialized("RPC has not been initialized. Call init_rpc() first.")
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout must be at least 0 seconds, found {timeout!r}")
    if timeout >= FOREVER_S:
        timeout = 0
    if graceful and serving_agent.get() is session.agent:
        raise UsageError(
            f"a handler of worker {session.agent.info.name!r}, or what it has started, "
            "called shutdown(), which waits until all handlers have ended. Call "
            "shutdown() in the main program of each worker, or "
            "shutdown(graceful=False) here to leave at once"
        )
    limit = time.monotonic() + timeout if graceful and timeout else float("inf")
    with shielded():
        try:
            # While everybody waits in here, the store still answers.
            session.rendezvous.leave(limit - time.monotonic())
            departure = session.agent.departure
            if graceful and session.rendezvous.is_open:
                departure.wait_alone(limit, timeout)
            elif graceful:
                departure.wait(limit, timeout)
        finally:
            with _lock:
                if _session is session:
                    _session = None
            session.agent.close(limit=limit)


@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Eventually[T]],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> T: ...


@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> T: ...


@overload
def rpc_sync(
    to: str | int | WorkerInfo,
    func: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any: ...


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Calls ``func(*args, **kwargs)`` on another worker and returns its result.

    Args:
        to: Name, rank or `WorkerInfo` of the worker.
        func: A function that the worker can import: a module-level function, a class, a
            torch operator, or a bound method of something that can be pickled. With
            ``serializer="safe"``: what the worker has exported, or its name.
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
    return current_agent().call(to, func, args, kwargs, timeout)


@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Eventually[T]],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[T]: ...


@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[T]: ...


@overload
def rpc_async(
    to: str | int | WorkerInfo,
    func: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]: ...


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]:
    """Like `rpc_sync`, but returns a `Future` of the result at once.

    The arguments are captured: they may be changed as soon as this returns.

    Example:
        >>> future = rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
        >>> future.wait()
        tensor([2., 2.])
    """
    return current_agent().call_async(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and rank of a worker of the group, by default of this one.

    Example:
        >>> get_worker_info()
        WorkerInfo(id=0, name=worker0)
        >>> get_worker_info("worker1").id
        1
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.network.find(worker_name).info


def get_workers() -> list[WorkerInfo]:
    """The workers of the group that are neither lost nor gone, by rank; this one too.

    Example:
        >>> [worker.name for worker in get_workers()]
        ['worker0', 'worker1']
    """
    peers = current_agent().network.peers()
    return [peer.info for peer in peers if peer.is_usable]


def wait_for_worker(
    name: str, timeout: float = 60.0, *, or_role: bool = False
) -> WorkerInfo:
    """Waits until a worker can be called: it joins, or comes back after a loss.

    A worker that is lost may live: the network was cut, or it was stopped. Then the two
    meet again here, with nothing left of what they had of each other. One that is connected
    has to answer: it may have taken this worker for lost, or be stopped.

    Args:
        name: Its name.
        timeout: Limit in seconds; a worker that answers at once is found even if it is 0.
        or_role: Another worker of the same role serves as well: one whose name differs
            in the number at its end only, as ``trainer:1`` and ``trainer:2``.

    Returns:
        The worker that is there.

    Raises:
        ConnectTimeout: Nobody came in time.

    Example:
        >>> wait_for_worker("worker1", timeout=10).name
        'worker1'
    """
    check_worker_name(name)
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout must be at least 0 seconds, found {timeout!r}")
    return current_agent().membership.wait_for(name, timeout, or_role=or_role)


def on_worker_lost(callback: Callable[[WorkerInfo, str], None]) -> Subscription:
    """Has ``callback(info, reason)`` called for each worker that is lost or leaves.

    From now on this worker stays connected to all others, so that no end goes unnoticed.
    Callbacks run on a thread of the agent, one after the other; one that blocks holds up
    those that come later.

    Returns:
        An object whose ``remove()`` ends it.

    Example:
        >>> news = on_worker_lost(lambda info, reason: print(f"{info.name}: {reason}"))
        >>> news.remove()
    """
    agent = current_agent()
    subscription = agent.membership.on_lost(callback)
    agent.watch_all()
    return subscription


def on_worker_joined(callback: Callable[[WorkerInfo], None]) -> Subscription:
    """Has ``callback(info)`` called for each worker that joins, or comes back.

    It can be called as soon as the callback runs. The workers of a group with a size are
    all there when ``init_rpc`` returns, so these are the ones that were started again.

    Returns:
        An object whose ``remove()`` ends it.

    Example:
        >>> news = on_worker_joined(lambda info: print(f"welcome, {info.name}"))
        >>> news.remove()
    """
    return current_agent().membership.on_joined(callback)


def get_rpc_timeout() -> float:
    """The default deadline of calls, in seconds.

    Example:
        >>> get_rpc_timeout()
        60.0
    """
    return current_agent().rpc_timeout


def get_debug_info() -> dict[str, Any]:
    """Counts of what is there: calls in flight, threads, connections, bytes, buffers.

    Example:
        >>> info = get_debug_info()
        >>> info["client_active_calls"], info["workers_lost"]
        (0, 0)
    """
    return current_agent().debug_info()


@for_agents
def is_initialized() -> bool:
    """Whether this process is a worker now.

    Example:
        >>> is_initialized()
        True
    """
    return _session is not None


def current_agent() -> Agent:
    """The agent that serves the current handler, else the one of the process."""
    agent = serving_agent.get()
    if agent is not None:
        return agent
    session = _session
    if session is None:
        origin = "after shutdown() no call is possible."
        if _parents:
            parent = _parents[-1].agent.info.name
            origin = (
                f"this process was forked from worker {parent!r} and is none itself."
            )
        raise NotInitialized(
            f"RPC has not been initialized. Call init_rpc() first; {origin}"
        )
    return session.agent


# The compiler need not look inside: it breaks the graph at a call. (What its decorator
# sets, without the seconds that it takes to import.)
rpc_sync._torchdynamo_disable = True  # type: ignore[attr-defined]
rpc_async._torchdynamo_disable = True  # type: ignore[attr-defined]
