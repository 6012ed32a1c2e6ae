"""Asking several owners at once, and telling all that went wrong.

Calls to owners are not part of the context around the program, though most are about it:
a backward waits for all calls of its context, and one that a closure makes would wait
for the very step that waits for the closure. Nor need an owner take part in a context
only because it was asked whether it has gradients of it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from gradwire.autograd.extension import outside_context
from gradwire.errors import GradwireError
from gradwire.rpc import Future
from gradwire.rpc.extension import Agent, Outcome, current_agent

__all__ = [
    "Call",
    "OwnersFailed",
    "ask_all",
    "call_of",
    "collect",
    "combine",
    "outcome_of",
    "raise_failures",
]


class OwnersFailed(GradwireError):
    """Several owners of parameters failed at the same request.

    It is also an instance of the class of the first of their errors, so that ``except``
    finds it, and has the attributes of that one.

    Attributes:
        failures: The errors by name of the owner, in the order of the parameters.

    Example:
        >>> error = OwnersFailed()
        >>> error.failures = {"worker1": ValueError("no such option")}
        >>> list(error.failures)
        ['worker1']
    """

    failures: dict[str, Exception]

    def __str__(self) -> str:
        texts = [
            f"on worker {name!r}: {type(error).__name__}: {error}"
            for name, error in self.failures.items()
        ]
        return f"{len(texts)} owners failed\n\n" + "\n\n".join(texts)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return combine, (self.failures,)


Call: TypeAlias = tuple[str, Callable[[Agent], Outcome]]
"""The name of an owner, and what starts a call there."""
_start_of = operator.itemgetter(1)
_value_of, _error_of = operator.attrgetter("value"), operator.attrgetter("error")


def call_of(owner: str, function: Callable[..., Any], *args: Any) -> Call:
    """The call of a function on an owner, which has no deadline."""
    return owner, operator.methodcaller("begin_call", owner, function, args, None, 0)


def ask_all(calls: Iterable[Call]) -> list[Any]:
    """Calls all owners at once, waits for all of them, and returns their results.

    Raises:
        OwnersFailed: More than one owner failed.
        Exception: What failed on the only owner that did.
    """
    results, failures = collect(calls)
    if failures:
        raise_failures(failures)
    return results


def raise_failures(failures: dict[str, Exception]) -> None:
    """Raises what failed on owners, if anything did."""
    if len(failures) > 1:
        raise combine(failures)
    while failures:
        raise failures.popitem()[1]


def collect(calls: Iterable[Call]) -> tuple[list[Any], dict[str, Exception]]:
    """Calls all owners at once, and waits for all of them.

    Returns:
        Their results, None for those that failed; and what failed, by owner.
    """
    asked = list(calls)
    outcomes = outside_context(current_agent().call_all, map(_start_of, asked))
    failures: dict[str, Exception] = {}
    if any(map(operator.is_not, map(_error_of, outcomes), itertools.repeat(None))):
        for (owner, _), outcome in zip(asked, outcomes, strict=True):
            if outcome.error is not None:
                # An owner is asked more than once if groups of parameters came later.
                failures.setdefault(owner, _failure_of(outcome))
    return [*map(_value_of, outcomes)], failures


def _failure_of(outcome: Outcome) -> Exception:
    """The error of an outcome, without frames; raises what is for nobody to collect."""
    try:
        outcome.result()
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("an outcome with an error has raised nothing")


def outcome_of(future: Future[Any]) -> tuple[Any, Exception | None]:
    """Waits for a future; its error comes without the frames of the wait."""
    try:
        return future.wait(), None
    except Exception as error:
        return None, error.with_traceback(None)


def combine(failures: dict[str, Exception]) -> OwnersFailed:
    """One error for several."""
    first = next(iter(failures.values()))
    combined: Any
    kind: Any = type(first)
    try:
        combined = copy.copy(first)
        combined.__class__ = _class_for(kind)
        # What it would be sent as alone is not what it is now.
        facts = {k: v for k, v in vars(first).items() if not k.startswith("_gradwire")}
        combined.__dict__.clear()
        combined.__dict__.update(facts)
    except Exception:  # it cannot be copied, or its class not be combined with ours
        combined = OwnersFailed()
    combined.failures = failures
    return combined  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _class_for(first: Any) -> type[OwnersFailed]:
    return type(
        first.__name__,
        (OwnersFailed, first),
        {"__module__": first.__module__, "__qualname__": first.__qualname__},
    )
