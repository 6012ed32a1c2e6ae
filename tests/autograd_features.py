"""The same program in one process and on several workers, and what its workers run.

A program is a function of a `Session`. It makes its leaves with `leaf`, calls functions
on other workers with `call`, and runs its backwards through the session. `check` runs it
twice on the worker that it is called on: once with all functions called right here, which
is plain torch, and once with real calls. All gradients of all leaves, and whatever the
program has written down with `note`, must be the same.

    def program(session):
        y = call("w1", scale, leaf("x", 3), "weight")
        session.backward(y.sum())

    check(program, "dict")
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import api_functions as api
from gradwire import autograd, rpc
from gradwire.errors import UnknownContext

WORKERS = ("w0", "w1", "w2", "w3")

LOCAL = "local"
"""All in one process, plain torch: what the others are compared with."""
BARE = "bare"
"""No context, ``loss.backward()``."""
DICT = "dict"
"""A context, and its own backward into its dictionary."""
GRAD = "grad"
"""A context, and its own backward into ``.grad``."""
PLAIN = "plain"
"""A context, and ``loss.backward()``."""

MODES = [BARE, DICT, GRAD, PLAIN]
INTO_GRAD = [BARE, GRAD, PLAIN]
IN_CONTEXT = [DICT, GRAD, PLAIN]

TOLERANCE = 1e-10


# --------------------------------------------------------------------- what a worker has


@dataclass
class Notebook:
    """What programs have made on this worker since the last `reset`."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, list[Any]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


_book = Notebook()
_lock = threading.Lock()  # guards the notes, which hooks on any thread make
_is_local = False  # the program runs in one process


def leaf(
    name: str,
    *shape: int,
    dtype: torch.dtype = torch.float64,
    parameter: bool = False,
    data: Tensor | None = None,
) -> Tensor:
    """The leaf of this name, made at first use; its values depend on the name only."""
    if name not in _book.leaves:
        if data is None:
            data = numbers(name, *shape, dtype=dtype)
        _book.leaves[name] = (
            torch.nn.Parameter(data) if parameter else data.requires_grad_()
        )
    return _book.leaves[name]


