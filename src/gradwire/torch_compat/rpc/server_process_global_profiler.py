"""A profile of all requests that this worker serves while it is open."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

# Torch does not declare the types of its profiler.
# mypy: disable-error-code="no-untyped-call"

__all__ = ["begin_request", "end_request"]

# Guards the list: threads that serve requests, and those that open and close profiles.
_lock = threading.Lock()
_open: list[_server_process_global_profile] = []


class _server_process_global_profile(profiler_legacy.profile):
    """Torch's legacy profiler for all threads that serve requests.

    Several may be open at a time; each gets the events of all requests that began while
    it was.

    Attributes:
        process_global_function_events: Events by request.
    """

    def __enter__(self) -> Any:
        """Requests that begin from now on are profiled."""
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        self.process_global_function_events: list[list[FunctionEvent]] = []
        with _lock:
            _open.append(self)
        return self

    def __exit__(self, *exception: Any) -> Any:
        """Ends it; what was found is in ``function_events``."""
        if not self.enabled:
            return None
        with _lock:
            _open.remove(self)
        every = [e for events in self.process_global_function_events for e in events]
        self.function_events = EventList(
            every, use_device=None, profile_memory=self.profile_memory
        )
        self.function_events._build_tree()
        return False


def begin_request() -> list[_server_process_global_profile]:
    """A request is about to run on this thread; the profiles that want to know."""
    if not _open or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return []
    with _lock:
        wanted = list(_open)
    if wanted:
        torch.autograd._enable_profiler_legacy(wanted[0].config())  # type: ignore[attr-defined]
    return wanted


def end_request(wanted: list[_server_process_global_profile]) -> None:
    """It has run."""
    if not wanted:
        return
    records = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    events = profiler_legacy._parse_legacy_records(records)
    for one in wanted:
        if one.function_events is None:
            one.process_global_function_events.append(events)
