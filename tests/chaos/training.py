"""What the workers of a chaos run do: they train a small model.

    trainer     the loop; asks, runs the backward passes, and never dies
    owner0, ... hold the parameters, and have snapshots of them
    stage0, ... compute, and keep nothing: any of them can do any of the work
    witness     has a thread of the trainer to itself, whose contexts nobody disturbs

Each parameter is used at most twice in a step, and a sum of two gradients does not depend
on their order. So the losses of a run equal those of one process bit by bit, whoever
computed what, and however often.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import functions
from gradwire import autograd, optim, rpc
from gradwire.errors import GradwireError
from gradwire.rpc._membership import Subscription

TRAINER, WITNESS = "trainer", "witness"
SIZE = 96  # such a matrix goes through shared memory
BATCH = 96
NUM_LAYERS = 3
LEARNING_RATE = 0.05
MOMENTUM = 0.9
BACK_S = 20.0
"""How long the trainer waits for workers that are being restarted."""

ATTEMPTS = 20
BACKOFF_S = 0.005
PAUSE_S = 0.005


# ------------------------------------------------------------------- the model itself


def make_parameters(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, dtype=torch.double, generator=generator)
        return (values / SIZE**0.5).requires_grad_()

    return [(draw(SIZE, SIZE), draw(SIZE)) for _ in range(NUM_LAYERS)]


def make_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    x = torch.randn(BATCH, SIZE, dtype=torch.double, generator=generator)
    return x, torch.sin(x)


def compute_layer(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight + bias)


def compute_loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class OneProcess:
    """The undisturbed run, in plain torch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._layers = make_parameters(seed)
        flat = [parameter for layer in self._layers for parameter in layer]
        self._optimizer = torch.optim.SGD(flat, lr=LEARNING_RATE, momentum=MOMENTUM)
        self.losses: list[float] = []

    def train_until(self, num_steps: int) -> list[float]:
        """Goes on until there are so many losses; returns them."""
        while len(self.losses) < num_steps:
            x, target = make_batch(self._seed, len(self.losses))
            first, *others = self._layers
            y = torch.cat([compute_layer(*first, half) for half in x.chunk(2)])
            for layer in others:
                y = compute_layer(*layer, y)
            loss = compute_loss(y, target)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.losses.append(loss.item())
        return self.losses[:num_steps]


# ---------------------------------------------------------------------------- owners

Layer = tuple[rpc.RRef[Tensor], rpc.RRef[Tensor]]


@functools.lru_cache
def own_layers(seed: int, numbers: tuple[int, ...]) -> list[Tensor]:
    """The parameters of some layers, on their owner; a new one makes them anew."""
    layers = make_parameters(seed)
    return [parameter for number in numbers for parameter in layers[number]]


def forget_layers() -> None:
    """The next training begins with new ones."""
    own_layers.cache_clear()


# ---------------------------------------------------------------------------- stages


def run_layer(layer: Layer, x: Tensor) -> Tensor:
    """Gets the parameters from their owner, and computes."""
    weight, bias = (rref.to_here() for rref in layer)
    return compute_layer(weight, bias, x)


def run_layers(stages: list[str], layers: list[Layer], x: Tensor) -> Tensor:
    """Computes one layer here and has the others computed further on."""
    y = run_layer(layers[0], x)
    if len(layers) == 1:
        return y
    return rpc.rpc_sync(stages[0], run_layers, (stages[1:], layers[1:], y))


# --------------------------------------------------------------------------- trainer


@dataclass(frozen=True)
class Attempt:
    """One try at a step."""

    step: int
    number: int
    start: float
    end: float
    stages: tuple[str, ...]
    error: str = ""


@dataclass
class Report:
    """What the trainer says about some steps."""

    losses: list[float] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    num_witnessed: int = 0


class Progress:
    """Where the trainer is, for the driver to see without asking.

    A file that both have mapped: it works when nothing else does.
    """

    _FORMAT = struct.Struct("qqd")

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)

    def write(self, step: int, attempt: int) -> None:
        packed = self._FORMAT.pack(step, attempt, time.monotonic())
        self._map[: len(packed)] = packed

    def read(self) -> tuple[int, int, float]:
        """Step, attempt, and when it began."""
        size = self._FORMAT.size
        packed = self._map[:size]
        while packed != (again := self._map[:size]):  # it is just being written
            packed = again
        step, attempt, since = self._FORMAT.unpack(packed)
        return step, attempt, since

    def close(self) -> None:
        self._map.close()


