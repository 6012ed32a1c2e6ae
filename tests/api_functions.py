"""What workers call on each other in the tests of the public API.

See functions.py, which has the small general ones. These here know gradwire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

import functions
from gradwire import rpc

LIMIT_S = 20.0
POLL_S = 0.01


# ------------------------------------------------------------------------ who and where


def worker_name() -> str:
    """Name of the worker that runs this."""
    return rpc.get_worker_info().name


def call(to: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A remote call; inside a handler it is a nested one."""
    return rpc.rpc_sync(to, function, args, kwargs)


def run_along(route: list[str], function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function at the end of a chain of nested calls."""
    if not route:
        return function(*args)
    return rpc.rpc_sync(route[0], run_along, args=(route[1:], function, *args))


def get_debug_info() -> dict[str, Any]:
    return rpc.get_debug_info()


# ----------------------------------------------------------------------------- waiting


def wait_until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    """Looks again and again until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition did not come true within {limit_s} s")
        time.sleep(POLL_S)


def is_idle() -> bool:
    """Whether this worker neither waits for an answer nor owes one."""
    info = rpc.get_debug_info()
    return not any(
        info[key]
        for key in ("client_active_calls", "server_active_calls", "inflight_bytes")
    )


@contextlib.contextmanager
def blocked_call(to: str, name: str, **kwargs: Any) -> Iterator[rpc.Future[str]]:
    """A call that runs on the other worker until this block ends."""
    future = rpc.rpc_async(to, functions.block_until_set, args=(name,), **kwargs)
    rpc.rpc_sync(to, functions.wait_until_blocked, args=(name,))
    try:
        yield future
    finally:
        rpc.rpc_sync(to, functions.set_event, args=(name,))


def num_served_now() -> int:
    """How many calls this worker has not answered yet, this one included."""
    count: int = rpc.get_debug_info()["server_active_calls"]
    return count


def wait_until_main_thread_waits() -> None:
    """Returns when the main thread of this process is inside a call and stays there."""

    def position() -> tuple[bool, str, int]:
        innermost = frame = sys._current_frames()[threading.main_thread().ident or 0]
        modules = set()
        while frame is not None:
            modules.add(frame.f_globals.get("__name__", ""))
            frame = frame.f_back  # type: ignore[assignment]
        is_inside = any(name.startswith("gradwire.rpc.") for name in modules)
        return is_inside, innermost.f_code.co_filename, innermost.f_lasti

    def is_waiting() -> bool:
        before = position()
        time.sleep(POLL_S)
        return before[0] and position() == before

    wait_until(is_waiting)


# ------------------------------------------------------------------ things to be called


@dataclass
class Point:
    """A class that can be called remotely in all the ways that a class has."""

    x: int
    y: int

    def shifted(self, dx: int, dy: int = 0) -> Point:
        return Point(self.x + dx, self.y + dy)

    def __call__(self, factor: int) -> Point:
        return Point(self.x * factor, self.y * factor)

    @classmethod
    def origin(cls) -> Point:
        return cls(0, 0)

    @staticmethod
    def distance(a: Point, b: Point) -> int:
        return abs(a.x - b.x) + abs(a.y - b.y)


# ------------------------------------------------------------------------------ tensors

_kept: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    """Keeps what arrived, so that a later call can look at it."""
    _kept[name] = value


def take_kept(name: str) -> Any:
    return _kept.pop(name)


def total(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.fill_(value)


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """What makes a tensor an ordinary one with memory of its own."""
    return {
        "is_view": tensor._is_view(),
        "is_inference": tensor.is_inference(),
        "is_leaf": tensor.is_leaf,
        "device": tensor.device.type,
        "offset": tensor.storage_offset(),
        "spare_bytes": tensor.untyped_storage().nbytes() - tensor.nbytes,
    }


ORDINARY = {
    "is_view": False,
    "is_inference": False,
    "is_leaf": True,
    "device": "cpu",
    "offset": 0,
    "spare_bytes": 0,
}


def scale_in_place(tensor: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
    """Changes an argument in place under autograd; it and the gradient of the factor."""
    weight = torch.tensor(factor, requires_grad=True)
    tensor.mul_(weight)
    tensor.sum().backward()
    assert weight.grad is not None
    return tensor.detach(), float(weight.grad)


def describe_module(module: torch.nn.Module) -> dict[str, tuple[str, bool]]:
    """Type of each parameter, and whether it wants a gradient."""
    return {
        name: (type(parameter).__name__, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def switch_grad_off() -> None:
    torch.set_grad_enabled(False)


def switch_grad_off_and_fail() -> None:
    torch.set_grad_enabled(False)
    raise ValueError("with grad mode off")


def is_grad_enabled() -> bool:
    return torch.is_grad_enabled()


# ------------------------------------------------------------------------------- errors


class Refused(Exception):
    """An error as programs have them: its arguments are not those of its base."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"refused with {code}: {reason}")
        self.code = code
        self.reason = reason


class Rated(ValueError):
    """An error that knows how it is pickled, and has a state besides."""

    def __init__(self, rating: int) -> None:
        super().__init__(rating)
        self.rating = rating
        self.notes_taken: list[str] = []

    def __str__(self) -> str:
        return f"rated {self.rating}"


class LooksGood(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> Any:
        return _refuse, (self.args[0],)


def _refuse(text: str) -> NoReturn:
    raise RuntimeError("this cannot be rebuilt")


class Remade(Exception):
    """An error that is made again of its parts, of which it has made its text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"made of {code} and {reason}")
        self.code = code
        self.reason = reason

    def __reduce__(self) -> Any:
        return type(self), (self.code, self.reason)


class Slotted(Exception):
    """An error that keeps what it knows in slots."""

    __slots__ = ("_text", "code")

    def __init__(self, code: int) -> None:
        self.code = code
        self._text = f"slot {code}"

    def __str__(self) -> str:
        return self._text


def raise_error(kind: str) -> NoReturn:
    """Raises one of the errors that tests ask for by name."""
    if kind == "refused":
        raise Refused(7, reason="no room")
    if kind == "rated":
        error = Rated(3)
        error.notes_taken.append("seen")
        raise error
    if kind == "missing file":
        open("/no/such/file").close()
    if kind == "key":
        vars(asyncio)["no such key"]
    if kind == "decode":
        b"ab\xff".decode()
    if kind == "looks good":
        raise LooksGood("surprise")
    if kind == "with cause":
        try:
            vars(asyncio)["the first"]
        except KeyError as cause:
            raise ValueError("the second") from cause
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt("stop it")
    if kind == "cancelled":
        raise asyncio.CancelledError("stop it")
    if kind == "torch":
        torch.ones(2) @ torch.ones(3)
    if kind == "text fails":
        raise _Mute
    if kind == "frozen":
        raise Frozen(7)
    if kind == "memory":
        raise MemoryError("no room")
    if kind == "remade":
        raise Remade(7, "no room")
    if kind == "slotted":
        raise Slotted(7)
    if kind == "sealed":
        raise Sealed("no changes")
    raise AssertionError(f"there is no error {kind!r}")


def call_and_note(to: str, kind: str) -> NoReturn:
    """Adds a note to the error of another worker."""
    try:
        rpc.rpc_sync(to, raise_error, args=(kind,))
    except Exception as error:
        notes = [*getattr(error, "__notes__", ()), f"seen by {worker_name()}"]
        vars(error)["__notes__"] = notes  # what ``add_note`` does from Python 3.11 on
        raise
    raise AssertionError("it did not raise")


@dataclass(frozen=True)
class Frozen(Exception):
    """An error whose attributes cannot be set, nor be restored."""

    code: int


class Sealed(Exception):
    """An error that has no attributes, and lets none be set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")


# ------------------------------------------------------------------------------ futures


@rpc.functions.async_execution
def add_elsewhere(to: str, x: Any, y: Any, z: Any) -> rpc.Future[Any]:
    """Adds two numbers on a third worker and the third one here."""
    future = rpc.rpc_async(to, functions.add, args=(x, y))
    return future.then(lambda done: done.value() + z)


class Adder:
    """Asynchronous functions inside a class."""

    @staticmethod
    @rpc.functions.async_execution
    def add_statically(to: str, x: Any, y: Any) -> rpc.Future[Any]:
        return rpc.rpc_async(to, functions.add, args=(x, y))

    @classmethod
    @rpc.functions.async_execution
    def add_as_class(cls, to: str, x: Any, y: Any) -> rpc.Future[Any]:
        return rpc.rpc_async(to, functions.add, args=(x, y))


@rpc.functions.async_execution
def fail_through_future(ours: bool) -> Any:
    """Returns a future that ends with an error, of our class or of torch's."""
    future: Any = rpc.Future() if ours else torch.futures.Future()
    future.set_exception(KeyError("through the future"))
    return future


@rpc.functions.async_execution
def forget_to_return_a_future() -> Any:
    return 5


@rpc.functions.async_execution
def complete_when_told(name: str) -> rpc.Future[str]:
    """A future that another call completes; no thread is held until then."""
    future: rpc.Future[str] = rpc.Future()
    keep(name, future)
    return future


def tell(name: str, value: str) -> None:
    """Completes the future of `complete_when_told`."""
    wait_until(lambda: name in _kept)
    take_kept(name).set_result(value)


async def add_soon(x: Any, y: Any) -> Any:
    await asyncio.sleep(0)
    return x + y


async def add_on(to: str, x: Any, y: Any) -> tuple[str, Any]:
    """Awaits a call of its own."""
    total = await rpc.rpc_async(to, functions.add, args=(x, y))
    return worker_name(), total


async def fail_soon(text: str) -> NoReturn:
    await asyncio.sleep(0)
    raise LookupError(text)


async def exit_soon() -> NoReturn:
    await asyncio.sleep(0)
    sys.exit(3)


async def wait_without_grad(name: str) -> None:
    """Waits for another coroutine inside of ``no_grad``; see `meet`."""
    with torch.no_grad():
        await meet(name, 2)


async def scale_soon(x: torch.Tensor, factor: float) -> torch.Tensor:
    await asyncio.sleep(0)
    return x * factor


async def has_autocast() -> list[bool]:
    """Before and after a step."""
    before = torch.is_autocast_enabled("cpu")
    await asyncio.sleep(0)
    return [before, torch.is_autocast_enabled("cpu")]


async def block_the_loop(name: str) -> str:
    """Blocks all coroutines of this worker, which no coroutine should do."""
    return functions.block_until_set(name)


async def leave_at_once() -> None:
    rpc.shutdown(graceful=False)


async def call_and_block(to: str) -> Any:
    """Does what an asynchronous function must not do."""
    return rpc.rpc_sync(to, functions.add, args=(1, 2))


async def wait_and_block(to: str) -> Any:
    future: rpc.Future[Any] = rpc.Future()  # nobody completes it
    return future.wait(LIMIT_S)


_meetings: dict[str, list[asyncio.Future[int]]] = {}


async def meet(name: str, size: int) -> int:
    """Returns when so many of these calls are there at the same time."""
    waiting = _meetings.setdefault(name, [])
    here: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting.append(here)
    if len(waiting) == size:
        for other in _meetings.pop(name):
            other.set_result(size)
    return await asyncio.wait_for(here, LIMIT_S)


# --------------------------------------------------------------------------- deadlines

_marks: list[str] = []
_marks_lock = threading.Lock()  # guards _marks; touched by handlers on any thread


def mark(text: str, *_: Any) -> None:
    """Leaves a trace of having run."""
    with _marks_lock:
        _marks.append(text)


def get_marks() -> list[str]:
    with _marks_lock:
        return list(_marks)


def block_and_take(name: str, argument: torch.Tensor) -> None:
    """Holds on to an argument until the event is set."""
    functions.block_until_set(name)


def block_and_return(name: str, size: int) -> torch.Tensor:
    functions.block_until_set(name)
    return torch.ones(size)


# ----------------------------------------------------------------- beginning and the end


def list_threads() -> list[str]:
    """Names of the threads of this process that are ours."""
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("gradwire")
    )


def set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def grad_modes_of_callbacks(to: str) -> list[bool]:
    """What callbacks see that come while a handler waits inside ``no_grad``."""
    seen = []
    with torch.no_grad():
        for number in range(10):
            # Blocked until the callback is there: else it would run where it is added.
            with blocked_call(to, f"callback {to} {number}") as future:
                mode = future.then(lambda _: torch.is_grad_enabled())
            seen.append(mode.wait())
    return seen