def numbers(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A constant whose values depend on its name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def adopt(name: str, tensor: Tensor) -> None:
    """Makes a tensor that is there already the leaf of this name."""
    _book.leaves[name] = tensor


def note(key: str, value: Any) -> None:
    """Writes something down; the same must be written in one process and on workers."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    with _lock:
        _book.notes.setdefault(key, []).append(value)


def keep(name: str, value: Any) -> None:
    """Keeps something on this worker until the end of the program."""
    _book.kept[name] = value


def kept(name: str) -> Any:
    return _book.kept[name]


def reset() -> None:
    _book.leaves.clear()
    _book.notes.clear()
    _book.kept.clear()


@dataclass
class Report:
    """What a worker has after a program: gradients by leaf, and notes."""

    gradients: dict[str, Tensor | None]
    notes: dict[str, list[Any]]


def report(context: int | None) -> Report:
    """What this worker has; gradients are those of a dictionary, or else of .grad."""
    found: dict[Tensor, Tensor] = {}
    if context is not None:
        with contextlib.suppress(UnknownContext):
            found = autograd.get_gradients(context)
    for name, tensor in _book.leaves.items():
        if context is not None and tensor.grad is not None:
            raise AssertionError(f"the .grad of {name} was touched")
    gradients: dict[str, Tensor | None] = {}
    for name, tensor in _book.leaves.items():
        gradient = tensor.grad if context is None else found.get(tensor)
        gradients[name] = None if gradient is None else gradient.detach()
    return Report(gradients, dict(_book.notes))


def debug_info() -> dict[str, Any]:
    return autograd.get_debug_info()


def is_idle() -> bool:
    """Whether nothing of any pass or context is left on this worker."""
    return not any(autograd.get_debug_info().values())


# ------------------------------------------------------------------------------ programs


def call(to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function on a worker, or right here if all is in one process."""
    if not _is_local:
        return rpc.rpc_sync(to, function, args=args, kwargs=kwargs)
    args, kwargs = _as_sent((args, kwargs))
    return _as_sent(function(*args, **kwargs))


def _as_sent(value: Any) -> Any:
    """What would arrive: copies that share memory with nobody, but with a history."""
    copies: dict[int, Any] = {}

    def copy_one(item: Any) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in copies:
                copies[id(item)] = item.clone()
            return copies[id(item)]
        return copy.deepcopy(item) if isinstance(item, torch.nn.Module) else item

    return tree_map(copy_one, value)


class Session:
    """How a program runs its backwards: see the modes above."""

    def __init__(self, mode: str, context: autograd.Context | None) -> None:
        self.mode = mode
        self.context = context

    def backward(
        self,
        roots: Tensor | Sequence[Tensor],
        grad_tensors: Any = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        if self.context is not None and self.mode != PLAIN:
            autograd.backward(
                self.context,
                roots,
                retain_graph,
                create_graph,
                grad_tensors=grad_tensors,
            )
            return
        with warnings.catch_warnings():
            # Torch warns of the cycles that create_graph makes.
            warnings.simplefilter("ignore", UserWarning)
            torch.autograd.backward(
                roots,
                grad_tensors,
                retain_graph=retain_graph or None,
                create_graph=create_graph,
            )

    def grad(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        if self.context is not None and self.mode != PLAIN:
            return autograd.grad(
                self.context, outputs, inputs, grad_outputs, **options
            )
        return torch.autograd.grad(outputs, inputs, grad_outputs, **options)

    def gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that passes have left for a leaf of this worker."""
        if self.mode == DICT and self.context is not None:
            return autograd.get_gradients(self.context)[tensor]
        assert tensor.grad is not None
        return tensor.grad


Program = Callable[[Session], None]


@contextlib.contextmanager
def session(mode: str) -> Iterator[Session]:
    """Where a program of a mode runs."""
    if mode in (LOCAL, BARE):
        yield Session(mode, None)
        return
    with autograd.context(accumulate="grad" if mode == GRAD else "dict") as context:
        yield Session(mode, context)


def run_locally(program: Program) -> Report:
    """The oracle: the program in one process."""
    global _is_local
    reset()
    _is_local = True
    try:
        with session(LOCAL) as local:
            program(local)
        return report(None)
    finally:
        _is_local = False
        reset()


def run_on_workers(program: Program, mode: str) -> Report:
    """The program with real calls; the reports of all workers in one."""
    for worker in WORKERS:
        rpc.rpc_sync(worker, reset)
    with session(mode) as ours:
        program(ours)
        context = ours.context if mode == DICT else None
        reports = [rpc.rpc_sync(worker, report, args=(context,)) for worker in WORKERS]
    whole = Report({}, {})
    for part in reports:
        twice = whole.gradients.keys() & part.gradients.keys()
        assert not twice, f"{twice} exist on several workers"
        whole.gradients.update(part.gradients)
        for key, values in part.notes.items():
            whole.notes.setdefault(key, []).extend(values)
    return whole


def settle() -> None:
    """Waits until no worker has anything of a pass or context any more."""
    for worker in WORKERS:
        rpc.rpc_sync(worker, reset)
    for worker in WORKERS:
        try:
            api.wait_until(lambda to=worker: rpc.rpc_sync(to, is_idle), 5.0)
        except AssertionError:
            left = rpc.rpc_sync(worker, debug_info)
            raise AssertionError(f"left on {worker}: {left}") from None


def check(
    program: Program, mode: str, *, exact: bool = True, settles: bool = True
) -> Report:
    """Runs a program both ways and compares; returns what it gave on the workers.

    Args:
        program: See above.
        mode: How it runs on workers.
        exact: Gradients must be equal bit by bit; else, where the order of additions is
            not fixed, within `TOLERANCE`.
        settles: Afterwards nothing may be left, without the cyclic collector's help.
    """
    expected = run_locally(program)
    gc.collect()
    gc.disable()
    try:
        found = run_on_workers(program, mode)
        if settles:
            settle()
    finally:
        gc.enable()
    compare(found, expected, exact=exact)
    return found


def compare(found: Report, expected: Report, *, exact: bool = True) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_same(found.gradients[name], gradient, f"gradient of {name}", exact)
    assert found.notes.keys() == expected.notes.keys()
    for key, values in expected.notes.items():
        assert_same(found.notes[key], values, f"note {key}", exact)


def error_text(
    kind: type[BaseException], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """Text of the error that a function must raise; keeps nothing of its frames alive."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def assert_same(found: Any, expected: Any, what: str, exact: bool = True) -> None:
    assert type(found) is type(expected), f"{what}: {found!r}, expected {expected!r}"
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{what}: {found!r}, expected {expected!r}"
        for mine, other in zip(found, expected, strict=True):
            assert_same(mine, other, what, exact)
        return
    if not isinstance(expected, Tensor):
        assert found == expected, f"{what}: {found!r}, expected {expected!r}"
        return
    for attribute in ("layout", "dtype", "shape"):
        mine, other = getattr(found, attribute), getattr(expected, attribute)
        assert mine == other, f"{attribute} of {what}: {mine}, expected {other}"
    if expected.is_sparse:
        found, expected = found.to_dense(), expected.to_dense()
    if exact:
        is_same = torch.equal(found, expected)
    else:
        is_same = torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert is_same, f"{what}: {found}, expected {expected}"


# --------------------------------------------------------- what workers run for programs


def scale(x: Tensor, name: str) -> Tensor:
    """Multiplies with a leaf of this worker, element by element."""
    return x * leaf(name, *x.shape, dtype=x.dtype)


def tanh_layer(x: Tensor, name: str, size: int = 3) -> Tensor:
    """A layer with a leaf of this worker."""
    return torch.tanh(x @ leaf(name, x.shape[-1], size, dtype=x.dtype))


def relay(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls on, to another worker."""
    return call(to, function, *args)


def apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# in place


def change_in_place(x: Tensor, name: str) -> Tensor:
    """Overwrites an argument, whole and in part."""
    x.mul_(leaf(name, *x.shape)).add_(1)
    x[0] = x[-1] * 2
    x[1:].sin_()
    return x.exp()


def overwrite(target: Tensor, source: Tensor) -> Tensor:
    target.copy_(source * 3)
    return target


def square_then_change(x: Tensor) -> Tensor:
    """What torch's version counters catch in backward."""
    y = x * x
    x.add_(1)
    return y


# views


def rows(x: Tensor, name: str) -> list[Tensor]:
    """Views of one storage."""
    y = x * leaf(name, *x.shape)
    return [y[0], y[1:], y.t(), y.diagonal()]


def whole_and_part(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y[1:]


def weigh(first: Tensor, second: Tensor, name: str) -> Tensor:
    """Two arguments that may have shared memory where they came from."""
    weight = leaf(name, *first.shape)
    first.mul_(2)
    return (first * weight).sum() + (second * second).sum()


# sparse


def embed(indices: Tensor, name: str, dense: bool = False) -> Tensor:
    """Rows of a table of this worker, with a sparse gradient, and maybe a dense one."""
    weight = leaf(name, 5, 3)
    found = torch.nn.functional.embedding(indices, weight, sparse=True)
    return found * weight.sum() if dense else found


def embed_in(indices: Tensor, weight: Tensor) -> Tensor:
    """The same with a table that arrived."""
    return torch.nn.functional.embedding(indices, weight, sparse=True)


def sum_of_table(name: str) -> Tensor:
    return (leaf(name, 5, 3) * numbers("weights of the table", 5, 3)).sum()


# parameters and modules


def use_parameter(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x @ weight + bias)


def describe(*tensors: Tensor) -> list[tuple[bool, bool]]:
    return [(t.requires_grad, t.is_leaf) for t in tensors]


def run_module(module: torch.nn.Module, x: Tensor, name: str) -> Tensor:
    """Uses a module that arrived; its parameters are leaves of this worker."""
    for key, parameter in module.named_parameters():
        assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf
        adopt(f"{name}.{key}", parameter)
    result: Tensor = module(x)
    return result


def get_parameter(name: str, *shape: int) -> Tensor:
    return leaf(name, *shape, parameter=True)


def get_twice(name: str, *shape: int) -> dict[str, Tensor]:
    weight = leaf(name, *shape, parameter=True)
    return {"once": weight, "again": weight}


def make_linear(name: str, *sizes: int) -> torch.nn.Linear:
    """A module with known values."""
    module = torch.nn.Linear(*sizes, dtype=torch.float64)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(numbers(f"{name}.{key}", *parameter.shape))
    return module


# checkpointing


def checkpointed(x: Tensor, name: str, reentrant: bool) -> Tensor:
    """Local code under a checkpoint."""
    result: Tensor = checkpoint(_two_layers, x, name, use_reentrant=reentrant)
    return result


def _two_layers(x: Tensor, name: str) -> Tensor:
    note(f"{name} ran", True)
    hidden = tanh_layer(x, f"{name} 1")
    return tanh_layer(hidden, f"{name} 2")


# compiled


def run_compiled(x: Tensor, name: str, backend: str) -> Tensor:
    """A compiled module of this worker."""
    if name not in _book.kept:
        module = make_linear(name, 3, 3)
        for key, parameter in module.named_parameters():
            adopt(f"{name}.{key}", parameter)
        keep(name, torch.compile(module, backend=backend))
    result: Tensor = torch.tanh(kept(name)(x))
    return result


# custom Functions


class Triple(torch.autograd.Function):
    """Missing gradients come as zeros, as torch does by default."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 3, x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        note("triple", [g is None for g in gradients])
        return gradients[0] * 3 + gradients[1] * 5


class Sparing(torch.autograd.Function):
    """Missing gradients come as None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 3, x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor | None:
        note("sparing", [g is None for g in gradients])
        (x,) = ctx.saved_tensors
        parts = [
            g * factor
            for g, factor in zip(gradients, (3, x.cos()), strict=True)
            if g is not None
        ]
        return sum(parts) if parts else None  # type: ignore[return-value]


def triple(x: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = Triple.apply(x)  # type: ignore[no-untyped-call]
    return result


def sparing(x: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = Sparing.apply(x)  # type: ignore[no-untyped-call]
    return result


class ByCall(torch.autograd.Function):
    """Forward and backward are calls of another worker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.to = to
        y: Tensor = call(to, sine, x)
        note("has a history inside forward", y.requires_grad)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return call(ctx.to, cosine_product, x, gradient), None


def sine(x: Tensor) -> Tensor:
    return x.sin()


def cosine_product(x: Tensor, gradient: Tensor) -> Tensor:
    return x.cos() * gradient


def by_call(x: Tensor, to: str) -> Tensor:
    result: Tensor = ByCall.apply(x, to)  # type: ignore[no-untyped-call]
    return result


# grad modes and autocast


def without_grad(x: Tensor, name: str, how: str) -> tuple[Tensor, Tensor]:
    """Part of the work is not recorded."""
    if how == "set_grad_enabled":
        torch.set_grad_enabled(False)
        constant = scale(x, name).detach()
        torch.set_grad_enabled(True)
    elif how == "inference_mode":
        with torch.inference_mode():
            constant = scale(x, name) + 0
        constant = constant.clone()
    else:
        with torch.no_grad():
            constant = scale(x, name)
    return x * constant, constant


def leave_grad_off(x: Tensor, name: str) -> Tensor:
    """Ends with grad mode off, which must not reach the next call."""
    y = scale(x, name)
    torch.set_grad_enabled(False)
    return y


def modes_here() -> tuple[bool, bool, bool]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


def multiply(x: Tensor, name: str) -> Tensor:
    """A product for autocast, in float32."""
    product = x @ leaf(name, x.shape[-1], 4, dtype=torch.float32)
    note(f"dtype of {name}", product.dtype)
    return product


def multiply_without_autocast(x: Tensor, name: str) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return multiply(x.float(), name)


class ProductInBackward(torch.autograd.Function):
    """Its backward does what autocast changes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        product = gradient @ x.t()
        note("dtype in backward", product.dtype)
        return 2 * gradient + product.sum().float()


def product_in_backward(x: Tensor) -> Tensor:
    result: Tensor = ProductInBackward.apply(x)  # type: ignore[no-untyped-call]
    return result