class Trainer:
    """Lives on the trainer for as long as the run does."""

    def __init__(
        self, seed: int, owners: list[str], stages: list[str], folder: Path
    ) -> None:
        self.seed = seed
        self.stages = stages
        self.progress = Progress(folder / "progress")
        share = -(-NUM_LAYERS // len(owners))
        numbers = range(NUM_LAYERS)
        # On disk, or in the memory of a worker that nobody kills.
        kept = (
            optim.Snapshots(folder / "snapshots")
            if seed % 2
            else optim.Snapshots(peer=WITNESS)
        )
        self.optimizer = optim.DistributedOptimizer(
            torch.optim.SGD,
            [
                optim.ParametersOf(
                    owner,
                    own_layers,
                    seed,
                    tuple(numbers[index * share : (index + 1) * share]),
                )
                for index, owner in enumerate(owners)
            ],
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
            snapshots=kept,
        )

    @property
    def layers(self) -> list[Layer]:
        """References; others after an owner was lost."""
        (group,) = self.optimizer.param_groups
        rrefs = group["params"]
        return list(zip(rrefs[::2], rrefs[1::2], strict=True))

    def train(self, first: int, number: int) -> Report:
        report = Report()
        with _witness(self.seed + first, report):
            for step in range(first, first + number):
                report.losses.append(self._step(step, report))
        self.progress.write(first + number, 0)
        return report

    def _step(self, step: int, report: Report) -> float:
        number = 0

        def attempt(ctx: autograd.Context) -> float:
            nonlocal number
            self.progress.write(step, number)
            stages = self._draw_stages(step, number)
            start, text = time.monotonic(), ""
            try:
                return self.attempt(ctx, step, stages)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise
            finally:
                end = time.monotonic()
                report.attempts.append(
                    Attempt(step, number, start, end, tuple(stages), text)
                )
                number += 1

        return autograd.retry(
            attempt,
            ATTEMPTS,
            BACKOFF_S,
            timeout=BACK_S,
            recover=self.optimizer.recover,
        )

    def _draw_stages(self, step: int, number: int) -> list[str]:
        draw = random.Random(f"{self.seed}/{step}/{number}")
        return [draw.choice(self.stages) for _ in range(2 + NUM_LAYERS - 1)]

    def attempt(self, ctx: autograd.Context, step: int, stages: list[str]) -> float:
        x, target = make_batch(self.seed, step)
        layers = self.layers
        futures = [
            rpc.rpc_async(stage, run_layer, (layers[0], half))
            for stage, half in zip(stages, x.chunk(2), strict=False)
        ]
        y = torch.cat([future.wait() for future in futures])
        y = rpc.rpc_sync(stages[2], run_layers, (stages[3:], layers[1:], y))
        loss = compute_loss(y, target)
        ctx.backward(loss)
        self.optimizer.step(ctx)
        return loss.item()


@contextlib.contextmanager
def _witness(seed: int, report: Report) -> Iterator[None]:
    """Meanwhile, contexts that have nothing to do with stages must not notice anything."""
    over = threading.Event()

    def watch() -> None:
        weight, _ = make_parameters(seed)[0]
        while not over.wait(PAUSE_S):
            x, target = make_batch(seed, report.num_witnessed)
            try:
                with autograd.context() as ctx:
                    y = rpc.rpc_sync(WITNESS, compute_square, (weight, x))
                    ctx.backward(compute_loss(y, target))
                    (found,) = (ctx.gradients()[leaf] for leaf in (weight,))
            except BaseException as error:
                report.unexpected.append(
                    f"a context of other workers was disturbed: {type(error).__name__}: "
                    f"{error}"
                )
                return
            loss = compute_loss(compute_square(weight, x), target)
            (expected,) = torch.autograd.grad(loss, [weight])
            if not torch.equal(found, expected):
                report.unexpected.append(f"the witness got {found}, not {expected}")
            report.num_witnessed += 1

    thread = threading.Thread(target=watch, name="witness")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BACK_S)
        if thread.is_alive():
            report.unexpected.append("the witness hangs")


def compute_square(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight).square()


_trainer: Trainer | None = None


def begin(seed: int, owners: list[str], stages: list[str], folder: Path) -> None:
    global _trainer
    _trainer = Trainer(seed, owners, stages, folder)


def train(first: int, number: int) -> Report:
    assert _trainer is not None
    return _trainer.train(first, number)


def try_step(step: int, stages: list[str]) -> tuple[float | None, Report]:
    """One attempt only; the loss if it succeeds."""
    assert _trainer is not None
    report = Report()
    loss = None
    start, text = time.monotonic(), ""
    with _witness(_trainer.seed + step, report):
        try:
            with autograd.context() as ctx:
                loss = _trainer.attempt(ctx, step, stages)
        except GradwireError as error:
            text = f"{type(error).__name__}: {error}"
        end = time.monotonic()
    report.attempts.append(Attempt(step, 0, start, end, tuple(stages), text))
    return loss, report


def call_everybody(names: list[str]) -> None:
    """Opens all connections of this worker."""
    for name in names:
        rpc.rpc_sync(name, functions.echo, (1,))


_losses: dict[str, str] = {}
_heard = threading.Condition()  # guards _losses; written by a thread of the pool
_news: list[Subscription] = []


def listen() -> None:
    """Hears from now on whom this worker loses, and why."""

    def note(info: rpc.WorkerInfo, reason: str) -> None:
        with _heard:
            _losses[info.name] = reason
            _heard.notify_all()

    for subscription in _news:
        subscription.remove()
    _losses.clear()
    _news[:] = [rpc.on_worker_lost(note)]


def why_lost(name: str) -> str:
    """Why this worker has lost another, since it listens."""
    with _heard:
        _heard.wait_for(lambda: name in _losses, BACK_S)
        return _losses.get(name, "")


def meet_everybody(names: list[str]) -> None:
    """Finds all workers again, after they had lost this one."""
    for name in names:
        rpc.wait_for_worker(name, BACK_S)
