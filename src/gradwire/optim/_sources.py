"""Parameters that can be found again on a worker that was restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradwire._ids import check_worker_name
from gradwire.errors import SnapshotError, UsageError
from gradwire.optim._references import check_references
from gradwire.rpc import RRef, get_worker_info, rpc_sync

__all__ = ["ParametersOf", "Span", "check_spans", "expand"]


class ParametersOf:
    """The parameters that a function finds on a worker, for a `DistributedOptimizer`.

    An RRef dies with the worker that owns its value. A function can be called again, on
    the process that takes that worker's place.

    Args:
        worker: Name of the worker.
        find: Called there, at the beginning and after each restart. Returns a module, or
            parameters, always as many and in the same order. It must be importable there.
        args: Arguments for it.
        kwargs: Likewise.

    Example:
        A function of the program is usual, one that keeps the module that it makes:

        >>> source = ParametersOf("worker1", nn.Linear, 8, 8)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [source], lr=0.1)
        >>> [rref.owner_name() for rref in optimizer.param_groups[0]["params"]]
        ['worker1', 'worker1']
    """

    def __init__(
        self,
        worker: str,
        find: Callable[..., nn.Module | Iterable[Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check_worker_name(worker)
        if not callable(find):
            raise TypeError(
                "ParametersOf needs a function that finds the parameters, found "
                f"{type(find).__name__}"
            )
        self.worker = worker
        self._call = find, args, kwargs

    def refer(self) -> list[RRef[Tensor]]:
        """References to what the function finds now."""
        return rpc_sync(self.worker, refer_to, self._call, timeout=0)


def refer_to(
    find: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[RRef[Tensor]]:
    """On the owner: calls the function, and refers to what it returns."""
    found = find(*args, **kwargs)
    text = (
        f"{getattr(find, '__qualname__', find)!s} on worker {get_worker_info().name!r} "
        "must return a module or parameters, found "
    )
    if isinstance(found, nn.Module):
        found = found.parameters()
    elif isinstance(found, Tensor) or not isinstance(found, Iterable):
        raise TypeError(f"{text}{type(found).__name__}")
    parameters = list(found)
    for value in parameters:
        if not isinstance(value, Tensor):
            raise TypeError(f"{text}{type(value).__name__} among them")
    return [RRef(parameter) for parameter in parameters]


class Span(NamedTuple):
    """Which parameters of a group come from one source."""

    source: ParametersOf
    group: int
    start: int
    stop: int

    def put(self, params: list[RRef[Tensor]], found: list[RRef[Tensor]]) -> None:
        """Replaces these among the parameters of their group.

        Raises:
            SnapshotError: There are more or fewer than at the beginning.
        """
        if len(found) != self.stop - self.start:
            raise SnapshotError(
                f"worker {self.source.worker!r} had {self.stop - self.start} parameters, "
                f"and now the same function finds {len(found)}",
                worker=self.source.worker,
            )
        params[self.start : self.stop] = found


def expand(given: Any, group: int) -> tuple[list[RRef[Tensor]], list[Span]]:
    """What a program gave as the parameters of a group, as references.

    Args:
        given: A reference, a `ParametersOf`, or several.
        group: Number of the group.
    """
    if isinstance(given, (set, frozenset)):
        raise TypeError(
            "the parameters of a group must have an order, as their numbers in the state "
            f"depend on it; pass a list, found {type(given).__name__}"
        )
    entries: Sequence[Any] = (
        [given] if isinstance(given, (RRef, ParametersOf)) else list(given)
    )
    rrefs: list[Any] = []
    spans = []
    for entry in entries:
        if isinstance(entry, ParametersOf):
            found = entry.refer()
            spans.append(Span(entry, group, len(rrefs), len(rrefs) + len(found)))
            rrefs += found
        else:
            rrefs.append(entry)
    return check_references(rrefs), spans


def check_spans(rrefs: Sequence[RRef[Tensor]], spans: Sequence[Span]) -> None:
    """Raises if some parameters could not be found again."""
    num_found = sum(span.stop - span.start for span in spans)
    if num_found != len(rrefs):
        raise UsageError(
            f"{len(rrefs) - num_found} of {len(rrefs)} parameters were given by RRefs, which "
            "die with the worker that owns them. With snapshots, give functions that "
            "find them again: optim.ParametersOf(worker, function)"
        )
