"""When a step may be run again: what its error means, and what it has done for good.

Decisions only; `gradwire.autograd._retry` does what they say.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradwire.errors import GradwireError, NotRepeatable, RemoteError

__all__ = ["Attempt", "Attempts", "Pause", "add_note", "find_lost"]


class Attempt:
    """One run of a step, in a context of its own.

    Layers above find it by the context: `Side.attempt`.

    Args:
        outer: The attempt around this one, if a step runs another.
    """

    __slots__ = ("_applied", "_outer")

    def __init__(self, outer: Attempt | None = None) -> None:
        self._outer = outer
        self._applied: list[str] = []

    def note_applied(self, what: str) -> None:
        """Something was done that running the step again would do twice."""
        self._applied.append(what)
        if self._outer is not None:
            self._outer.note_applied(what)

    @property
    def applied(self) -> list[str]:
        """All that was done for good."""
        return list(self._applied)


class Pause(NamedTuple):
    """What comes before the next attempt."""

    worker: str | None
    """Who is waited for; None: nobody knows who it was."""
    witness: str | None
    """Who has lost it, if that was another worker."""
    delay_s: float
    """How much time shall pass between the two attempts, at least."""


class Attempts:
    """What to do after each failed attempt of a step.

    Args:
        limit: How often the step is run at most.
        backoff_s: Time before the second attempt; it doubles before each further one.
        kinds: Errors after which it is run again.
    """

    def __init__(
        self, limit: int, backoff_s: float, kinds: Sequence[type[BaseException]]
    ) -> None:
        self._limit = limit
        self._backoff_s = backoff_s
        self._kinds = tuple(kinds)
        self._failures: list[str] = []

    def after(self, error: Exception, attempt: Attempt, me: str) -> Pause | None:
        """What comes after a failed attempt; None: the error is for the caller.

        Args:
            error: Why it failed.
            attempt: What it had done until then.
            me: Name of this worker.

        Raises:
            NotRepeatable: A worker was lost after something was applied for good.
        """
        chain = list(_causes_of(error))
        if any(isinstance(link, NotRepeatable) for link in chain):
            return None
        found = find_lost(error, self._kinds)
        if found is not None and found.name == me:
            # Another worker has lost us: for us it is the lost one.
            found = (
                Lost(found.witness, None) if found.witness not in (None, me) else None
            )
        if found is None:
            return None
        if attempt.applied:
            raise NotRepeatable(
                f"a worker was lost after {', '.join(attempt.applied)}: to run the step "
                "again would do that twice. Make it the last thing that the step does; "
                "what comes after it belongs behind retry()",
                worker=found.name,
            ) from error
        self._failures.append("".join(traceback.format_exception_only(error)).rstrip())
        if len(self._failures) >= self._limit:
            add_note(error, self.report())
            return None
        delay_s = self._backoff_s * 2 ** (len(self._failures) - 1)
        return Pause(found.name, found.witness, delay_s)

    def report(self) -> str:
        """What became of all attempts."""
        lines = [f"{len(self._failures)} of {self._limit} attempts failed:"]
        for number, text in enumerate(self._failures, 1):
            lines.append(f"  attempt {number}: " + text.replace("\n", "\n    "))
        return "\n".join(lines)


class Lost(NamedTuple):
    """A worker is gone: its name, and who said so, as far as the error has them."""

    name: str | None
    witness: str | None


def find_lost(
    error: BaseException, kinds: Sequence[type[BaseException]]
) -> Lost | None:
    """Whether an error, or one behind it, is of these kinds, and about which worker.

    What was raised elsewhere and could not be rebuilt here counts by the name of its
    class.
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _with_derived(kinds)}
    found: Lost | None = None
    for link in _causes_of(error):
        if not isinstance(link, tuple(kinds)) and (
            getattr(link, "remote_type", None) not in names
        ):
            continue
        witness = link.worker if isinstance(link, RemoteError) else None
        name = link.about if isinstance(link, GradwireError) else None
        if name is not None:
            return Lost(name, witness)
        found = Lost(None, witness)
    return found


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and what it is made of if it is several."""
    seen: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        link = ahead.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        ahead.append(link.__cause__)
        parts = getattr(link, "failures", None)  # of owners of parameters
        if isinstance(parts, dict):
            ahead += [p for p in parts.values() if isinstance(p, BaseException)]
        parts = getattr(link, "exceptions", None)  # of an exception group
        if isinstance(parts, (list, tuple)):
            ahead += [p for p in parts if isinstance(p, BaseException)]


def _with_derived(
    kinds: Sequence[type[BaseException]],
) -> Iterator[type[BaseException]]:
    for kind in kinds:
        yield kind
        yield from _with_derived(kind.__subclasses__())


def add_note(error: BaseException, text: str) -> None:
    """As ``error.add_note``, which Python 3.10 does not have."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        vars(error).setdefault("__notes__", []).append(text)
