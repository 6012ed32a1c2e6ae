"""Which leaves a pass finds."""

from __future__ import annotations

import torch

from gradwire.autograd._engine import leaves_of


class Doubled(torch.autograd.Function):
    """Keeps something under the name that accumulators use for their leaf."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = "mine"
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_each_leaf_is_found_once():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    both = (a * b + a).tanh()

    found = leaves_of([both.sum(), (both * b).sum()])

    assert {id(leaf) for leaf in found} == {id(a), id(b)}
    assert len(found) == 2


def test_constants_are_no_leaves():
    x = torch.ones(2, requires_grad=True)

    assert [leaf is x for leaf in leaves_of([(x * torch.ones(2)).sum()])] == [True]


def test_attributes_of_custom_functions_are_no_leaves():
    x = torch.ones(2, requires_grad=True)

    assert [leaf is x for leaf in leaves_of([Doubled.apply(x)])] == [True]
