"""One owner's share of a distributed optimizer.

The torch optimizer here does not work on the parameters but on stand-ins: tensors that
share the memory of a parameter, but have a ``.grad`` and a version counter of their own.
A step gives them the gradients of its context and takes them back afterwards.

1. So ``.grad`` of the parameters is neither changed nor read by steps of a context.
   Setting it aside during the step would not do: a backward of another trainer may add
   to it at any time, and no lock of ours holds that up.
2. A parameter without a gradient has a stand-in without one, which every optimizer of
   torch leaves alone.
3. Any optimizer class works; there is no need for functional versions of them.
4. A step that nobody gets to see changes nothing of a parameter, not even its version; for
   other steps see `gradwire.optim._versions`.

Steps of plain SGD in one phase need none of them: see `gradwire.optim._at_once`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradwire.optim._at_once import step_at_once
from gradwire.optim._closures import Evaluations
from gradwire.optim._gradients import (
    drop_gradients,
    find_gradients,
    replace_gradients,
)
from gradwire.optim._keeping import Keeper
from gradwire.optim._known import find_optimizer
from gradwire.optim._locks import (
    Held,
    find_locks,
    hold,
    hold_or_borrow,
    lend,
    try_hold,
)
from gradwire.optim._places import Place
from gradwire.optim._protocol import Mark, OwnerRecord
from gradwire.optim._references import values_of
from gradwire.optim._torch_private import run_step
from gradwire.optim._trial import Trial
from gradwire.optim._versions import Versions
from gradwire.rpc import RRef, get_worker_info
from gradwire.rpc.extension import for_agents, methods_for_agents
from gradwire.wire import move

__all__ = [
    "Changes",
    "Group",
    "LocalOptimizer",
    "Look",
    "Saving",
    "make_local_optimizer",
]

Changes = dict[int, dict[str, Any]]
"""New values of hyperparameters, by number of the group."""


class Group(NamedTuple):
    """Parameters of one group that live on one owner."""

    rrefs: list[RRef[Tensor]]
    options: dict[str, Any] | None
    """None: the program gave a plain list and no groups."""


@for_agents
def make_local_optimizer(
    optimizer_class: type[torch.optim.Optimizer] | str,
    groups: list[tuple[list[RRef[Tensor]], dict[str, Any] | None]],
    others: list[RRef[LocalOptimizer]],
    mark: tuple[int, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[RRef[LocalOptimizer], dict[str, Any], list[dict[str, Any]]]:
    """Makes an optimizer on this worker; also returns its hyperparameters.

    Args:
        optimizer_class: Class of the optimizer; its name where nothing is unpickled.
        groups: Its parameters; each a `Group`.
        others: What else there is of the same distributed optimizer on this worker.
        mark: The state that all owners are in; a `Mark`.
        args: Arguments of the class.
        kwargs: Likewise.
    """
    taken = [
        parameter for other in others for parameter in other.local_value().parameters
    ]
    cls: Any = optimizer_class
    if isinstance(cls, str):
        cls = find_optimizer(cls)
    members = [Group(*group) for group in groups]
    local = LocalOptimizer(cls, members, taken, Mark(*mark), args, kwargs)
    return RRef(local), local.defaults, local.hyperparameters()


class Saving(NamedTuple):
    """A request for a snapshot, besides which only one other is kept."""

    kept: Mark | None


class Look(NamedTuple):
    """What an owner is asked for after a loss."""

    mark: Mark
    """The state that it is in."""
    saved: list[Mark] | None
    """Of which states it has snapshots; None: they cannot be reached."""


class _Pending(NamedTuple):
    """A step that was prepared. It ends with this object: then nothing has happened."""

    trial: Trial
    held: Held


# Not those for snapshots: where workers do not trust each other, none may say where
# another one writes.
@methods_for_agents(
    *("step", "prepare", "commit", "abort", "step_alone", "look"),
    *("zero_grad", "state_dict", "load_state_dict"),
)
class LocalOptimizer:
    """A torch optimizer for parameters of this worker; see `make_local_optimizer`.

    Its methods are called by trainers, on any thread of the agent.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: list[Group],
        taken: Sequence[Tensor],
        mark: Mark,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        values = [values_of(group.rrefs) for group in groups]
        self.parameters = [parameter for group in values for parameter in group]
        _refuse_twins([*taken, *self.parameters])
        stand_ins = [[_stand_in(parameter) for parameter in group] for group in values]
        self._stand_ins = [stand_in for group in stand_ins for stand_in in group]
        self._versions = Versions(self.parameters, self._stand_ins)
        given: list[Any] = [
            {**(group.options or {}), "params": members}
            for group, members in zip(groups, stand_ins, strict=True)
        ]
        if groups[0].options is None:
            given = stand_ins[0]
        self._optimizer = optimizer_class(given, *args, **kwargs)
        # Torch's own classes leave it to programs.
        self._may_replace_gradients = not optimizer_class.__module__.startswith(
            "torch.optim."
        )
        self._lent: Sequence[Tensor | None] = ()
        self._locks = find_locks(values)
        self._parameters_held = hold(self._locks)
        # Guards what is below; handlers, which may come in another order than they were
        # asked for if the trainer was interrupted.
        self._transaction_lock = threading.Lock()
        self._record = OwnerRecord(mark)
        self._pending: _Pending | None = None
        self._keeper: Keeper | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """Hyperparameters of groups that say nothing else."""
        return self._optimizer.defaults

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Those of each group."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def step(
        self,
        context_id: int | None,
        changes: Changes | None = None,
        evaluations: RRef[Evaluations] | None = None,
    ) -> tuple[int | None, Any] | None:
        """One step.

        Args:
            context_id: Whose gradients to use; None: ``.grad``.
            changes: Hyperparameters that have changed.
            evaluations: The closure.

        Returns:
            With a closure: the number of the evaluation whose loss the optimizer
            returned; None and what it returned if that is something else.
        """
        with self._parameters_held:
            if changes:
                self._apply(changes)
            gradients = find_gradients(context_id, self.parameters)
            if evaluations is None and step_at_once(
                self._optimizer, self.parameters, gradients
            ):
                return None
            _give_memory(self.parameters, self._stand_ins)
            try:
                self._lend(gradients)
                self._versions.begin(gradients)
                if evaluations is None:
                    run_step(self._optimizer)
                    return None
                return self._step_with(evaluations, context_id)
            finally:
                self._return_gradients(context_id)
                # The optimizer may itself have given parameters other memory.
                _give_memory(self._stand_ins, self.parameters)
                self._versions.end()

    # ------------------------------------------------------------------- in two phases

    def prepare(
        self,
        mark: Mark,
        priority: int,
        context_id: int | None,
        changes: Changes,
        saving: Saving | None = None,
    ) -> bool:
        """Makes a step that nobody sees; the parameters are locked until its end.

        Args:
            mark: The state to which it leads.
            priority: Of several transactions the one with the lowest comes first.
            context_id: Whose gradients to use; None: ``.grad``.
            changes: Hyperparameters that have changed.
            saving: Make a snapshot of that state.

        Returns:
            False: another transaction has the parameters, and comes first.
        """
        mark = Mark(*mark)  # comes as a plain tuple
        with self._transaction_lock:
            if not self._record.may_prepare(mark):
                return False
        held = try_hold(self._locks, priority)
        if held is None:
            return False
        try:
            trial = self._try_step(mark, context_id, changes, saving)
        except BaseException:
            held.release()
            raise
        with self._transaction_lock:
            if self._record.may_prepare(mark):
                self._record.prepare(mark)
                self._pending = _Pending(trial, held)
                return True
        # The trainer was interrupted, and has given up meanwhile.
        trial.undo()
        held.release()
        return False

    def commit(self, mark: Mark) -> None:
        """Shows a step that was prepared; nothing if that was done before."""
        mark = Mark(*mark)
        with self._transaction_lock:
            pending = self._pending if self._record.commit(mark) else None
            if pending is not None:
                self._pending = None
                pending.trial.show()
                pending.held.release()

    def abort(self, mark: Mark) -> None:
        """Undoes a step that was prepared, or will be."""
        mark = Mark(*mark)
        if self._keeper is not None:
            self._keeper.drop(mark)
        with self._transaction_lock:
            pending = self._pending if self._record.abort(mark) else None
            if pending is not None:
                self._pending = None
                pending.trial.undo()
                pending.held.release()

    def step_alone(
        self,
        mark: Mark,
        context_id: int | None,
        changes: Changes,
        saving: Saving | None = None,
    ) -> None:
        """Both phases at once, for the only owner."""
        mark = Mark(*mark)
        with self._parameters_held:
            trial = self._try_step(mark, context_id, changes, saving)
            with self._transaction_lock:
                is_wanted = self._record.may_prepare(mark)
                if is_wanted:
                    self._record.prepare(mark)
                    self._record.commit(mark)
            if is_wanted:
                trial.show()
            else:  # the trainer was interrupted, and has given up meanwhile
                trial.undo()

    def _try_step(
        self,
        mark: Mark,
        context_id: int | None,
        changes: Changes,
        saving: Saving | None,
    ) -> Trial:
        """The caller has the locks."""
        _give_memory(self.parameters, self._stand_ins)
        trial = Trial(self._optimizer, self.parameters, self._stand_ins)
        try:
            self._apply(changes)
            self._lend(find_gradients(context_id, self.parameters))
            trial.step()
            if saving is not None:
                self._snapshots().save(mark, saving.kept)
        except BaseException:
            trial.undo()
            raise
        finally:
            self._drop_gradients()
        return trial

    # ----------------------------------------------------------------------- snapshots

    def attach(self, place: Place) -> list[Mark]:
        """Says where snapshots are kept; returns those that are there."""
        self._keeper = Keeper(place, self._optimizer, self._stand_ins)
        return place.marks()

    def keep(self, mark: Mark, changes: Changes, kept: Mark | None) -> None:
        """Makes a snapshot of the present state, which gets a mark by this."""
        with self._parameters_held:
            self._apply(changes)
            _give_memory(self.parameters, self._stand_ins)
            self._snapshots().save(mark, kept)
            self._set_record(mark)

    def restore(self, mark: Mark) -> list[dict[str, Any]]:
        """Goes to a state of which there is a snapshot; returns hyperparameters."""
        with self._transaction_lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.trial.undo()
            pending.held.release()
        with self._parameters_held:
            _give_memory(self.parameters, self._stand_ins)
            self._snapshots().restore(mark)
            increment_version(self.parameters)
            self._set_record(mark)
            return self.hyperparameters()

    def look(self) -> tuple[Any, ...]:
        """Where this owner is: a `Look`, as plain data."""
        with self._transaction_lock:
            mark = self._record.mark
        saved = None if self._keeper is None else self._keeper.find_marks()
        return tuple(mark), saved

    def _set_record(self, mark: Mark) -> None:
        with self._transaction_lock:
            self._record = OwnerRecord(mark)

    def _snapshots(self) -> Keeper:
        if self._keeper is None:
            raise AssertionError("nobody has said where snapshots are kept")
        return self._keeper

    # ------------------------------------------------------------------- with closures

    def _step_with(
        self, evaluations: RRef[Evaluations], context_id: int | None
    ) -> tuple[int | None, Any]:
        losses: list[Any] = []

        def closure() -> Any:
            # The program sees what the class has done so far.
            self._return_gradients(context_id)
            _give_memory(self._stand_ins, self.parameters)
            self._versions.end()
            with lend(self._locks):
                losses.append(evaluations.rpc_sync(timeout=0).request())
            _give_memory(self.parameters, self._stand_ins)
            gradients = find_gradients(context_id, self.parameters)
            self._lend(gradients)
            self._versions.begin(gradients)
            return losses[-1]

        returned = run_step(self._optimizer, closure)
        for number, loss in enumerate(losses):
            if loss is returned:
                return number, None
        if isinstance(returned, Tensor):
            returned = move(returned.detach(), "cpu")
        return None, returned

    def _lend(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives the stand-ins gradients, until `_return_gradients`."""
        self._lent = gradients
        for stand_in, gradient in zip(self._stand_ins, gradients, strict=True):
            stand_in.grad = gradient

    def _return_gradients(self, context_id: int | None) -> None:
        """Takes them from the stand-ins; what the class has put there goes in their place."""
        if self._may_replace_gradients:
            replaced = [
                (parameter, lent, stand_in.grad)
                for parameter, lent, stand_in in zip(
                    self.parameters, self._lent, self._stand_ins, strict=False
                )
                if stand_in.grad is not lent
            ]
            if replaced:
                replace_gradients(context_id, replaced)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._lent = ()
        for stand_in in self._stand_ins:
            stand_in.grad = None

    def zero_grad(self, set_to_none: bool, context_id: int | None) -> None:
        """Forgets gradients of a context; None: ``.grad``."""
        if context_id is not None:
            drop_gradients(context_id, self.parameters)
            return
        with hold_or_borrow(self._locks):
            for parameter in self.parameters:
                if set_to_none:
                    parameter.grad = None
                elif (gradient := parameter.grad) is not None:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's state dictionary."""
        with hold_or_borrow(self._locks):
            state: dict[str, Any] = copy.deepcopy(self._optimizer.state_dict())
        return {key: move(value, "cpu") for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes a state dictionary over; returns hyperparameters."""
        with hold_or_borrow(self._locks):
            self._optimizer.load_state_dict(state_dict)
            return self.hyperparameters()

    def _apply(self, changes: Changes) -> None:
        for number, values in changes.items():
            self._optimizer.param_groups[number].update(values)


def _give_memory(givers: Sequence[Tensor], takers: Sequence[Tensor]) -> None:
    """Makes each taker the same part of the same memory as its giver."""
    try:
        # Every step asks twice, and mostly it is so: hence no loop in Python.
        if all(map(Tensor.is_set_to, takers, givers)):
            return
    except RuntimeError:  # not for all devices: it takes a closer look
        pass
    for giver, taker in zip(givers, takers, strict=True):
        if not _is_one(taker, giver):
            taker.data = giver.detach()


def _is_one(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same part of the same memory."""
    try:
        return one.is_set_to(other)  # all of the below at once
    except RuntimeError:  # not for all devices
        return (
            one.data_ptr() == other.data_ptr()
            and one.shape == other.shape
            and one.stride() == other.stride()
        )


def _stand_in(parameter: Tensor) -> Tensor:
    if not parameter.is_leaf:
        raise ValueError(
            f"can't optimize a non-leaf Tensor: a parameter of shape "
            f"{tuple(parameter.shape)} on worker {get_worker_info().name!r} was computed "
            "from others; pass a reference to the leaf itself"
        )
    shared = parameter.data  # unlike detach(): with a version counter of its own
    stand_in: Tensor
    if isinstance(parameter, torch.nn.Parameter):
        stand_in = torch.nn.Parameter(shared, requires_grad=parameter.requires_grad)
    else:
        stand_in = shared.requires_grad_(parameter.requires_grad)
    stand_in.__dict__.update(vars(parameter))  # marks that some optimizers look for
    return stand_in


def _refuse_twins(parameters: Sequence[Tensor]) -> None:
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) in seen:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} on worker "
                f"{get_worker_info().name!r} was given twice; each may be given "
                "once, by one reference"
            )
        seen.add(id(parameter))
