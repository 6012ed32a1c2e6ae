"""The local operations of random programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.programs import PARAMETER_KINDS

# Torch's own declarations of custom functions are loose.
# mypy: disable-error-code="no-untyped-call"

NUM_ROWS = 5
SHAPES = {
    "f": (2, 3),
    "x": (2, 3),
    "w": (3, 3),
    "t": (NUM_ROWS, 3),
    "u": (NUM_ROWS, 3),
    "s": (),
}


@dataclass(frozen=True)
class Operation:
    """A local operation.

    Attributes:
        takes: Kinds of its inputs; see `FITS`.
        gives: Kinds of its results.
        run: What it does.
        is_fresh: Nothing refers to its result, so it may be changed in place.
        is_view: It is a view of an input.
        twice: It can be differentiated twice.
        weight: How often it is chosen.
    """

    takes: str
    gives: str
    run: Callable[..., Any]
    is_fresh: bool = False
    is_view: bool = False
    twice: bool = True
    weight: float = 1.0


# --------------------------------------------------------------------- custom Functions


class Cube(torch.autograd.Function):
    """Saves its input; a missing gradient stays missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * x * x * 0.25

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        (x,) = ctx.saved_tensors
        return gradient * x * x * 0.75


class Pair(torch.autograd.Function):
    """Two results, of which one may be unused; saves one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, torch.sin(x) + y

    @staticmethod
    def backward(
        ctx: Any, first: Tensor | None, second: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        if first is None and second is None:
            return None, None
        if first is None:
            assert second is not None
            return second * torch.cos(x), second
        if second is None:
            return first * y, first * x
        return first * y + second * torch.cos(x), first * x + second


class Zeros(torch.autograd.Function):
    """Materialises: it makes zeros of a missing gradient, as Functions do by default."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x)


MATERIALISING = "zeros"
"""The operation whose node gives zeros where no gradient comes."""
MATERIALISING_NODE = "ZerosBackward"


# --------------------------------------------------------------------------- operations


def _tanh_mul(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a * b + 0.3 * a)


def _column(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], 2)[..., 1]


def _swap_rows(a: Tensor) -> Tensor:
    first, second = a.unbind(0)
    return torch.stack([second, first * 0.5])


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.cat([a, a * 0.5], 1)
    return wide[:, :3], wide[:, 3:]


def _packed(a: Tensor, b: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda p: p[0]):
        return torch.sin(a * b)


def _mix(*values: Tensor) -> Tensor:
    total = values[0].new_zeros(2, 3)
    for number, value in enumerate(values):
        part = value[1:3] if value.dim() else value
        total = total + (0.5 + 0.25 * number) * (
            value if value.shape == (2, 3) else part
        )
    return torch.sin(total)


def _loss(*values: Tensor) -> Tensor:
    total = (values[0] ** 2).sum()
    for value in values[1:]:
        total = total + (value**2).sum()
    return total


OPERATIONS: dict[str, Operation] = {
    "tanh_mul": Operation("ff", "f", _tanh_mul, weight=3),
    "add": Operation("ff", "f", lambda a, b: a + 0.5 * b, is_fresh=True, weight=2),
    "sub": Operation("ff", "f", lambda a, b: 0.75 * a - b, is_fresh=True),
    "sin": Operation("f", "f", torch.sin, weight=2),
    "matmul": Operation("fw", "f", lambda a, w: a @ w, is_fresh=True, weight=2),
    "weights": Operation("ww", "w", lambda a, b: torch.sin(a @ b)),
    "transposed": Operation("f", "f", lambda a: a.reshape(3, 2).t(), is_view=True),
    "column": Operation("ff", "f", _column),
    "shifted": Operation(
        "ff", "f", lambda a, b: torch.cat([a[:1] * 2, b[1:]]), is_fresh=True
    ),
    "swap_rows": Operation("f", "f", _swap_rows, is_fresh=True),
    "split": Operation("f", "ff", _split, weight=0.5),
    "expanded": Operation("f", "x", lambda a: a.mean(0, True).expand(2, 3)),
    "where": Operation("ff", "f", lambda a, b: torch.where(a > b, a, b)),
    "scaled": Operation("fs", "f", lambda a, s: a * torch.tanh(s)),
    "norm": Operation("f", "s", lambda a: ((a**2).sum() + 0.1).sqrt()),
    "rows": Operation("ti", "f", lambda t, i: F.embedding(i, t), weight=3),
    "sparse_rows": Operation(
        "pi", "f", lambda t, i: F.embedding(i, t, sparse=True), twice=False, weight=4
    ),
    "table": Operation("tf", "u", lambda t, a: torch.cat([t[:3], a]), weight=0.5),
    "make_rows": Operation("", "i", lambda: torch.tensor([1, 3]), weight=0.0),
    "next_rows": Operation("i", "i", lambda i: (i + 1) % NUM_ROWS, weight=0.5),
    "cube": Operation("f", "f", Cube.apply),
    "pair": Operation("ff", "ff", Pair.apply),
    "packed": Operation("ff", "f", _packed, weight=0.5),
    "detached": Operation("f", "f", lambda a: a.detach(), is_view=True, weight=0.5),
    MATERIALISING: Operation("f", "f", Zeros.apply, twice=False, weight=0.0),
    # These take any number of values of any shape; chosen apart.
    "mix": Operation("f", "f", _mix, weight=0.0),
    "loss": Operation("f", "s", _loss, weight=0.0),
}


def _halve(target: Tensor, _: Tensor) -> None:
    target.mul_(0.5)


def _add_into(target: Tensor, other: Tensor) -> None:
    target.add_(other, alpha=0.25)


def _copy_row(target: Tensor, other: Tensor) -> None:
    target[0].copy_(other[1])


def _multiply_part(target: Tensor, _: Tensor) -> None:
    target[:, 1:].mul_(-2.0)


def _tanh(target: Tensor, _: Tensor) -> None:
    target.tanh_()


IN_PLACE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "halve": _halve,
    "add_into": _add_into,
    "copy_row": _copy_row,
    "multiply_part": _multiply_part,
    "tanh": _tanh,
}
SAVES_ITS_RESULT = "tanh"
"""After this one in place the value must not be changed again."""


# ------------------------------------------------------------------------------- values


def constant(kind: str) -> Tensor:
    """A value of a kind, without history."""
    if kind == "i":
        return torch.zeros(2, dtype=torch.int64)
    return torch.full(SHAPES[kind], 0.5, dtype=torch.float64)


def seed_like(root: Tensor) -> Tensor:
    """The gradient with which a pass begins at a root that is not a scalar."""
    count = root.numel()
    return torch.linspace(-1.0, 1.5, count, dtype=torch.float64).reshape(root.shape)


def sum_of_squares(gradients: Sequence[Tensor | None]) -> Tensor:
    """A penalty; a constant if there is nothing to sum up."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            total = total + (gradient**2).sum()
    return total


def make_parameters(seed: int, worker: int) -> list[Tensor]:
    """The parameters of a worker."""
    generator = torch.Generator().manual_seed(seed * 16 + worker)
    made: list[Tensor] = []
    for number, kind in enumerate(PARAMETER_KINDS):
        tensor = torch.randn(SHAPES[kind], dtype=torch.float64, generator=generator)
        if number % 2:
            made.append(torch.nn.Parameter(tensor))
        else:
            made.append(tensor.requires_grad_())
    return made
