"""Runs the steps of programs. How calls are made is left to the kind of machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oracle.operations import (
    IN_PLACE,
    OPERATIONS,
    SAVES_ITS_RESULT,
    constant,
    make_parameters,
    seed_like,
)
from oracle.programs import (
    Body,
    Call,
    Compute,
    Gradient,
    Hook,
    InPlace,
    Join,
    Load,
    Packing,
    Program,
    Step,
    Store,
)

Label: TypeAlias = tuple[Any, ...]
"""What a gradient belongs to: ``("parameter", worker, number)`` and the like."""


@dataclass
class HookCounts:
    """How often hooks saw a gradient, or None. Refers to no tensor."""

    with_gradient: dict[int, int] = field(default_factory=dict)
    with_none: dict[int, int] = field(default_factory=dict)
    is_on: bool = True
    only_into_grad: bool = True

    def note(self, hook: int, gradient: Tensor | None) -> None:
        if not self.is_on:
            return
        engine: Any = torch.autograd.Variable._execution_engine
        # In `torch.autograd.grad` a single process runs only what leads to the inputs;
        # the other workers of a pass do not know what that is.
        if self.only_into_grad and not engine.is_checkpoint_valid():
            return
        if getattr(_taking, "depth", 0):
            return
        counts = self.with_none if gradient is None else self.with_gradient
        counts[hook] = counts.get(hook, 0) + 1


# How many passes for the sake of a few inputs this thread is in. The engine does not
# tell in hooks of those inputs.
_taking = threading.local()


@contextlib.contextmanager
def taking() -> Iterator[None]:
    """Around a pass that leaves most leaves alone: hooks do not count in it."""
    _taking.depth = getattr(_taking, "depth", 0) + 1
    try:
        yield
    finally:
        _taking.depth -= 1


class Place:
    """What one worker has of a program."""

    def __init__(self, program: Program, here: int) -> None:
        self.program = program
        self.here = here
        self.parameters = make_parameters(program.seed, here)
        # Keeps the accumulator of each parameter alive. While there is none, torch can
        # deadlock on a leaf that several threads use: one makes an accumulator, and
        # wants the interpreter's lock for it, which another has that waits for the leaf.
        self.views = [parameter.view_as(parameter) for parameter in self.parameters]
        self.stored: dict[int, Tensor] = {}
        self.hooks = HookCounts(only_into_grad=program.mode not in "ac")
        self.leaves: dict[Label, Tensor] = {
            ("parameter", here, number): tensor
            for number, tensor in enumerate(self.parameters)
        }
        self.retained: dict[Label, Tensor] = {}

    def note_leaves(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """Leaves that come with calls which are not recorded."""
        for number, tensor in enumerate(tensors):
            if tensor.is_leaf and tensor.requires_grad:
                place = (*label, number)
                self.leaves[place] = tensor


class Frame:
    """The values of one body, or of the driver, while its steps run."""

    def __init__(self, place: Place, arguments: Sequence[Tensor]) -> None:
        self.place = place
        self.values: list[Tensor] = [*arguments, *place.parameters]
        self.pending: dict[int, Any] = {}
        # Memory that must not be changed in place, by address. All of it is kept alive
        # by the values, so that no address is used twice.
        self.touched = {_memory(tensor) for tensor in place.parameters}

    def use(self, number: int) -> Tensor:
        value = self.values[number]
        self.touched.add(_memory(value))
        return value

    def add(self, values: Sequence[Tensor], *, is_fresh: bool = False) -> None:
        self.values += values
        if not is_fresh:
            self.touched.update(map(_memory, values))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --------------------------------------------------------------------------- containers


def pack(packing: Packing, value_of: Callable[[int], Tensor]) -> Any:
    return _pack(packing.shape, value_of)


def _pack(shape: Any, value_of: Callable[[int], Tensor]) -> Any:
    tag, content = shape
    if tag == "ref":
        return value_of(content)
    if tag == "other":
        return content
    if tag == "dict":
        return {key: _pack(inner, value_of) for key, inner in content}
    packed = [_pack(inner, value_of) for _, inner in content]
    return tuple(packed) if tag == "tuple" else packed


def tensors_in(packed: Any) -> list[Tensor]:
    """The tensors of a container, in order, with repetitions."""
    return list(_tensors_in(packed))


def _tensors_in(packed: Any) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, (list, tuple)):
        for inner in packed:
            yield from _tensors_in(inner)
    elif isinstance(packed, dict):
        for inner in packed.values():
            yield from _tensors_in(inner)


# ------------------------------------------------------------------------------ machine


class Machine:
    """Runs steps. Subclasses say how calls are made."""

    def start(self, frame: Frame, call: Call, packed: Any) -> Any:
        """Begins a call; returns what `finish` takes."""
        raise NotImplementedError

    def finish(self, started: Any) -> Any:
        """Waits for a call; returns what it gave."""
        raise NotImplementedError

    def let_go(self, frame: Frame, call: Call, started: Any) -> None:
        """Nobody waits for this call."""
        raise NotImplementedError

    def run_body(self, place: Place, body: Body, call: int, packed: Any) -> Any:
        """What a call does on the worker that is called."""
        arguments = tensors_in(packed)
        place.note_leaves(("argument", place.here, call), arguments)
        frame = Frame(place, arguments)
        self.run_steps(frame, body.steps)
        return pack(body.results, frame.values.__getitem__)

    def run_steps(self, frame: Frame, steps: Sequence[Step]) -> None:
        for step in steps:
            self._run_step(frame, step)

    def _run_step(self, frame: Frame, step: Step) -> None:
        place = frame.place
        if isinstance(step, Compute):
            _compute(frame, step)
        elif isinstance(step, InPlace):
            _change_in_place(frame, step)
        elif isinstance(step, Hook):
            self.hook(frame, step)
        elif isinstance(step, Call):
            self._call(frame, step)
        elif isinstance(step, Join):
            if step.call in frame.pending:
                self._take_results(frame, step.call, frame.pending.pop(step.call))
        elif isinstance(step, Store):
            place.stored[step.slot] = frame.use(step.target)
        elif isinstance(step, Load):
            found = place.stored.get(step.slot)
            frame.add([constant(step.adds) if found is None else found])
        elif isinstance(step, Gradient):
            _gradient(frame, step)
        else:
            frame.add([constant(kind) for kind in step.adds])

    def _call(self, frame: Frame, step: Call) -> None:
        packed = pack(step.arguments, frame.use)
        with torch.set_grad_enabled(step.is_recorded):
            started = self.start(frame, step, packed)
        if step.style == "sync":
            self._take_results(frame, step.id, started)
        elif step.style == "async":
            frame.pending[step.id] = started
        else:
            self.let_go(frame, step, started)

    def _take_results(self, frame: Frame, call: int, started: Any) -> None:
        results = tensors_in(self.finish(started))
        frame.place.note_leaves(("result", frame.place.here, call), results)
        frame.add(results, is_fresh=True)

    def hook(self, frame: Frame, step: Hook) -> None:
        place, target = frame.place, frame.values[step.target]
        if not target.requires_grad:
            return
        if step.action == "retain":
            target.retain_grad()
            # For some outputs of custom Functions torch cannot bear both.
            frame.use(step.target)
            if not target.is_leaf:
                place.retained["retained", place.here, step.id] = target
            return
        note, number, factor = place.hooks.note, step.id, step.factor
        if step.action == "after":
            if target.is_leaf:
                target.register_post_accumulate_grad_hook(lambda t: note(number, t))
            return

        def see(gradient: Tensor | None) -> Tensor | None:
            note(number, gradient)
            if step.action == "observe" or gradient is None:
                return None
            return gradient * factor

        target.register_hook(see)


def _compute(frame: Frame, step: Compute) -> None:
    operation = OPERATIONS[step.operation]
    with torch.set_grad_enabled(step.is_recorded):
        result = operation.run(*[frame.use(number) for number in step.inputs])
    results = result if isinstance(result, tuple) else (result,)
    frame.add(results, is_fresh=operation.is_fresh)


def _change_in_place(frame: Frame, step: InPlace) -> None:
    target, other = frame.values[step.target], frame.values[step.other]
    if not target.requires_grad or target.is_leaf or _memory(target) in frame.touched:
        return
    if _memory(other) == _memory(target):
        return
    IN_PLACE[step.operation](target, frame.use(step.other))
    if step.operation == SAVES_ITS_RESULT:
        frame.touched.add(_memory(target))


def _gradient(frame: Frame, step: Gradient) -> None:
    inputs = [frame.use(number) for number in step.inputs]
    outputs = [frame.use(number) for number in step.outputs]
    frame.add(gradients_or_zeros(take(outputs, inputs, step.create_graph), inputs))


def take(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    create_graph: bool,
    grad: Callable[..., Any] = torch.autograd.grad,
) -> list[Tensor | None]:
    """``autograd.grad``, for whichever of the tensors have a history."""
    known = [t for t in inputs if is_input(t)]
    roots = roots_of(outputs)
    if not known or not roots:
        return [None] * len(inputs)
    with taking():
        gradients = grad(
            scalars(roots),
            known,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    found = iter(gradients)
    return [next(found) if is_input(t) else None for t in inputs]


def is_input(tensor: Tensor) -> bool:
    """Whether ``autograd.grad`` is asked for the gradient of a tensor.

    For one with hooks that is not a leaf torch gives the gradient before its hooks or
    after them, depending on whether anything behind it is wanted too.
    """
    return tensor.requires_grad and (tensor.is_leaf or not tensor._backward_hooks)


def gradients_or_zeros(
    gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """As values of a frame: dense, and never None."""
    return [
        torch.zeros_like(t) if g is None else g.to_dense() if g.is_sparse else g
        for g, t in zip(gradients, inputs, strict=True)
    ]


def roots_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where a pass can begin, each once."""
    return list({id(t): t for t in tensors if t.grad_fn is not None}.values())


def scalars(roots: Sequence[Tensor]) -> list[Tensor]:
    """Scalars whose gradients with respect to the roots are their seeds.

    Torch's own functions are not given seeds: checking them makes torch import a lot,
    which takes seconds in each worker.
    """
    return [r if r.numel() == 1 else (r * seed_like(r)).sum() for r in roots]
