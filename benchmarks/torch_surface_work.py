"""What benchmarks/torch_surface.py lets workers do: the same programs for both systems."""

from __future__ import annotations

import functools
import time
from typing import Any

from benchmarks import rpc as calls
from benchmarks.workers import Library, this_library

# Torch is imported by the workers only.

NUM_PARAMETERS, WIDTH = 20, 64
INPUTS, HIDDEN, CLASSES, BATCH = 64, 128, 10, 32


# --------------------------------------------------------------- what is called remotely


class Counter:
    """Something with a method."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def make_parameters(count: int) -> Any:
    """A module with some parameters, which stays where it is made."""
    from torch import nn

    return nn.ParameterList([nn.Parameter(_filled(WIDTH)) for _ in range(count)])


def _filled(width: int) -> Any:
    import torch

    return torch.full((width, width), 0.5)


def references_of(module: Any) -> list[Any]:
    """References to the parameters of a module that lives here."""
    rref = this_library().rpc.RRef
    return [rref(parameter) for parameter in module.local_value().parameters()]


def use_parameters(module: Any, x: Any) -> Any:
    """Gives every parameter of a module that lives here a gradient."""
    return sum((parameter * x).sum() for parameter in module.local_value())


def make_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def train(model: Any, num: int) -> float:
    """A trainer: some steps on a model that lives on the server; returns the last loss."""
    trainer = _trainer(this_library())
    for _ in range(num):
        trainer.step(model)
    return trainer.loss


class Trainer:
    def __init__(self, library: Library) -> None:
        import torch

        self._rpc, self._autograd = library.rpc, library.autograd
        self._make_optimizer = optimizer_class(library)
        torch.manual_seed(5)
        self._x = torch.randn(BATCH, INPUTS)
        self._y = torch.randint(CLASSES, (BATCH,))
        self._parameters: list[Any] = []
        self._optimizer: Any = None
        self.loss = 0.0

    def step(self, model: Any) -> None:
        import torch

        if self._optimizer is None:
            self._parameters = self._rpc.rpc_sync("w0", references_of, args=(model,))
            self._optimizer = self._make_optimizer(
                torch.optim.SGD, self._parameters, lr=0.01
            )
        functional = torch.nn.functional
        with self._autograd.context() as context_id:
            # Copies: the other trainer may change the parameters at any time.
            w1, b1, w2, b2 = [p.to_here() for p in self._parameters]
            hidden = functional.relu(functional.linear(self._x, w1, b1))
            output = functional.linear(hidden, w2, b2)
            loss = torch.nn.functional.cross_entropy(output, self._y)
            self._autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
            self.loss = loss.item()


@functools.cache
def _trainer(library: Library) -> Trainer:
    return Trainer(library)


def optimizer_class(library: Library) -> Any:
    if library.name == "torch":
        from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

        return TorchOptimizer
    from gradwire.optim import DistributedOptimizer

    return DistributedOptimizer


# ----------------------------------------------------------------- what worker 0 does


class Programs:
    """One method for each piece of work; each returns what there is to check."""

    def __init__(self, library: Library) -> None:
        import torch

        self._library = library
        self._rpc, self._autograd = library.rpc, library.autograd
        self._small = torch.ones(256)
        self._counter = self._rpc.remote("w1", Counter)
        self._model = self._rpc.RRef(make_model())

    def remote_to_here(self) -> Any:
        import torch

        rref = self._rpc.remote("w1", torch.add, args=(self._small, 1))
        return rref.to_here()

    def method(self) -> Any:
        return self._counter.rpc_sync().add(0)

    def optimizer(self) -> float:
        """The time of the step alone: the gradients are there already."""
        modules, optimizer, x = self._parameters
        with self._autograd.context() as context_id:
            parts = [
                self._rpc.rpc_sync(name, use_parameters, args=(module, x))
                for name, module in modules
            ]
            self._autograd.backward(context_id, [sum(parts)])
            start = time.perf_counter()
            optimizer.step(context_id)
            return time.perf_counter() - start

    @functools.cached_property
    def _parameters(self) -> tuple[Any, Any, Any]:
        import torch

        modules = [
            (name, self._rpc.remote(name, make_parameters, args=(NUM_PARAMETERS // 2,)))
            for name in ("w1", "w2")
        ]
        references = [
            reference
            for name, module in modules
            for reference in self._rpc.rpc_sync(name, references_of, args=(module,))
        ]
        optimizer = optimizer_class(self._library)(
            torch.optim.SGD, references, lr=0.001
        )
        return modules, optimizer, torch.ones(WIDTH, WIDTH, requires_grad=True)

    def server(self, num: int) -> float:
        """The time of so many steps of both trainers, which work at the same time."""
        start = time.perf_counter()
        futures = [
            self._rpc.rpc_async(name, train, args=(self._model, num))
            for name in ("w1", "w2")
        ]
        for future in futures:
            future.wait()
        return time.perf_counter() - start


@functools.cache
def _programs(library: Library) -> Programs:
    return Programs(library)


def prepare(library: Library) -> None:
    """For all workers: what they need is imported."""
    optimizer_class(library)


def check(library: Library, key: str) -> None:
    """The same results on both systems, and those of one process."""
    import torch

    programs = _programs(library)
    if key == "remote_to_here":
        torch.testing.assert_close(programs.remote_to_here(), torch.full((256,), 2.0))
    elif key == "method":
        assert programs._counter.rpc_sync().add(2) == 2
    elif key == "optimizer":
        before = programs._parameters[0][0][1].to_here()[0].detach().clone()
        programs.optimizer()
        after = programs._parameters[0][0][1].to_here()[0].detach()
        torch.testing.assert_close(after, before - 0.001)
    else:
        before = [
            p.detach().clone() for p in programs._model.local_value().parameters()
        ]
        programs.server(2)
        after = list(programs._model.local_value().parameters())
        assert not all(map(torch.equal, before, after))


def measure(library: Library, key: str, num: int) -> list[float]:
    programs = _programs(library)
    if key == "optimizer":
        return [programs.optimizer() for _ in range(num)]
    if key == "server":
        return [programs.server(num) / num]
    return calls._time_each(getattr(programs, key), num)
