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
import functools
import gc
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import leaks
import worker_process
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
TWO_MODES = [BARE, DICT]

ALL_MODES = pytest.mark.parametrize("mode", MODES)
FEW_MODES = pytest.mark.parametrize("mode", TWO_MODES)
GRAD_MODES = pytest.mark.parametrize("mode", INTO_GRAD)
CONTEXT_MODES = pytest.mark.parametrize("mode", IN_CONTEXT)
"""Where the mode makes little difference."""

TOLERANCE = 1e-10
SETTLE_S = 5.0
POLL_S = 0.001


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
_is_dirty = False  # a program failed, and its error may keep things alive


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
        made = torch.nn.Parameter(data) if parameter else data.requires_grad_()
        # Several callers may be the first.
        _book.leaves.setdefault(name, made)
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
    """Forgets all; a gradient with a history of its own refers to its leaf."""
    for tensor in _book.leaves.values():
        tensor.grad = None
    _book.leaves.clear()
    _book.notes.clear()
    _book.kept.clear()


@dataclass
class Report:
    """What a worker has after a program: gradients by leaf, their strides, and notes."""

    gradients: dict[str, Tensor | None]
    strides: dict[str, tuple[int, ...]]
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
    strides = {}
    memory: dict[int, str] = {}
    for name, tensor in _book.leaves.items():
        gradient = tensor.grad if context is None else found.get(tensor)
        gradients[name] = None if gradient is None else gradient.detach()
        if gradient is None or gradient.layout is not torch.strided:
            continue
        strides[name] = gradient.stride()
        if gradient.numel() > 0:
            other = memory.setdefault(gradient.untyped_storage().data_ptr(), name)
            assert other == name, f"the gradients of {name} and {other} share memory"
    return Report(gradients, strides, dict(_book.notes))


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
            return autograd.grad(self.context, outputs, inputs, grad_outputs, **options)
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
    whole = Report({}, {}, {})
    for part in reports:
        twice = whole.gradients.keys() & part.gradients.keys()
        assert not twice, f"{twice} exist on several workers"
        whole.gradients.update(part.gradients)
        whole.strides.update(part.strides)
        for key, values in part.notes.items():
            whole.notes.setdefault(key, []).extend(values)
    return whole


def settle() -> None:
    """Waits until no worker has anything of a pass or context any more."""
    for worker in WORKERS:
        rpc.rpc_sync(worker, reset)
    deadline = time.monotonic() + SETTLE_S
    for worker in WORKERS:
        while not rpc.rpc_sync(worker, is_idle):
            if time.monotonic() > deadline:
                left = rpc.rpc_sync(worker, autograd.get_debug_info)
                raise AssertionError(f"left on {worker}: {left}")
            time.sleep(POLL_S)


