"""Calls, as programs for torch make them."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

import gradwire.rpc
from gradwire.errors import NotInitialized, TransportError
from gradwire.torch_compat import _core
from gradwire.torch_compat._errors import operator_or_none, torch_errors
from gradwire.torch_compat.futures import TorchFuture
from gradwire.torch_compat.rpc import _calls, _gather, functions
from gradwire.torch_compat.rpc._agent_view import RpcAgent, WorkerInfo
from gradwire.torch_compat.rpc.constants import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
)
from gradwire.torch_compat.rpc.internal import PythonUDF, _internal_rpc_pickler
from gradwire.torch_compat.rpc.rref import RRef, adopt_reference

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
T = TypeVar("T")

_FAIL_S = 10.0  # to tell others that a round has failed

_log = logging.getLogger("gradwire.torch_compat")

AllGatherStates = _gather.Round

# Whether a reference that is left at shutdown is no error.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_ALL_WORKER_NAMES: set[str] = set()
_rounds = _gather.Rounds()
_thread_local_var = _calls.futures_of_thread
# An agent of a backend that the program has registered itself.
_foreign_agent: Any = None


def _require_initialized(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _is_current_rpc_agent_set():
            raise NotInitialized(
                "RPC has not been initialized. Call "
                "torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return wrapper


# ------------------------------------------------------------------------------- agents


def _is_current_rpc_agent_set() -> bool:
    """Whether this process is a worker now."""
    return _foreign_agent is not None or _core.is_worker()


def _get_current_rpc_agent() -> Any:
    """The agent of this process."""
    if _foreign_agent is not None:
        return _foreign_agent
    return RpcAgent(_core.current_agent())


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Makes an agent the current one; ours is that already."""
    global _foreign_agent  # noqa: PLW0603
    if not isinstance(agent, RpcAgent):
        _foreign_agent = agent


def _reset_current_rpc_agent() -> None:
    """Forgets the agent of a backend that is not ours."""
    global _foreign_agent  # noqa: PLW0603
    _foreign_agent = None


def _init_rpc_states(agent: Any) -> None:
    """Takes over an agent that was started."""
    global _ALL_WORKER_NAMES  # noqa: PLW0603
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


# -------------------------------------------------------------------------------- calls


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Has calls in this block pickled by another pickler."""
    global _default_pickler  # noqa: PLW0603
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and rank of a worker, by default of this one."""
    agent: WorkerInfo = _get_current_rpc_agent().get_worker_info(worker_name)
    return agent


def _to_worker_info(to: Any) -> gradwire.rpc.WorkerInfo:
    """The worker that a destination means."""
    found = _destination(to)
    if isinstance(found, gradwire.rpc.WorkerInfo):
        return found
    return get_worker_info(found)


