"""The optimizer, as trainers hold it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.extension import check_repeatable
from gradwire.errors import NotRepeatable, RolledBack, UsageError
from gradwire.optim._closures import (
    Evaluations,
    decides_itself,
    evaluate,
    needs_closure,
)
from gradwire.optim._gradients import Source, check_context, find_source
from gradwire.optim._hyperparameters import find_changes
from gradwire.optim._known import name_optimizer
from gradwire.optim._local import Changes, Group, Look, make_local_optimizer
from gradwire.optim._owners import ask_all
from gradwire.optim._protocol import Mark, find_common
from gradwire.optim._recovery import look_at, refuse_found
from gradwire.optim._shares import Part, Share, calls_to
from gradwire.optim._snapshots import Snapshots
from gradwire.optim._sources import ParametersOf, Span, check_spans, expand
from gradwire.optim._state import gather, scatter
from gradwire.optim._torch_private import shown_to_profiler
from gradwire.optim._transactions import Transactions
from gradwire.rpc import RRef, WorkerInfo, wait_for_worker
from gradwire.rpc.extension import Agent, Outcome

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, for parameters that live on any workers.

    On each owner there is an instance of ``optimizer_class`` for its parameters. It is
    released there when this object is. Calls to owners go out together and have no
    deadline: they end with their answer, or when the owner is lost.

    Args:
        optimizer_class: A class derived from ``torch.optim.Optimizer``.
        params_rref: References to parameters, or `ParametersOf` workers; or groups of
            them, dictionaries with ``"params"`` and hyperparameters, as in torch.
        args: Further arguments of the class.
        two_phase: Each step is made by all owners or by none: all prepare it, and then
            commit. That takes two requests instead of one. It is always so with several
            owners inside of `gradwire.autograd.retry`.
        snapshots: Where owners keep what they must not lose; needs `ParametersOf`, and
            makes all steps in two phases.
        kwargs: Further arguments of the class.

    Attributes:
        param_groups: As in torch, with references for parameters. Changed
            hyperparameters are sent with the next step, so torch's schedulers work.

    Raises:
        OwnersFailed: More than one owner failed; the error of the only one otherwise.
        SnapshotError: There are snapshots already and ``resume`` is not set; or it is,
            and they do not fit together.

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
        params_rref: Iterable[RRef[Tensor] | ParametersOf] | Iterable[dict[str, Any]],
        *args: Any,
        two_phase: bool = False,
        snapshots: Snapshots | None = None,
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
        if snapshots is not None and not isinstance(snapshots, Snapshots):
            raise TypeError(
                "snapshots must be an instance of Snapshots, found "
                f"{type(snapshots).__name__}"
            )
        self._is_two_phase = two_phase or snapshots is not None
        self._snapshots = snapshots
        self._transactions = Transactions(
            None if snapshots is None else snapshots.every
        )
        self._spans: list[Span] = []
        self._shares: list[Share] = []
        self._sent: dict[int, dict[str, Any]] = {}  # hyperparameters that owners have
        # In a step that evaluates a closure at the request of the owner.
        self._serving_threads: set[int] = set()
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
        if snapshots is not None:
            self._begin_snapshots(snapshots)

    # ------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as in torch.

        Args:
            param_group: ``"params"``, references or `ParametersOf`, and hyperparameters.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(
                "a parameter group must be a dict with the key 'params', found "
                f"{param_group!r:.200}"
            )
        rrefs, spans = expand(param_group["params"], len(self.param_groups))
        if self._snapshots is not None:
            check_spans(rrefs, spans)
        group = {**param_group, "params": rrefs}
        if self._shares:
            num_before = len(self._shares)
            self._add_groups([group], is_plain=False)
            self._spans += spans
            if self._snapshots is not None:
                self._attach(self._snapshots, range(num_before, len(self._shares)))
                self._keep_now()
        else:
            self._spans += spans
            self.param_groups.append(group)  # the constructor does the rest

    def _add_groups(self, groups: list[dict[str, Any]], *, is_plain: bool) -> None:
        """Makes an optimizer for new groups on each of their owners."""
        first = len(self.param_groups)
        position = sum(self._sizes())
        parts: dict[str, Part] = {}
        for number, group in enumerate(groups, first):
            options = {key: value for key, value in group.items() if key != "params"}
            for rref in group["params"]:
                part = parts.setdefault(rref.owner_name(), Part())
                part.add(number, None if is_plain else options, rref, position)
                position += 1
        answers = ask_all(
            (owner, partial(self._start_local, owner, part.groups, self._shares))
            for owner, part in parts.items()
        )
        added = [{"params": group["params"]} for group in groups]
        for answer, (owner, part) in zip(answers, parts.items(), strict=True):
            rref, defaults, hyperparameters = answer
            self.defaults = self.defaults or defaults
            self._shares.append(
                Share(owner, rref, part.numbers, part.positions, is_plain)
            )
            for number, values in zip(part.numbers, hyperparameters, strict=True):
                added[number - first] = {**values, **added[number - first]}
        self.param_groups += added
        changes = self._changes().items()
        self._note_sent({n: values for n, values in changes if n >= first})

    def _start_local(
        self, owner: str, groups: list[Group], shares: Sequence[Share], agent: Agent
    ) -> Outcome:
        """Has an optimizer made on an owner."""
        others = [share.rref for share in shares if share.owner == owner]
        made_of = [tuple(group) for group in groups]
        optimizer_class = name_optimizer(self._optimizer_class)
        mark = tuple(self._transactions.ledger.committed)
        arguments = (optimizer_class, made_of, others, mark, *self._arguments)
        return agent.begin_call(owner, make_local_optimizer, arguments, None, 0)

    # --------------------------------------------------------------------------- steps

    @shown_to_profiler
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
            What the closure returned, or what the class returns instead of that; None
            without a closure.

        Raises:
            UnknownContext: There is no such context, or it is over.
            UsageError: The class must evaluate the closure again and again, but the
                parameters live in several places, or steps are made in two phases. Or
                this is called by the closure of a step that has not ended.
            NotRepeatable: In two phases: all owners had prepared the step when one of
                them was lost, and the others have made it.
            OwnersFailed: More than one owner failed; the error of the only one otherwise.
        """
        if callable(context_id):
            raise TypeError("pass a closure by name: step(context_id, closure=...)")
        if self._serving_threads and threading.get_ident() in self._serving_threads:
            raise UsageError(
                "the closure of a step has called step() of the same optimizer, which "
                "would wait for the end of the step that waits for the closure"
            )
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
        changes = self._take_changes()
        if self._needs_two_phases(source):
            self._transactions.step(self._shares, source, changes)
        else:
            # Mostly nothing has changed, and the request is a few plain numbers.
            alike = (source.context_id,)
            arguments = partial(_add_changes, alike, changes) if changes else alike
            ask_all(calls_to(self._shares, "step", arguments))
        if changes:
            self._note_sent(changes)

    def _needs_two_phases(self, source: Source) -> bool:
        return self._is_two_phase or source.attempt is not None

    def _step_with(self, closure: Callable[[], Any], source: int | None) -> Any:
        (share,) = self._shares
        changes = self._take_changes()
        evaluations = Evaluations(closure)
        proxy = share.rref.rpc_async(timeout=0)
        thread = threading.get_ident()
        self._serving_threads.add(thread)
        try:
            loss = evaluations.serve(
                lambda: proxy.step(source, share.select(changes), RRef(evaluations))
            )
        finally:
            self._serving_threads.discard(thread)
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
        self._ask("zero_grad", (set_to_none, source))

    # --------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizers on all owners, gathered, in torch's form.

        Parameters are numbered in the order in which they were given. What belongs to
        no parameter is that of the first owner.
        """
        parts = self._ask("state_dict")
        state = gather(self._shares, parts, self._sizes())
        # These go to the owners with the next step, so that they come into its snapshot.
        for number, values in self._changes().items():
            state["param_groups"][number].update(values)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sends the parts of a state dictionary to the owners.

        Args:
            state_dict: From `state_dict`, or from a torch optimizer of the same class
                over the same parameters in the same order.

        Raises:
            ValueError: Its groups are of other sizes.
        """
        parts = iter(scatter(self._shares, state_dict, self._sizes()))
        self._sent = {}  # should one owner fail, the others get ours again
        answers = self._ask("load_state_dict", lambda _: (next(parts),))
        self._take_hyperparameters(answers)
        if self._snapshots is not None:
            self._keep_now()

    def _take_hyperparameters(self, answers: Sequence[list[dict[str, Any]]]) -> None:
        """Takes over what the owners, all of them, say of their groups."""
        groups = [{"params": group["params"]} for group in self.param_groups]
        for share, answer in zip(self._shares, answers, strict=True):
            for number, values in zip(share.groups, answer, strict=True):
                groups[number] = {**values, **groups[number]}
        self.param_groups = groups
        self._sent = {}
        self._note_sent(self._changes())

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    # ----------------------------------------------------------------------- snapshots

    @property
    def committed_steps(self) -> int:
        """How many steps were made in two phases, and are to stay."""
        return self._transactions.ledger.committed.step

    def recover(
        self, worker: WorkerInfo | str | None = None, *, timeout: float = 60.0
    ) -> int:
        """Brings all owners to one state again, after some were lost.

        For lost owners, when they are back, optimizers are made anew: for the parameters
        that `ParametersOf` find there now, with the values of the last snapshot. So
        references in ``param_groups`` are others afterwards. If snapshots are made at
        every step, no other owner is touched. If nobody was lost, nothing happens.

        Args:
            worker: Who is back; for `gradwire.autograd.retry`. All owners are looked at
                in any case.
            timeout: For how many seconds each lost owner is awaited.

        Returns:
            The number of steps that were made.

        Raises:
            RolledBack: Steps were undone on all owners, since snapshots are not made at
                every step; go on with its ``step``. Schedulers know nothing of it.
            NotRepeatable: An owner was lost, and there are no snapshots.
            SnapshotError: A snapshot is missing, or does not fit.
            ConnectTimeout: An owner did not come back.

        Example:
            >>> retry(step, recover=optimizer.recover)
        """
        ledger = self._transactions.ledger
        looks = look_at(self._shares)
        plan = ledger.plan(
            {n: None if look is None else look.mark for n, look in enumerate(looks)}
        )
        lost = {self._shares[n].owner for n, look in enumerate(looks) if look is None}
        if plan is None:
            # Or an interrupt came too late to take a step back.
            ahead = {
                share.owner
                for share, look in zip(self._shares, looks, strict=True)
                if look is not None and look.mark != ledger.committed
            }
            owners = sorted(lost or ahead)
            raise NotRepeatable(
                f"worker {', '.join(map(repr, owners))} "
                + ("was lost with its parameters" if lost else "has made another step")
                + ", and there are no snapshots to go back to: begin again from a saved "
                "state, and see DistributedOptimizer(snapshots=...)",
                worker=owners[0],
            )
        # A step must not find new ones before they are restored.
        shares = list(self._shares)
        for owner in sorted(lost):
            wait_for_worker(owner, timeout)
            self._make_again(owner, shares)
        restored = [shares[n] for n in plan.restored]
        answers = ask_all(calls_to(restored, "restore", (plan.mark,)))
        self._shares = shares
        ledger.recovered(plan)
        if plan.num_undone:
            # First: else new snapshots would get those from before.
            self._take_hyperparameters(answers)
        unsafe: Exception | None = None
        if self._snapshots is not None:
            try:
                self._make_safe(self._snapshots, looks, timeout)
            except Exception as error:
                if not plan.num_undone:
                    raise
                unsafe = (
                    error  # the next call tries again; what was undone it cannot tell
                )
        if plan.num_undone:
            raise RolledBack(
                f"{plan.num_undone} steps were undone on all owners, because "
                f"{', '.join(map(repr, sorted(lost))) or 'an owner'} was lost and "
                f"snapshots are made at every {ledger.every} steps; go on with step "
                f"{plan.mark.step}, counted from 0",
                step=plan.mark.step,
            ) from unsafe
        return self.committed_steps

    def _make_again(self, owner: str, shares: list[Share]) -> None:
        """Makes the optimizers of an owner that is back, in its new process.

        Args:
            owner: Its name.
            shares: Those of all owners; its are replaced.
        """
        for span in self._spans:
            if span.source.worker == owner:
                span.put(self.param_groups[span.group]["params"], span.source.refer())
        rrefs = [rref for group in self.param_groups for rref in group["params"]]
        made: list[Share] = []
        for number, share in enumerate(shares):
            if share.owner != owner:
                continue
            groups = [
                Group(
                    [rrefs[position] for position in positions],
                    None if share.is_plain else self._options_of(group),
                )
                for group, positions in zip(share.groups, share.positions, strict=True)
            ]
            start = partial(self._start_local, owner, groups, made)
            ((rref, _, _),) = ask_all([(owner, start)])
            share = share._replace(rref=rref)  # noqa: PLW2901
            ask_all(calls_to([share], "attach", (share.place,)))
            made.append(share)
            shares[number] = share

    def _options_of(self, group: int) -> dict[str, Any]:
        return {k: v for k, v in self.param_groups[group].items() if k != "params"}

    def _begin_snapshots(self, snapshots: Snapshots) -> None:
        ledger = self._transactions.ledger
        found = self._attach(snapshots, range(len(self._shares)))
        if not any(found):
            self._keep_now()
            return
        common = find_common(found)
        if common is None or not snapshots.resume:
            raise refuse_found(self._shares, found, is_resumed=snapshots.resume)
        self._take_hyperparameters(self._ask("restore", (common,)))
        ledger.keep(common)

    def _attach(self, snapshots: Snapshots, numbers: Iterable[int]) -> list[list[Mark]]:
        """Gives owners new places for snapshots; returns what is there already."""
        numbers = list(numbers)
        for number in numbers:
            share = self._shares[number]
            place = snapshots.make_place(share.owner, number)
            self._shares[number] = share._replace(place=place)
        shares = [self._shares[number] for number in numbers]
        return ask_all(calls_to(shares, "attach", lambda share: (share.place,)))

    def _make_safe(
        self, snapshots: Snapshots, looks: Sequence[Look | None], timeout: float
    ) -> None:
        """Sees to it that there are snapshots of all that is committed last."""
        kept = self._transactions.ledger.kept
        homeless = [n for n, look in enumerate(looks) if look and look.saved is None]
        for number in homeless:
            peer = snapshots.peer_of(self._shares[number].owner)
            if peer is not None:
                wait_for_worker(peer, timeout)
        self._attach(snapshots, homeless)
        if any(
            look and (look.saved is None or kept not in look.saved) for look in looks
        ):
            self._keep_now()

    def _keep_now(self) -> None:
        """Makes snapshots of the present state, apart from a step."""
        ledger = self._transactions.ledger
        mark = Mark(ledger.committed.step, self._transactions.next_number())
        changes = self._take_changes()
        self._ask("keep", lambda share: (mark, share.select(changes), ledger.kept))
        self._note_sent(changes)
        ledger.keep(mark)

    # ---------------------------------------------------------------- hyperparameters

    def _changes(self) -> Changes:
        """Hyperparameters that the program or a scheduler has changed, by group."""
        return find_changes(self.param_groups, self._sent)

    def _take_changes(self) -> Changes:
        """As `_changes`, to be sent: until `_note_sent` nobody knows what owners have."""
        changes = find_changes(self.param_groups, self._sent)
        for number, values in changes.items():
            sent = self._sent.get(number, {})
            for key in values:
                sent.pop(key, None)
        return changes

    def _note_sent(self, changes: Changes) -> None:
        for number, values in changes.items():
            self._sent.setdefault(number, {}).update(values)

    def _ask(
        self,
        method: str,
        arguments: tuple[Any, ...] | Callable[[Share], tuple[Any, ...]] = (),
    ) -> list[Any]:
        """Asks all owners at once; see `calls_to`."""
        return ask_all(calls_to(self._shares, method, arguments))


def _add_changes(
    arguments: tuple[Any, ...], changes: Changes, share: Share
) -> tuple[Any, ...]:
    """Those for one owner, with what has changed in its groups, if anything has."""
    selected = share.select(changes)
    return (*arguments, selected) if selected else arguments
