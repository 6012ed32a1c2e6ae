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
import weakref
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


class _State:
    """What one worker keeps between calls."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.kept: dict[str, Any] = {}


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


def _send(value: Any) -> Any:
    """A copy, as the wire makes one, that is part of the graph."""
    copies: dict[int, Any] = {}

    def copied(item: Any) -> Any:
        if isinstance(item, Tensor):
            return copies.setdefault(id(item), item.clone())
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(copied, item))
        if isinstance(item, (list, tuple)):
            return type(item)(map(copied, item))
        if isinstance(item, dict):
            return {key: copied(entry) for key, entry in item.items()}
        if isinstance(item, Box):
            return Box(copied(item.value))
        return item

    return copied(value)


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


def get_kept(name: str) -> Any:
    return _state().kept[name]


def reset() -> None:
    """Forgets everything that earlier tests left on this worker."""
    _real.parameters.clear()
    _real.kept.clear()
    _runs.clear()
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
    return _on_all_workers(_grad_here)


def fetch_dictionary(ctx: int) -> Gradients:
    """The context's dictionary on all workers."""
    return _on_all_workers(dictionary_here, ctx)


def _on_all_workers(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Asks all workers, without touching the context around this code."""

    def ask() -> dict[str, Any]:
        with torch.no_grad():
            futures = {w: rpc.rpc_async(w, function, args) for w in WORKERS}
            return {worker: future.wait() for worker, future in futures.items()}

    return contextvars.Context().run(ask)


def _grad_here() -> dict[str, Tensor | None]:
    return {
        name: None if leaf.grad is None else leaf.grad.detach().clone()
        for name, leaf in _real.parameters.items()
    }


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
        torch.testing.assert_close(
            found.detach(),
            expected.detach(),
            rtol=0 if exact else TOLERANCE,
            atol=0 if exact else TOLERANCE,
            msg=lambda text: f"{where}: {text}",
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
    return _on_all_workers(counts)


def wait_until_released(*workers: str) -> None:
    """Returns when these workers, or all, hold nothing; messages may be on their way."""
    names = workers or WORKERS
    found: dict[str, Any] = {}

    def is_released() -> bool:
        found.update(counts_everywhere())
        return all(_only_counts(found[name]) == ZERO for name in names)

    try:
        probes.wait_until(is_released, "nothing is left")
    except AssertionError:
        raise AssertionError(f"left: {found}") from None


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
    """Body of a fixture: tests begin with clean workers, and leave nothing behind."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster = request.getfixturevalue("cluster")
    for rank in range(cluster.world_size):
        cluster.run(rank, reset)
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed == failed_before and cluster.is_healthy():
        for rank in range(cluster.world_size):
            cluster.run(rank, reset)
        cluster.run(0, wait_until_released)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without the cyclic collector on any worker."""
    _on_all_workers(gc.disable)
    try:
        yield
    finally:
        _on_all_workers(gc.enable)


# -------------------------------------------------------------- nodes that tests watch


class Broken(Exception):
    """Raised in backward; its arguments are not those of its base."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"broken with {code}: {reason}")
        self.code = code
        self.reason = reason


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise Broken(7, reason=f"by {here()}")


def break_backward(x: Tensor) -> Tensor:
    return _Break.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        functions.block_until_set(ctx.name)
        return gradient, None


def pause_backward(x: Tensor, name: str) -> Tensor:
    """The backward blocks here; see `functions.block_until_set`."""
    return _Pause.apply(x, name)  # type: ignore[no-any-return,no-untyped-call]


_runs: defaultdict[str, int] = defaultdict(int)


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        with _lock:
            _runs[ctx.name] += 1
        return gradient, None


def count_backward(x: Tensor, name: str) -> Tensor:
    return _Count.apply(x, name)  # type: ignore[no-any-return,no-untyped-call]


def num_backwards(name: str) -> int:
    """How often the backward of `count_backward` has run on this worker."""
    return _runs[name]


class Witness:
    """Lives as long as the graph that it is part of."""


_witnesses: weakref.WeakSet[Witness] = weakref.WeakSet()


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.witness = Witness()
        _witnesses.add(ctx.witness)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def watch_graph(x: Tensor) -> Tensor:
    return _Watch.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def num_graphs() -> int:
    """How many graphs with a `watch_graph` are alive on this worker."""
    return len(_witnesses)


def wait_until_graphs(worker: str, number: int) -> None:
    """Returns when so many watched graphs are alive on a worker."""
    probes.wait_until(
        lambda: _on_all_workers(num_graphs)[worker] == number,
        f"{number} graphs on {worker}, found {_on_all_workers(num_graphs)}",
        5,
    )


# ------------------------------------------------------------- what is called on workers


class Box:
    """A class of a program, with a tensor inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Pair(NamedTuple):
    first: Any
    second: Any


def linear(x: Tensor) -> Tensor:
    return x @ parameter("weight")


def affine(x: Tensor) -> Tensor:
    return torch.tanh(x @ parameter("weight") + parameter("bias"))


def counted(x: Tensor, name: str = "counted") -> Tensor:
    return count_backward(linear(x), name)


def watched(x: Tensor) -> Tensor:
    return watch_graph(linear(x))


def paused(x: Tensor, name: str) -> Tensor:
    return pause_backward(affine(x), name)


def double(x: Any) -> Any:
    return x * 2


def join(*tensors: Tensor) -> Tensor:
    """Uses each of them differently."""
    return sum((t * (i + 1) for i, t in enumerate(tensors)), parameter("bias"))  # type: ignore[return-value]


def join_by_name(*, left: Tensor, right: Tensor) -> Tensor:
    return left @ parameter("weight") - right


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ parameter("weight"), x * parameter("bias")


def pack(x: Tensor) -> dict[str, Any]:
    """Tensors of all kinds, in containers of all kinds."""
    y = affine(x)
    return {
        "list": [y, x.detach() * 3, {"deep": (y * 2, 7)}],
        "named": Pair(y.sum(), y.argmax()),
        "box": Box(linear(x)),
        "integers": torch.arange(SIZE),
        "flags": y > 0,
        "again": y,
        "nothing": None,
    }


def unpack(pack: dict[str, Any], scale: float) -> Tensor:
    """Takes what `pack` made, as an argument."""
    first, constant, rest = pack["list"]
    deep, number = rest["deep"]
    total = first * constant + deep * number + pack["box"].value * scale
    total = total[pack["integers"]] * pack["flags"] + pack["again"]
    return total * pack["named"].first + pack["named"].second


def split_three_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return affine(x), x.detach() * 2, linear(x)


def get_constant(x: Tensor) -> Tensor:
    return x.detach() * 2


def get_indices(x: Tensor) -> Tensor:
    return x.argmax(dim=0)


def get_parameter(name: str) -> Tensor:
    """A leaf of this worker, as it is."""
    return parameter(name)


def get_own(x: Any = None) -> Tensor:
    """Needs grad because of what is here, not because of what came."""
    return parameter("weight") * 2


def return_argument(x: Tensor) -> Tensor:
    return x


def forward_along(route: list[str], x: Tensor) -> Tensor:
    """Goes from worker to worker, with something to do on the way there and back."""
    y = affine(x)
    if route:
        y = y + call(route[0], forward_along, route[1:], y * 2)
    return linear(y)


def relay(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return call(to, function, *args)


def affine_relay(to: str, function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Computes, passes on, computes."""
    return linear(call(to, function, affine(x), *args))


def fan_out(workers: list[str], function: Callable[..., Any], x: Tensor) -> Tensor:
    y = affine(x)
    futures = [call_async(worker, function, y) for worker in workers]
    return sum(future.wait() for future in futures)  # type: ignore[return-value]


async def affine_soon(x: Tensor) -> Tensor:
    return affine(x)


async def await_relay(to: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    """Awaits a call of its own."""
    y = await call_async(to, function, affine(x))
    return linear(y)


@rpc.functions.async_execution
def relay_through_future(
    to: str, function: Callable[..., Any], x: Tensor
) -> rpc.Future[Tensor]:
    """Its reply is made in a callback."""
    future = call_async(to, function, affine(x))
    return future.then(lambda done: linear(done.value()))


@rpc.functions.async_execution
def relay_twice_through_futures(
    to: str, function: Callable[..., Any], x: Tensor
) -> rpc.Future[Tensor]:
    """The second call is made by a callback of the first."""
    ended: rpc.Future[Tensor] = rpc.Future()

    def go_on(first: rpc.Future[Tensor]) -> None:
        second = call_async(to, function, linear(first.value()))
        second.add_done_callback(lambda done: ended.set_result(done.value()))

    call_async(to, function, affine(x)).add_done_callback(go_on)
    return ended


def keep_linear(name: str, x: Tensor) -> None:
    """The value stays here."""
    keep(name, linear(x))


def use_kept(name: str, x: Tensor) -> Tensor:
    return get_kept(name) * x


def add_to_kept(name: str, x: Tensor) -> None:
    keep(name, get_kept(name) + linear(x))


def kept_total(name: str) -> Tensor:
    total: Tensor = get_kept(name).sum()
    return total


def wait_then(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Blocks in the handler first; see `functions.block_until_set`."""
    functions.block_until_set(name)
    return function(*args)


def fail_after(x: Tensor) -> Tensor:
    """A handler that records, and fails then."""
    watched(x)
    raise ValueError("after the forward")


# ------------------------------------------------ programs: run on w0, and return losses


def _x() -> Tensor:
    return parameter("x")


def one_call() -> Tensor:
    return call("w1", affine, _x()).sum()


def call_with_names() -> Tensor:
    return call("w1", join_by_name, left=_x(), right=parameter("y")).sum()


def call_without_waiting() -> Tensor:
    future = call_async("w1", affine, _x())
    return future.wait().sum()


def two_calls_at_once() -> Tensor:
    futures = [call_async(w, affine, _x()) for w in ("w1", "w2")]
    first, second = (future.wait() for future in futures)
    return (first * second).sum()


def several_results() -> Tensor:
    product, scaled = call("w1", split, _x())
    return (product.tanh() * scaled).sum()


def nested_containers() -> Tensor:
    packed = call("w1", pack, _x())
    return call("w2", unpack, packed, 0.5).sum()


def grad_and_no_grad_results() -> Tensor:
    first, constant, second = call("w1", split_three_ways, _x())
    assert [t.requires_grad for t in (first, constant, second)] == [True, False, True]
    return (first * constant - second).sum()


def grad_and_integer_arguments() -> Tensor:
    rows = torch.tensor([0, 0, 2])
    constant = torch.full((SIZE, SIZE), 0.5, dtype=torch.double)
    return call("w1", mix, rows, _x(), constant, parameter("y"), 3).sum()


def mix(rows: Tensor, x: Tensor, constant: Tensor, y: Tensor, number: int) -> Tensor:
    assert not rows.requires_grad and not constant.requires_grad
    return x[rows] * constant + y * number + linear(x)


def same_tensor_twice_in_one_call() -> Tensor:
    x = _x() * 2
    return call("w1", join, x, x).sum()


def same_tensor_in_two_calls() -> Tensor:
    x = _x() * 2
    return (call("w1", linear, x) * call("w1", affine, x)).sum()


def same_tensor_to_three_workers() -> Tensor:
    x = _x() * 2
    y, z, v = (call(worker, affine, x) for worker in ("w1", "w2", "w3"))
    return (y * z + v).sum()


def same_result_twice_in_one_reply() -> Tensor:
    first, second = call("w1", twins, _x())
    return (first * 2 + second.tanh()).sum()


def twins(x: Tensor) -> tuple[Tensor, Tensor]:
    y = affine(x)
    return y, y


def call_to_oneself() -> Tensor:
    return call(here(), affine, _x()).sum()


def call_to_oneself_and_out() -> Tensor:
    return call(here(), affine_relay, "w1", linear, _x()).sum()


def result_goes_back_to_its_worker() -> Tensor:
    y = call("w1", affine, _x())
    z = call("w1", linear, y + parameter("y"))
    return (y * z).sum()


def chain_over_all_workers() -> Tensor:
    value = _x()
    for worker in ("w1", "w2", "w3", "w1"):
        value = call(worker, affine, value) + value
    return value.sum()


def there_and_back() -> Tensor:
    """A calls B, which calls A."""
    return call("w1", affine_relay, "w0", linear, _x()).sum()


def there_and_back_in_the_loss() -> Tensor:
    """The same parameter of A is used by B's call and around it."""
    y = call("w1", affine_relay, "w0", linear, _x())
    return linear(y).sum()


def deep_nesting() -> Tensor:
    route = ["w2", "w0", "w3", "w1", "w0", "w1", "w2"]
    return call("w1", forward_along, route, _x()).sum()


def ping_pong() -> Tensor:
    return call("w1", forward_along, ["w0", "w1"] * 4, _x()).sum()


def diamond() -> Tensor:
    """w1 and w2 both get the input, and both call w3."""
    left = call_async("w1", affine_relay, "w3", linear, _x())
    right = call_async("w2", affine_relay, "w3", affine, _x())
    return (left.wait() * right.wait()).sum()


def diamond_inside_a_handler() -> Tensor:
    return call("w1", fan_out, ["w2", "w3"], affine, _x()).sum()


def unused_result() -> Tensor:
    call("w1", affine, _x())
    return call("w2", linear, _x()).sum()


def unused_part_of_a_result() -> Tensor:
    used, _ = call("w1", split, _x())
    return used.sum()


def unused_argument() -> Tensor:
    return call("w1", first_of, _x(), parameter("y")).sum()


def first_of(x: Tensor, y: Tensor) -> Tensor:
    return linear(x)


def only_unused_results() -> Tensor:
    """The loss does not depend on any call."""
    call("w1", affine_relay, "w2", linear, _x())
    return (parameter("y") ** 2).sum()


def detached_result() -> Tensor:
    y = call("w1", affine, _x())
    return (y.detach() * call("w2", affine, _x())).sum()


def detached_argument() -> Tensor:
    return (call("w1", affine, _x().detach()) * parameter("y")).sum()


def result_used_twice() -> Tensor:
    y = call("w1", affine, _x())
    return (y * y.exp() + y).sum()


def result_used_by_two_workers() -> Tensor:
    y = call("w1", affine, _x())
    return (call("w2", linear, y) * call("w3", linear, y)).sum()


def result_without_grad() -> Tensor:
    constant = call("w1", get_constant, _x())
    assert not constant.requires_grad
    return (constant * _x()).sum()


def integer_result() -> Tensor:
    indices = call("w1", get_indices, _x())
    return _x()[indices].sum()


def result_of_remote_leaves_only() -> Tensor:
    own = call("w1", get_own)
    assert own.requires_grad
    return (own * 3).sum()


def remote_leaf_itself() -> Tensor:
    weight = call("w1", get_parameter, "weight")
    return (weight * _x()).sum()


def argument_comes_back() -> Tensor:
    y = call("w1", return_argument, _x() * 2)
    return (y**2).sum()


def leaf_comes_back() -> Tensor:
    y = call("w1", return_argument, _x())
    return (y**2).sum()


def nested_call_without_grad() -> Tensor:
    """Nothing with a history goes to w1, which calls w2 nevertheless."""
    return call("w1", relay, "w2", get_own).sum()


def history_passes_through() -> Tensor:
    """w1 has no part of its own in what it passes on."""
    return call("w1", relay, "w2", affine, _x()).sum()


def coroutine() -> Tensor:
    return call("w1", affine_soon, _x()).sum()


def coroutine_that_calls() -> Tensor:
    return call("w1", await_relay, "w2", affine, _x()).sum()


def reply_from_a_callback() -> Tensor:
    return call("w1", relay_through_future, "w2", affine, _x()).sum()


def call_from_a_callback() -> Tensor:
    return call("w1", relay_twice_through_futures, "w2", affine, _x()).sum()


def callback_of_the_caller() -> Tensor:
    future = call_async("w1", affine, _x())
    return future.then(lambda done: linear(done.value()).sum()).wait()


def many_calls() -> Tensor:
    value = _x()
    for number in range(20):
        value = value + call(WORKERS[number % 4], affine, value)
    return value.sum()


def many_calls_side_by_side() -> Tensor:
    futures = [
        call_async(WORKERS[number % 4], affine, _x() * number) for number in range(20)
    ]
    return sum((future.wait() for future in futures), torch.zeros(())).sum()


def several_losses() -> list[Tensor]:
    y = call("w1", affine, _x())
    return [y.sum(), (call("w2", linear, y) ** 2).sum(), _x().exp().sum()]


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        one_call,
        call_with_names,
        call_without_waiting,
        two_calls_at_once,
        several_results,
        nested_containers,
        grad_and_no_grad_results,
        grad_and_integer_arguments,
        same_tensor_twice_in_one_call,
        same_tensor_in_two_calls,
        same_tensor_to_three_workers,
        same_result_twice_in_one_reply,
        call_to_oneself,
        call_to_oneself_and_out,
        result_goes_back_to_its_worker,
        chain_over_all_workers,
        there_and_back,
        there_and_back_in_the_loss,
        deep_nesting,
        ping_pong,
        diamond,
        diamond_inside_a_handler,
        unused_result,
        unused_part_of_a_result,
        unused_argument,
        only_unused_results,
        detached_result,
        detached_argument,
        result_used_twice,
        result_used_by_two_workers,
        result_without_grad,
        integer_result,
        result_of_remote_leaves_only,
        remote_leaf_itself,
        argument_comes_back,
        leaf_comes_back,
        nested_call_without_grad,
        history_passes_through,
        coroutine,
        coroutine_that_calls,
        reply_from_a_callback,
        call_from_a_callback,
        callback_of_the_caller,
        many_calls,
        many_calls_side_by_side,
        several_losses,
    )
}
"""Programs that mean the same with and without a context, by name."""

# Three or more terms meet in one gradient, in an order that is not fixed.
UNORDERED = {
    "chain_over_all_workers",
    "deep_nesting",
    "ping_pong",
    "diamond",
    "diamond_inside_a_handler",
    "same_tensor_to_three_workers",
    "call_from_a_callback",
    "many_calls",
    "many_calls_side_by_side",
    "several_losses",
    "nested_containers",
}


def kept_value_is_used_again() -> Tensor:
    call("w1", keep_linear, "a", _x())
    return call("w1", use_kept, "a", parameter("y")).sum()


def kept_value_is_used_twice() -> Tensor:
    call("w1", keep_linear, "a", _x())
    first = call("w1", use_kept, "a", parameter("y"))
    second = call("w1", use_kept, "a", parameter("z"))
    return (first * second).sum()


def kept_value_grows() -> Tensor:
    call("w1", keep_linear, "a", _x())
    call("w1", add_to_kept, "a", parameter("y"))
    call("w1", add_to_kept, "a", parameter("z"))
    return call("w1", kept_total, "a")  # type: ignore[no-any-return]


def kept_argument_is_used_again() -> Tensor:
    """The received tensor itself stays there."""
    call("w1", keep, "a", _x() * 2)
    return call("w1", use_kept, "a", parameter("y")).sum()


def kept_value_is_fetched_by_another_worker() -> Tensor:
    call("w1", keep_linear, "a", _x())
    y = call("w2", affine_relay, "w1", use_kept_second, parameter("y"), "a")
    return y.sum()


def use_kept_second(x: Tensor, name: str) -> Tensor:
    return use_kept(name, x)


def kept_by_two_workers() -> Tensor:
    for worker in ("w1", "w2"):
        call(worker, keep_linear, "a", _x())
    y, z = (call(worker, use_kept, "a", parameter("y")) for worker in ("w1", "w2"))
    return (y * z).sum()


def kept_value_is_never_used() -> Tensor:
    call("w1", keep_linear, "a", _x())
    return call("w2", linear, _x()).sum()


def kept_reply_of_a_nested_call() -> Tensor:
    """w1 keeps what w2 gave it, and sends it to w3 later."""
    call("w1", keep_result_of, "a", "w2", affine, _x())
    return call("w1", send_kept, "a", "w3", linear).sum()


def keep_result_of(name: str, to: str, function: Callable[..., Any], x: Any) -> None:
    keep(name, call(to, function, x))


def send_kept(name: str, to: str, function: Callable[..., Any]) -> Any:
    return call(to, function, get_kept(name))


CONTEXT_PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        kept_value_is_used_again,
        kept_value_is_used_twice,
        kept_value_grows,
        kept_argument_is_used_again,
        kept_value_is_fetched_by_another_worker,
        kept_by_two_workers,
        kept_value_is_never_used,
        kept_reply_of_a_nested_call,
    )
}
"""Programs that need one: values stay on a worker between calls."""
