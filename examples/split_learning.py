"""Two hospitals and a label holder train one model: ``python examples/split_learning.py``.

Each hospital has half of the measurements of the same patients (scikit-learn's breast
cancer data, columns split in two). A third party knows the diagnoses. None may show its
data to the others. So each hospital has a small network of its own for its own columns,
and sends only what comes out of it; the label holder puts both together, computes the
loss, and the gradients travel back. What crosses is counted, and checked.

The parties need not trust each other: no message is ever unpickled, and only functions
that a party has exported can be called. The result is compared with the same model that
is trained in one process with all the data, and a picture of the graph of one step is
written to a file. ``--short`` trains for a few seconds only.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from gradwire import autograd, launch, rpc

ROLES = {"labels": 1, "hospital": 2}
HOSPITALS = ("hospital:0", "hospital:1")
NUM_TEST = 169
NUM_FEATURES = 8  # that a hospital sends of each patient
BATCH = 50
RATE = 0.003
LIMIT_S = 300.0


class Plan(NamedTuple):
    epochs: int
    threshold: float
    picture: Path


# --------------------------------------------------------------------- data and networks


def load() -> tuple[Tensor, Tensor]:
    """All patients, in an order that is always the same; the first ones are for tests.

    In life nobody can do this: here every party takes its own part of it, and forgets
    the rest.
    """
    from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped]

    data = load_breast_cancer()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    columns = torch.tensor(data.data)[order]
    columns = (columns - columns.mean(0)) / columns.std(0)
    return columns, torch.tensor(data.target, dtype=torch.float64)[order]


def columns_of(hospital: int) -> slice:
    return slice(15 * hospital, 15 * (hospital + 1))


def make_encoder(hospital: int) -> nn.Module:
    torch.manual_seed(hospital)
    return nn.Sequential(
        nn.Linear(15, 16), nn.Tanh(), nn.Linear(16, NUM_FEATURES), nn.Tanh()
    ).double()


def make_head() -> nn.Module:
    torch.manual_seed(len(HOSPITALS))
    return nn.Linear(2 * NUM_FEATURES, 1).double()


def batches(num_patients: int, epochs: int) -> Iterator[Tensor]:
    """Which patients, by number: all parties know them by the same numbers."""
    generator = torch.Generator().manual_seed(1)
    patients = torch.arange(NUM_TEST, num_patients)
    for _ in range(epochs):
        order = torch.randperm(len(patients), generator=generator)
        yield from patients[order].split(BATCH)


def num_batches(num_patients: int) -> int:
    return math.ceil((num_patients - NUM_TEST) / BATCH)


# ------------------------------------------------------------------------- at a hospital


class Hospital:
    """What a hospital has; it stays there."""

    def __init__(self, number: int) -> None:
        self.columns = load()[0][:, columns_of(number)]
        self.encoder = make_encoder(number)
        self.optimizer = torch.optim.Adam(self.encoder.parameters(), lr=RATE)


@functools.cache
def this_hospital() -> Hospital:
    return Hospital(launch.this_worker().index)


@rpc.export(peers=["labels"])
def encode(patients: Tensor) -> Tensor:
    """What others may know of some patients; differentiable."""
    hospital = this_hospital()
    features: Tensor = hospital.encoder(hospital.columns[patients])
    return features


@rpc.export(peers=["labels"])
def learn() -> None:
    """Applies the gradients that a backward has left here."""
    this_hospital().optimizer.step()
    this_hospital().optimizer.zero_grad()


@rpc.export(peers=["labels"])
def show_weights() -> list[Tensor]:
    """Only for the comparison at the end: the label holder need not know them."""
    return [weight.detach() for weight in this_hospital().encoder.parameters()]


# -------------------------------------------------------------------- at the label holder


class Arrivals:
    """All tensors that come from the hospitals go through here, and are looked at."""

    def __init__(self) -> None:
        self.num_numbers = 0

    def check(self, features: Tensor, patients: Tensor) -> Tensor:
        assert features.shape == (len(patients), NUM_FEATURES), features.shape
        assert features.abs().max() <= 1, "this is not the output of a tanh"
        self.num_numbers += features.numel()
        return features


def predict(head: nn.Module, patients: Tensor, arrivals: Arrivals) -> Tensor:
    """How likely it is that some patients are well; asks both hospitals at once."""
    futures = [rpc.rpc_async(name, encode, args=(patients,)) for name in HOSPITALS]
    features = [arrivals.check(future.wait(), patients) for future in futures]
    logits: Tensor = head(torch.cat(features, dim=1))
    return logits.squeeze(1)


@torch.no_grad()
def measure(head: nn.Module, labels: Tensor, arrivals: Arrivals) -> float:
    """The accuracy on patients of which nothing was learnt."""
    patients = torch.arange(NUM_TEST)
    found = predict(head, patients, arrivals) > 0
    return (found == labels[patients].bool()).double().mean().item()


def train(plan: Plan) -> None:
    labels = load()[1]
    head = make_head()
    optimizer = torch.optim.Adam(head.parameters(), lr=RATE)
    arrivals = Arrivals()
    start = time.perf_counter()
    num_steps = plan.epochs * num_batches(len(labels))
    print("Two hospitals and a label holder train together; they unpickle nothing:")
    for step, patients in enumerate(batches(len(labels), plan.epochs), start=1):
        logits = predict(head, patients, arrivals)
        loss = binary_cross_entropy_with_logits(logits, labels[patients])
        if step == 1:
            plan.picture.write_text(autograd.draw(loss, title="One step of training"))
        loss.backward()  # goes to both hospitals, and waits for them
        optimizer.step()
        optimizer.zero_grad()
        for future in [rpc.rpc_async(name, learn) for name in HOSPITALS]:
            future.wait()
        if step % num_batches(len(labels)) == 0:
            accuracy = measure(head, labels, arrivals)
            note = f"loss {loss.item():.4f}  accuracy {accuracy:.3f}"
            show_progress(step, num_steps, note)
    took_s = time.perf_counter() - start
    print(f"    {num_steps} steps took {took_s:.1f} s")
    check(accuracy >= plan.threshold, f"the accuracy is at least {plan.threshold}")
    print(
        f"    {arrivals.num_numbers:,} numbers came from the hospitals, all of them "
        f"outputs of their networks: {NUM_FEATURES} of a patient, who has 15 there"
    )

    print("The same model in one process that has all the data:")
    alone = train_alone(plan.epochs)
    together = [
        *(rpc.rpc_sync(HOSPITALS[0], show_weights)),
        *(rpc.rpc_sync(HOSPITALS[1], show_weights)),
        *head.parameters(),
    ]
    same = all(map(torch.equal, alone, together))
    check(same, "every weight of all three networks is the same, to the last bit")
    print(f"A picture of the graph of one step: {plan.picture.resolve()}")


# ----------------------------------------------------------------------- in one process


def train_alone(epochs: int) -> list[Tensor]:
    """What the three parties are compared with."""
    columns, labels = load()
    encoders = [make_encoder(number) for number in range(len(HOSPITALS))]
    head = make_head()
    weights = [*encoders[0].parameters(), *encoders[1].parameters()]
    weights += head.parameters()
    optimizer = torch.optim.Adam(weights, lr=RATE)
    for patients in batches(len(labels), epochs):
        features = [
            encoder(columns[:, columns_of(number)][patients])
            for number, encoder in enumerate(encoders)
        ]
        logits = head(torch.cat(features, dim=1)).squeeze(1)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(logits, labels[patients]).backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


# ------------------------------------------------------------------------------ the rest


def show_progress(done: int, total: int, note: str) -> None:
    """A bar that grows in its place, or now and then a line if this is no terminal."""
    filled = 30 * done // total
    line = f"    [{'#' * filled:<30}] {done}/{total}  {note}"
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if done == total else "", flush=True)
    elif done == total:
        print(line)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SystemExit(f"    NOT so: {text}")
    print(f"    {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few seconds only")
    parser.add_argument(
        "--picture", type=Path, default=Path("split_learning.svg"), metavar="FILE"
    )
    given = parser.parse_args()
    plan = Plan(
        epochs=3 if given.short else 25,
        threshold=0.85 if given.short else 0.95,
        picture=given.picture,
    )
    options = rpc.RpcBackendOptions(serializer="safe")
    launch.main({"labels": train}, ROLES, (plan,), options=options, timeout=LIMIT_S)


if __name__ == "__main__":
    main()
