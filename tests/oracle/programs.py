"""What a random program is: plain data, which any process can run.

A program is a list of acts that its driver, worker 0, carries out: it runs forward
steps, and backward passes over what they made. Steps stand in bodies. The body of a call
runs on the worker that is called, and its steps may call again; each body is run once.

Steps work on the values of their frame, by number: first the arguments of the call, then
the parameters of the worker that runs it, then what the steps before have added. Each
value has a kind, known before the program runs:

    f  float64, 2 x 3        x  the same, expanded: several elements share their memory
    w  float64, 3 x 3        s  float64, a scalar
    t  float64, 5 x 3, a table of rows; its gradient may be sparse
    u  the same, computed: its gradient may not
    i  int64, two row numbers

Modes:

    a  a context, gradients in its dictionary
    b  a context, gradients in ``.grad``
    c  a context, second order
    d  no context
    e  no context, second order
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

MODES = "abcde"
IN_CONTEXT = "abc"
SECOND_ORDER = "ce"

PARAMETER_KINDS = "ffwt"
FITS = {"f": "fx", "t": "tu", "p": "t"}
"""What an operation takes, if that is more than one kind; ``p`` is a plain table."""

Style = Literal["sync", "async", "kept", "dropped"]
"""How a call is made: waited for at once; waited for later by a `Join`; never waited
for, with the future kept until the end, or dropped at once."""


@dataclass(frozen=True)
class Packing:
    """A nested container with numbers of values at its leaves, and other objects."""

    shape: Any
    """``("ref", number)``, ``("other", object)`` or ``(container, [(key, shape)])``."""

    def refs(self) -> tuple[int, ...]:
        return tuple(_refs(self.shape))

    def __str__(self) -> str:
        return _show(self.shape)


def _refs(shape: Any) -> Iterator[int]:
    tag, content = shape
    if tag == "ref":
        yield content
    elif tag != "other":
        for _, inner in content:
            yield from _refs(inner)


def _show(shape: Any) -> str:
    tag, content = shape
    if tag == "ref":
        return f"v{content}"
    if tag == "other":
        return repr(content)
    inside = ", ".join(
        f"{key!r}: {_show(inner)}" if tag == "dict" else _show(inner)
        for key, inner in content
    )
    return {"dict": "{%s}", "list": "[%s]", "tuple": "(%s,)"}[tag] % inside


# ------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Compute:
    """A local operation; adds its results."""

    id: int
    operation: str
    inputs: tuple[int, ...]
    adds: str
    is_recorded: bool = True
    """False: under ``no_grad``."""


@dataclass(frozen=True)
class InPlace:
    """Changes a value in place, if that is allowed for what it is when it runs."""

    id: int
    operation: str
    target: int
    other: int
    adds: str = ""


@dataclass(frozen=True)
class Hook:
    """Sees the gradient of a value, and may change it."""

    id: int
    target: int
    action: Literal["scale", "observe", "retain", "after"]
    """Change it; only count; ``retain_grad``; count after a leaf's accumulation."""
    factor: float = 1.0
    adds: str = ""


@dataclass(frozen=True)
class Call:
    """A body run on a worker. Adds its results, unless it is waited for later."""

    id: int
    to: int
    body: int
    arguments: Packing
    style: Style
    adds: str
    is_recorded: bool = True


@dataclass(frozen=True)
class Join:
    """Waits for a call; adds its results."""

    id: int
    call: int
    adds: str


@dataclass(frozen=True)
class Store:
    """Leaves a value on this worker, for later calls of the context."""

    id: int
    slot: int
    target: int
    adds: str = ""


@dataclass(frozen=True)
class Load:
    """Takes up a value that an earlier call has left on this worker."""

    id: int
    slot: int
    adds: str


@dataclass(frozen=True)
class Gradient:
    """``torch.autograd.grad`` in the middle of a forward; adds what it gives."""

    id: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    create_graph: bool
    adds: str


@dataclass(frozen=True)
class Blank:
    """What is left of a step that was taken out: constants in the place of results."""

    id: int
    adds: str


Step: TypeAlias = (
    Compute | InPlace | Hook | Call | Join | Store | Load | Gradient | Blank
)


@dataclass(frozen=True)
class Body:
    """What a call runs."""

    here: int
    arguments: str
    steps: tuple[Step, ...]
    results: Packing


# -------------------------------------------------------------------------------- acts


@dataclass(frozen=True)
class Forward:
    """Steps of the driver, in a new frame or one that went before.

    Attributes:
        first: Number of the first value that they add.
    """

    id: int
    frame: int
    context: int
    first: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Backward:
    """A backward pass from the driver.

    Attributes:
        how: ``plain``: ``loss.backward()``, or ``torch.autograd.backward`` for several;
            ``inputs``: the same, for the driver's parameters only; ``api``:
            ``gradwire.autograd.backward``; ``method``: ``ctx.backward``.
    """

    id: int
    frame: int
    context: int
    roots: tuple[int, ...]
    how: Literal["plain", "inputs", "api", "method"]
    retain: bool = False
    create_graph: bool = False


