"""Models for the tests of the optimizer: on several workers, and in one process.

A `Model` is a chain of layers, each on some worker or all of them here. The same training
runs on both, and what it leaves in the parameters is compared to the last bit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import probes
from gradwire import autograd, rpc
from gradwire.optim import DistributedOptimizer
from gradwire.optim._local import LocalOptimizer
from gradwire.rpc import RRef

SIZE = 4
DEFAULT_OWNERS = ("w1", "w2")
HERE = None
"""Instead of the names of owners: plain torch, in this process."""

SGD_WITH_ALL = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with all": (torch.optim.SGD, SGD_WITH_ALL),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.95}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
}


# ------------------------------------------------------------------------------ the model


class Layer(nn.Module):
    """One layer, the same wherever it is made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(_random((SIZE, SIZE), generator))
        self.bias = nn.Parameter(_random((SIZE,), generator))
        self.spare = nn.Parameter(_random((SIZE,), generator))

    def forward(self, x: Tensor, *, with_spare: bool = False) -> Tensor:
        y = torch.tanh(x @ self.weight + self.bias)
        return y * self.spare if with_spare else y

    def references(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def grads(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]

    def grads_in(self, ctx: int) -> list[Tensor | None]:
        found = autograd.get_gradients(ctx)
        return [found.get(parameter) for parameter in self.parameters()]

    def set_grads(self, value: float) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, value)

    def move(self) -> None:
        """Gives the parameters other memory and other values."""
        for parameter in self.parameters():
            parameter.data = parameter.detach() * 1.5

    def turn(self) -> None:
        """The same memory, read in another order."""
        self.weight.data = self.weight.detach().t()

    def cut(self) -> None:
        """Less of the same memory."""
        self.spare.data = self.spare.detach()[:1]

    def computed(self) -> RRef[Tensor]:
        return RRef(self.weight * 2)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5


class Model:
    """Layers one after the other.

    Args:
        owners: Their workers, by name; None: all in this process, plain torch.
        num_layers: How many there are if they are here.
    """

    def __init__(
        self, owners: Sequence[str] | None = DEFAULT_OWNERS, num_layers: int = 2
    ) -> None:
        self.layers: list[Any]
        if owners is None:
            self.layers = [Layer(seed) for seed in range(num_layers)]
        else:
            self.layers = [
                rpc.remote(owner, Layer, args=(seed,))
                for seed, owner in enumerate(owners)
            ]
        self.is_here = owners is None

    def parameters(self) -> list[Any]:
        """Parameters, or references to them."""
        if self.is_here:
            return [p for layer in self.layers for p in layer.parameters()]
        return [rref for found in self.ask("references") for rref in found]

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of each layer."""
        if self.is_here:
            return [getattr(layer, method)(*args) for layer in self.layers]
        return [getattr(layer.rpc_sync(), method)(*args) for layer in self.layers]

    def values(self) -> list[Tensor]:
        return [value for found in self.ask("values") for value in found]

    def grads(self) -> list[Tensor | None]:
        return [grad for found in self.ask("grads") for grad in found]

    def loss(self, number: int, *, with_spare: bool = False) -> Tensor:
        """The loss for the data of this number."""
        generator = torch.Generator().manual_seed(1000 + number)
        x = _random((3, SIZE), generator)
        target = _random((3, SIZE), generator)
        for layer in self.layers:
            forward = layer.forward if self.is_here else layer.rpc_sync().forward
            x = forward(x, with_spare=with_spare)
        return ((x - target) ** 2).sum()

    def optimizer(
        self, optimizer_class: type[torch.optim.Optimizer], *args: Any, **kwargs: Any
    ) -> Any:
        return self.optimizer_of(self.parameters(), optimizer_class, *args, **kwargs)

    def optimizer_of(
        self,
        parameters: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """An optimizer for given parameters or groups of this model."""
        if self.is_here:
            return optimizer_class(parameters, *args, **kwargs)
        return DistributedOptimizer(optimizer_class, parameters, *args, **kwargs)

    def train(
        self,
        optimizer: Any,
        steps: range,
        after_step: Callable[[float], object] = lambda loss: None,
        *,
        with_spare: bool = False,
    ) -> None:
        """Some steps of training, each in a context of its own."""
        for number in steps:
            if self.is_here:
                optimizer.zero_grad()
                loss = self.loss(number, with_spare=with_spare)
                loss.backward()
                optimizer.step()
            else:
                with autograd.context() as ctx:
                    loss = self.loss(number, with_spare=with_spare)
                    ctx.backward(loss)
                    optimizer.step(ctx)
            after_step(loss.item())


def stepper(scheduler: Any) -> Callable[[float], None]:
    """Calls a scheduler after each step of a training."""

    def step(_: float) -> None:
        scheduler.step()

    return step


def assert_same(found: Any, expected: Any) -> None:
    """To the last bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------ optimizers for tests


