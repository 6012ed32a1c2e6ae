"""The oracle can fail: it sees every kind of difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.check import Mismatch, Outcome, compare
from oracle.reference import Expected, Reference
from oracle.workers import Found, Report

LABEL = ("parameter", 1, 0)


def number(value: float) -> Tensor:
    return torch.tensor([value, 1.0], dtype=torch.float64)


def make_reference(expected: Expected, **changes: Any) -> Reference:
    reference = Reference({LABEL: expected}, [number(3.0)], {7: 1}, set(), set(), 2)
    for name, value in changes.items():
        setattr(reference, name, value)
    return reference


def make_outcome(value: Tensor | None, **changes: Any) -> Outcome:
    outcome = Outcome()
    outcome.gradients = {LABEL: None if value is None else Found(value, False)}
    outcome.roots = [number(3.0)]
    outcome.reports = [Report({}, {7: 1}, {}, [])]
    for name, value in changes.items():
        setattr(outcome, name, value)
    return outcome


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        (Expected(number(2.0), True), number(2.0)),
        (Expected(number(2.0), False), number(2.0 + 1e-12)),
        (Expected(None, True), None),
        (Expected(None, True, is_zeros=True), torch.zeros(2, dtype=torch.float64)),
    ],
    ids=["exact", "close", "none", "zeros"],
)
def test_the_same_gradients_pass(expected, value):
    compare(make_reference(expected), make_outcome(value), [])


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        (Expected(number(2.0), True), number(2.0 + 1e-15)),
        (Expected(number(2.0), False), number(2.0 + 1e-8)),
        (Expected(number(2.0), True), None),
        (Expected(None, True), torch.zeros(2, dtype=torch.float64)),
        (Expected(None, True, is_zeros=True), None),
        (Expected(None, True, is_zeros=True), number(2.0)),
    ],
    ids=["inexact", "far", "lost", "zeros for none", "none for zeros", "not zeros"],
)
def test_another_gradient_is_a_mismatch(expected, value):
    with pytest.raises(Mismatch, match="'parameter', 1, 0"):
        compare(make_reference(expected), make_outcome(value), [])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reports": [Report({}, {7: 2}, {}, [])]}, "hook 7 saw 2 gradients"),
        ({"reports": [Report({}, {}, {}, [])]}, "hook 7 saw 0 gradients"),
        ({"reports": [Report({}, {7: 1}, {7: 2}, [])]}, "None 2 times, in 2 passes"),
        ({"reports": [Report({}, {7: 1}, {}, ["it hurts"])]}, "it hurts"),
        ({"roots": [number(4.0)]}, "passes began with"),
        ({"roots": []}, "passes began with"),
        ({"gradients": {}}, "only in one process"),
    ],
    ids=["twice", "never", "none too often", "problem", "value", "no pass", "missing"],
)
def test_another_outcome_is_a_mismatch(changes, text):
    reference = make_reference(Expected(number(2.0), True))

    with pytest.raises(Mismatch, match=text):
        compare(reference, make_outcome(number(2.0), **changes), [])


def test_a_sparse_gradient_for_a_dense_one_is_a_mismatch():
    reference = make_reference(Expected(number(2.0), False))
    outcome = make_outcome(None, gradients={LABEL: Found(number(2.0), True)})

    with pytest.raises(Mismatch, match="sparse"):
        compare(reference, outcome, [])


def test_something_left_on_a_worker_is_a_mismatch():
    reference = make_reference(Expected(number(2.0), True))

    with pytest.raises(Mismatch, match="still has"):
        compare(reference, make_outcome(number(2.0)), ["w1 still has 1 context"])
