"""When a step is run again, and when its error is for the caller."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from gradwire.autograd._attempts import Attempt, Attempts, Pause, find_lost
from gradwire.errors import (
    BackwardFailed,
    CallTimeout,
    ConnectError,
    NotRepeatable,
    OwnerLost,
    PeerLostError,
    RemoteError,
)
from gradwire.optim._owners import combine
from gradwire.rpc._remote_exceptions import describe, rebuild

ME = "w0"
KINDS: Sequence[type[Exception]] = (PeerLostError, ConnectError)


def caused_by(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def travelled(error: Exception, *workers: str) -> Exception:
    """The error as it arrives over these workers."""
    for worker in workers:
        arrived = rebuild(describe(error, worker))
        assert isinstance(arrived, Exception)
        error = arrived
    return error


def as_text(error: Exception) -> RemoteError:
    """As it arrives if it cannot be rebuilt."""
    *facts, _ = describe(error, "w1")
    rebuilt = rebuild((*facts, None))  # type: ignore[arg-type]
    assert type(rebuilt) is RemoteError
    return rebuilt


LOST = {
    "here": PeerLostError("w2 is lost", worker="w2"),
    "an owner": OwnerLost("w2 is lost", worker="w2"),
    "elsewhere": travelled(PeerLostError("w2 is lost", worker="w2"), "w1"),
    "far away": travelled(OwnerLost("w2 is lost", worker="w2"), "w3", "w1"),
    "pickled": pickle.loads(pickle.dumps(PeerLostError("lost", worker="w2"))),
    "not reached": ConnectError("nobody listens", worker="w2"),
    "not reached from elsewhere": travelled(ConnectError("no", worker="w2"), "w1"),
    "a cause": caused_by(ValueError("bad"), PeerLostError("lost", worker="w2")),
    "one of several": combine(
        {"w1": ValueError("bad"), "w2": PeerLostError("lost", worker="w2")}
    ),
}


@pytest.mark.parametrize("where", LOST)
def test_lost_worker_is_found_and_named(where):
    found = find_lost(LOST[where], KINDS)

    assert found is not None
    assert found.name == "w2"
    expected = {"elsewhere": "w1", "far away": "w3"}
    assert found.witness == expected.get(where.removeprefix("not reached from "))


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="Python 3.10")
def test_lost_worker_is_found_in_a_group():
    several: Any = getattr(builtins, "ExceptionGroup")  # noqa: B009
    group = several("two", [ValueError(), PeerLostError("lost", worker="w2")])

    found = find_lost(group, KINDS)

    assert found is not None
    assert found.name == "w2"


def test_lost_worker_without_a_name_counts_all_the_same():
    found = find_lost(as_text(OwnerLost("w2 is lost", worker="w2")), KINDS)

    assert found == (None, "w1")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        CallTimeout("too slow", worker="w2"),
        BackwardFailed("two passes met"),
        travelled(KeyError("k"), "w1"),
        as_text(CallTimeout("too slow", worker="w2")),
    ],
)
def test_other_errors_are_for_the_caller(error):
    assert Attempts(3, 1.0, KINDS).after(error, Attempt(), ME) is None


def test_what_was_raised_while_a_loss_was_handled_is_not_a_loss():
    try:
        try:
            raise PeerLostError("lost", worker="w2")
        except PeerLostError:
            raise ValueError("the program has decided") from None
    except ValueError as error:
        assert find_lost(error, KINDS) is None


def test_waits_become_longer_and_end_with_a_note_of_all_attempts():
    attempts = Attempts(3, 0.5, KINDS)
    errors = [PeerLostError(f"lost {n}", worker=f"w{n}") for n in (1, 2, 3)]

    pauses = [attempts.after(error, Attempt(), ME) for error in errors]

    assert pauses == [Pause("w1", None, 0.5), Pause("w2", None, 1.0), None]
    (note,) = vars(errors[-1])["__notes__"]
    assert "3 of 3 attempts failed" in note
    for n in (1, 2, 3):
        assert f"attempt {n}: gradwire.errors.PeerLostError: lost {n}" in note


def test_single_attempt_is_never_repeated():
    error = PeerLostError("lost", worker="w1")

    assert Attempts(1, 0.5, KINDS).after(error, Attempt(), ME) is None


def test_worker_that_has_lost_us_is_the_one_to_wait_for():
    error = travelled(PeerLostError("you are lost", worker=ME), "w1")

    assert Attempts(3, 0.5, KINDS).after(error, Attempt(), ME) == Pause("w1", None, 0.5)


def test_own_loss_that_nobody_else_has_seen_is_for_the_caller():
    for error in (
        PeerLostError("lost", worker=ME),
        travelled(PeerLostError("lost", worker=ME), ME),
    ):
        assert Attempts(3, 0.5, KINDS).after(error, Attempt(), ME) is None


def test_loss_after_something_was_applied_is_not_repeatable():
    outer = Attempt()
    inner = Attempt(outer)
    inner.note_applied("a step")
    error = PeerLostError("lost", worker="w1")

    for attempt in (inner, outer):
        with pytest.raises(NotRepeatable, match="after a step: to run") as caught:
            Attempts(3, 0.5, KINDS).after(error, attempt, ME)
        assert caught.value.__cause__ is error
        # What comes out of an inner retry is not run again by an outer one.
        assert Attempts(3, 0.5, KINDS).after(caught.value, Attempt(), ME) is None


def test_other_error_after_something_was_applied_stays_as_it_is():
    attempt = Attempt()
    attempt.note_applied("a step")

    assert Attempts(3, 0.5, KINDS).after(ValueError(), attempt, ME) is None
