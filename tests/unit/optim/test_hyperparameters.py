"""Which hyperparameters are sent with a step: what the owners do not know yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.optim._hyperparameters import find_changes


def make_group() -> dict[str, Any]:
    return {
        "lr": 0.1,
        "momentum": 0,
        "foreach": None,
        "betas": (0.9, 0.99),
        "steps": [1, 2],
        "scale": torch.ones(2),
        "params": [object()],
    }


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lr": lambda group: group.update(lr=0.2),
    "momentum": lambda group: group.update(momentum=0.0),  # another type
    "foreach": lambda group: group.update(foreach=False),
    "betas": lambda group: group.update(betas=[0.9, 0.99]),
    "steps": lambda group: group["steps"].append(3),
    "scale": lambda group: group["scale"].add_(1),
    "new": lambda group: group.update(new=None),
}


def test_all_is_new_at_first_and_nothing_later():
    group = make_group()

    changes = find_changes([group], {})

    assert changes[0].keys() == group.keys() - {"params"}
    assert find_changes([group], changes) == {}


def test_equal_values_are_no_change():
    group = make_group()
    sent = find_changes([group], {})

    equal = {**group, "lr": float("0.1"), "betas": tuple([0.9, 0.99])}

    assert find_changes([equal], sent) == {}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_found_once_and_alone(name):
    groups = [make_group(), make_group()]
    sent = find_changes(groups, {})
    CHANGES[name](groups[1])

    changes = find_changes(groups, sent)

    assert changes.keys() == {1}
    assert changes[1].keys() == {name}
    sent[1].update(changes[1])
    assert find_changes(groups, sent) == {}


def test_new_one_in_place_of_another_is_found():
    group = make_group()
    sent = find_changes([group], {})
    del group["foreach"]
    group["new"] = None

    assert find_changes([group], sent) == {0: {"new": None}}


def test_values_that_change_places_are_found():
    group = make_group()
    sent = find_changes([group], {})
    group["lr"], group["momentum"] = group["momentum"], group["lr"]

    assert find_changes([group], sent) == {0: {"lr": 0, "momentum": 0.1}}


def test_what_is_found_is_a_copy():
    group = make_group()
    sent = find_changes([group], {})
    before = copy.deepcopy(sent[0]["steps"])

    group["steps"].append(3)

    assert sent[0]["steps"] == before
