"""Groups without a size: workers come and go, as torch's backend allows.

Who wants to join or to leave holds a token in the store meanwhile. The store has one list
of the members. A worker that joins connects to all of them, and that is how they learn of
it; one that leaves says goodbye.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import gradwire.rpc
from gradwire.errors import ConnectTimeout, UsageError
from gradwire.torch_compat import _core

__all__ = ["OpenGroup", "mark_static"]

MAX_SIZE = 1 << 15
"""Ids of contexts have room for so many ranks."""

_POLL_S = 0.005
_KIND, _TOKEN, _MEMBERS = "kind", "token", "members"
_STATIC, _DYNAMIC = "static", "dynamic"
_NOBODY = "-"


class OpenGroup:
    """One worker's membership.

    Args:
        name: Its name.
        rank: Its rank.
        options: Its options.
        store: Where the workers meet.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        options: gradwire.rpc.RpcBackendOptions,
        store: Any,
    ) -> None:
        self._name = name
        self._limit_s = options.init_timeout
        self._store = PrefixStore(_core.STORE_PREFIX, store)
        if _write_kind(self._store, _DYNAMIC) != _DYNAMIC:
            raise UsageError(
                "RPC group mixes statically and dynamically initialized members which is "
                "not supported. Give world_size to all of them, or to none"
            )
        with self._token():
            members = self._read()
            if name in members:
                raise UsageError(f"worker name {name!r} is not unique in this group")
            agent, record = _core.start_open_agent(name, rank, MAX_SIZE, options)
            try:
                _core.meet(agent, list(members.values()))
            except BaseException:
                agent.close("its init_rpc failed")
                raise
            self._write({**members, name: record})
        _core.set_session(agent, self, self._store)

    def leave(self) -> None:
        """Called by ``shutdown``: nobody who comes later will look for us."""
        with self._token():
            members = self._read()
            members.pop(self._name, None)
            self._write(members)

    @contextlib.contextmanager
    def _token(self) -> Iterator[None]:
        deadline = time.monotonic() + self._limit_s
        mine = self._name
        while (holder := _compare_set(self._store, _TOKEN, _NOBODY, mine)) != mine:
            if time.monotonic() > deadline:
                raise ConnectTimeout(
                    f"worker {mine!r} waited {self._limit_s} s for worker {holder!r} to "
                    "join or leave the group; is it alive?"
                )
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self._store.compare_set(_TOKEN, mine, _NOBODY)

    def _read(self) -> dict[str, str]:
        text = _compare_set(self._store, _MEMBERS, "", "{}")
        members: dict[str, str] = json.loads(text)
        return members

    def _write(self, members: dict[str, str]) -> None:
        self._store.set(_MEMBERS, json.dumps(members))


def mark_static(store: Any) -> None:
    """Says in the store of a group of fixed size that it is one."""
    _write_kind(store, _STATIC)


def _write_kind(store: Any, kind: str) -> str:
    return _compare_set(store, _KIND, "", kind)


def _compare_set(store: Any, key: str, expected: str, wanted: str) -> str:
    """The value that the key has now; an absent one counts as the expected."""
    if expected:
        store.compare_set(key, "", expected)
    return bytes(store.compare_set(key, expected, wanted)).decode()
