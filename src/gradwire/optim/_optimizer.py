"""The optimizer, as trainers hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.autograd.extension import check_repeatable
from gradwire.errors import UsageError
from gradwire.optim._closures import (
    Evaluations,
    decides_itself,
    evaluate,
    needs_closure,
)
from gradwire.optim._gradients import Source, check_context, find_source
from gradwire.optim._known import name_optimizer
from gradwire.optim._local import (
    Changes,
    Group,
    LocalOptimizer,
    make_local_optimizer,
)
from gradwire.optim._owners import ask_all
from gradwire.optim._references import check_references
from gradwire.optim._state import gather, scatter
from gradwire.optim._transactions import Transactions
from gradwire.rpc import Future, RRef, rpc_async

__all__ = ["DistributedOptimizer"]


class _Share(NamedTuple):
    """What one owner has of the parameters; see `Places`."""

    owner: str
    rref: RRef[LocalOptimizer]
    groups: list[int]
    positions: list[list[int]]

    def select(self, changes: Changes) -> Changes:
        """Changes of its groups, under the owner's numbers."""
        if not changes:
            return changes
        return {
            local: changes[number]
            for local, number in enumerate(self.groups)
            if number in changes
        }


class _Part:
    """What an owner will be asked to make an optimizer for."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.numbers: list[int] = []
        self.positions: list[list[int]] = []

    def add(
        self,
        number: int,
        options: dict[str, Any] | None,
        rref: RRef[Tensor],
        position: int,
    ) -> None:
        """Adds a parameter of the group with this number; groups come in order."""
        if number not in self.numbers[-1:]:
            self.groups.append(Group([], options))
            self.numbers.append(number)
            self.positions.append([])
        self.groups[-1].rrefs.append(rref)
        self.positions[-1].append(position)


class DistributedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, for parameters that live on any workers.

    On each owner there is an instance of ``optimizer_class`` for its parameters. It is
    released there when this object is. Calls to owners go out together and have no
    deadline: they end with their answer, or when the owner is lost.

    Args:
        optimizer_class: A class derived from ``torch.optim.Optimizer``.
        params_rref: References to parameters; or groups of them, dictionaries with
            ``"params"`` and hyperparameters, as in torch.
        args: Further arguments of the class.
        two_phase: Each step is made by all owners or by none: all prepare it, and then
            commit. That takes two requests instead of one. It is always so with several
            owners inside of `gradwire.autograd.retry`.
        kwargs: Further arguments of the class.

    Attributes:
        param_groups: As in torch, with references for parameters. Changed
            hyperparameters are sent with the next step, so torch's schedulers work.

    Raises:
        OwnersFailed: More than one owner failed; the error of the only one otherwise.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(weight)], lr=0.5)
        >>> with context() as ctx:
        ...     ctx.backward(rpc_sync("worker1", torch.mul, args=(weight, 3)).sum())
        ...     optimizer.step(ctx)
        >>> weight.detach()
        tensor([-0.5000, -0.5000])
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[RRef[Tensor]] | Iterable[dict[str, Any]],
        *args: Any,
        two_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(optimizer_class, type) or not issubclass(
            optimizer_class, torch.optim.Optimizer
        ):
            raise TypeError(
                "optimizer_class must be a class derived from torch.optim.Optimizer, "
                f"found {optimizer_class!r}"
            )
        self._optimizer_class = optimizer_class
        self._needs_closure = needs_closure(optimizer_class)
        self._arguments = args, kwargs
        self._is_two_phase = two_phase
        self._transactions = Transactions()
        self._shares: list[_Share] = []
        self._sent: dict[int, dict[str, Any]] = {}  # hyperparameters that owners have
        if isinstance(params_rref, (RRef, Tensor)):
            raise TypeError(
                "params_rref must be a list of RRefs or of groups, found "
                f"{type(params_rref).__name__}"
            )
        given: list[Any] = list(params_rref)
        is_plain = not any(isinstance(entry, dict) for entry in given)
        groups: list[dict[str, Any]] = [{"params": given}] if is_plain else given
        super().__init__(groups, {})  # hands them one by one to `add_param_group`
        groups, self.param_groups = self.param_groups, []
        self._add_groups(groups, is_plain=is_plain)

    # ------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as in torch.

        Args:
            param_group: ``"params"``, references, and hyperparameters.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(
                "a parameter group must be a dict with the key 'params', found "
                f"{param_group!r:.200}"
            )
        rrefs = param_group["params"]
        rrefs = check_references([rrefs] if isinstance(rrefs, RRef) else list(rrefs))
        group = {**param_group, "params": rrefs}
        if self._shares:
            self._add_groups([group], is_plain=False)
        else:
            self.param_groups.append(group)  # the constructor does the rest

    def _add_groups(self, groups: list[dict[str, Any]], *, is_plain: bool) -> None:
        """Makes an optimizer for new groups on each of their owners."""
        first = len(self.param_groups)
        position = sum(self._sizes())
        parts: dict[str, _Part] = {}
        for number, group in enumerate(groups, first):
            options = {key: value for key, value in group.items() if key != "params"}
            for rref in group["params"]:
                part = parts.setdefault(rref.owner_name(), _Part())
                part.add(number, None if is_plain else options, rref, position)
                position += 1
        answers = ask_all(
            (owner, partial(self._make_local, owner, part.groups))
            for owner, part in parts.items()
        )
        added = [{"params": group["params"]} for group in groups]
        for answer, (owner, part) in zip(answers, parts.items(), strict=True):
            rref, defaults, hyperparameters = answer
            self.defaults = self.defaults or defaults
            self._shares.append(_Share(owner, rref, part.numbers, part.positions))
            for number, values in zip(part.numbers, hyperparameters, strict=True):
                added[number - first] = {**values, **added[number - first]}
        self.param_groups += added
        changes = self._changes().items()
        self._note_sent({n: values for n, values in changes if n >= first})

    def _make_local(self, owner: str, groups: list[Group]) -> Future[Any]:
        others = [share.rref for share in self._shares if share.owner == owner]
        made_of = [tuple(group) for group in groups]
        optimizer_class = name_optimizer(self._optimizer_class)
        arguments = (optimizer_class, made_of, others, *self._arguments)
        return rpc_async(owner, make_local_optimizer, arguments, None, 0)

    # --------------------------------------------------------------------------- steps

    def step(  # type: ignore[override]
        self,
        context_id: int | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Changes all parameters that have a gradient, on their owners.

        Steps of several trainers on the same parameters come one after the other. If an
        owner fails, the others have made their step all the same; in two phases nobody
        has.

        Args:
            context_id: The context whose gradients to use; those of other contexts, and
                ``.grad``, are left alone. None, or a context that accumulates into
                ``.grad``: use ``.grad``.
            closure: Computes the loss and its gradients, and returns the loss.

        Returns:
            What the closure returned; None without one.

        Raises:
            UnknownContext: There is no such context, or it is over.
            UsageError: The class must evaluate the closure again and again, but the
                parameters live in several places, or steps are made in two phases.
            NotRepeatable: In two phases: all owners had prepared the step when one of
                them was lost, and the others have made it.
            OwnersFailed: More than one owner failed; the error of the only one otherwise.
        """
        if callable(context_id):
            raise TypeError("pass a closure by name: step(context_id, closure=...)")
        if context_id is None:
            check_repeatable("optimizer.step() without a context")
        source = find_source(context_id)
        if closure is None:
            if self._needs_closure:
                raise TypeError(
                    f"{self._optimizer_class.__name__} needs a closure: "
                    "step(context_id, closure=...)"
                )
            self._step_everywhere(source)
            return None
        if len(self._shares) == 1 and decides_itself(self._optimizer_class):
            if self._needs_two_phases(source):
                raise UsageError(
                    f"{self._optimizer_class.__name__} evaluates its closure while it "
                    "changes parameters, so its steps cannot be undone: neither two "
                    "phases nor retry() are possible with it"
                )
            return self._step_with(closure, source.context_id)
        if self._needs_closure:
            owners = ", ".join(repr(share.owner) for share in self._shares)
            raise UsageError(
                f"{self._optimizer_class.__name__} decides from all gradients together "
                "how often to evaluate the closure and where to go, so all its "
                "parameters must live on one worker and be given at once; these were "
                f"found on {owners}"
            )
        loss = evaluate(closure)
        self._step_everywhere(source)
        return loss

    def _step_everywhere(self, source: Source) -> None:
        changes = self._changes()
        if self._needs_two_phases(source):
            self._transactions.step(self._shares, source, changes)
        else:
            context_id = source.context_id
            self._ask(
                lambda share, proxy: proxy.step(context_id, share.select(changes))
            )
        self._note_sent(changes)

    def _needs_two_phases(self, source: Source) -> bool:
        return self._is_two_phase or source.attempt is not None

    def _step_with(self, closure: Callable[[], Any], source: int | None) -> Any:
        (share,) = self._shares
        changes = self._changes()
        evaluations = Evaluations(closure)
        proxy = share.rref.rpc_async(timeout=0)
        loss = evaluations.serve(
            lambda: proxy.step(source, share.select(changes), RRef(evaluations))
        )
        self._note_sent(changes)
        return loss

    def zero_grad(
        self, set_to_none: bool = True, *, context_id: int | None = None
    ) -> None:
        """Forgets gradients of all parameters, on their owners.

        Args:
            set_to_none: Otherwise ``.grad`` is filled with zeros.
            context_id: Forget those of this context instead of ``.grad``; for closures
                that are evaluated several times in one context.
        """
        source = check_context(context_id)
        self._ask(lambda _, proxy: proxy.zero_grad(set_to_none, source))

    # --------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizers on all owners, gathered, in torch's form.

        Parameters are numbered in the order in which they were given. What belongs to
        no parameter is that of the first owner.
        """
        changes = self._changes()
        parts = self._ask(lambda share, proxy: proxy.state_dict(share.select(changes)))
        self._note_sent(changes)
        return gather(self._shares, parts, self._sizes())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sends the parts of a state dictionary to the owners.

        Args:
            state_dict: From `state_dict`, or from a torch optimizer of the same class
                over the same parameters in the same order.

        Raises:
            ValueError: Its groups are of other sizes.
        """
        parts = iter(scatter(self._shares, state_dict, self._sizes()))
        answers = self._ask(lambda _, proxy: proxy.load_state_dict(next(parts)))
        groups = [{"params": group["params"]} for group in self.param_groups]
        for share, answer in zip(self._shares, answers, strict=True):
            for number, values in zip(share.groups, answer, strict=True):
                groups[number] = {**values, **groups[number]}
        self.param_groups = groups
        self._sent = {}
        self._note_sent(self._changes())

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    # ---------------------------------------------------------------- hyperparameters

    def _changes(self) -> Changes:
        """Hyperparameters that the program or a scheduler has changed, by group."""
        changes: Changes = {}
        for number, group in enumerate(self.param_groups):
            sent = self._sent.get(number, {})
            for key, value in group.items():
                if key != "params" and not (key in sent and _is_same(value, sent[key])):
                    # A copy: a scheduler may write into a tensor, a program into a list.
                    changes.setdefault(number, {})[key] = copy.deepcopy(value)
        return changes

    def _note_sent(self, changes: Changes) -> None:
        for number, values in changes.items():
            self._sent.setdefault(number, {}).update(values)

    def _ask(self, call: Callable[[_Share, Any], Future[Any]]) -> list[Any]:
        """Asks all owners at once."""
        return ask_all(
            (share.owner, partial(call, share, share.rref.rpc_async(timeout=0)))
            for share in self._shares
        )


def _is_same(value: Any, sent: Any) -> bool:
    if value is sent:
        return True
    if type(value) is not type(sent):
        return False
    if isinstance(value, Tensor):
        return torch.equal(value, sent)
    return bool(value == sent)
