"""What autograd is told of the changes that an optimizer makes to stand-ins."""

from __future__ import annotations

import torch
from torch import nn

from gradwire.optim._local import _stand_in
from gradwire.optim._versions import Versions


class Bench:
    """Parameters of which the first has a gradient; how often each has changed."""

    def __init__(self) -> None:
        self._parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.stand_ins = [_stand_in(parameter) for parameter in self._parameters]
        self.versions = Versions(self._parameters, self.stand_ins)

    def begin(self) -> None:
        self.versions.begin([torch.ones(2), None, None])

    def begin_with_all(self) -> None:
        self.versions.begin([torch.ones(2)] * 3)

    def seen(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def test_graphs_from_before_and_from_meanwhile_are_refused():
    bench = Bench()
    before = bench.seen()

    bench.begin()
    meanwhile = bench.seen()
    bench.versions.end()
    after = bench.seen()

    assert before[0] < meanwhile[0] < after[0]
    assert before[1:] == meanwhile[1:] == after[1:]


def test_change_without_a_gradient_is_seen():
    bench = Bench()

    bench.begin()
    with torch.no_grad():
        bench.stand_ins[2].add_(1)
    bench.versions.end()

    _, left_alone, changed = bench.seen()
    assert left_alone == 0
    assert changed > 0


def test_end_without_a_beginning_changes_nothing():
    bench = Bench()
    bench.begin()
    bench.versions.end()
    before = bench.seen()

    bench.versions.end()

    assert bench.seen() == before


def test_all_change_if_all_have_gradients():
    bench = Bench()
    before = bench.seen()

    bench.begin_with_all()
    meanwhile = bench.seen()
    bench.versions.end()

    assert all(map(int.__lt__, before, meanwhile))
    assert all(map(int.__lt__, meanwhile, bench.seen()))


def test_step_knows_nothing_of_the_one_before():
    bench = Bench()
    for begin in (bench.begin_with_all, bench.begin):
        begin()
        with torch.no_grad():
            bench.stand_ins[2].add_(1)
        bench.versions.end()
    before = bench.seen()

    bench.begin()
    bench.versions.end()

    after = bench.seen()
    assert after[0] > before[0]
    assert after[1:] == before[1:]
