"""Futures without workers; the rest is in tests/integration/test_futures.py."""

from __future__ import annotations

import gc
import signal
import weakref
from typing import Any

import pytest
import torch

from gradwire.errors import RemoteError
from gradwire.rpc import Future


class Big:
    """Something that a caller holds."""


def wait_in_vain() -> weakref.ref[Big]:
    big = Big()
    future: Future[int] = Future()
    future.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        future.wait()
    return weakref.ref(big)


def test_failed_future_does_not_keep_the_frames_of_those_who_waited():
    held = wait_in_vain()
    gc.collect()

    assert held() is None


def test_failed_future_is_seen_by_torch_with_its_error():
    future: Future[int] = Future()
    future.set_exception(KeyError("gone"))

    with pytest.raises(KeyError, match="gone"):
        torch.futures.wait_all([future])


class Demanding(Exception):
    """Cannot be made of what it keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


class Odd(Exception):
    """Its copy is no exception."""

    def __reduce__(self) -> Any:
        return str, ("no exception",)


@pytest.mark.parametrize(
    "error", [Demanding(1, 2), Odd("1 2")], ids=["demanding", "odd"]
)
def test_error_that_cannot_be_copied_is_raised_all_the_same(error):
    future: Future[int] = Future()
    future.set_exception(error)

    with pytest.raises(type(error), match="1 2"):
        future.wait()
    with pytest.raises(RemoteError, match=f"{type(error).__name__}: 1 2"):
        torch.futures.wait_all([future])


class Interrupting:
    """A waiter that is woken when a signal comes."""

    def __init__(self) -> None:
        self.is_woken = False

    def release(self) -> None:
        self.is_woken = True
        signal.raise_signal(signal.SIGUSR1)


class Interrupted(BaseException):
    """What the signal handler raises."""


def test_signal_that_comes_when_a_future_is_completed_leaves_nobody_waiting():
    def interrupt(*_: object) -> None:
        raise Interrupted

    future: Future[int] = Future()
    called: list[int] = []
    future.add_done_callback(lambda f: called.append(f.value()))
    waiters: Any = [Interrupting(), Interrupting()]
    future._outcome._waiters = list(waiters)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            future.set_result(7)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [waiter.is_woken for waiter in waiters] == [True, True]
    assert called == [7]
    assert torch.futures.wait_all([future]) == [7]