def collect() -> None:
    """Runs the cyclic collector on all workers."""
    for worker in WORKERS:
        rpc.rpc_sync(worker, reset)
        rpc.rpc_sync(worker, gc.collect)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No cyclic collector here, and nothing that an earlier failure has left behind."""
    global _is_dirty
    if _is_dirty:
        collect()
    _is_dirty = True
    gc.disable()
    try:
        yield
        _is_dirty = False
    finally:
        gc.enable()


def check(
    program: Program, mode: str, *, exact: bool = True, has_cycles: bool = False
) -> Report:
    """Runs a program both ways and compares; returns what it gave on the workers.

    Args:
        program: See above.
        mode: How it runs on workers.
        exact: Gradients must be equal bit by bit; else, where the order of additions is
            not fixed, within `TOLERANCE`.
        has_cycles: The program makes reference cycles, so that only the cyclic collector
            can free what it used. Else nothing may be left also without its help.
    """
    expected = run_locally(program)
    with undisturbed():
        found = run_on_workers(program, mode)
        if has_cycles:
            collect()
        settle()
    compare(found, expected, exact=exact)
    return found


def compare(found: Report, expected: Report, *, exact: bool = True) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_same(found.gradients[name], gradient, f"gradient of {name}", exact)
    assert found.strides == expected.strides
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


def make_linear(name: str, num_in: int, num_out: int) -> torch.nn.Linear:
    """A module with known values."""
    module = torch.nn.Linear(num_in, num_out, dtype=torch.float64)
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


def run_compiled(x: Tensor, name: str) -> Tensor:
    """A compiled module of this worker."""
    if name not in _book.kept:
        module = make_linear(name, 3, 3)
        for key, parameter in module.named_parameters():
            adopt(f"{name}.{key}", parameter)
        keep(name, torch.compile(module, backend="aot_eager"))
    result: Tensor = torch.tanh(kept(name)(x))
    return result


def compile_with_a_call(x: Tensor, where: str) -> Tensor:
    """Compiled code with a call in the middle: the compiler stays out of that."""

    def model(x: Tensor) -> Tensor:
        y = torch.tanh(x @ leaf("before", 3, 3))
        return torch.sin(call(where, tanh_layer, y, "inside") * leaf("after", 3))

    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend="eager")
    return compiled(x)


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


# hooks


def hooked(x: Tensor, name: str, kind: str) -> Tensor:
    """Work with hooks of all kinds on what arrived, on the way, and on a leaf."""
    weight = leaf(name, *x.shape)
    if kind == "argument":
        x.register_hook(functools.partial(_see, name))
    y = x.sin() * weight
    if kind == "way":
        y.register_hook(functools.partial(_see, name))
    if kind == "leaf":
        weight.register_hook(functools.partial(_see, name))
    if kind == "result":
        result = y.exp()
        result.register_hook(functools.partial(_see, name))
        return result
    return y.exp()


def _see(name: str, gradient: Tensor) -> Tensor:
    """A hook that writes down what it sees and changes it."""
    note(f"hook of {name}", gradient)
    return gradient * 2


def see_quietly(name: str, gradient: Tensor) -> None:
    note(f"hook of {name}", gradient)


def retaining(x: Tensor, name: str) -> Tensor:
    """Keeps the gradients of tensors that are no leaves, see `read_retained`."""
    y = scale(x, name)
    x.retain_grad()
    y.retain_grad()
    keep("argument", x)
    keep("on the way", y)
    return y * y


def read_retained() -> list[Tensor]:
    found = [kept("argument").grad, kept("on the way").grad]
    _book.kept.clear()
    return found


def accumulator_of(tensor: Tensor) -> Any:
    """The node that adds to .grad."""
    view: Any = tensor.view_as(tensor).grad_fn
    return view.next_functions[0][0]


def hook_accumulator(x: Tensor, name: str, kind: str) -> Tensor:
    """Hooks where gradients are added to .grad."""
    weight = leaf(name, *x.shape)
    node = accumulator_of(weight)
    if kind == "hook":
        node.register_hook(functools.partial(_after_accumulation, name))
    elif kind == "prehook":
        node.register_prehook(functools.partial(_before_accumulation, name))
    else:
        weight.register_post_accumulate_grad_hook(functools.partial(_read_grad, name))
    keep(f"accumulator of {name}", node)
    return x * weight


def _after_accumulation(name: str, inputs: Any, outputs: Any) -> None:
    note(f"added to {name}", outputs[0])


def _before_accumulation(name: str, gradients: Any) -> Any:
    note(f"about to be added to {name}", gradients[0])
    return (gradients[0] * 2,)


def _read_grad(name: str, tensor: Tensor) -> None:
    note(f"grad of {name}", tensor.grad)


def step_in_backward(x: Tensor, name: str) -> Tensor:
    """An optimiser step as soon as a gradient is there."""
    weight = leaf(name, *x.shape)
    if not weight._backward_hooks and not kept_or_none(name):
        keep(name, weight.register_post_accumulate_grad_hook(_step))
    return x * weight


def kept_or_none(name: str) -> Any:
    return _book.kept.get(name)


def _step(weight: Tensor) -> None:
    assert weight.grad is not None
    with torch.no_grad():
        weight -= 0.5 * weight.grad
    weight.grad = None


def value_of(name: str) -> Tensor:
    return leaf(name).detach().clone()


def hook_several(x: Tensor, name: str) -> Tensor:
    """A hook that waits for the gradients of several tensors."""
    y, z = scale(x, f"{name} 1"), scale(x.sin(), f"{name} 2")
    torch.autograd.graph.register_multi_grad_hook(
        (y, z), functools.partial(_see_several, name)
    )
    return y * z


def _see_several(name: str, gradients: Sequence[Tensor | None]) -> None:
    for gradient in gradients:
        note(f"several of {name}", gradient)


def hook_node(x: Tensor, name: str) -> Tensor:
    """Hooks on a node of the graph."""
    y = scale(x, name)
    node: Any = y.grad_fn
    node.register_prehook(functools.partial(_before_node, name))
    node.register_hook(functools.partial(_after_node, name))
    return y


def _before_node(name: str, gradients: Any) -> Any:
    note(f"node of {name}", gradients[0])
    return (gradients[0] * 3,)


def _after_node(name: str, inputs: Any, outputs: Any) -> Any:
    note(f"node of {name}", inputs[0])
    return (inputs[0] * 5, *inputs[1:])


def queueing(x: Tensor, name: str) -> Tensor:
    """A hook that asks to be called back at the end of the backward."""
    y = scale(x, name)
    y.register_hook(functools.partial(_queue, name))
    return y


def _queue(name: str, gradient: Tensor) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(functools.partial(_at_the_end, name))


def _at_the_end(name: str) -> None:
    weight = leaf(name)
    note(f"at the end {name}", weight.grad)


def calling_in_backward(x: Tensor, name: str, to: str) -> Tensor:
    """A hook that makes a call, and uses its result."""
    y = scale(x, name)
    y.register_hook(functools.partial(_call_in_hook, name, to))
    return y


def _call_in_hook(name: str, to: str, gradient: Tensor) -> Tensor:
    result: Tensor = call(to, scale, gradient, f"{name} in backward")
    note("call in a hook has a history", result.requires_grad)
    return result.detach()


def failing_in_backward(x: Tensor, name: str) -> Tensor:
    y = scale(x, name)
    y.register_hook(_fail)
    return y


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("a hook that fails")


def num_notes(key: str) -> int:
    return len(_book.notes.get(key, []))


# higher order


def network(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A network all of whose weights are arguments."""
    return torch.tanh(x @ first) @ second


