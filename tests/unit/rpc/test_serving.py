"""Serving calls: what is known of functions before they run."""

from __future__ import annotations

import time

import pytest

import gradwire.nn
import gradwire.optim  # noqa: F401 - they have functions of their own, too
from gradwire.rpc import _serving
from gradwire.rpc._exports import exports
from gradwire.rpc._serving import _Long
from gradwire.rpc._targets import AnyTargets, ExportedTargets, own_functions, own_names

SLOW_S = 2 * _serving._SLOW_S
BUSY_S = (_serving._BUSY_S + _serving._SLOW_S) / 2


@pytest.fixture
def ways(monkeypatch):
    """What was done to make way."""
    found: list[str] = []
    monkeypatch.setattr(_serving, "about_to_block", lambda: found.append("block"))
    monkeypatch.setattr(_serving, "about_to_compute", lambda: found.append("compute"))
    return found


def test_functions_of_our_own_are_what_their_names_lead_to():
    assert own_functions

    for name, function in own_functions.items():
        assert name == own_names[function]
        assert AnyTargets("w0").find(name, None) is function
        assert ExportedTargets(exports, "w0").find(name, None) is function
        assert exports.is_own(*name.split(":"))


def test_function_that_took_long_three_times_makes_way(ways):
    long = _Long()

    for _ in range(3):
        long.make_way()
        long.note(SLOW_S, 0.0)
    assert ways == []

    long.make_way()
    assert ways == ["block"]


def test_function_that_was_busy_three_times_makes_way_for_the_core(ways):
    long, before_s = _Long(), time.thread_time() - 1.0

    for _ in range(3):
        long.make_way()
        long.note(BUSY_S, before_s)
    assert ways == []

    long.make_way()
    assert ways == ["compute"]


@pytest.mark.parametrize("before_s", [0.0, float("inf")])
def test_function_that_waited_for_a_core_is_not_busy(ways, before_s):
    long = _Long()
    for _ in range(3):
        long.note(SLOW_S, time.thread_time() - 1.0)

    long.note(BUSY_S, before_s)
    long.make_way()

    assert ways == []