@dataclass(frozen=True)
class BackwardThere:
    """A backward pass that another worker starts, from a scalar left there."""

    id: int
    context: int
    worker: int
    slot: int
    how: Literal["plain", "api"]
    retain: bool = False


@dataclass(frozen=True)
class TakeGradient:
    """``autograd.grad`` by the driver, torch's or ours; adds what it gives."""

    id: int
    frame: int
    context: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    how: Literal["plain", "api"]
    retain: bool
    create_graph: bool


@dataclass(frozen=True)
class Penalty:
    """Adds the sum of squares of gradients, as a scalar, to a frame.

    Attributes:
        source: ``values``: of the frame; ``dict``: what the context's dictionary has for
            the parameters of some workers; ``grad``: ``.grad`` of the driver's.
    """

    id: int
    frame: int
    context: int
    source: Literal["values", "dict", "grad"]
    values: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()


Act: TypeAlias = Forward | Backward | BackwardThere | TakeGradient | Penalty


@dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes:
        contexts: How many contexts are open while it runs; 0 without any.
        into_grad: Those contexts put gradients into ``.grad``.
    """

    mode: str
    seed: int
    num_workers: int
    contexts: int
    into_grad: bool
    acts: tuple[Act, ...]
    bodies: tuple[Body, ...] = field(repr=False)

    def all_steps(self) -> Iterator[Step]:
        for act in self.acts:
            if isinstance(act, Forward):
                yield from act.steps
        for body in self.bodies:
            yield from body.steps

    def reached_bodies(self) -> list[int]:
        """Numbers of the bodies that are run: some may have lost their calls."""
        found: list[int] = []
        stack = [act.steps for act in self.acts if isinstance(act, Forward)]
        while stack:
            for step in stack.pop():
                if isinstance(step, Call):
                    found.append(step.body)
                    stack.append(self.bodies[step.body].steps)
        return found

    def removable(self) -> set[int]:
        """Ids of what can be taken out, of all that is run."""
        found = {a.id for a in self.acts if isinstance(a, (Backward, BackwardThere))}
        pieces = [a.steps for a in self.acts if isinstance(a, Forward)]
        pieces += [self.bodies[number].steps for number in self.reached_bodies()]
        for steps in pieces:
            found.update(s.id for s in steps if not isinstance(s, (Blank, Join)))
        return found

    def uses(self, operation: str) -> bool:
        return any(
            isinstance(step, Compute) and step.operation == operation
            for step in self.all_steps()
        )

    def without(self, ids: set[int]) -> Program:
        """The same program with some steps and acts taken out."""
        acts = tuple(
            replace(act, steps=_blanked(act.steps, ids))
            if isinstance(act, Forward)
            else act
            for act in self.acts
            if act.id not in ids
        )
        bodies = tuple(
            replace(body, steps=_blanked(body.steps, ids)) for body in self.bodies
        )
        return replace(self, acts=acts, bodies=bodies)

    def __str__(self) -> str:
        lines = [
            f"mode {self.mode}, seed {self.seed}: {self.num_workers} workers, "
            f"{self.contexts} contexts"
            + (", into .grad" if self.contexts and self.into_grad else "")
        ]
        for act in self.acts:
            if isinstance(act, Forward):
                lines.append(f"[{act.id}] frame {act.frame}, context {act.context}:")
                self._show_steps(act.steps, act.first, 1, lines)
            else:
                lines.append(f"[{act.id}] {act!r}")
        return "\n".join(lines)

    def _show_steps(
        self, steps: tuple[Step, ...], first: int, depth: int, lines: list[str]
    ) -> None:
        number = first
        for step in steps:
            adds = step.adds
            if isinstance(step, Call) and step.style != "sync":
                adds = ""
            names = ", ".join(f"v{number + i}:{k}" for i, k in enumerate(adds))
            number += len(adds)
            head = f"{'    ' * depth}[{step.id}] " + (f"{names} = " if names else "")
            if not isinstance(step, Call):
                lines.append(head + repr(step))
                continue
            body = self.bodies[step.body]
            grad = "" if step.is_recorded else ", no_grad"
            lines.append(
                f"{head}call({step.style}{grad}) worker {step.to} {step.arguments}"
            )
            start = len(body.arguments) + len(PARAMETER_KINDS)
            self._show_steps(body.steps, start, depth + 1, lines)
            lines.append(f"{'    ' * (depth + 1)}return {body.results}")


def _blanked(steps: tuple[Step, ...], ids: set[int]) -> tuple[Step, ...]:
    gone = {s.id for s in steps if s.id in ids}
    return tuple(
        Blank(s.id, s.adds)
        if s.id in gone or (isinstance(s, Join) and s.call in gone)
        else s
        for s in steps
    )
