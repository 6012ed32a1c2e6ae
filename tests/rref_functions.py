"""What workers run for the tests of references. Found by name, so it stands here."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

import autograd_functions as ag
import functions
from autograd_functions import parameter
from gradwire import rpc
from gradwire.rpc import Future, RRef

LIMIT_S = 10.0
COLLECT_S = 0.1
COUNTS = (
    "owner_rrefs",
    "forks",
    "user_rrefs",
    "pending_users",
    "pending_children",
    "awaited_values",
)

E = TypeVar("E", bound=BaseException)

kept: dict[str, Any] = {}
"""What a worker keeps from one call to the next, by name."""


# ------------------------------------------------------------------------------ waiting


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Returns as soon as a condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition} did not come true within {limit_s} s")
        time.sleep(0.001)


def catch(
    kind: type[E] | tuple[type[E], ...],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> E:
    """The error that a call raises; without its traceback, which would keep references."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return error.with_traceback(None)
    raise AssertionError(f"no {kind} was raised")


# ------------------------------------------------------------------------------- counts


def counts() -> dict[str, int]:
    """What this worker still has to do with references, without what is zero."""
    info = rpc.get_debug_info()
    return {key: info[key] for key in COUNTS if info[key]}


def wait_until_nothing_is_left(limit_s: float = LIMIT_S) -> None:
    """Fails if this worker has to do with a reference for longer than the limit."""
    start = time.monotonic()
    is_collected = False
    while found := counts():
        waited = time.monotonic() - start
        if waited > limit_s:
            raise AssertionError(f"{rpc.get_worker_info().name} still has {found}")
        if waited > COLLECT_S and not is_collected:
            gc.collect()  # takes a while, and is needed only after errors
            is_collected = True
        time.sleep(0.002)


def end_test() -> None:
    """Drops what this worker keeps; then there must soon be nothing left."""
    kept.clear()
    functions.forget_events()
    wait_until_nothing_is_left()


def clean(request: Any) -> Iterator[None]:
    """Body of a fixture: a test leaves no references on the workers that it shares."""
    cluster: Any = None
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
    yield
    if cluster is not None:
        check_nothing_is_left(cluster)


def check_nothing_is_left(cluster: Any, *lost: int) -> None:
    ranks = [rank for rank in range(cluster.world_size) if rank not in lost]
    for ending in [cluster.start(rank, end_test) for rank in ranks]:
        ending.result()


def count_of(key: str) -> int:
    value: int = rpc.get_debug_info()[key]
    return value


# ------------------------------------------------------------------ values and functions


