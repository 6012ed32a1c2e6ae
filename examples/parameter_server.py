"""Three trainers share the weights of one server: ``python examples/parameter_server.py``.

The server holds the weights of a small network. Each trainer has a third of scikit-learn's
images of handwritten digits. For every batch it fetches the weights, computes the loss by
itself, and lets gradients flow back to the server, where an optimizer applies them. All
trainers do so at the same time and wait for nobody. There is no lock in this file: each
batch has a context of its own, with gradients of its own.

Before that, one trainer does the same on its own, and ends with exactly the weights that
training in one process gives. ``--short`` trains for a few seconds only.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu

from gradwire import autograd, launch, rpc
from gradwire.optim import DistributedOptimizer

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
except ImportError:  # a plain one does as well
    Progress = None  # type: ignore[assignment, misc]

ROLES = {"server": 1, "trainer": 3}
TRAINERS = ("trainer:0", "trainer:1", "trainer:2")
NUM_TEST = 360
BATCH = 32
RATE = 0.2
REPORT_EVERY = 5
LIMIT_S = 300.0


class Plan(NamedTuple):
    epochs: int
    threshold: float  # an accuracy that one process reaches from each of the seeds
    seeds: range = range(10)


FULL = Plan(epochs=20, threshold=0.95)
SHORT = Plan(epochs=5, threshold=0.88)


# ------------------------------------------------------------------- data and network


class Data(NamedTuple):
    images: Tensor
    labels: Tensor

    def share(self, number: int, num_shares: int) -> Data:
        """One of equal parts of it."""
        return Data(self.images[number::num_shares], self.labels[number::num_shares])


def load() -> tuple[Data, Data]:
    """All digits, in an order that is always the same: to learn from, and to test."""
    # Only the server needs it; the trainers start faster without.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (
        Data(images[NUM_TEST:], labels[NUM_TEST:]),
        Data(images[:NUM_TEST], labels[:NUM_TEST]),
    )


def make_network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def predict(weights: Sequence[Tensor], images: Tensor) -> Tensor:
    """What `make_network` computes, with weights that may have come from elsewhere."""
    weight1, bias1, weight2, bias2 = weights
    return linear(relu(linear(images, weight1, bias1)), weight2, bias2)


def batches(data: Data, seed: int, epochs: int) -> Iterator[Data]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.labels), generator=generator).split(
            BATCH
        ):
            yield Data(data.images[chosen], data.labels[chosen])


def count_batches(data: Data, epochs: int) -> int:
    return math.ceil(len(data.labels) / BATCH) * epochs


@torch.no_grad()
def measure(weights: Sequence[Tensor], data: Data) -> float:
    """The accuracy: which part of the images is recognised."""
    found = predict(weights, data.images).argmax(dim=1)
    return (found == data.labels).double().mean().item()


# --------------------------------------------------------------------- in one process


def train_alone(data: Data, seed: int, epochs: int) -> list[Tensor]:
    """What all others are compared with."""
    weights: list[Tensor] = list(make_network(seed).parameters())
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for batch in batches(data, seed, epochs):
        optimizer.zero_grad()
        cross_entropy(predict(weights, batch.images), batch.labels).backward()
        optimizer.step()
    return weights


# ---------------------------------------------------------------- what trainers run


def train(weights: list[rpc.RRef[Tensor]], data: Data, seed: int, epochs: int) -> None:
    """Trains the server's weights with a share of the data."""
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=RATE)
    num_done = 0
    for batch in batches(data, seed, epochs):
        with autograd.context() as ctx:
            here = [weight.to_here() for weight in weights]
            loss = cross_entropy(predict(here, batch.images), batch.labels)
            autograd.backward(ctx, [loss])
            optimizer.step(ctx)
        num_done += 1
        if num_done % REPORT_EVERY == 0:
            report(num_done)
    report(num_done)


def report(num_done: int) -> None:
    me = rpc.get_worker_info().name
    rpc.rpc_sync("server", show_progress, args=(me, num_done))


# ------------------------------------------------------------------ what the server runs


def train_with(
    trainers: Sequence[str], data: Data, seed: int, epochs: int
) -> list[Tensor]:
    """Trains a new network with some trainers at once; each has a share of the data."""
    weights = [rpc.RRef(weight) for weight in make_network(seed).parameters()]
    shares = {
        name: data.share(number, len(trainers)) for number, name in enumerate(trainers)
    }
    sizes = {name: count_batches(share, epochs) for name, share in shares.items()}
    with progress_bars(sizes):
        # All at the same time. Each has its own seed, the first that of one process.
        futures = [
            rpc.rpc_async(
                name, train, args=(weights, share, seed + i, epochs), timeout=0
            )
            for i, (name, share) in enumerate(shares.items())
        ]
        for future in futures:
            future.wait()
    return [weight.local_value().detach() for weight in weights]


# ---------------------------------------------------------------------- progress bars


class PlainBars:
    """One line for all trainers, for who has no rich."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._done = dict.fromkeys(sizes, 0)

    def update(self, name: str, completed: int) -> None:
        self._done[name] = completed
        parts = []
        for trainer, size in self._sizes.items():
            filled = 12 * self._done[trainer] // size
            parts.append(f"{trainer} [{'#' * filled:<12}]")
        print("\r    " + "  ".join(parts), end="", flush=True)


_bars: dict[str, Any] = {}


@contextmanager
def progress_bars(sizes: dict[str, int]) -> Iterator[None]:
    """Shows a bar for each trainer while the block runs."""
    if Progress is None:
        _bars["update"] = PlainBars(sizes).update
        yield
        print()
        return
    columns = (TextColumn("    {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns) as progress:
        tasks = {n: progress.add_task(n, total=size) for n, size in sizes.items()}
        _bars["update"] = lambda name, completed: progress.update(
            tasks[name], completed=completed
        )
        yield


def show_progress(name: str, num_done: int) -> None:
    _bars["update"](name, num_done)


# ------------------------------------------------------------------------------- the tour


def show(plan: Plan) -> None:
    data, test = load()
    print(f"In one process, {plan.epochs} epochs, from {len(plan.seeds)} seeds:")
    alone = {seed: train_alone(data, seed, plan.epochs) for seed in plan.seeds}
    reached = [measure(weights, test) for weights in alone.values()]
    print("    accuracy", " ".join(f"{accuracy:.3f}" for accuracy in reached))
    check(min(reached) > plan.threshold, f"each is above {plan.threshold}")

    print("With a server and one trainer:")
    seed = plan.seeds[0]
    weights = train_with(TRAINERS[:1], data, seed, plan.epochs)
    same = all(map(torch.equal, weights, alone[seed]))
    check(same, "the weights are exactly those of one process")

    print("With a server and three trainers at once, each with a third of the data:")
    start = time.perf_counter()
    weights = train_with(TRAINERS, data, seed, plan.epochs)
    took_s = time.perf_counter() - start
    accuracy = measure(weights, test)
    print(f"    accuracy {accuracy:.3f}, after {took_s:.1f} s")
    check(accuracy > plan.threshold, f"it is above {plan.threshold}")


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SystemExit(f"    NOT so: {text}")
    print(f"    {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few seconds only")
    plan = SHORT if parser.parse_args().short else FULL
    launch.main({"server": show}, ROLES, (plan,), timeout=LIMIT_S)


if __name__ == "__main__":
    main()