class Fails(torch.optim.SGD):
    """Cannot step."""

    def step(self, closure: Any = None) -> Any:
        raise FloatingPointError("it cannot step")


class FailsToLoad(torch.optim.SGD):
    """Cannot load a state on worker w2."""

    def load_state_dict(self, state_dict: Any) -> None:
        if rpc.get_worker_info().name == "w2":
            raise FloatingPointError("it cannot load")
        super().load_state_dict(state_dict)


class FailsElsewhere(torch.optim.SGD):
    """Cannot step on worker w2; on w1 it fails in another way."""

    def step(self, closure: Any = None) -> Any:
        name = rpc.get_worker_info().name
        raise KeyError(name) if name == "w2" else FloatingPointError(name)


class FailsWhenFast(torch.optim.SGD):
    """Cannot step on worker w2 if its learning rate is large."""

    def step(self, closure: Any = None) -> Any:
        name = rpc.get_worker_info().name
        if self.param_groups[0]["lr"] > 1 and name == "w2":
            raise FloatingPointError("it cannot step")
        return super().step(closure)


class FailsOn(torch.optim.SGD):
    """Cannot be made, or cannot step, on some workers."""

    def __init__(self, params: Any, names: str, *, at_once: bool = False) -> None:
        super().__init__(params, lr=0.5)
        self._fails = rpc.get_worker_info().name in names.split()
        if at_once and self._fails:
            raise FloatingPointError("it cannot be made")

    def step(self, closure: Any = None) -> Any:
        if self._fails:
            raise FloatingPointError("it cannot step")
        return super().step(closure)


class Ascent(torch.optim.SGD):
    """Evaluates a closure twice: goes up a little, and comes down from there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise TypeError("expected a closure")
        with torch.enable_grad():
            loss = closure()
        moved = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    up = 0.1 * p.grad
                    p.add_(up)
                    moved.append((p, up))
        with torch.enable_grad():
            closure()
        for p, up in moved:
            p.sub_(up)
        super().step()
        return loss


class AscentFromZero(Ascent):
    """As `Ascent`; it forgets gradients itself, between evaluations and at the end."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        def evaluate() -> Any:
            self.zero_grad()
            return closure()

        loss = super().step(evaluate)
        self.zero_grad()
        return loss


class Shrinks(torch.optim.SGD):
    """Puts other gradients in the place of those that it finds."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / 2
        super().step()
        return loss


class Moves(torch.optim.SGD):
    """Gives parameters other memory before it evaluates a closure, and looks twice."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.data = p.data * 1.5
        loss = closure()
        for p in params:
            p.data = p.data / 1.5
        closure()
        super().step()
        return loss


class ReturnsNumber(torch.optim.SGD):
    """Returns a number that it makes of the loss; without a loss, nothing."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        return None if loss is None else float(loss) + 1


class Alive(torch.optim.SGD):
    """Can be counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _alive.add(self)


_alive: weakref.WeakSet[Alive] = weakref.WeakSet()


def count_alive() -> int:
    return len(_alive)


def has_none_alive(name: str) -> bool:
    """Whether there is no such optimizer on a worker."""
    return rpc.rpc_sync(name, count_alive) == 0


