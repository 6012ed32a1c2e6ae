"""A program in one process, with plain torch: what all must come to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from oracle.machine import (
    Frame,
    HookCounts,
    Label,
    Machine,
    Place,
    gradients_or_zeros,
    is_input,
    roots_of,
    scalars,
    take,
    taking,
)
from oracle.operations import MATERIALISING, sum_of_squares
from oracle.prediction import Edge, Exactness, Messages, Transfer, edge_of, flow
from oracle.programs import (
    Act,
    Backward,
    BackwardThere,
    Call,
    Forward,
    Gradient,
    Hook,
    Penalty,
    Program,
    TakeGradient,
)

__all__ = ["Expected", "Reference", "run_reference"]


@dataclass(frozen=True)
class Expected:
    """What a gradient must be.

    Attributes:
        value: As one process has it.
        is_exact: To the last bit.
        is_zeros: The value is None, but zeros must come, as documented: what is behind a
            "none" answer is fed by a Function that materialises.
    """

    value: Tensor | None
    is_exact: bool
    is_zeros: bool = False


@dataclass
class Reference:
    """All that a program must come to.

    Attributes:
        gradients: By what they belong to.
        roots: What passes began with, in order.
        hooks: How often each hook must have seen a gradient.
        leaf_hooks: Those on leaves. Where each call is a context of its own a leaf gets
            gradients from each call, and its hooks run for each.
        after_hooks: Those that run after accumulation. Torch runs them also where no
            gradient came.
        num_passes: How many passes there were that hooks counted.
    """

    gradients: dict[Label, Expected]
    roots: list[Tensor]
    hooks: dict[int, int]
    leaf_hooks: set[int]
    after_hooks: set[int]
    num_passes: int


def run_reference(program: Program) -> Reference:
    """Runs a program in this process."""
    machine = _OneProcess(program)
    for act in program.acts:
        machine.act(act)
    return machine.reference()


class _OneProcess(Machine):
    def __init__(self, program: Program) -> None:
        self.program = program
        self.places = [Place(program, n) for n in range(program.num_workers)]
        counts = HookCounts(only_into_grad=self.places[0].hooks.only_into_grad)
        for place in self.places:
            place.hooks = counts
        self.counts = counts
        self.frames: dict[int, Frame] = {}
        self.gradients: dict[Label, Tensor] = {}  # in dictionaries of contexts
        self.taken: dict[Label, Expected] = {}
        self.roots: list[Tensor] = []
        self.num_passes = 0
        # For predictions.
        self.materialises = program.uses(MATERIALISING)
        self.context = 0
        self.transfers: dict[int, list[Transfer]] = {}
        self.events = [0] * program.num_workers
        self.hook_edges: dict[int, Edge] = {}
        self.leaf_hooks: set[int] = set()
        self.after_hooks: set[int] = set()
        self.more_hooks: dict[int, int] = {}
        self.is_second_order = any(
            isinstance(step, Gradient) and step.create_graph
            for step in program.all_steps()
        )
        self.contributions: dict[Label, int] = {}
        self.inexact: set[Label] = set()
        self.zeros: set[Label] = set()
        self.given: set[Label] = set()

    # ---------------------------------------------------------------------------- calls

    def start(self, frame: Frame, call: Call, packed: Any) -> Any:
        here, there = frame.place.here, call.to
        recorded = call.is_recorded
        arguments = self.transfer(packed, recorded, "arguments", call.id, here, there)
        body = self.program.bodies[call.body]
        with torch.enable_grad():
            results = self.run_body(self.places[there], body, call.id, arguments)
        return self.transfer(results, recorded, "results", call.id, there, here)

    def finish(self, started: Any) -> Any:
        return started

    def let_go(self, frame: Frame, call: Call, started: Any) -> None:
        pass

    def transfer(
        self,
        packed: Any,
        recorded: bool,
        kind: Literal["arguments", "results"],
        call: int,
        sender: int,
        receiver: int,
    ) -> Any:
        """Copies what a message holds; the same tensor twice is one."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        sources, nodes = [], []

        def copy(packed: Any) -> Any:
            if isinstance(packed, (list, tuple)):
                return type(packed)(map(copy, packed))
            if isinstance(packed, dict):
                return {key: copy(inner) for key, inner in packed.items()}
            if not isinstance(packed, Tensor):
                return packed
            if id(packed) not in copies:
                made = _copy(packed, recorded)
                copies[id(packed)] = made, packed
                if made.grad_fn is not None:
                    sources.append(edge_of(packed))
                    nodes.append(made.grad_fn)
            return copies[id(packed)][0]

        copied = copy(packed)
        if sources:
            sent = self._event(sender)
            received = self._event(receiver)
            self.transfers.setdefault(self.context, []).append(
                Transfer(call, kind, sender, receiver, sources, nodes, sent, received)
            )
        return copied

    def _event(self, worker: int) -> int:
        self.events[worker] += 1
        return self.events[worker]

    def hook(self, frame: Frame, step: Hook) -> None:
        target = frame.values[step.target]
        if target.requires_grad and step.action != "retain":
            self.hook_edges[step.id] = edge_of(target)
            if step.action == "after":
                self.after_hooks.add(step.id)
            if target.is_leaf:
                self.leaf_hooks.add(step.id)
        super().hook(frame, step)

    # ----------------------------------------------------------------------------- acts

    def act(self, act: Act) -> None:
        self.context = act.context
        if isinstance(act, Forward):
            frame = self.frames.setdefault(act.frame, Frame(self.places[0], ()))
            self.run_steps(frame, act.steps)
        elif isinstance(act, Backward):
            values = self.frames[act.frame].values
            self.backward(
                [values[n] for n in act.roots],
                act.how,
                0,
                act.retain,
                act.create_graph,
            )
        elif isinstance(act, BackwardThere):
            root = self.places[act.worker].stored.get(act.slot)
            if root is not None:
                self.backward([root], act.how, act.worker, act.retain, False)
        elif isinstance(act, TakeGradient):
            self.take_gradient(act)
        else:
            self.add_penalty(act)

    def backward(
        self,
        tensors: Sequence[Tensor],
        how: str,
        starter: int,
        retain: bool,
        create_graph: bool,
    ) -> None:
        roots = roots_of(tensors)
        self.roots += [t.detach() for t in tensors]
        if not roots:
            return
        self.num_passes += how != "inputs"
        into_dict = how in ("api", "method") and not self.program.into_grad
        self._predict(roots, how, starter, into_dict, retain or create_graph)
        self.is_second_order |= create_graph
        options: dict[str, Any] = {
            "retain_graph": retain or create_graph,
            "create_graph": create_graph,
        }
        if not into_dict:
            if how == "inputs":
                options["inputs"] = self.places[0].parameters
            with taking() if how == "inputs" else contextlib.nullcontext():
                torch.autograd.backward(scalars(roots), **options)
            return
        leaves = self._leaves()
        found = torch.autograd.grad(
            scalars(roots), list(leaves.values()), allow_unused=True, **options
        )
        for label, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                key = ("dict", self.context, *label)
                before = self.gradients.get(key)
                if before is None:
                    self.gradients[key] = gradient
                elif (
                    before.is_sparse
                ):  # sparse + dense is not defined, dense + sparse is
                    self.gradients[key] = gradient + before
                else:
                    self.gradients[key] = before + gradient

    def take_gradient(self, act: TakeGradient) -> None:
        frame = self.frames[act.frame]
        inputs = [frame.use(n) for n in act.inputs]
        outputs = [frame.use(n) for n in act.outputs]
        exactness = Exactness(roots_of(outputs))
        found = take(outputs, inputs, act.create_graph)
        for number, (tensor, gradient) in enumerate(zip(inputs, found, strict=True)):
            exact = not is_input(tensor) or exactness.holds_for(tensor)
            exact = exact and not self.is_second_order
            value = None if gradient is None else gradient.detach()
            self.taken["taken", act.id, number] = Expected(value, exact)
        self.is_second_order |= act.create_graph
        frame.add(gradients_or_zeros(found, inputs))

    def add_penalty(self, act: Penalty) -> None:
        frame = self.frames[act.frame]
        if act.source == "values":
            total = sum_of_squares([frame.use(n) for n in act.values])
        elif act.source == "grad":
            total = sum_of_squares([p.grad for p in self.places[0].parameters])
        else:
            total = sum_of_squares([])
            for worker in act.workers:
                own = sum_of_squares(
                    [
                        self.gradients.get(
                            ("dict", act.context, "parameter", worker, n)
                        )
                        for n in range(len(self.places[worker].parameters))
                    ]
                )
                if worker:
                    own = self.transfer(own, True, "results", -act.id, worker, 0)
                total = total + own
        frame.add([total])

    def _leaves(self) -> dict[Label, Tensor]:
        return {k: t for place in self.places for k, t in place.leaves.items()}

    # ---------------------------------------------------------------------- predictions

    def _predict(
        self,
        roots: list[Tensor],
        how: str,
        starter: int,
        into_dict: bool,
        retain: bool,
    ) -> None:
        exactness = Exactness(roots)
        watched = {
            **{
                (("dict", self.context, *label) if into_dict else label): leaf
                for label, leaf in self._leaves().items()
            },
            **{k: t for place in self.places for k, t in place.retained.items()},
        }
        joined = self.program.contexts > 0
        for label, tensor in watched.items():
            # In a context all that a pass has for a leaf is added up first. Without one
            # each call adds what it has, one after the other.
            count = self.contributions.get(label, 0) + exactness.count(tensor)
            self.contributions[label] = count
            is_exact = exactness.holds_for(tensor) and (joined or count <= 2)
            # Graphs of gradients are not the same, node by node.
            if self.is_second_order or not is_exact:
                self.inexact.add(label)
        transfers = self.transfers.get(self.context, [])
        if joined and not retain:
            self.transfers[self.context] = []  # a context is consumed as a whole
        if not self.materialises:
            return
        plain_on = starter if joined and how == "plain" else None
        alone = flow(roots, None)
        passed = flow(roots, Messages(transfers, joined, plain_on))
        assert alone <= passed, "a pass would lose gradients"
        for label, tensor in watched.items():
            edge = edge_of(tensor)
            if edge in alone:
                self.given.add(label)
            elif edge in passed:
                self.zeros.add(label)
        for hook, edge in self.hook_edges.items():
            more = (edge in passed) - (edge in alone)
            self.more_hooks[hook] = self.more_hooks.get(hook, 0) + more

    # --------------------------------------------------------------------------- result

    def reference(self) -> Reference:
        gradients = dict(self.taken)
        found: dict[Label, Tensor | None] = dict(self.gradients)
        for label, leaf in self._leaves().items():
            found[label] = leaf.grad
            for context in range(self.program.contexts):
                found.setdefault(("dict", context, *label), None)
        for place in self.places:
            for label, tensor in place.retained.items():
                found[label] = tensor.grad
        for label, gradient in found.items():
            exact = label not in self.inexact
            value = None
            if gradient is not None:
                value, exact = gradient.detach(), exact and not gradient.is_sparse
            zeros = label in self.zeros
            if self.materialises:
                given = label in self.given
                assert given == (gradient is not None), ("wrong prediction", label)
            gradients[label] = Expected(value, exact, zeros and value is None)
        hooks = {
            hook: self.counts.with_gradient.get(hook, 0) + self.more_hooks.get(hook, 0)
            for hook in self.hook_edges
        }
        return Reference(
            gradients,
            self.roots,
            hooks,
            set() if self.program.contexts else self.leaf_hooks,
            self.after_hooks,
            self.num_passes,
        )


def _copy(tensor: Tensor, recorded: bool) -> Tensor:
    if recorded:
        with torch.enable_grad():
            return tensor.clone()
    copy = tensor.detach().clone()
    if tensor.is_leaf and tensor.requires_grad:
        copy.requires_grad_()
    return copy
