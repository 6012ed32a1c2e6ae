"""What torch does around the functions that a worker runs for others."""

from __future__ import annotations

import contextlib
import sys
import traceback
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor

from gradwire.rpc.extension import (
    Agent,
    Interceptor,
    Peer,
    Scope,
    current_agent,
    register_interceptor,
)
from gradwire.torch_compat import remote_module
from gradwire.torch_compat.rpc import server_process_global_profiler as profiler

__all__ = ["watch_handlers"]


class _Watch(AbstractContextManager[None]):
    """Tells errors of one function on this worker, too, and profiles it if wanted."""

    __slots__ = ("_wanted",)

    def __enter__(self) -> None:
        self._wanted = profiler.begin_request()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        profiler.end_request(self._wanted)
        if isinstance(error, Exception):
            # A stream that takes nothing, or a text that cannot be made, must not
            # become the error of the call.
            with contextlib.suppress(Exception):
                text = "".join(traceback.format_exception(error))
                print(f"On {current_agent().info}:\n{error!r}\n{text}", file=sys.stderr)


class _Handler(Scope):
    __slots__ = ()

    def enter_handler(self) -> AbstractContextManager[None]:
        """See `Scope`."""
        return _Watch()


class _Handlers(Interceptor):
    name = "torch_compat"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        kinds = (remote_module.RemoteModule, remote_module._RemoteModule)
        self.packs = dict.fromkeys(kinds, _pack_module)

    def unpack(self, packed: Any, peer: Peer) -> Any:
        """See `Interceptor`."""
        return remote_module.unpack(packed)

    def packed_reply(self, peer: Peer) -> Scope:
        """See `Interceptor`."""
        return _Handler()

    def received_call(
        self,
        peer: Peer,
        call_id: int,
        label: str,
        header: bytes,
        tracked: list[Tensor],
    ) -> Scope | None:
        """See `Interceptor`."""
        return self.received_plain(peer, call_id, label)

    def received_plain(self, peer: Peer, call_id: int, label: str) -> Scope | None:
        """See `Interceptor`."""
        # Functions of ours, such as those for references, are none of the program's.
        return None if label.startswith("gradwire.") else _Handler()


def _pack_module(module: Any, peer: Peer) -> Any:
    return remote_module.pack(module)


def watch_handlers() -> None:
    """From now on, agents tell errors of the functions that they run."""
    register_interceptor(_Handlers)