def _destination(to: Any) -> str | int | gradwire.rpc.WorkerInfo:
    if isinstance(to, (str, int, gradwire.rpc.WorkerInfo)):
        return to
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def _as_sent(func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A call as it goes to gradwire: in a pickle of its own, inside `_use_rpc_pickler`."""
    if not callable(func):
        raise TypeError("function should be callable.")
    args = tuple(args) if args else ()
    if _default_pickler is _internal_rpc_pickler:
        return func, args, kwargs
    pickled = _default_pickler.serialize(PythonUDF(func, args, kwargs or {}))
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    return _run_pickled_async if is_async else _run_pickled, pickled, None


def _run_pickled(data: bytes, tensors: list[torch.Tensor]) -> Any:
    call: PythonUDF = _internal_rpc_pickler.deserialize(data, tensors)
    return call.func(*call.args, **call.kwargs)


_run_pickled_async = functions.async_execution(_run_pickled)
_run_pickled_async.__name__ = _run_pickled_async.__qualname__ = "_run_pickled_async"


@_require_initialized
def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Calls a function on another worker and returns its result."""
    with torch_errors(func):
        return _calls.call(_destination(to), *_as_sent(func, args, kwargs), timeout)


@_require_initialized
def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> TorchFuture[Any]:
    """Calls a function on another worker and returns a future of its result."""
    with torch_errors():
        sent = _as_sent(func, args, kwargs)
        future = _calls.remember(_calls.start(_destination(to), *sent, timeout))
        future.function = operator_or_none(func)
        return future


@_require_initialized
def remote(
    to: Any,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Calls a function on another worker and returns a reference to its result there."""
    with torch_errors():
        sent = _as_sent(func, args, kwargs)
        plain, found = _calls.create(_destination(to), *sent, timeout)
        rref = adopt_reference(plain)
        _core.note_function(rref, operator_or_none(func))
        if found is not None:
            rref._set_profiling_future(found)
        return rref


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    """A method of `RRef` that does what the class below does, with another docstring."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(super(RRef, self), method_name)(*args, **kwargs)

    method.__name__ = method_name
    method.__doc__ = docstring
    return method


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for all calls that were made with `rpc_async` inside."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# ------------------------------------------------------------------------------- groups


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    _rounds.add(sequence_id, worker_name, obj, worker_names or _ALL_WORKER_NAMES)


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    one = _rounds.get(sequence_id)
    if one.is_complete():
        raise AssertionError(f"Termination signal {sequence_id} got set twice.")
    one.gathered_objects = objects_map
    one.complete()


def _fail_followers(sequence_id: str, error: Exception) -> None:
    _rounds.get(sequence_id).fail(error)


@_require_initialized
def _all_gather(
    obj: Any,
    worker_names: Collection[str] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Objects of all workers by name; every worker has to call this.

    Args:
        obj: That of this worker.
        worker_names: Who takes part; all if left out.
        timeout: Limit for each call and for waiting, in seconds. -1: the default for
            calls; 0: none. In these two cases waiting ends with the loss of a worker
            only.

    Raises:
        TransportError: The leader is lost, or a worker whose object is missing.
    """
    with torch_errors():
        names = set(worker_names or _ALL_WORKER_NAMES)
        return _gather_all(obj, names, timeout, without_lost=False)


def _gather_all(
    obj: Any, names: set[str], timeout: float, *, without_lost: bool
) -> dict[str, Any]:
    leader, me = min(names), get_worker_info().name
    sequence_id = _rounds.begin(names)
    limit = (
        None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    )
    call_limit = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    if me == leader:
        _gather_to_leader(sequence_id, me, obj, names)
    else:
        # Without a deadline on the leader's side: it waits for this call.
        start = time.monotonic()
        told = rpc_async(
            leader, _gather_to_leader, (sequence_id, me, obj, names), None, 0
        )
        left = max(0.0, call_limit - (time.monotonic() - start))
        told.wait(left if call_limit else None)
    one = _rounds.get(sequence_id)
    try:
        if me == leader:
            if not one.is_complete():
                _core.watch_all()
            find_lost = functools.partial(_find_lost, sequence_id, names, without_lost)
            one.wait(limit, find_lost)
            _tell_followers(
                sequence_id, one, names - {leader}, call_limit, without_lost
            )
        else:
            one.wait(limit, functools.partial(_check, leader))
        return one.gathered_objects
    finally:
        _rounds.end(sequence_id)


def _check(name: str) -> None:
    error = _core.loss_of(name)
    if error is not None:
        raise error


def _find_lost(sequence_id: str, names: set[str], without_lost: bool) -> None:
    """Looks, as the leader, for those who will never send their objects."""
    missing = names - _rounds.get(sequence_id).gathered_objects.keys()
    losses = {name: _core.loss_of(name) for name in sorted(missing)}
    lost = {name: error for name, error in losses.items() if error is not None}
    if not lost:
        return
    if without_lost:
        _rounds.leave_out(sequence_id, names - lost.keys())
        return
    first = next(iter(lost.values()))
    for name in sorted(names - {min(names)}):
        _calls.start(name, _fail_followers, (sequence_id, first), None, _FAIL_S)
    raise first


def _tell_followers(
    sequence_id: str,
    one: _gather.Round,
    followers: set[str],
    timeout: float,
    without_lost: bool,
) -> None:
    told = {
        name: rpc_async(
            name,
            _broadcast_to_followers,
            (sequence_id, one.gathered_objects),
            None,
            timeout,
        )
        for name in sorted(followers)
    }
    errors: dict[str, Exception] = {}
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            if not (without_lost and isinstance(error, TransportError)):
                errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        raise RuntimeError(
            f"Followers {list(errors)} timed out in _all_gather after {timeout:.2f} "
            f"seconds. The first exception is {first}"
        ) from first


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Waits until all of these workers have called this; a failure is only logged."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        _log.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until all workers have called this that are not lost."""
    _rounds.arrive()
    try:
        with torch_errors():
            try:
                names = set(_ALL_WORKER_NAMES)
                _gather_all(None, names, timeout, without_lost=True)
            except TransportError:
                _wait_for_each(timeout)  # the leader is lost
    except RuntimeError:
        _log.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def _wait_for_each(timeout: float) -> None:
    """As `_wait_all_workers`, without a leader: each asks each.

    The leader may be lost when some have heard from it, and others have not. So nobody
    has to wait here for another to be here too: that it has come to the end is enough.
    """
    others = sorted(_ALL_WORKER_NAMES - {get_worker_info().name})
    asked = [_calls.start(name, _await_arrival, (), None, timeout) for name in others]
    for future in asked:
        try:
            future.wait()
        except TransportError:
            continue  # it is lost, too


@functions.async_execution
def _await_arrival() -> gradwire.rpc.Future[None]:
    return _rounds.arrival()


# ------------------------------------------------------------------- settings, and the end


@_require_initialized
def get_rpc_timeout() -> float:
    """The default deadline of calls, in seconds."""
    return gradwire.rpc.get_rpc_timeout()


@_require_initialized
def _set_rpc_timeout(seconds: float) -> None:
    """Sets the default deadline of calls that are made from now on."""
    _core.current_agent().rpc_timeout = float(seconds)


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Gives up all references that this worker holds, and waits for theirs to us."""
    _core.delete_references(timeout)


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Ends this worker; gracefully: when all others have come here too.

    Whatever goes wrong is raised when this worker has ended.
    """
    is_quiet = False
    try:
        if graceful and _core.is_open_group():
            # Whoever is left goes on without us.
            _core.wait_until_quiet(timeout)
            _core.drop_references()
        elif graceful:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            is_quiet = True
    finally:
        _finalize_shutdown(is_quiet, timeout)


def _finalize_shutdown(graceful: bool, timeout: float) -> None:
    try:
        if not _ignore_rref_leak and _core.is_worker():
            _core.check_leaks()
    finally:
        with torch_errors():
            if gradwire.rpc.is_initialized():
                gradwire.rpc.shutdown(graceful, timeout)
        _rounds.clear()
        _reset_current_rpc_agent()
