"""Programs for the tests of the autograd layer, and the same programs in one process.

A program is a function that runs on one worker, makes calls and uses a `parameter`
wherever it likes. Under `in_one_process` the very same code runs in plain torch: calls
become function calls, and each worker that is played has parameters of its own, with the
values that they have on the real one. So every gradient has something to be compared with.

    def program():
        return call("w1", affine, parameter("x")).sum()

    check(program, "dictionary")
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import inspect
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import functions
import probes
from gradwire import autograd, rpc
from gradwire.errors import UnknownContext

WORKERS = ("w0", "w1", "w2", "w3")
SIZE = 3
TOLERANCE = 1e-10
"""For sums whose order is not fixed."""

Mode = Literal["calls", "dictionary", "into grad", "plain"]
MODES: tuple[Mode, ...] = ("calls", "dictionary", "into grad", "plain")
"""No context; one with a dictionary; one with ``.grad``; ``loss.backward()`` in one."""
CONTEXT_MODES: tuple[Mode, ...] = MODES[1:]


# ---------------------------------------------------------------- a worker and its state


class Box:
    """A class of a program, with a tensor inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _State:
    """What one worker keeps between calls."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.kept: dict[str, Any] = {}
        self.runs: defaultdict[str, int] = defaultdict(int)


class _OneProcess:
    """All workers, played in one process."""

    def __init__(self) -> None:
        self.states: defaultdict[str, _State] = defaultdict(_State)

    def call(
        self, to: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        args, kwargs = _send((args, kwargs))
        token = _stage.set((self, to))
        try:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = _finish(result)
            elif isinstance(result, torch.futures.Future):
                result = result.wait()
        finally:
            _stage.reset(token)
        return _send(result)


_stage: contextvars.ContextVar[tuple[_OneProcess, str] | None] = contextvars.ContextVar(
    "stage", default=None
)
_real = _State()
_lock = threading.Lock()  # guards the making of parameters, and counters; any handler


def _send(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy, as the wire makes one, that is part of the graph."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        return copies.setdefault(id(value), value.clone())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_send(item, copies) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_send(item, copies) for item in value)
    if isinstance(value, dict):
        return {key: _send(item, copies) for key, item in value.items()}
    if isinstance(value, Box):
        return Box(_send(value.value, copies))
    return value


def _finish(coroutine: Any) -> Any:
    """Runs a coroutine that awaits nothing but what is there already."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine waits for something in one process")


def here() -> str:
    """Name of the worker that runs this, or that is played."""
    stage = _stage.get()
    return rpc.get_worker_info().name if stage is None else stage[1]


def _state() -> _State:
    stage = _stage.get()
    return _real if stage is None else stage[0].states[stage[1]]


def parameter(name: str, *shape: int) -> Tensor:
    """A leaf of this worker; its values depend on the two names only."""
    with _lock:
        found = _state().parameters.get(name)
        if found is None:
            seed = zlib.crc32(f"{here()}.{name}".encode())
            generator = torch.Generator().manual_seed(seed)
            found = torch.randn(
                *(shape or (SIZE, SIZE)), dtype=torch.double, generator=generator
            ).requires_grad_()
            _state().parameters[name] = found
        return found


