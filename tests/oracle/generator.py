"""Makes random programs out of seeds. The same seed gives the same program everywhere.

Only programs that have one right answer are made: what calls that run at the same time do
must not depend on who comes first. So a value that was stored is used only by calls that
begin after the one that stored it was waited for, and calls that nobody waits for neither
store nor load anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from oracle.operations import IN_PLACE, MATERIALISING, OPERATIONS
from oracle.programs import (
    FITS,
    IN_CONTEXT,
    PARAMETER_KINDS,
    SECOND_ORDER,
    Act,
    Backward,
    BackwardThere,
    Body,
    Call,
    Compute,
    Forward,
    Gradient,
    Hook,
    InPlace,
    Join,
    Load,
    Packing,
    Penalty,
    Program,
    Step,
    Store,
    Style,
    TakeGradient,
)

T = TypeVar("T")

MAX_WORKERS = 5
_FACTORS = [2.0, 0.5, -1.0, -0.5]  # exact, so that hooks on one value commute
_LITTLE = 0.05  # what constants are worth
_OTHERS: list[Any] = [None, 7, "text", 2.5, (1, 2)]


@dataclass(frozen=True)
class Stored:
    """A value left on a worker."""

    slot: int
    kind: str
    worth: float


Stores = dict[int, list[Stored]]
"""By worker."""


@dataclass
class Scope:
    """A frame as it is while its steps are made.

    Attributes:
        here: The worker that runs it.
        kinds: Of its values.
        uses: How often each value was used.
        worth: How much of the program each value depends on, more or less.
        visible: Stored values that can be used, here and on other workers.
        new: Those of them that came with this frame.
        called: Workers that were called, also by those that were called.
    """

    here: int
    kinds: list[str]
    uses: list[int]
    worth: list[float]
    visible: Stores
    first_parameter: int
    called: set[int] = field(default_factory=set)
    new: Stores = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    pending: list[tuple[Call, list[float], Stores]] = field(default_factory=list)
    depth: int = 0
    is_waited_for: bool = True

    def add(self, step: Step, worth: Sequence[float] = ()) -> list[int]:
        """Appends a step; returns the numbers of what it adds."""
        self.steps.append(step)
        if isinstance(step, Call) and step.style != "sync":
            return []
        return self.extend(step.adds, worth)

    def extend(self, kinds: Sequence[str], worth: Sequence[float] = ()) -> list[int]:
        first = len(self.kinds)
        self.kinds += kinds
        self.uses += [0] * len(kinds)
        self.worth += worth or [_LITTLE] * len(kinds)
        return list(range(first, len(self.kinds)))

    def is_parameter(self, number: int) -> bool:
        return 0 <= number - self.first_parameter < len(PARAMETER_KINDS)

    def see(self, stores: Stores) -> None:
        """A call that stored these has been waited for."""
        for where in (self.visible, self.new):
            for worker, found in stores.items():
                where.setdefault(worker, []).extend(found)

    def find(self, kind: str) -> list[int]:
        fits = FITS.get(kind, kind)
        return [i for i, k in enumerate(self.kinds) if k in fits]


def make_program(mode: str, seed: int) -> Program:
    """The program of a seed."""
    return _Maker(mode, seed).make()


class _Maker:
    def __init__(self, mode: str, seed: int) -> None:
        self.mode, self.seed = mode, seed
        self.rng = rng = random.Random(f"{mode}:{seed}")
        self.num_workers = rng.choice([2, 2, 3, 3, 4, MAX_WORKERS])
        self.second_order = mode in SECOND_ORDER
        self.in_context = mode in IN_CONTEXT
        # What sort of program it is.
        self.narrow = self.chance(0.5)  # few uses of a value: sums have a fixed order
        self.materialises = not self.second_order and self.chance(0.35)
        self.through = not self.materialises and self.chance(0.6)  # has autograd.grad
        self.overlaps = self.chance(0.6)  # has calls that run at the same time
        self.strays = True  # has calls that nobody waits for
        self.sparse = not self.second_order and self.chance(0.3)
        self.hooks = self.chance(0.6)
        self.calls_left = rng.randint(2, 9 if self.second_order else 12)
        if mode == "b" and self.materialises:
            # Which sends lie behind what a plain backward reaches on its own worker is
            # then a matter of who comes first.
            self.overlaps = False
        self.bodies: list[Body] = []
        self.acts: list[Act] = []
        self.num_ids = 0
        self.num_slots = 0
        self.frames: dict[int, Scope] = {}
        self.visible: Stores = {}

    def make(self) -> Program:
        contexts, into_grad = 0, True
        if self.in_context:
            contexts = 2 if self.mode != "c" and self.chance(0.25) else 1
            into_grad = self.mode == "b" and self.chance(0.5)
        getattr(self, f"_make_acts_{self.mode}")(contexts, into_grad)
        return Program(
            self.mode,
            self.seed,
            self.num_workers,
            contexts,
            into_grad,
            tuple(self.acts),
            tuple(self.bodies),
        )

    # ------------------------------------------------------------------------- choosing

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, scope: Scope, kinds: str) -> int:
        """The number of a value of one of some kinds, rather a new or unused one."""
        found = [i for k in dict.fromkeys(kinds) for i in scope.find(k)]
        power = 4.0 if self.narrow else 0.5
        weights = [scope.worth[i] / (1 + scope.uses[i]) ** power for i in found]
        (chosen,) = self.rng.choices(found, weights)
        scope.uses[chosen] += 1
        return chosen

    def some(self, scope: Scope, kinds: str, low: int, high: int) -> tuple[int, ...]:
        count = self.rng.randint(low, high)
        return tuple(self.pick(scope, kinds) for _ in range(count))

    def id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def packing(self, refs: Sequence[int]) -> Packing:
        leaves: list[Any] = [("ref", ref) for ref in refs]
        if self.chance(0.2):
            leaves.insert(
                self.rng.randint(0, len(leaves)), ("other", self.rng.choice(_OTHERS))
            )
        return Packing(self._nested(leaves, 2))

    def _nested(self, leaves: list[Any], depth: int) -> Any:
        if len(leaves) == 1 and self.chance(0.6):
            return leaves[0]
        if depth and len(leaves) > 1 and self.chance(0.4):
            cut = self.rng.randint(1, len(leaves) - 1)
            parts = [self._nested(p, depth - 1) for p in (leaves[:cut], leaves[cut:])]
        else:
            parts = leaves
        container = self.rng.choice(["tuple", "list", "dict"])
        return container, [(f"k{n}", part) for n, part in enumerate(parts)]

    # ---------------------------------------------------------------------------- steps

    def new_scope(
        self,
        here: int,
        arguments: str,
        worths: Sequence[float],
        visible: Stores,
        depth: int,
    ) -> Scope:
        kinds = [*arguments, *PARAMETER_KINDS]
        # Parameters rather have a use elsewhere already, arguments have none.
        uses = [0] * len(arguments) + [1] * len(PARAMETER_KINDS)
        worth = [*worths, *[0.4] * len(PARAMETER_KINDS)]
        stores = {worker: list(found) for worker, found in visible.items()}
        return Scope(here, kinds, uses, worth, stores, len(arguments), depth=depth)

    def make_steps(self, scope: Scope, count: int) -> None:
        for _ in range(count):
            if scope.pending and self.chance(0.4):
                self._join(scope, self.rng.randrange(len(scope.pending)))
            if self.calls_left > 0 and self.chance(0.75 / (1 + 0.6 * scope.depth)):
                self._call(scope)
            else:
                self._local_step(scope)

    def end_steps(self, scope: Scope) -> None:
        while scope.pending:
            self._join(scope, self.rng.randrange(len(scope.pending)))

    def _local_step(self, scope: Scope) -> None:
        roll = self.rng.random()
        if roll < 0.12:
            name = self.rng.choice(sorted(IN_PLACE))
            targets = [i for i, k in enumerate(scope.kinds) if k == "f"]
            fresh = [i for i in targets if not scope.uses[i]] or targets
            step = InPlace(
                self.id(), name, self.rng.choice(fresh), self.pick(scope, "f")
            )
            scope.add(step)
        elif roll < 0.32 and self.hooks:
            self._hook(scope)
        elif roll < 0.45 and self.in_context and scope.is_waited_for:
            self._store_or_load(scope)
        elif roll < 0.52 and self.through and not self.in_context:
            self._gradient(scope)
        else:
            self._compute(scope)

    def _compute(self, scope: Scope) -> None:
        if "i" not in scope.kinds and self.chance(0.2):
            scope.add(Compute(self.id(), "make_rows", (), "i"))
        names = [
            name
            for name, operation in OPERATIONS.items()
            if operation.weight
            and (operation.twice or not self.second_order)
            and (name != "sparse_rows" or self.sparse)
            and all(scope.find(kind) for kind in operation.takes)
        ]
        weights = [OPERATIONS[name].weight for name in names]
        if self.materialises and scope.is_waited_for:
            names.append(MATERIALISING)
            weights.append(8.0)
        (name,) = self.rng.choices(names, weights)
        operation = OPERATIONS[name]
        inputs = tuple(self.pick(scope, kind) for kind in operation.takes)
        # A view made under no_grad is neither a leaf nor has it a history.
        recorded = operation.is_view or not self.chance(0.04)
        worth = max((scope.worth[i] for i in inputs), default=_LITTLE) + 0.3
        if not recorded or name in ("detached", "next_rows"):
            worth = _LITTLE
        worths = [worth] * len(operation.gives)
        scope.add(Compute(self.id(), name, inputs, operation.gives, recorded), worths)

    def _hook(self, scope: Scope) -> None:
        action: Literal["scale", "observe", "retain", "after"]
        action = self.rng.choice(["scale", "scale", "scale", "observe", "retain"])
        number = self.pick(scope, "fwt" + ("s" if "s" in scope.kinds else ""))
        scope.uses[number] -= 1
        if action == "retain" and (self.through or self.second_order):
            # In a pass that leaves remote leaves alone hooks may run that a single
            # process would not run.
            action = "observe"
        if action == "observe" and self.mode in "bd" and self.chance(0.3):
            number = scope.first_parameter + self.rng.randrange(len(PARAMETER_KINDS))
            action = "after"
        races = self.overlaps and self.through and not self.in_context
        if scope.is_parameter(number) and (races or not scope.is_waited_for):
            return  # other calls would see its effect, or not
        scope.add(Hook(self.id(), number, action, self.rng.choice(_FACTORS)))

    def _store_or_load(self, scope: Scope) -> None:
        there = scope.visible.get(scope.here, [])
        if there and self.chance(0.5):
            stored = self.rng.choice(there)
            scope.add(Load(self.id(), stored.slot, stored.kind), [stored.worth])
            return
        if self.chance(0.3):
            (target,) = self._loss(scope)
        else:
            target = self.pick(scope, "fwst" if "s" in scope.kinds else "fwt")
        self.num_slots += 1
        scope.add(Store(self.id(), self.num_slots, target))
        stored = Stored(self.num_slots, scope.kinds[target], scope.worth[target])
        scope.see({scope.here: [stored]})

    def _gradient(self, scope: Scope) -> None:
        outputs = self.some(scope, "f", 1, 2)
        inputs = self._inputs(scope, 2)
        adds = "".join("f" if scope.kinds[i] == "x" else scope.kinds[i] for i in inputs)
        worth = scope.worth[outputs[0]] if self.second_order else _LITTLE
        step = Gradient(self.id(), outputs, inputs, self.second_order, adds)
        scope.add(step, [worth] * len(inputs))

    def _inputs(self, scope: Scope, count: int) -> tuple[int, ...]:
        """Values to take gradients of.

        Outside of any context this worker's uses of a parameter in other calls, those
        that this frame has made or those that its arguments come from, are not seen.
        """
        inputs = dict.fromkeys(self.some(scope, "fw", 1, count))
        is_elsewhere = scope.first_parameter > 0 or scope.here in scope.called
        if not self.in_context and is_elsewhere:
            inputs = {i: None for i in inputs if not scope.is_parameter(i)}
        return tuple(inputs)

    def _loss(self, scope: Scope) -> list[int]:
        return self._gather(scope, "loss", "s", 1, 4)

    def _gather(
        self, scope: Scope, name: str, adds: str, low: int, high: int
    ) -> list[int]:
        kinds = "fwt" + ("s" if "s" in scope.kinds else "")
        inputs = self.some(scope, kinds, low, high)
        worth = max(scope.worth[i] for i in inputs) + 0.3
        return scope.add(Compute(self.id(), name, inputs, adds), [worth])

    # ---------------------------------------------------------------------------- calls

    def _call(self, scope: Scope) -> None:
        self.calls_left -= 1
        style: Style = "sync"
        if self.overlaps:
            never = 0.5 if self.strays else 0.0
            styles: list[Style] = ["sync", "async", "kept", "dropped"]
            (style,) = self.rng.choices(styles, [5, 4, never, never])
        to = self.rng.randrange(self.num_workers)
        kinds = "fffwti" + ("s" if "s" in scope.kinds else "")
        kinds = "".join(k for k in kinds if scope.find(k))
        refs = list(self.some(scope, kinds, 0 if self.chance(0.1) else 1, 4))
        if refs and self.chance(0.1):
            refs.append(refs[0])
        arguments = self.packing(refs)
        recorded = not self.chance(0.05)
        inner = self.new_scope(
            to,
            "".join(scope.kinds[ref] for ref in arguments.refs()),
            [scope.worth[ref] + 0.5 * recorded for ref in arguments.refs()],
            scope.visible,
            scope.depth + 1,
        )
        inner.is_waited_for = scope.is_waited_for and style in ("sync", "async")
        results = self._fill(inner)
        body = Body(
            to,
            "".join(inner.kinds[: len(arguments.refs())]),
            tuple(inner.steps),
            results,
        )
        self.bodies.append(body)
        adds = "".join(inner.kinds[ref] for ref in results.refs())
        call = Call(
            self.id(), to, len(self.bodies) - 1, arguments, style, adds, recorded
        )
        worths = [
            inner.worth[ref] + 0.5 if recorded else _LITTLE for ref in results.refs()
        ]
        scope.add(call, worths)
        scope.called |= {to} | inner.called
        if style == "sync":
            scope.see(inner.new)
        elif style == "async":
            scope.pending.append((call, worths, inner.new))

    def _fill(self, scope: Scope) -> Packing:
        """The steps of a call; returns what it gives back."""
        if not self.chance(0.1):  # else it only sends back what it got
            self.make_steps(scope, self.rng.randint(1, 5))
        if self.chance(0.15):
            self._loss(scope)
        self.end_steps(scope)
        if self.chance(0.04):
            return self.packing([])
        if self.chance(0.7):
            refs = self._gather(scope, "mix", "f", 2, 4)
        else:
            refs = [self.pick(scope, "f")]
        if scope.kinds[-1] in "fswx" and len(scope.kinds) - 1 not in refs:
            refs.append(len(scope.kinds) - 1)
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            refs.append(self.rng.randrange(len(scope.kinds)))
        if self.materialises and scope.is_waited_for and self.chance(0.4):
            # Often unused, and often all that uses the parameter.
            parameter = scope.first_parameter + self.rng.randrange(2)
            step = Compute(self.id(), MATERIALISING, (parameter,), "f")
            refs += scope.add(step, [_LITTLE])
        return self.packing(refs)

    def _join(self, scope: Scope, number: int) -> None:
        call, worths, stores = scope.pending.pop(number)
        scope.add(Join(self.id(), call.id, call.adds), worths)
        scope.see(stores)

    # ----------------------------------------------------------------------------- acts

    def forward(self, frame: int, context: int, *, losses: int = 1) -> list[int]:
        """Steps of the driver; returns the numbers of scalars to begin a pass with."""
        scope = self.frames.get(frame)
        if scope is None:
            scope = self.frames[frame] = self.new_scope(0, "", (), self.visible, 0)
        scope.steps = []
        first = len(scope.kinds)
        scope.visible = {worker: list(found) for worker, found in self.visible.items()}
        # The losses are to reach something that was called for.
        self.make_steps(scope, self.rng.randint(3, 8))
        found = []
        for _ in range(losses):
            if "s" in scope.kinds[first:] and self.chance(0.15):
                last = max(i for i, k in enumerate(scope.kinds) if k == "s")
                found.append(last)
                scope.uses[last] += 1
            elif self.chance(0.12):
                found.append(self.pick(scope, "f"))
            else:
                self.end_steps(scope)
                if self.chance(0.7):
                    self._gather(scope, "mix", "f", 2, 5)
                found += self._loss(scope)
        self.end_steps(scope)
        self.visible = scope.visible
        act = Forward(self.id(), frame, context, first, tuple(scope.steps))
        self.acts.append(act)
        return found

    def backward(
        self,
        frame: int,
        context: int,
        roots: Sequence[int],
        how: Any,
        *,
        retain: bool = False,
        create_graph: bool = False,
    ) -> None:
        self.acts.append(
            Backward(self.id(), frame, context, tuple(roots), how, retain, create_graph)
        )

    def take(
        self,
        frame: int,
        context: int,
        outputs: Sequence[int],
        how: Any,
        *,
        create_graph: bool = False,
    ) -> list[int]:
        """A `TakeGradient`; returns the numbers of the gradients."""
        scope = self.frames[frame]
        inputs = self._inputs(scope, 4)
        self.acts.append(
            TakeGradient(
                self.id(),
                frame,
                context,
                tuple(outputs),
                inputs,
                how,
                True,
                create_graph,
            )
        )
        return self._extend(frame, [scope.kinds[i] for i in inputs])

    def penalty(self, frame: int, context: int, source: Any, **what: Any) -> int:
        self.acts.append(Penalty(self.id(), frame, context, source, **what))
        return self._extend(frame, ["s"])[0]

    def _extend(self, frame: int, kinds: list[str]) -> list[int]:
        # Gradients may share memory in ways of their own: never changed in place.
        return self.frames[frame].extend(["x" if k == "f" else k for k in kinds])

    def add_up(self, frame: int, context: int, numbers: list[int]) -> int:
        """A scalar made of scalars."""
        scope = self.frames[frame]
        scope.steps = []
        first = len(scope.kinds)
        total = scope.add(Compute(self.id(), "loss", tuple(numbers), "s"))[0]
        self.acts.append(Forward(self.id(), frame, context, first, tuple(scope.steps)))
        return total

    def meet_a_call(self, frame: int, context: int) -> int:
        """A value that has come from another worker for sure."""
        scope = self.frames[frame]
        scope.steps = []
        first = len(scope.kinds)
        to = self.rng.randrange(1, self.num_workers)
        self.bodies.append(Body(to, "", (), Packing(("ref", 0))))
        nothing = Packing(("tuple", ()))
        call = Call(self.id(), to, len(self.bodies) - 1, nothing, "sync", "f")
        (number,) = scope.add(call, [1.0])
        self.acts.append(Forward(self.id(), frame, context, first, tuple(scope.steps)))
        return number

    def new_graph(self) -> None:
        """A pass has consumed all that there was."""
        self.visible = {}

    def pass_in_context(
        self,
        frame: int,
        context: int,
        roots: list[int],
        into_grad: bool,
        retain: bool,
        *,
        is_last: bool = True,
    ) -> None:
        """A first order pass over a context, by any way that its mode has."""
        ways: list[Any] = ["api", "method"]
        if self.mode == "b":
            ways = ["plain", "plain", "api"] if into_grad else ["plain"]
        scalars = [
            (worker, stored.slot)
            for worker, found in self.visible.items()
            for stored in found
            if stored.kind == "s" and worker
        ]
        # A plain backward that meets no call at all leaves the context as it is, but
        # uses up graphs that a later pass runs through.
        if scalars and self.chance(0.6) and (is_last or retain or self.mode == "a"):
            worker, slot = self.rng.choice(scalars)
            way = "plain" if "plain" in ways and self.chance(0.7) else ways[-1]
            if way == "method":
                way = "api"
            self.acts.append(
                BackwardThere(self.id(), context, worker, slot, way, retain)  # type: ignore[arg-type]
            )
            return
        self.backward(frame, context, roots, self.rng.choice(ways), retain=retain)

    def _make_acts_a(self, contexts: int, into_grad: bool) -> None:
        if contexts == 2:
            self._two_contexts(into_grad)
            return
        shape = self.rng.choice(["one", "one", "retained", "again", "shared"])
        # What a stray call makes before and after a pass that consumes the context
        # would be half consumed, and break the pass after that one.
        self.strays = shape != "again"
        losses = self.forward(0, 0, losses=self.rng.choice([1, 1, 2]))
        if self.through and self.chance(0.5):
            self.take(0, 0, losses[:1], self.rng.choice(["plain", "api"]))
        if shape == "one":
            self.pass_in_context(0, 0, losses, into_grad, False)
        elif shape == "retained":
            self.pass_in_context(0, 0, losses[:1], into_grad, True)
            self.pass_in_context(0, 0, losses, into_grad, False)
        elif shape == "again":
            losses = [self.add_up(0, 0, [*losses, self.meet_a_call(0, 0)])]
            self.pass_in_context(0, 0, losses, into_grad, False, is_last=False)
            self.new_graph()
            self.strays = True
            self.calls_left = max(self.calls_left, 3)
            losses = self.forward(1, 0)
            self.pass_in_context(1, 0, losses, into_grad, False)
        else:
            self.calls_left = max(self.calls_left, 3)
            more = self.forward(self.rng.choice([0, 1]), 0)
            frame = self.acts[-1].frame  # type: ignore[union-attr]
            self.pass_in_context(0, 0, losses, into_grad, True)
            self.pass_in_context(frame, 0, more, into_grad, False)

    _make_acts_b = _make_acts_a

    def _two_contexts(self, into_grad: bool) -> None:
        roots, stores = [], []
        for context in range(2):
            self.calls_left = max(self.calls_left, 3)
            self.visible = {}
            roots.append(self.forward(context, context))
            stores.append(self.visible)
        for context in self.rng.sample([0, 1], 2):
            self.visible = stores[context]
            self.pass_in_context(context, context, roots[context], into_grad, False)

    def _make_acts_c(self, contexts: int, into_grad: bool) -> None:
        losses = self.forward(0, 0)
        source = self.rng.choice(["dict", "dict", "taken", "taken", "grad"])
        second: Any = "api"
        if source == "dict":
            self.backward(
                0, 0, losses, self.rng.choice(["api", "method"]), create_graph=True
            )
            count = self.rng.randint(1, self.num_workers)
            workers = tuple(self.rng.sample(range(self.num_workers), count))
            total = self.penalty(0, 0, "dict", workers=workers)
        elif source == "grad":
            self.backward(0, 0, losses, "plain", create_graph=True)
            total = self.penalty(0, 0, "grad")
            second = "plain"
        else:
            how = self.rng.choice(["api", "plain"])
            taken = self.take(0, 0, losses, how, create_graph=True)
            total = self.penalty(0, 0, "values", values=tuple(taken))
            second = self.rng.choice(["api", "method", "plain"])
        if self.chance(0.3):
            self.calls_left = max(self.calls_left, 2)
            losses += self.forward(0, 0)
        if self.chance(0.5):
            total = self.add_up(0, 0, [total, *losses])
        self.backward(0, 0, [total], second)

    def _make_acts_d(self, contexts: int, into_grad: bool) -> None:
        first = self.forward(0, 0, losses=self.rng.choice([1, 1, 2]))
        self.calls_left = max(self.calls_left, 3)
        shares = self.chance(0.4)
        frame = 0 if shares else 1
        second = self.forward(frame, 0)
        if self.through and self.chance(0.7):
            self.take(0, 0, first, "plain")
        is_here = 0 not in self.frames[0].called  # see _inputs
        if self.through and is_here and self.chance(0.6):
            self.backward(0, 0, first[:1], "inputs", retain=True)
        if shares and self.chance(0.3):
            self.backward(0, 0, [*first, *second], "plain")
            return
        order = [(0, first), (frame, second)]
        self.rng.shuffle(order)
        twice = self.chance(0.3)
        for number, (where, roots) in enumerate(order):
            retain = twice or (shares and number == 0)
            self.backward(where, 0, roots, "plain", retain=retain)
        if twice:
            where, roots = self.rng.choice(order)
            self.backward(where, 0, roots, "plain")

    def _make_acts_e(self, contexts: int, into_grad: bool) -> None:
        losses = self.forward(0, 0)
        if self.through and self.chance(0.3):  # second order by its own steps only
            self.backward(0, 0, losses, "plain")
            return
        is_here = 0 not in self.frames[0].called  # see _inputs
        if is_here and self.chance(0.5):
            self.backward(0, 0, losses, "plain", create_graph=True)
            total = self.penalty(0, 0, "grad")
        else:
            taken = self.take(0, 0, losses, "plain", create_graph=True)
            total = self.penalty(0, 0, "values", values=tuple(taken))
            if self.chance(0.2):
                taken = self.take(0, 0, [total], "plain", create_graph=True)
                total = self.penalty(0, 0, "values", values=tuple(taken))
        if self.chance(0.3):
            self.calls_left = max(self.calls_left, 2)
            losses += self.forward(0, 0)
        if self.chance(0.5):
            total = self.add_up(0, 0, [total, *losses])
        self.backward(0, 0, [total], "plain")
