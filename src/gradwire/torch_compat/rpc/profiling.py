"""Calls in profiles of torch's legacy profiler: the call itself, and what it ran there.

While a `profile` is open on a thread, calls of that thread run on the other worker under
a profile of their own. What that finds comes back with the result and is put into the
caller's profile, under names that begin with that of the call.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

import gradwire.rpc
from gradwire.rpc.functions import ASYNC_ATTRIBUTE, async_execution
from gradwire.torch_compat.futures import TorchFuture, adopt
from gradwire.torch_compat.rpc.internal import RPCExecMode, _build_rpc_profiling_key

# Torch does not declare the types of its profiler.
# mypy: disable-error-code="no-untyped-call"

__all__ = ["call", "call_remote", "is_on", "profile"]

REMOTE = "#remote_op: "

_active: contextvars.ContextVar[profile | None] = contextvars.ContextVar(
    "gradwire_torch_compat_profile", default=None
)


class Settings(NamedTuple):
    """How the caller profiles."""

    record_shapes: bool
    profile_memory: bool


_FIELDS = (
    "id",
    "node_id",
    "name",
    "trace_name",
    "thread",
    "fwd_thread",
    "input_shapes",
    "stack",
    "scope",
    "cpu_memory_usage",
    "device_memory_usage",
    "is_async",
    "sequence_nr",
    "flops",
)

Record = tuple[dict[str, Any], float, float]
"""Fields of an event, its start and its end in microseconds: what travels of it."""


class profile(profiler_legacy.profile):
    """Torch's legacy profiler, which sees calls too."""

    def __enter__(self) -> Any:
        """Begins to profile this thread, and the calls that it makes."""
        result = super().__enter__()
        if self.enabled:
            self._began = time.perf_counter()
            self._found: list[FunctionEvent] = []
            self._outer = _active.get()
            _active.set(self)
        return result

    def __exit__(self, *exception: Any) -> Any:
        """Ends it; what was found is in ``function_events``."""
        result = super().__exit__(*exception)
        if self.enabled:
            _active.set(self._outer)
            self._merge()
        return result

    def settings(self) -> Settings:
        """What others need to profile alike."""
        return Settings(self.record_shapes, self.profile_memory)

    def now_us(self) -> float:
        """Time since this began."""
        return (time.perf_counter() - self._began) * 1e6

    def add(self, event: FunctionEvent) -> None:
        """Adds what was not found on this thread; also when this has ended."""
        self._found.append(event)
        if self.function_events is not None:
            self._merge()

    def _merge(self) -> None:
        found: Any = self.function_events
        events = [*found, *self._found]
        self._found = []
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        for event in events:
            event.cpu_children, event.cpu_parent = [], None
        self.function_events = EventList(
            events,
            use_device=None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        self.function_events._build_tree()


def is_on() -> bool:
    """Whether calls of this thread are profiled."""
    return _active.get() is not None


# ------------------------------------------------------------------------ on the caller


class _Range:
    """One call in the caller's profile."""

    def __init__(
        self,
        mode: RPCExecMode,
        me: gradwire.rpc.WorkerInfo,
        to: gradwire.rpc.WorkerInfo,
        func: Callable[..., Any],
    ) -> None:
        found = _active.get()
        if found is None:
            raise AssertionError("no profile is open")
        self.profile = found
        self._me = me.id
        self._key = _build_rpc_profiling_key(mode, _name_of(func), me.name, to.name)
        self._thread = threading.get_ident()
        self._start_us = found.now_us()

    def end(self, records: Iterable[Record]) -> None:
        """The call is over, and this is what it ran there."""
        own = {
            "id": -1,
            "node_id": self._me,
            "name": self._key,
            "trace_name": self._key,
            "thread": self._thread,
            "stack": [],
            "flops": 0,
            "is_async": True,
        }
        self.profile.add(_event((own, self._start_us, self.profile.now_us())))
        for fields, start_us, end_us in records:
            name = f"{self._key}{REMOTE}{fields['name']}"
            there = {**fields, "name": name, "trace_name": name, "is_remote": True}
            # Clocks differ: what ran there is shown from the start of the call on.
            self.profile.add(
                _event((there, self._start_us + start_us, self._start_us + end_us))
            )


def call(
    mode: RPCExecMode,
    me: gradwire.rpc.WorkerInfo,
    to: gradwire.rpc.WorkerInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> TorchFuture[Any]:
    """Makes a call that shows up in the profile before its future is done."""
    one = _Range(mode, me, to, func)
    arguments = (one.profile.settings(), func, args, kwargs or {})
    future = gradwire.rpc.rpc_async(to, run, arguments, None, timeout)

    def finish(done: gradwire.rpc.Future[Any]) -> Any:
        records: list[Record] = []
        try:
            value, records = done.value()
        finally:
            one.end(records)
        return value

    # The plain `then`: the type of an error is that of the call.
    return adopt(gradwire.rpc.Future.then(future, finish))


def call_remote(
    me: gradwire.rpc.WorkerInfo,
    to: gradwire.rpc.WorkerInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> tuple[gradwire.rpc.RRef[Any], TorchFuture[None]]:
    """As `call`, for a value that stays there; the future tells when all is found."""
    one = _Range(RPCExecMode.REMOTE, me, to, func)
    ticket = (me.id, next(_tickets))
    arguments = (ticket, one.profile.settings(), func, args, kwargs or {})
    rref = gradwire.rpc.remote(to, run_and_keep, arguments, None, timeout)
    finished: TorchFuture[None] = TorchFuture()

    def collect(done: Any) -> None:
        records: list[Record] = []
        try:
            done.value()
            records = gradwire.rpc.rpc_sync(to, take, (ticket,))
        finally:
            one.end(records)
            finished.set_result(None)

    rref._get_future().add_done_callback(collect)
    return rref, finished


_tickets = itertools.count()


def _name_of(func: Callable[..., Any]) -> str:
    builtin: str | None = torch.jit._builtins._find_builtin(func)
    return builtin or func.__qualname__


def _event(record: Record) -> FunctionEvent:
    fields, start_us, end_us = record
    return FunctionEvent(start_us=start_us, end_us=end_us, is_legacy=True, **fields)


# ------------------------------------------------------------------------ on the callee


def _run(
    settings: Settings,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, profile | None]:
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return func(*args, **kwargs), None  # this thread has a profile already
    with profile(**settings._asdict()) as found:
        result = func(*args, **kwargs)
    return result, found


@async_execution
def run(
    settings: Settings,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a function; its result, and the records of what it ran."""
    result, found = _run(settings, func, args, kwargs)
    if _is_awaited(func):
        return result.then(lambda done: (done.value(), _records_of(found)))
    return _completed((result, _records_of(found)))


_kept: dict[tuple[int, int], profile | None] = {}


@async_execution
def run_and_keep(
    ticket: tuple[int, int],
    settings: Settings,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a function whose result stays here; `take` gets the records."""
    result, _kept[ticket] = _run(settings, func, args, kwargs)
    return result if _is_awaited(func) else _completed(result)


def _is_awaited(func: Callable[..., Any]) -> bool:
    """Whether a function returns a future of its result."""
    return getattr(func, ASYNC_ATTRIBUTE, None) is not None


def _completed(value: Any) -> gradwire.rpc.Future[Any]:
    future: gradwire.rpc.Future[Any] = gradwire.rpc.Future()
    future.set_result(value)
    return future


def take(ticket: tuple[int, int]) -> list[Record]:
    """The records of what `run_and_keep` ran."""
    return _records_of(_kept.pop(ticket, None))


def _records_of(found: profile | None) -> list[Record]:
    events: Any = [] if found is None else found.function_events
    return [
        (
            {name: getattr(event, name) for name in _FIELDS},
            event.time_range.start,
            event.time_range.end,
        )
        for event in events
    ]