def body_of_network(x: Tensor, name: str) -> Tensor:
    """A part of a network whose weights stay here."""
    return torch.tanh(torch.sin(x @ leaf(f"{name} 1", 3, 3)) @ leaf(f"{name} 2", 3, 3))


def cube(x: Tensor, name: str) -> Tensor:
    """Something whose third derivative is not a constant."""
    return x**4 * leaf(name, *x.shape).exp()


def gradient_norm(name: str, context: int | None) -> Tensor:
    """A penalty on the gradient that a pass has left for a leaf of this worker."""
    weight = leaf(name)
    gradient = weight.grad
    if context is not None:
        gradient = autograd.get_gradients(context)[weight]
    assert gradient is not None and gradient.requires_grad
    return (gradient * gradient).sum()


class SlowSquare(torch.autograd.Function):
    """Its backward can be differentiated, and calls another worker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.to = to
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return call(ctx.to, three_squares, x, gradient), None


def three_squares(x: Tensor, gradient: Tensor) -> Tensor:
    return 3 * x * x * gradient


def slow_square(x: Tensor, to: str) -> Tensor:
    result: Tensor = SlowSquare.apply(x, to)  # type: ignore[no-untyped-call]
    return result


def switch_collector(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


# data parallel


def join_group(path: str, rank: int, size: int) -> None:
    """Makes a process group of some of the workers, for DistributedDataParallel."""
    before = leaks.take_snapshot().descriptors.items()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size
    )
    # Torch leaks the sockets of a group that was used for data parallel training; the
    # harness must not take them for ours.
    made = leaks.take_snapshot().descriptors.items() - before
    assert worker_process._before_init is not None
    worker_process._before_init.descriptors.update(made)


def leave_group() -> None:
    torch.distributed.destroy_process_group()


class Model(torch.nn.Module):
    """A model of a trainer: two layers, the first of which may be on a server.

    Args:
        server: Who has the first layer.
        calls_inside: The call is part of this module, not of the program around it.
    """

    def __init__(self, server: str, calls_inside: bool = False) -> None:
        super().__init__()
        self.first = make_linear("first", 3, 4)
        self.second = make_linear("second", 4, 2)
        self.unused = make_linear("unused", 2, 2)
        self._server = server
        self._calls_inside = calls_inside

    def forward(self, x: Tensor, use_all: bool = True) -> Tensor:
        if self._calls_inside:
            x = call(self._server, tanh_layer, x, "server")
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return self.unused(y) if use_all else y


def train(
    rank: int, mode: str, num_steps: int, calls_inside: bool, options: dict[str, Any]
) -> list[list[Tensor]]:
    """A trainer's loop; returns the gradients of its model after each step."""
    model = Model("w2", calls_inside)
    replica = torch.nn.parallel.DistributedDataParallel(model, **options)
    uses_all = not options.get("find_unused_parameters", False)
    found = []
    for step in range(num_steps):
        with session(mode) as ours:
            ours.backward(_loss_of(replica, rank, step, calls_inside, uses_all))
            if mode == DICT and ours.context is not None:
                _move_to_grad(model, autograd.get_gradients(ours.context))
        found.append(
            [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        )
        _descend(model)
    return found


def _move_to_grad(model: torch.nn.Module, gradients: dict[Tensor, Tensor]) -> None:
    for parameter in model.parameters():
        assert parameter.grad is None
        parameter.grad = gradients.get(parameter)


def _loss_of(
    model: Any, rank: int, step: int, calls_inside: bool, uses_all: bool
) -> Tensor:
    x = numbers(f"data {rank} {step}", 4, 3)
    if not calls_inside:
        x = call("w2", tanh_layer, x, "server")
    y = call("w2", tanh_layer, model(x, uses_all), "server 2")
    return y.pow(2).sum()


def _descend(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    model.zero_grad()


def train_in_one_process(
    num_steps: int, calls_inside: bool, uses_all: bool
) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
    """The same with both trainers and the server in one process."""
    global _is_local
    reset()
    _is_local = True
    try:
        model = Model("w2", calls_inside)
        found = []
        for step in range(num_steps):
            sums: dict[str, Tensor] = {}
            for rank in range(2):
                model.zero_grad()
                _loss_of(model, rank, step, calls_inside, uses_all).backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        half = parameter.grad / 2
                        sums[name] = sums[name] + half if name in sums else half
            for name, parameter in model.named_parameters():
                parameter.grad = sums.get(name)
            found.append([sums[n] for n, _ in model.named_parameters() if n in sums])
            _descend(model)
        return found, report(None).gradients
    finally:
        _is_local = False
        reset()


def make_replica(name: str) -> None:
    """A model under DistributedDataParallel that stays on this worker."""
    module = make_linear(name, 3, 2)
    keep(name, torch.nn.parallel.DistributedDataParallel(module))


def run_replica(name: str, x: Tensor) -> Tensor:
    result: Tensor = kept(name)(x)
    return result


def dictionary_pass_over_replica(name: str, rank: int) -> list[Tensor]:
    """The gradients of a pass into the dictionary, which leaves ``.grad`` as it is."""
    parameters = list(kept(name).parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    with autograd.context() as context:
        x = call("w2", tanh_layer, numbers(f"data {rank}", 4, 3), "server")
        context.backward(run_replica(name, x).pow(2).sum())
        gradients = autograd.get_gradients(context)
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in parameters)
    return [gradients[parameter] for parameter in parameters]


def dictionary_pass_beside_replica(name: str) -> Tensor:
    """A dictionary pass that has nothing to do with the replica, which stays alive."""
    assert isinstance(kept(name), torch.nn.parallel.DistributedDataParallel)
    x = leaf("x", 3)
    with autograd.context() as context:
        context.backward(call("w2", sine, x).sum())
        return autograd.get_gradients(context)[x]


def dictionary_pass_over_former_replica(name: str) -> tuple[Tensor, Tensor]:
    """A dictionary pass over a module that is no replica any more, and the truth."""
    module = kept(name).module
    del _book.kept[name]
    gc.collect()
    x = numbers("data", 4, 3)
    with autograd.context() as context:
        context.backward(module(call("w2", tanh_layer, x, "server")).sum())
        found = autograd.get_gradients(context)[module.weight]
    expected = torch.tanh(x @ numbers("server", 3, 3)).sum(dim=0).expand(2, 3)
    return found, expected


def pass_from_elsewhere(name: str, trainers: Sequence[str]) -> list[list[Tensor]]:
    """The gradients of a dictionary pass that reaches replicas on other workers."""
    with autograd.context() as context:
        x = leaf("x", 4, 3)
        results = [
            call(trainer, run_replica, name, x * (1 + number))
            for number, trainer in enumerate(trainers)
        ]
        context.backward(torch.stack(results).sum())
        return [call(trainer, gradients_of, name, int(context)) for trainer in trainers]


def gradients_of(name: str, context: int) -> list[Tensor]:
    gradients = autograd.get_gradients(context)
    return [gradients[parameter] for parameter in kept(name).parameters()]


def accumulate_in_two_steps(rank: int, mode: str) -> list[Tensor]:
    """Two batches, of which only the second is averaged, with what the first left."""
    model = make_linear("model", 3, 2)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    guards: list[Any] = [replica.no_sync(), contextlib.nullcontext()]
    for step, guard in enumerate(guards):
        with guard, session(mode) as ours:
            x = call("w2", tanh_layer, numbers(f"data {rank} {step}", 4, 3), "server")
            ours.backward(replica(x).pow(2).sum())
    return [p.grad for p in model.parameters() if p.grad is not None]


def accumulate_in_one_process() -> list[Tensor]:
    halves: list[list[Tensor]] = []
    for rank in range(2):
        model = make_linear("model", 3, 2)
        for step in range(2):
            x = torch.tanh(
                numbers(f"data {rank} {step}", 4, 3) @ numbers("server", 3, 3)
            )
            model(x).pow(2).sum().backward()
        halves.append([p.grad / 2 for p in model.parameters() if p.grad is not None])
    return [a + b for a, b in zip(*halves, strict=True)]


def wrap_before_init(path: str) -> tuple[list[str], bool]:
    """A pass over a replica that was there before `init_rpc`: what was averaged."""
    rpc.shutdown(graceful=False)
    join_group(f"{path}/group", 0, 1)
    make_replica("replica")
    averaged: list[str] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]  # torch checks the types
        averaged.extend("bucket" for _ in bucket.parameters())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    kept("replica").register_comm_hook(None, note)
    options = rpc.RpcBackendOptions(init_method=f"file://{path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    with autograd.context() as context:
        y = call("alone", sine, run_replica("replica", numbers("data", 4, 3)))
        context.backward(y.sum())
        is_whole = len(autograd.get_gradients(context)) == 2
    reset()
    leave_group()
    return averaged, is_whole


# derivatives that a function takes itself


def forces(x: Tensor, name: str, to: str | None = None) -> Tensor:
    """The gradient of an energy, which can be differentiated further."""
    energy = energy_of(x, name) if to is None else call(to, energy_of, x, name)
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return -gradient


def energy_of(x: Tensor, name: str) -> Tensor:
    return (torch.sin(x * leaf(name, *x.shape)) * x).sum()


def descend_inside(x: Tensor, name: str) -> Tensor:
    """Trains something of its own before it answers."""
    weight = numbers(f"start of {name}", *x.shape).requires_grad_()
    for _ in range(2):
        (weight - x.detach()).pow(2).sum().backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    return x * weight.detach() * leaf(name, *x.shape)


def checkpointed_relay(x: Tensor, to: str, name: str) -> Tensor:
    """A call under a checkpoint; made again in backward."""
    result: Tensor = checkpoint(_call_and_more, x, to, name, use_reentrant=False)
    return result


def _call_and_more(x: Tensor, to: str, name: str) -> Tensor:
    y: Tensor = call(to, tanh_layer, x.sin(), name)
    return y.exp()


def run_hooked_module(x: Tensor, name: str) -> Tensor:
    """A module with hooks that see and change its gradients."""
    module = make_linear(name, x.shape[-1], x.shape[-1])
    for key, parameter in module.named_parameters():
        adopt(f"{name}.{key}", parameter)
    module.register_full_backward_hook(functools.partial(_change_inputs, name))
    module.register_full_backward_pre_hook(functools.partial(_change_outputs, name))
    result: Tensor = module(x)
    return result


def _change_inputs(name: str, module: Any, inputs: Any, outputs: Any) -> Any:
    note(f"inputs of {name}", inputs[0])
    return (inputs[0] * 2,)


def _change_outputs(name: str, module: Any, outputs: Any) -> Any:
    note(f"outputs of {name}", outputs[0])
    return (outputs[0] * 3,)


def infer(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def add_leaf(x: Tensor, *names: str) -> Tensor:
    """All of these get the very same gradient."""
    for name in names:
        x = x + leaf(name, *x.shape)
    return x
