"""What workers do for a program: they serve its calls, and tell what they have of it."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from gradwire.errors import UnknownContext
from oracle.machine import Frame, Label, Machine, Place, roots_of
from oracle.operations import sum_of_squares
from oracle.programs import Call, Program

LIMIT_S = 4.0
POLL_S = 0.0005


class Site(Place):
    """What this worker has of a program that runs on several."""

    def __init__(self, program: Program, here: int, names: list[str]) -> None:
        super().__init__(program, here)
        self.names = names
        self.machine = Workers(self)
        self.futures: list[Any] = []
        self.problems: list[str] = []
        own = [n for n in program.reached_bodies() if program.bodies[n].here == here]
        # Guards the number of calls that are still to be served; handlers.
        self.changed = threading.Condition()
        self.left_to_serve = len(own)

    def note_served(self) -> None:
        with self.changed:
            self.left_to_serve -= 1
            self.changed.notify_all()

    def wait_until_served(self) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.left_to_serve <= 0, LIMIT_S)


class Workers(Machine):
    """Makes calls with gradwire."""

    def __init__(self, site: Site) -> None:
        self.names = site.names

    def start(self, frame: Frame, call: Call, packed: Any) -> Any:
        site = frame.place
        assert isinstance(site, Site)
        arguments = (key_of(site.program), call.body, call.id, packed)
        if call.style == "sync":
            return rpc.rpc_sync(self.names[call.to], serve, arguments)
        return rpc.rpc_async(self.names[call.to], serve, arguments)

    def finish(self, started: Any) -> Any:
        return started.wait() if isinstance(started, torch.futures.Future) else started

    def let_go(self, frame: Frame, call: Call, started: Any) -> None:
        if call.style == "kept":
            assert isinstance(frame.place, Site)
            frame.place.futures.append(started)


_sites: dict[str, Site] = {}


def key_of(program: Program) -> str:
    return f"{program.mode}:{program.seed}"


def find_site(key: str) -> Site:
    return _sites[key]


def serve(key: str, body: int, call: int, packed: Any) -> Any:
    """A call of a program."""
    site = find_site(key)
    try:
        return site.machine.run_body(site, site.program.bodies[body], call, packed)
    except BaseException:
        site.problems.append(traceback.format_exc())
        raise
    finally:
        site.note_served()


# ------------------------------------------------------------------ asked by the driver


def prepare() -> None:
    """Once per process: graphs must be freed without the help of the collector."""
    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
    gc.collect()
    gc.freeze()
    gc.disable()


def set_up(program: Program, here: int, names: list[str]) -> None:
    _sites[key_of(program)] = Site(program, here, names)


def switch_counting(key: str, is_on: bool) -> None:
    find_site(key).hooks.is_on = is_on


def backward_there(
    key: str, context: int, slot: int, how: str, retain: bool
) -> Tensor | None:
    """A pass that is started by this worker, from a scalar that was left here."""
    root = find_site(key).stored.get(slot)
    if root is None:
        return None
    roots = roots_of([root])
    if roots and how == "plain":
        roots[0].backward(retain_graph=retain)
    elif roots:
        autograd.backward(context, roots, retain_graph=retain)
    return root.detach()


def penalty_there(key: str, context: int) -> Tensor:
    gradients = autograd.get_gradients(context)
    return sum_of_squares([gradients.get(p) for p in find_site(key).parameters])


@dataclass
class Found:
    """A gradient as it is on a worker."""

    value: Tensor
    is_sparse: bool


def _found(gradient: Tensor | None) -> Found | None:
    if gradient is None:
        return None
    return Found(gradient.detach().to_dense(), gradient.is_sparse)


def dictionary(key: str, context: int) -> dict[Label, Found | None]:
    """What the context's dictionary holds on this worker, by label of the leaf."""
    try:
        gradients = autograd.get_gradients(context)
    except UnknownContext:
        gradients = {}
    leaves = find_site(key).leaves
    known = {id(leaf) for leaf in leaves.values()}
    strange = [g for leaf, g in gradients.items() if id(leaf) not in known]
    assert not strange, f"gradients of leaves that the program does not have: {strange}"
    return {label: _found(gradients.get(leaf)) for label, leaf in leaves.items()}


@dataclass
class Report:
    """What a worker has in the end."""

    gradients: dict[Label, Found | None]
    with_gradient: dict[int, int]
    with_none: dict[int, int]
    problems: list[str]


def finish(key: str) -> Report:
    """Forgets a program, when all its calls have been served; tells what it came to."""
    site = find_site(key)
    if not site.wait_until_served():
        site.problems.append(f"{site.left_to_serve} calls never came")
    del _sites[key]
    kept = {**site.leaves, **site.retained}
    gradients = {label: _found(tensor.grad) for label, tensor in kept.items()}
    for tensor in kept.values():
        tensor.grad = None  # with create_graph a cycle: leaf, gradient, graph, leaf
    return Report(
        gradients, site.hooks.with_gradient, site.hooks.with_none, site.problems
    )


def wait_until_idle() -> dict[str, Any]:
    """Waits until this worker has nothing of autograd left; returns what stays."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        left = {name: n for name, n in autograd.get_debug_info().items() if n}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def outside(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function outside of any context."""
    return contextvars.Context().run(function, *args)
