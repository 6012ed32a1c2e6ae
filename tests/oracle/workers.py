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
from gradwire.rpc.functions import async_execution
from oracle.machine import Frame, Label, Machine, Place, roots_of
from oracle.operations import sum_of_squares
from oracle.programs import Body, Call, Program

LIMIT_S = 4.0
POLL_S = 0.0005


class Site(Place):
    """What this worker has of a program that runs on several."""

    def __init__(self, program: Program, here: int, names: list[str]) -> None:
        super().__init__(program, here)
        self.names = names
        self.machine = RemoteCalls(self)
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


class RemoteCalls(Machine):
    """Makes calls with gradwire."""

    def __init__(self, site: Site) -> None:
        self.names = site.names

    def start(self, frame: Frame, call: Call, packed: Any) -> Any:
        program = frame.place.program
        handler = _handler(call, program.bodies[call.body])
        arguments = (key_of(program), call.body, call.id, packed)
        name = self.names[call.to]
        if call.style == "sync":
            return rpc.rpc_sync(name, handler, arguments)
        if call.style == "async" and call.id % 4 == 0:
            return _InThread(name, handler, arguments, call.is_recorded)
        return rpc.rpc_async(name, handler, arguments)

    def finish(self, started: Any) -> Any:
        if isinstance(started, (torch.futures.Future, _InThread)):
            return started.wait()
        return started

    def let_go(self, frame: Frame, call: Call, started: Any) -> None:
        if call.style == "kept":
            assert isinstance(frame.place, Site)
            frame.place.futures.append(started)


class _InThread:
    """A call that a thread of its own makes, in the same context."""

    def __init__(
        self, name: str, handler: Any, arguments: tuple[Any, ...], is_recorded: bool
    ) -> None:
        self._what = name, handler, arguments
        self._is_recorded = is_recorded
        self._result: Any = None
        self._error: BaseException | None = None
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), daemon=True)
        self._thread.start()

    def _run(self) -> None:
        name, handler, arguments = self._what
        try:
            with torch.set_grad_enabled(self._is_recorded):
                self._result = rpc.rpc_sync(name, handler, arguments)
        except BaseException as error:
            self._error = error

    def wait(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


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


async def serve_as_coroutine(key: str, body: int, call: int, packed: Any) -> Any:
    """The same. All coroutines of a worker share a thread, which must not wait."""
    return serve(key, body, call, packed)


@async_execution
def serve_later(key: str, body: int, call: int, packed: Any) -> Any:
    """The same, in a callback."""
    turn = rpc.rpc_async(rpc.get_worker_info().name, int)
    return turn.then(lambda _: serve(key, body, call, packed))


def _handler(call: Call, body: Body) -> Callable[..., Any]:
    """How a body is run, mostly as a plain function."""
    if call.id % 5 == 0:
        return serve_later
    has_calls = any(isinstance(step, Call) for step in body.steps)
    if call.id % 3 == 0 and not has_calls:
        return serve_as_coroutine
    return serve


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
