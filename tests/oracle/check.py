"""Runs a program on workers and compares it with one process. For the driver."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire import autograd, rpc
from oracle.generator import MAX_WORKERS, make_program
from oracle.machine import (
    Frame,
    Label,
    gradients_or_zeros,
    roots_of,
    scalars,
    take,
    taking,
)
from oracle.operations import seed_like, sum_of_squares
from oracle.programs import (
    Act,
    Backward,
    BackwardThere,
    Forward,
    Penalty,
    Program,
    TakeGradient,
)
from oracle.reference import Reference, run_reference
from oracle.workers import (
    Found,
    Report,
    Site,
    backward_there,
    dictionary,
    find_site,
    finish,
    key_of,
    outside,
    penalty_there,
    set_up,
    switch_counting,
    wait_until_idle,
)

TOLERANCE = 1e-10


class Mismatch(AssertionError):
    """A program came to something else than in one process."""


def check(
    mode: str, seed: int, taken_out: frozenset[int] = frozenset()
) -> dict[str, int]:
    """Runs the program of a seed both ways; returns what was compared, in numbers.

    Args:
        mode: See `oracle.programs`.
        seed: Of the program.
        taken_out: Steps and acts to leave out.

    Raises:
        Mismatch: With all differences.
    """
    program = make_program(mode, seed).without(set(taken_out))
    reference = run_reference(program)
    me = rpc.get_worker_info().id
    others = [rank for rank in range(MAX_WORKERS) if rank != me]
    chosen = random.Random(seed).sample(others, program.num_workers - 1)
    names = [f"w{rank}" for rank in [me, *chosen]]
    outcome = _Driver(program, names).run()
    return compare(reference, outcome, _wait_for_idle(names))


def _wait_for_idle(names: list[str]) -> list[str]:
    left = _ask_all(names, wait_until_idle)
    return [
        f"{n} still has {counts}"
        for n, counts in zip(names, left, strict=True)
        if counts
    ]


def _ask_all(
    names: Sequence[str], function: Callable[..., Any], *args: Any
) -> list[Any]:
    return [f.wait() for f in [rpc.rpc_async(name, function, args) for name in names]]


class Outcome:
    """What a program came to on the workers."""

    def __init__(self) -> None:
        self.gradients: dict[Label, Found | None] = {}
        self.roots: list[Tensor] = []
        self.reports: list[Report] = []


class _Driver:
    def __init__(self, program: Program, names: list[str]) -> None:
        self.program, self.names = program, names
        self.key = key_of(program)
        self.frames: dict[int, Frame] = {}
        self.contexts: list[autograd.Context] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        calls = [
            rpc.rpc_async(name, set_up, (self.program, here, self.names))
            for here, name in enumerate(self.names)
        ]
        for call in calls:
            call.wait()
        self.site: Site = find_site(self.key)
        accumulate: Any = "grad" if self.program.into_grad else "dict"
        try:
            with contextlib.ExitStack() as stack:
                for act in self.program.acts:
                    # The second context is opened inside the first one.
                    if len(self.contexts) <= act.context < self.program.contexts:
                        one = autograd.context(accumulate=accumulate)
                        self.contexts.append(stack.enter_context(one))
                    self._act(act)
                outside(self._read_dictionaries)
        finally:
            self.frames.clear()
            del self.site
            self.outcome.reports = _ask_all(self.names, finish, self.key)
        for report in self.outcome.reports:
            self.outcome.gradients.update(report.gradients)
        return self.outcome

    def _read_dictionaries(self) -> None:
        for number, context in enumerate(self.contexts):
            for found in _ask_all(self.names, dictionary, self.key, context):
                for label, gradient in found.items():
                    place = ("dict", number, *label)
                    self.outcome.gradients[place] = gradient

    def _act(self, act: Act) -> None:
        if isinstance(act, Forward):
            if act.frame not in self.frames:
                self.frames[act.frame] = Frame(self.site, ())
            self.site.machine.run_steps(self.frames[act.frame], act.steps)
        elif isinstance(act, Backward):
            self._backward(act)
        elif isinstance(act, BackwardThere):
            root = rpc.rpc_sync(
                self.names[act.worker],
                backward_there,
                (self.key, self.contexts[act.context], act.slot, act.how, act.retain),
            )
            if root is not None:
                self.outcome.roots.append(root)
        elif isinstance(act, TakeGradient):
            self._take(act)
        else:
            self._add_penalty(act)

    def _backward(self, act: Backward) -> None:
        values = self.frames[act.frame].values
        tensors = [values[n] for n in act.roots]
        self.outcome.roots += [t.detach() for t in tensors]
        roots = roots_of(tensors)
        if not roots:
            return
        options: dict[str, Any] = {
            "retain_graph": act.retain or act.create_graph,
            "create_graph": act.create_graph,
        }
        if act.how == "plain" and len(roots) == 1:
            scalars(roots)[0].backward(**options)
        elif act.how in ("plain", "inputs"):
            if act.how == "inputs":
                options["inputs"] = self.site.parameters
            with taking() if act.how == "inputs" else contextlib.nullcontext():
                torch.autograd.backward(scalars(roots), **options)
        else:
            context = self.contexts[act.context]
            if any(root.numel() > 1 for root in roots):
                seeds = [None if r.numel() == 1 else seed_like(r) for r in roots]
                options["grad_tensors"] = seeds
            if act.how == "api":
                autograd.backward(context, roots, **options)
            else:
                context.backward(roots[0] if len(roots) == 1 else roots, **options)

    def _take(self, act: TakeGradient) -> None:
        frame = self.frames[act.frame]
        inputs = [frame.use(n) for n in act.inputs]
        outputs = [frame.use(n) for n in act.outputs]
        grad: Callable[..., Any] = torch.autograd.grad
        if act.how == "api":
            context = self.contexts[act.context]

            def grad(*args: Any, **options: Any) -> Any:
                return autograd.grad(context, *args, **options)

        in_context = bool(self.contexts)
        if in_context:
            outside(_ask_all, self.names, switch_counting, self.key, False)
        found = take(outputs, inputs, act.create_graph, grad)
        if in_context:
            outside(_ask_all, self.names, switch_counting, self.key, True)
        for number, gradient in enumerate(found):
            value = None
            if gradient is not None:
                value = Found(gradient.detach().to_dense(), gradient.is_sparse)
            self.outcome.gradients["taken", act.id, number] = value
        frame.add(gradients_or_zeros(found, inputs))

    def _add_penalty(self, act: Penalty) -> None:
        frame = self.frames[act.frame]
        own = self.site.parameters
        if act.source == "values":
            total = sum_of_squares([frame.use(n) for n in act.values])
        elif act.source == "grad":
            total = sum_of_squares([p.grad for p in own])
        else:
            context = self.contexts[act.context]
            total = sum_of_squares([])
            for worker in act.workers:
                if worker:
                    arguments = (self.key, context)
                    name = self.names[worker]
                    total = total + rpc.rpc_sync(name, penalty_there, arguments)
                else:
                    total = total + penalty_there(self.key, context)
        frame.add([total])


# --------------------------------------------------------------------------- comparison


def compare(
    reference: Reference, outcome: Outcome, problems: list[str]
) -> dict[str, int]:
    counts = dict.fromkeys(("none", "zeros", "exact", "close", "hooks"), 0)
    for report in outcome.reports:
        problems += report.problems
    if len(outcome.roots) != len(reference.roots) or not all(
        torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        for found, wanted in zip(outcome.roots, reference.roots, strict=True)
    ):
        problems.append(
            f"passes began with {outcome.roots} instead of {reference.roots}"
        )
    # A call that nobody waits for may bring its leaves later than dictionaries are read,
    # or come when its context is over, and then bring leaves instead of what has a
    # history. In no case have they got a gradient.
    for label in reference.gradients.keys() - outcome.gradients.keys():
        is_late = label[0] in ("dict", "retained")
        if not is_late or reference.gradients[label].value is not None:
            problems.append(f"{label}: only in one process")
    for label in outcome.gradients.keys() - reference.gradients.keys():
        if outcome.gradients[label] is not None:
            problems.append(f"{label}: only on workers")
    for label, expected in reference.gradients.items():
        found = outcome.gradients.get(label)
        value = found.value if found is not None else None
        is_sparse = found is not None and found.is_sparse
        wanted = expected.value
        if expected.is_zeros:
            counts["zeros"] += 1
            if value is None or value.count_nonzero():
                problems.append(f"{label}: {value} instead of zeros")
        elif value is None or wanted is None:
            counts["none"] += 1
            if value is not wanted:
                problems.append(f"{label}: {value} instead of {wanted}")
        else:
            if is_sparse != wanted.is_sparse:
                problems.append(f"{label}: sparse: {is_sparse}")
            wanted = wanted.to_dense()
            counts["exact" if expected.is_exact else "close"] += 1
            if expected.is_exact:
                is_same = torch.equal(value, wanted)
            else:
                is_same = torch.allclose(value, wanted, rtol=TOLERANCE, atol=TOLERANCE)
            if not is_same:
                problems.append(
                    f"{label}: {value} instead of {wanted}, difference {value - wanted}, "
                    + ("exactly" if expected.is_exact else "nearly")
                )
    counts["hooks"] = _compare_hooks(reference, outcome.reports, problems)
    if problems:
        raise Mismatch("\n".join(problems))
    return counts


def _compare_hooks(
    reference: Reference, reports: list[Report], problems: list[str]
) -> int:
    seen: dict[int, int] = {}
    seen_none: dict[int, int] = {}
    for report in reports:
        seen.update(report.with_gradient)
        seen_none.update(report.with_none)
    for hook, wanted in reference.hooks.items():
        found = seen.get(hook, 0)
        # Behind a "none" answer a hook may see None, once per pass like any other.
        calls = found + seen_none.get(hook, 0)
        is_right = found == wanted and calls <= reference.num_passes
        if hook in reference.leaf_hooks:
            is_right = (found > 0) == (wanted > 0) or hook in reference.after_hooks
        elif hook in reference.after_hooks:
            is_right = wanted <= found <= reference.num_passes
        if not is_right:
            problems.append(
                f"hook {hook} saw {found} gradients instead of {wanted}, and None "
                f"{calls - found} times, in {reference.num_passes} passes"
            )
    return sum(reference.hooks.values())