def call(to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A remote call; in one process a function call."""
    stage = _stage.get()
    if stage is None:
        return rpc.rpc_sync(to, function, args, kwargs)
    return stage[0].call(to, function, args, kwargs)


def call_async(
    to: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> rpc.Future[Any]:
    """Likewise, without waiting."""
    stage = _stage.get()
    if stage is None:
        return rpc.rpc_async(to, function, args, kwargs)
    future: rpc.Future[Any] = rpc.Future()
    future.set_result(stage[0].call(to, function, args, kwargs))
    return future


def keep(name: str, value: Any) -> None:
    """Keeps what arrived on this worker."""
    _state().kept[name] = value


def take(name: str) -> Any:
    """What was kept, which is kept no longer."""
    return _state().kept.pop(name)


def count_run(name: str) -> None:
    """Something has run on this worker; see `num_runs`."""
    with _lock:
        _state().runs[name] += 1


def num_runs(name: str) -> int:
    return _state().runs[name]


def drop(name: str) -> None:
    """Drops what was kept."""
    take(name)


def get_kept(name: str) -> Any:
    return _state().kept[name]


def outside(function: Callable[..., Any], *args: Any) -> Any:
    """Calls something outside of the context around this code."""
    return contextvars.Context().run(function, *args)


_open: list[tuple[autograd.context, autograd.Context, contextvars.Context]] = []


def open_context() -> autograd.Context:
    """Opens a context that outlives this function, and is current in `inside` only."""
    manager = autograd.context()
    variables = contextvars.copy_context()
    ctx = variables.run(manager.__enter__)
    _open.append((manager, ctx, variables))
    return ctx


def inside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls something inside the context that is open."""
    return _open[-1][2].run(function, *args, **kwargs)


def close_contexts(index: int | None = None) -> None:
    """Closes one of those that are open, or all."""
    while _open:
        manager, _, variables = _open.pop(-1 if index is None else index)
        variables.run(manager.__exit__, None, None, None)
        if index is not None:
            return


def reset() -> None:
    """Forgets everything that earlier tests left on this worker."""
    close_contexts()
    _real.parameters.clear()
    _real.kept.clear()
    _real.runs.clear()
    functions.forget_events()
    gc.enable()


# ------------------------------------------------------------------ running and comparing


Gradients = dict[str, dict[str, Tensor | None]]
"""By worker and parameter."""


class Outcome(NamedTuple):
    """What a program returned, and the gradients that it left."""

    value: Any
    gradients: Gradients


def in_one_process(program: Callable[[], Any]) -> Outcome:
    """Runs a program in plain torch, all of it here."""
    world = _OneProcess()
    token = _stage.set((world, here()))
    try:
        value = program()
    finally:
        _stage.reset(token)
    found = {
        worker: {name: leaf.grad for name, leaf in state.parameters.items()}
        for worker, state in world.states.items()
    }
    return Outcome(value, found)


def across_workers(program: Callable[[], Any]) -> Outcome:
    """Runs a program that fills ``.grad`` on workers."""
    return Outcome(program(), fetch_grad())


def check(
    program: Callable[[], Any],
    mode: Mode,
    *,
    exact: bool = True,
) -> None:
    """Compares all gradients of a program that returns losses with one process."""
    expected = in_one_process(lambda: torch.autograd.backward(program()))
    found = run(program, mode)
    assert_same(found, expected.gradients, exact=exact)


def run(program: Callable[[], Any], mode: Mode) -> Gradients:
    """The gradients that a program leaves on workers, which returns losses."""
    if mode == "calls":
        torch.autograd.backward(program())
        return fetch_grad()
    accumulate: Literal["dict", "grad"] = "grad" if mode == "into grad" else "dict"
    with autograd.context(accumulate=accumulate) as ctx:
        if mode == "plain":
            torch.autograd.backward(program())
        else:
            ctx.backward(program())
        kept = fetch_dictionary(ctx)
    in_grad = fetch_grad()
    (untouched, found) = (in_grad, kept) if mode == "dictionary" else (kept, in_grad)
    assert_all_none(untouched)
    return found


def check_calls(program: Callable[[], Any], *, exact: bool = True) -> None:
    """Compares a program that runs its own backwards, without context: value and grads."""
    expected = in_one_process(program)
    found = across_workers(program)
    assert_equal(found.value, expected.value, exact=exact)
    assert_same(found.gradients, expected.gradients, exact=exact)


def fetch_grad() -> Gradients:
    """``.grad`` of all parameters of all workers."""
    return on_all_workers(_grad_here)


def fetch_dictionary(ctx: int) -> Gradients:
    """The context's dictionary on all workers."""
    return on_all_workers(dictionary_here, ctx)


def on_all_workers(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Asks all workers, without touching the context around this code."""

    def ask() -> dict[str, Any]:
        with torch.no_grad():
            futures = {w: rpc.rpc_async(w, function, args) for w in _workers}
            return {worker: future.wait() for worker, future in futures.items()}

    found: dict[str, Any] = outside(ask)
    return found


_workers: tuple[str, ...] = WORKERS


def use_workers(*names: str) -> None:
    """From now on, only these are there to be asked by this worker."""
    global _workers
    _workers = names


def _grad_here() -> dict[str, Tensor | None]:
    return {
        name: None if leaf.grad is None else leaf.grad.detach().clone()
        for name, leaf in _real.parameters.items()
    }


def clear_grad() -> None:
    """As an optimizer does."""
    for leaf in _real.parameters.values():
        leaf.grad = None


def dictionary_here(ctx: int) -> dict[str, Tensor | None]:
    """The context's gradients on this worker by the name of the very leaf."""
    try:
        gradients = autograd.get_gradients(ctx)
    except UnknownContext:
        gradients = {}
    found = {
        name: gradients.pop(leaf).detach().clone() if leaf in gradients else None
        for name, leaf in _real.parameters.items()
    }
    assert not gradients, f"gradients of unknown leaves: {gradients}"
    return found


def assert_same(
    found: Mapping[str, Mapping[str, Tensor | None]],
    expected: Mapping[str, Mapping[str, Tensor | None]],
    *,
    exact: bool = True,
) -> None:
    """Both have the same gradients; the one of a leaf that only one knows is None."""
    for worker in {*found, *expected}:
        ours, theirs = found.get(worker, {}), expected.get(worker, {})
        for name in {*ours, *theirs}:
            where = f"{worker}.{name}"
            assert_equal(ours.get(name), theirs.get(name), exact=exact, where=where)


def assert_all_none(gradients: Gradients) -> None:
    assert_same(gradients, {})


def assert_equal(
    found: Any, expected: Any, *, exact: bool = True, where: str = "the value"
) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{where} is {found}, expected {expected}"
        assert found.dtype == expected.dtype, f"{where} is of type {found.dtype}"
        assert found.shape == expected.shape, f"{where} has the shape {found.shape}"
        tolerance = 0 if exact else TOLERANCE
        # Not torch.testing, which takes a second to import in every new worker.
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), (
            f"{where} is {found}, expected {expected}"
        )
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where} is {found}, expected {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, exact=exact, where=f"{where}[{index}]")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key], exact=exact, where=f"{where}.{key}")
    else:
        assert found == expected, f"{where} is {found}, expected {expected}"


