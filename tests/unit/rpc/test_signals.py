"""When signal handlers run."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from gradwire.rpc._signals import interruptible, shielded


def test_handler_that_runs_in_a_wait_is_shielded_in_turn():
    seen: list[str] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if seen:
            seen.append("second")
            return
        seen.append("first begins")
        with shielded():
            signal.raise_signal(signal.SIGUSR2)
            seen.append("its block ends")
        seen.append("first ends")

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        with shielded():
            interruptible(signal.raise_signal, signal.SIGUSR2)
            seen.append("wait is over")
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert seen == [
        "first begins",
        "its block ends",
        "second",
        "first ends",
        "wait is over",
    ]


def test_handler_that_waits_in_a_wait_is_interrupted_at_once():
    seen: list[str] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if seen:
            seen.append("second")
            return
        seen.append("first begins")
        with shielded():
            interruptible(signal.raise_signal, signal.SIGUSR2)
            seen.append("its wait is over")

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        with shielded():
            interruptible(signal.raise_signal, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)

    assert seen == ["first begins", "second", "its wait is over"]


def test_errors_pass_on_threads_that_need_no_shield():
    seen: list[str] = []

    def fail() -> None:
        with pytest.raises(KeyError, match="this one"), shielded():
            raise KeyError("this one")
        for _ in range(2):  # it is the same one for all
            with shielded(), shielded():
                seen.append("inside")

    other = threading.Thread(target=fail)
    other.start()
    other.join()

    assert seen == ["inside"] * 2