class Replaces(torch.optim.SGD):
    """Gives parameters other memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p - group["lr"] * p.grad


class Pauses(torch.optim.SGD):
    """Stops in the middle of a step until it is told to go on."""

    def step(self, closure: Any = None) -> Any:
        _begun.set()
        if not _go_on.wait(probes.LIMIT_S):
            raise AssertionError("nobody said to go on")
        return super().step(closure)


_begun = threading.Event()
_go_on = threading.Event()


def prepare_pause() -> None:
    _begun.clear()
    _go_on.clear()


def wait_for_pause() -> None:
    if not _begun.wait(probes.LIMIT_S):
        raise AssertionError("no step was begun")


def end_pause() -> None:
    _go_on.set()


def was_aborted(rref: RRef[LocalOptimizer]) -> bool:
    """Whether an owner has been told of a step that is not to be made."""
    return rref.local_value()._record._over > 0


class Meets(torch.optim.SGD):
    """Waits in its step for another one; notes whether it came."""

    patience_s = 0.05

    def step(self, closure: Any = None) -> Any:
        global _num_inside
        with _meeting:
            _num_inside += 1
            _most_inside[0] = max(_most_inside[0], _num_inside)
            _meeting.notify_all()
            _meeting.wait_for(lambda: _most_inside[0] > 1, self.patience_s)
            _num_inside -= 1
        return super().step(closure)


class MeetsForSure(Meets):
    """Is patient."""

    patience_s = probes.LIMIT_S


class MeetsInClosure(Meets):
    """Can be met while its closure is evaluated; see `wait_for_another`."""

    patience_s = 0.3

    def step(self, closure: Any = None) -> Any:
        global _num_inside
        with _meeting:
            _num_inside += 1
            _most_inside[0] = max(_most_inside[0], _num_inside)
            _meeting.notify_all()
        loss = torch.optim.SGD.step(self, closure)
        with _meeting:
            _num_inside -= 1
        return loss


_meeting = threading.Condition()
_num_inside = 0
_most_inside = [0]


def wait_for_another() -> None:
    """Gives another step the time to come."""
    with _meeting:
        _meeting.wait_for(lambda: _most_inside[0] > 1, MeetsInClosure.patience_s)


def take_most_inside() -> int:
    """How many steps were under way at once since the last time."""
    most, _most_inside[0] = _most_inside[0], 0
    return most


# ------------------------------------------------------------------------ other trainers


class Linear:
    """A model whose gradients do not depend on its parameters: the order is free."""

    def __init__(self) -> None:
        self.weights = [
            nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(3)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x * w).sum() for w in self.weights), torch.zeros(()))

    def references(self) -> list[RRef[Tensor]]:
        return [RRef(weight) for weight in self.weights]

    def values(self) -> list[Tensor]:
        return [weight.detach() for weight in self.weights]


def train_linear(
    models: list[RRef[Linear]],
    optimizer_class: Any,
    value: float,
    num_steps: int,
    options: dict[str, Any],
) -> None:
    """A trainer with an optimizer of its own."""
    rrefs = [rref for model in models for rref in model.rpc_sync().references()]
    optimizer = DistributedOptimizer(optimizer_class, rrefs, lr=1.0, **options)
    x = torch.full((SIZE,), value, dtype=torch.float64)
    for _ in range(num_steps):
        with autograd.context() as ctx:
            outputs = [model.rpc_sync().forward(x) for model in models]
            ctx.backward(torch.stack(outputs).sum())
            optimizer.step(ctx)


def train_with_others(
    owners: list[str],
    trainers: list[str],
    optimizer_class: Any,
    num_steps: int,
    **options: Any,
) -> None:
    """Several trainers at once on the same parameters; no step may get lost."""
    models = [rpc.remote(owner, Linear) for owner in owners]
    values = [2.0**number for number in range(len(trainers))]
    futures = [
        rpc.rpc_async(
            trainer,
            train_linear,
            args=(models, optimizer_class, value, num_steps, options),
        )
        for trainer, value in zip(trainers, values, strict=True)
    ]
    for future in futures:
        future.wait()
    expected = torch.full((SIZE,), -num_steps * sum(values), dtype=torch.float64)
    for model in models:
        for weight in model.rpc_sync().values():
            assert_same(weight, expected)


def data_of(number: int) -> Tensor:
    return _random((3, SIZE), torch.Generator().manual_seed(number))


def add_to_grad(layer: RRef[Layer], number: int) -> None:
    """A plain backward through a layer."""
    layer.rpc_sync().forward(data_of(number)).sum().backward()


def set_grads(layer: RRef[Layer], value: float) -> None:
    layer.local_value().set_grads(value)


def fail_in_step() -> None:
    """Run by a worker for another: an optimizer that fails on two owners."""
    model = Model(("w1", "w2"))
    optimizer = model.optimizer(Fails, lr=0.1)
    with autograd.context() as ctx:
        ctx.backward(model.loss(0))
        optimizer.step(ctx)


# ----------------------------------------------------------------------- nothing is left


def two_groups(model: Model) -> list[dict[str, Any]]:
    """Each with parameters of both owners."""
    parameters = model.parameters()
    return [
        {"params": parameters[0::2], "lr": 0.2, "momentum": 0.5},
        {"params": parameters[1::2], "weight_decay": 0.1},
    ]


def step_in_context(
    model: Model, optimizer: Any, number: int, before: Any = lambda: None
) -> Any:
    """A step with a closure, which calls something before it does anything else."""
    with autograd.context() as ctx:

        def closure() -> Tensor:
            before()
            loss = model.loss(number)
            ctx.backward(loss)
            return loss

        return optimizer.step(ctx, closure)


def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """No reference and no context is left on any worker of the shared cluster."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster = request.getfixturevalue("cluster")
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed == failed_before:
        cluster.run(0, check_nothing_stays)


def check_nothing_stays() -> None:
    """No references and no contexts on any worker, now or soon."""
    try:
        probes.wait_until(lambda: not what_stays(), "nothing is left here", 0.1)
    except AssertionError:
        gc.collect()  # errors have tracebacks, and these have frames
    for name in ("w0", "w1", "w2", "w3"):
        probes.wait_until(
            lambda name=name: not rpc.rpc_sync(name, what_stays),  # type: ignore[misc]
            f"nothing is left on worker {name!r}",
        )


def what_stays() -> dict[str, int]:
    """What there is of contexts and references on this worker."""
    references = {k: v for k, v in rpc.get_debug_info().items() if "rrefs" in k}
    found = {**autograd.get_debug_info(), **references}
    return {key: count for key, count in found.items() if count}
