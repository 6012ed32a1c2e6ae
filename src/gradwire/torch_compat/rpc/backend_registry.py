# mypy: disable-error-code="no-untyped-call"
"""Backends by name. There is one of ours, which goes by the name of torch's default."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.distributed.rendezvous import _create_store_from_options

from gradwire.errors import UsageError
from gradwire.torch_compat import _core
from gradwire.torch_compat.rpc import constants
from gradwire.torch_compat.rpc._agent_view import RpcAgent
from gradwire.torch_compat.rpc.options import TensorPipeRpcBackendOptions, translate

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """How to make a backend's options, and how to start it."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Members(type):
    """Makes a class look like an enumeration that can grow."""

    _members: dict[str, BackendType]

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)

    def __getitem__(cls, name: str) -> BackendType:
        return cls._members[name]

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return cls._members[name]
        except KeyError:
            raise AttributeError(
                f"no RPC backend is called {name!r}; known: {sorted(cls._members)}"
            ) from None

    @property
    def __members__(cls) -> dict[str, BackendType]:
        return dict(cls._members)


class BackendType(metaclass=_Members):
    """The backends that there are: ``BackendType.TENSORPIPE`` and registered ones."""

    _members: dict[str, BackendType] = {}  # noqa: RUF012

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> Any:
        return _find, (self.name,)


def _find(name: str) -> BackendType:
    return BackendType[name]


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of this name."""
    return backend_name in BackendType._members


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Adds a backend.

    Args:
        backend_name: Its name.
        construct_rpc_backend_options_handler: Makes options from keywords.
        init_backend_handler: Starts it, and returns its agent.
    """
    if backend_registered(backend_name):
        raise UsageError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    member = BackendType._members[backend_name] = BackendType(backend_name, value)
    return member


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout=rpc_timeout, init_method=init_method, **kwargs
    )


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Starts a backend and returns its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _make_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **_: Any,
) -> Any:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _start(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> RpcAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, found "
            f"{type(rpc_backend_options).__name__}"
        )
    options = translate(rpc_backend_options)
    if not world_size:
        if store is None:
            # Finds the rank in the URL or the environment, and says what is missing.
            store = _create_store_from_options(rpc_backend_options, rank)
        if rank < 0:
            rank = int(os.environ["RANK"])
        _core.start_open_agent(name, rank, options, store)
    else:
        _core.start_agent(name, rank, world_size, options, store)
    return RpcAgent(_core.current_agent())


register_backend("TENSORPIPE", _make_options, _start)
