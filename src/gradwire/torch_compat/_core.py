"""All that the drop-in needs of gradwire and that is not for users."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import gradwire.rpc
from gradwire._ids import WorkerInfo
from gradwire.autograd.extension import (
    current_context,
    find_context,
    open_context,
    release_context,
    set_implicit,
)
from gradwire.errors import UsageError
from gradwire.rpc import RRef, _api, _rref
from gradwire.rpc._store import OPEN, note_kind
from gradwire.rpc._store import PREFIX as STORE_PREFIX
from gradwire.rpc.extension import Agent, current_agent, serving_agent
from gradwire.torch_compat import _graph

__all__ = [
    "STORE_PREFIX",
    "Agent",
    "agent_of",
    "check_leaks",
    "creation_error",
    "current_agent",
    "current_context",
    "delete_references",
    "drop_references",
    "find_worker",
    "function_of",
    "inspect_context",
    "is_open_group",
    "is_over",
    "is_worker",
    "loss_of",
    "note_function",
    "open_context",
    "record_in_contexts_only",
    "reference_counts",
    "reference_ids",
    "release_context",
    "remote_origin",
    "session_store",
    "start_agent",
    "start_open_agent",
    "use_reference_class",
    "wait_until_quiet",
    "watch_all",
    "worker_infos",
]

_POLL_S = 0.002

# ------------------------------------------------------------------------------- agents


def start_agent(
    name: str,
    rank: int,
    world_size: int,
    options: gradwire.rpc.RpcBackendOptions,
    store: Any = None,
) -> None:
    """Starts this worker, and waits for the others; without a store, where options say."""
    prefixed = None if store is None else PrefixStore(STORE_PREFIX, store)
    _api.start_worker(name, rank, world_size, options, prefixed)


def start_open_agent(
    name: str, rank: int | None, options: gradwire.rpc.RpcBackendOptions, store: Any
) -> None:
    """Starts a worker of a group without a size."""
    prefixed = PrefixStore(STORE_PREFIX, store)
    try:
        note_kind(prefixed, is_open=True, timeout_s=options.init_timeout)
    except UsageError:
        raise UsageError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported. Give world_size to all of them, or to none"
        ) from None
    _api.start_worker(name, rank, OPEN, options, prefixed)


def session_store() -> Any:
    """The store of the group, under the prefix that all of gradwire uses."""
    session = _api._session
    return None if session is None else session.store


def is_open_group() -> bool:
    """Whether the group has no size."""
    session = _api._session
    return session is not None and session.rendezvous.is_open


def wait_until_quiet(timeout_s: float) -> None:
    """Waits until no call of this worker is in flight, and none is served here."""
    agent = current_agent()
    deadline = time.monotonic() + timeout_s
    while agent.num_pending or agent.num_active:
        if timeout_s and time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def find_worker(agent: Agent, worker: str | int | WorkerInfo) -> WorkerInfo:
    """A worker of the group."""
    return agent.network.find(worker).info


def worker_infos(agent: Agent) -> list[WorkerInfo]:
    """All workers of the group, by rank."""
    infos = {peer.info for peer in agent.network.peers()} | {agent.info}
    return sorted(infos, key=lambda info: info.id)


def watch_all() -> None:
    """Has the ends of all workers noticed, also of those that were never called."""
    current_agent().watch_all()


def loss_of(worker: str) -> Exception | None:
    """Why a worker cannot be asked any more; None if it can."""
    peer = current_agent().network.find(worker)
    return None if peer.is_usable else peer.error()


def is_worker() -> bool:
    """Whether calls can be made here: this process is a worker, or about to be one.

    Others may call a worker before its own ``init_rpc`` has returned.
    """
    return serving_agent.get() is not None or gradwire.rpc.is_initialized()


def remote_origin(cls: type[BaseException]) -> dict[str, Any]:
    """What a class of errors that came from elsewhere says of the original class."""
    name = "_gradwire_original_type"
    return {name: cls.__dict__[name]} if name in cls.__dict__ else {}


# ---------------------------------------------------------------------------- references


def reference_counts() -> dict[str, str]:
    """What there is of references on this worker, under torch's names."""
    counts = _references().debug_info()
    return {
        "num_owner_rrefs": str(counts["owner_rrefs"]),
        "num_pending_futures": str(counts["pending_children"]),
        "num_pending_users": str(counts["pending_users"]),
        "num_forks": str(counts["forks"]),
    }


def delete_references(timeout_s: float) -> None:
    """Gives up all references of this worker, and waits for those of others to it."""
    references = _references()
    drop_references()
    deadline = time.monotonic() + timeout_s
    while references.debug_info()["forks"] and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def drop_references() -> None:
    """Gives up all references of this worker."""
    _references().drop_everything()


def check_leaks() -> None:
    """Raises if somebody still holds a reference to a value of this worker."""
    counts = _references().debug_info()
    if counts["forks"]:
        raise UsageError(
            f"Leaking RRef: {counts['forks']} references to {counts['owner_rrefs']} values "
            f"of worker {current_agent().info.name!r} are left at its shutdown"
        )


def use_reference_class(cls: type[RRef[Any]]) -> None:
    """References that arrive in agents that are started from now on are of this class."""
    service: Any = _rref._Service
    service.handle_class = cls
    plain_init = service.__init__

    def init(self: Any, agent: Agent) -> None:
        plain_init(self, agent)
        self.packs = {**self.packs, RRef: self._pack}

    service.__init__ = init


def reference_ids(rref: RRef[Any]) -> tuple[Any, Any]:
    """The id of the value, and that of the fork; on the owner there is no fork."""
    return rref._ref.id, getattr(rref._ref, "fork", None)


def agent_of(rref: RRef[Any]) -> Agent:
    """The worker that holds a reference."""
    return rref._service.agent


def creation_error(rref: RRef[Any]) -> BaseException | None:
    """Why there is no value, as far as this worker knows."""
    outcome = getattr(rref._ref, "confirmation", None)
    return None if outcome is None else outcome.error


def note_function(rref: RRef[Any], function: Any) -> None:
    """Keeps which function makes the value."""
    if function is not None:
        rref._creation.function = function  # type: ignore[attr-defined]


def function_of(rref: RRef[Any]) -> Any:
    """The function that was noted; None if there is none."""
    return getattr(getattr(rref, "_creation", None), "function", None)


def is_over(rref: RRef[Any]) -> bool:
    """Whether the worker that holds a reference has been shut down."""
    fork = getattr(rref._ref, "fork", None)
    return fork is not None and fork not in rref._service._users


def _references() -> Any:
    return _rref._service_of(current_agent())


# ------------------------------------------------------------------------------- autograd


def record_in_contexts_only() -> None:
    """From now on calls outside of contexts are not recorded."""
    set_implicit(False)


class Inspection(NamedTuple):
    """A context on this worker: who takes part, and its messages by number."""

    peers: set[int]
    sends: dict[int, Any]
    recvs: dict[int, Any]


def inspect_context(context_id: int) -> Inspection:
    """What this worker knows of a context.

    Raises:
        UnknownContext: It takes no part in it.
    """
    side = find_context(context_id)
    with side.lock:
        peers = set(side.state.known)
        tail = side.peek_tail()
    sends, recvs = _graph.find_messages(tail)
    return Inspection(peers, sends, recvs)