def catch(
    kind: type[BaseException], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The error that a function raises, without the frames, which hold graphs."""
    try:
        function(*args, **kwargs)
    except kind as error:
        caught: BaseException | None = error
        while caught is not None:
            caught.__traceback__ = None
            caught = caught.__cause__ or caught.__context__
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def drain_engine() -> None:
    """Makes torch forget the nodes that a failed backward left in this thread's queue.

    Plain torch keeps them until a backward comes that has an older node: the first one
    that a thread makes.
    """
    made: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: made.append(torch.zeros((), requires_grad=True) * 1)
    )
    thread.start()
    thread.join()
    made.pop().backward()


# --------------------------------------------------------------------------- the end of it

ZERO = {
    "contexts": 0,
    "sends": 0,
    "recvs": 0,
    "passes": 0,
    "released_contexts_kept_alive": 0,
}


def counts() -> dict[str, Any]:
    return autograd.get_debug_info()


def counts_everywhere() -> dict[str, dict[str, Any]]:
    return on_all_workers(counts)


def wait_until_released(*workers: str) -> None:
    """Returns when these workers, or all, hold nothing; messages may be on their way."""
    names = workers or _workers
    found: dict[str, Any] = {}

    def is_released() -> bool:
        found.update(counts_everywhere())
        return all(_only_counts(found[name]) == ZERO for name in names)

    try:
        probes.wait_until(is_released, "nothing is left", 3)
    except AssertionError:
        raise AssertionError(f"left: {found}") from None


def wait_until_no_contexts() -> None:
    """Returns when all are over; a handler that still runs may keep its arguments."""
    probes.wait_until(
        lambda: not any(i["contexts"] for i in counts_everywhere().values()),
        "no contexts",
        5,
    )


def _only_counts(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ZERO}


def wait_until_counted(worker: str, **expected: int) -> None:
    """Returns when a worker counts what is expected, and nothing else."""
    found: dict[str, Any] = {}

    def is_so() -> bool:
        found.update(counts_everywhere()[worker])
        return _only_counts(found) == {**ZERO, **expected}

    try:
        probes.wait_until(is_so, "the counts are as expected", 5)
    except AssertionError:
        raise AssertionError(f"expected {expected}, found {found}") from None


def clean(request: Any) -> Iterator[None]:
    """Body of a fixture: a test leaves nothing behind on the workers that it shares."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster = request.getfixturevalue("cluster")
    cluster.run(0, begin)
    failed_before = request.session.testsfailed
    yield
    has_failed = request.session.testsfailed > failed_before
    if not has_failed:
        cluster.run(0, finish)
        return
    for rank in range(cluster.world_size):
        with contextlib.suppress(Exception):
            cluster.run(rank, reset, timeout=5)
            cluster.run(
                rank, gc.collect, timeout=5
            )  # frames of the failure hold graphs


def begin() -> None:
    """The begin of a test: what others left in cycles does not count.

    Frames of errors that a test expected hold graphs, until the collector comes by.
    """
    if any(_only_counts(info) != ZERO for info in counts_everywhere().values()):
        on_all_workers(gc.collect)


def finish() -> None:
    """The end of a test: forgets what it kept, and looks for what else is left."""
    on_all_workers(reset)
    wait_until_released()


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without the cyclic collector on any worker."""
    on_all_workers(gc.disable)
    try:
        yield
    finally:
        on_all_workers(gc.enable)
