"""What a worker holds, and whether it holds more than before."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any, NamedTuple

import leaks
import probes
from gradwire import autograd, rpc
from gradwire.autograd._api import current_exchange

SLACK_THREADS = 8
"""A pool grows while handlers block, and keeps the threads for a while. Idle ones do no
harm; those that are not are found by `State.busy`."""

SLACK_SEGMENTS = 16
"""A connection keeps segments for reuse: as many as were in use at the same time."""

PAUSE_S = 0.02


class State(NamedTuple):
    """What one worker holds when nothing is going on."""

    counts: dict[str, int]
    """Contexts, nodes, passes, calls, references: whatever the library counts."""
    sockets: int
    connections: int
    descriptors: dict[str, int]
    """Others than sockets, by what they refer to."""
    threads: dict[str, int]
    """By the name without its number."""
    busy: list[str]
    """Where threads of the pool are that neither wait for work nor answer this."""
    segments: int


_NOT_HELD = ("bytes_", "frames_", "calls_", "segment", "workers_lost")
_CHANGES = ("threads", "idle_threads", "connections")


def take_state() -> State:
    """Looks at the worker that runs this."""
    gc.collect()
    probes.pass_time(PAUSE_S)  # for threads that waited for the interpreter meanwhile
    info = {**rpc.get_debug_info(), **autograd.get_debug_info()}
    counts = {
        key: value
        for key, value in info.items()
        if isinstance(value, int)
        and key not in _CHANGES
        and not key.startswith(_NOT_HELD)
    }
    targets = leaks.take_snapshot().descriptors.values()
    others = [target for target in targets if not target.startswith("socket:")]
    kinds: dict[str, int] = {}
    for target in others:
        kind = "file" if target.startswith("/") else target.split(":[")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    threads: dict[str, int] = {}
    for thread in threading.enumerate():
        name = thread.name.rstrip("0123456789")
        threads[name] = threads.get(name, 0) + 1
    return State(
        counts,
        sockets=len(targets) - len(others),
        connections=info["connections"],
        descriptors=kinds,
        threads=threads,
        busy=_find_busy(),
        segments=probes.count_segments(),
    )


def _find_busy() -> list[str]:
    """Threads of the pool that are in some handler, callback or wait."""
    frames: dict[int, Any] = dict(sys._current_frames())
    busy: list[str] = []
    for thread in threading.enumerate():
        if not thread.name.startswith("gradwire-") or thread.ident not in frames:
            continue
        if thread is threading.current_thread() or thread.name.endswith("-monitor"):
            continue
        frame = frames[thread.ident]
        files = []
        while frame is not None:
            name = os.path.basename(frame.f_code.co_filename)
            files.append(f"{name}:{frame.f_lineno}")
            frame = frame.f_back
        idle = ("_poller.py", "_leftovers.py", "selectors.py")
        # The innermost frames of ours tell: an idle thread waits in the poller.
        ours = [file for file in files if not file.startswith(("threading", "queue"))]
        if ours and not ours[0].startswith(idle):
            busy.append(f"{thread.name} in {' < '.join(files[:6])}")
    return busy


def compare(name: str, before: State, after: State) -> list[str]:
    """One line for each thing of which there is more than before."""
    lines = []
    for key, value in after.counts.items():
        if value > before.counts.get(key, 0):
            lines.append(f"{name}: {key} is {value}, was {before.counts.get(key, 0)}")
    # Each connection is a socket; which of them are open depends on who called whom.
    extra = (after.sockets - after.connections) - (before.sockets - before.connections)
    if extra > 0:
        lines.append(f"{name}: {extra} more sockets that are no connections")
    for kind, number in after.descriptors.items():
        if number > before.descriptors.get(kind, 0):
            was = before.descriptors.get(kind, 0)
            lines.append(f"{name}: {number} descriptors {kind}, was {was}")
    for thread, number in after.threads.items():
        if number > before.threads.get(thread, 0) + SLACK_THREADS:
            was = before.threads.get(thread, 0)
            lines.append(f"{name}: {number} threads {thread}, was {was}")
    if after.segments > before.segments + SLACK_SEGMENTS:
        lines.append(f"{name}: {after.segments} segments, was {before.segments}")
    lines += [f"{name}: busy thread {text}" for text in after.busy]
    return lines


def describe_contexts() -> list[str]:
    """The contexts that are left here, and what is known of them."""
    registry = current_exchange().registry
    return [
        f"{side.label} ({side.name}), brought by {side.brought_by}: knows "
        f"{side.state.known}, {side.state.events} events, broken {side.state.broken}, "
        f"last pass {side.state.last}, serving {side.is_serving}, calls {side.calls}"
        for side in registry.sides()
    ]
