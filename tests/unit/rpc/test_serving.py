"""Serving calls: what is known of functions before they run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradwire.nn
import gradwire.optim  # noqa: F401 - they have functions of their own, too
from gradwire.rpc import _serving
from gradwire.rpc._exports import exports
from gradwire.rpc._interceptors import Addition
from gradwire.rpc._serving import _Long, _Request
from gradwire.rpc._targets import AnyTargets, ExportedTargets, own_functions, own_names
from gradwire.wire import Reply

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


# ----------------------------------------------------- layers that see all calls


class SeesAll:
    """A layer that had nothing to remember of a call, and its scope for the reply."""

    name = "all"
    keeps_result = False

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def plain_reply(self, peer: Any, call_id: int, label: str) -> SeesAll:
        self.seen.append((peer, call_id, label))
        return self

    def sending_opaque(self, tensors: Any) -> None:
        self.seen.append("opaque")

    def sending_reply(self, tensors: Any, of_modules: Any) -> Addition:
        self.seen.append("reply")
        return Addition(b"header")


def add_headers(
    layer: Any, tensors: list[Any], opaque: list[Any], **known: Any
) -> dict[str, bytes] | None:
    server: Any = SimpleNamespace(of_all_calls=(layer,))
    link: Any = None
    peer: Any = "peer"
    request = _Request(server, link, peer, 7, "f", known.pop("counts", True), 0)
    request.label = "f"
    for name, scope in known.items():
        request.add_scope(name, scope)
    reply, packer = Reply(7), SimpleNamespace(used=[], opaque=opaque)
    assert request._add_headers(reply, packer, tensors, set()) == {}  # type: ignore[arg-type]
    return reply.headers


def test_layer_that_sees_all_calls_is_asked_about_a_reply_with_tensors():
    layer = SeesAll()

    assert add_headers(layer, [torch.ones(2)], []) == {"all": b"header"}
    assert layer.seen == [("peer", 7, "f"), "reply"]


def test_layer_that_sees_all_calls_is_asked_about_a_reply_with_opaque_tensors():
    layer = SeesAll()

    assert add_headers(layer, [], [torch.ones(2)]) == {"all": b"header"}
    assert layer.seen == [("peer", 7, "f"), "opaque", "reply"]


def test_layer_that_sees_all_calls_is_not_asked_about_plain_values():
    layer = SeesAll()

    assert add_headers(layer, [], []) is None
    assert layer.seen == []


def test_layer_that_has_a_scope_is_not_asked_for_another():
    layer = SeesAll()

    assert add_headers(layer, [torch.ones(2)], [], all=layer) == {"all": b"header"}
    assert layer.seen == ["reply"]


def test_layers_are_not_asked_about_replies_to_calls_of_agents():
    layer = SeesAll()

    assert add_headers(layer, [torch.ones(2)], [], counts=False) is None
    assert layer.seen == []