class Counter:
    """A value with methods of all kinds, and plain attributes."""

    label = "counter"

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.none = None

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def get(self) -> int:
        return self.value

    def where(self) -> str:
        return rpc.get_worker_info().name

    def all_of(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return args, kwargs

    def itself(self) -> Counter:
        return self

    def reference(self) -> RRef[Counter]:
        return RRef(self)

    def fail(self, text: str) -> NoReturn:
        raise KeyError(text)

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def of_nobody(x: int) -> int:
        return x + 1

    @rpc.functions.async_execution
    def add_elsewhere(self, to: str, amount: int) -> Future[int]:
        return rpc.rpc_async(to, functions.add, args=(self.value, amount)).then(
            lambda future: future.value() * 10
        )

    @rpc.functions.async_execution
    def add_nowhere(self) -> Any:
        return 5

    async def add_slowly(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)

    async def fail_slowly(self) -> NoReturn:
        await asyncio.sleep(0)
        raise LookupError("slow")


class MyError(Exception):
    """An error that both sides can import."""


def raise_my_error(text: str = "mine") -> NoReturn:
    raise MyError(text)


async def add_slowly(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def raise_slowly() -> NoReturn:
    await asyncio.sleep(0)
    raise MyError("slow")


@rpc.functions.async_execution
def add_elsewhere(to: str, a: int, b: int) -> Future[int]:
    return rpc.rpc_async(to, functions.add, args=(a, b))


@rpc.functions.async_execution
def raise_elsewhere(to: str) -> Future[Any]:
    return rpc.rpc_async(to, raise_my_error)


@rpc.functions.async_execution
def no_future() -> Any:
    return 1


def return_unsendable() -> Any:
    return threading.Lock()


# ------------------------------------------------------------------ with references


def keep(name: str, value: Any) -> None:
    kept[name] = value


def keep_own(name: str, value: Any) -> RRef[Any]:
    """Makes a reference here, keeps it and returns it."""
    kept[name] = RRef(value)
    return kept[name]


def give(name: str) -> Any:
    return kept[name]


def take(name: str) -> Any:
    """As `give`, and forgets it."""
    return kept.pop(name)


def make(value: Any) -> RRef[Any]:
    """A new reference to a value that nobody else holds."""
    return RRef(value)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def fetch_all(rrefs: Iterable[RRef[Any]]) -> list[Any]:
    return [rref.to_here() for rref in rrefs]


def describe(rref: RRef[Any]) -> tuple[bool, str, bool]:
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()


def local(rref: RRef[Any]) -> Any:
    return rref.local_value()


def pass_on(rref: RRef[Any], to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function elsewhere with a reference that came from elsewhere."""
    return rpc.rpc_sync(to, function, args=(rref, *args))


def pass_around(rref: RRef[Any], *ways: str) -> Any:
    """Sends a reference from worker to worker; the last one fetches the value."""
    if not ways:
        return rref.to_here()
    return rpc.rpc_sync(ways[0], pass_around, args=(rref, *ways[1:]))


def fetch_from(to: str, name: str) -> Any:
    """Fetches the value of a reference that another worker keeps."""
    rref: RRef[Any] = rpc.rpc_sync(to, give, args=(name,))
    return rref.to_here()


def make_remote(to: str, function: Callable[..., Any], *args: Any) -> RRef[Any]:
    """A reference of this worker to a value of another, given to the caller."""
    return rpc.remote(to, function, args=args)


def note_start(name: str, *_: Any) -> None:
    """Says that it has begun."""
    functions.set_event(name)


def has_begun(name: str) -> bool:
    return functions.get_event(name).is_set()


def wait_and_make(name: str, value: Any) -> Any:
    """A value, as soon as an event is set."""
    functions.block_until_set(name)
    return value


def wait_and_refer(name: str, value: Any) -> RRef[Any]:
    functions.block_until_set(name)
    return RRef(value)


def wait_and_give(name: str, key: str) -> Any:
    functions.block_until_set(name)
    return kept.pop(key)


class Undecodable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return _refuse, ("this cannot be read",)


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


class Hooked:
    """Runs a function of the sender while it is packed."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self.hook = hook

    def __reduce__(self) -> Any:
        self.hook()
        return int, ()


def wait_a_bit(value: Any = None) -> Any:
    """Takes long for a function, so that others overtake it."""
    time.sleep(0.001)
    return value


def return_with_undecodable() -> Any:
    return [RRef(1), Undecodable(), RRef(2)]


def return_with_unsendable() -> Any:
    return [RRef(1), threading.Lock(), RRef(2)]


# ----------------------------------------------------------------------------- autograd


class PlayedRef:
    """A reference in a program that `autograd_functions.in_one_process` plays."""

    def __init__(self, owner: str, value: Any) -> None:
        self._owner = owner
        self._value = value

    def to_here(self) -> Any:
        return self._value if ag.here() == self._owner else ag._send(self._value)

    local_value = to_here

    def rpc_sync(self) -> Any:
        return _PlayedProxy(self, lambda result: result)

    def rpc_async(self) -> Any:
        return _PlayedProxy(self, _done)

    def remote(self) -> Any:
        return _PlayedProxy(self, lambda result: PlayedRef(self._owner, result))


class _PlayedProxy:
    def __init__(self, ref: PlayedRef, wrap: Callable[[Any], Any]) -> None:
        self._ref = ref
        self._wrap = wrap

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ref._value, name)
        return lambda *args: self._wrap(ag.call(self._ref._owner, method, *args))


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def refer(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """`rpc.remote`, which can be played."""
    if ag._stage.get() is None:
        return rpc.remote(to, function, args=args)
    return PlayedRef(to, ag.call(to, function, *args))


def own(value: Any) -> Any:
    """`RRef`, which can be played."""
    return RRef(value) if ag._stage.get() is None else PlayedRef(ag.here(), value)


class Layer:
    """A stage of a model; its weight is a parameter of the worker that it runs on."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ parameter("layer")

    def forward_all(self, *rrefs: Any) -> Tensor:
        return sum((self.forward(r.to_here()) for r in rrefs), torch.zeros(()))

    @rpc.functions.async_execution
    def forward_elsewhere(self, to: str, x: Tensor) -> Any:
        return ag.call_async(to, weighted, self.forward(x))


def weighted(x: Tensor) -> Tensor:
    return (x @ parameter("w")).sin()


def keep_computed(name: str) -> Any:
    """A reference to a tensor with a history of this worker."""
    kept[name] = RRef(parameter("w") * 2)
    return kept[name]


def square(x: Tensor) -> Tensor:
    return x * x


def weight() -> Tensor:
    return parameter("w")


def fetch_and_weight(rref: Any) -> Tensor:
    return weighted(rref.to_here())


def weight_and_refer(x: Tensor) -> Any:
    """A new reference to what was computed here."""
    return own(weighted(x))


def relay(rref: Any, to: str) -> Tensor:
    """Has another worker go on with a reference."""
    return weighted(ag.call(to, fetch_and_weight, rref))


def refer_onwards(rref: Any, to: str) -> Any:
    return refer(to, fetch_and_weight, rref)


def loss_of(x: Tensor) -> Tensor:
    return weighted(x).sum()


def fetch_loss(rref: Any) -> Tensor:
    return loss_of(rref.to_here())
