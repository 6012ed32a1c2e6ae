"""A transformer in three stages, with micro-batches: ``python examples/pipeline.py``.

A model that predicts the next character is cut into three stages, each on a worker of its
own. A batch goes through them in micro-batches: while the last stage works on the first
of them, the others are already at work on the next ones. Each stage hands on what it has
computed, and waits for nothing; backward takes the same way back by itself. The text is made of
torch's own documentation, which is there anyway.

Gradients are compared with those of the same model in one process, and so is every loss
of the training. (They are equal up to rounding: micro-batches add up in the order in
which they come.) Stages on one machine share its cores, so whether this is faster than one
process depends on how many there are. ``--short`` trains for a few seconds only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire import launch, rpc

ROLES = {"stage": 3}
STAGES = ("stage:0", "stage:1", "stage:2")
RATE = 2e-3
LIMIT_S = 300.0


class Plan(NamedTuple):
    num_steps: int
    width: int
    length: int  # of a sequence, in characters
    num_micro: int
    size_micro: int


FULL = Plan(num_steps=60, width=64, length=48, num_micro=4, size_micro=8)
SHORT = Plan(num_steps=4, width=16, length=12, num_micro=3, size_micro=2)


# ---------------------------------------------------------------------- text and network


def read_text() -> str:
    documented = [getattr(nn, name) for name in sorted(dir(nn)) if name[0].isupper()]
    return "\n".join(one.__doc__ or "" for one in documented)


def batches(plan: Plan) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Batches of micro-batches: characters, and those that come next."""
    text = torch.tensor([min(ord(letter), 127) for letter in read_text()])
    generator = torch.Generator().manual_seed(0)
    for _ in range(plan.num_steps):
        micro = []
        for _ in range(plan.num_micro):
            starts = torch.randint(
                len(text) - plan.length - 1, (plan.size_micro, 1), generator=generator
            )
            here = starts + torch.arange(plan.length)
            micro.append((text[here], text[here + 1]))
        yield micro


class First(nn.Module):
    """Characters and their places become vectors; then a layer."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, plan.width)
        self.places = nn.Parameter(torch.randn(plan.length, plan.width) / 10)
        self.layer = Layer(plan)

    def forward(self, letters: Tensor) -> Tensor:
        vectors: Tensor = self.layer(self.letters(letters) + self.places)
        return vectors


class Layer(nn.Module):
    """A transformer layer in which no character sees those that come later."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            plan.width,
            4,
            4 * plan.width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        mask = nn.Transformer.generate_square_subsequent_mask(plan.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = self.layer(vectors, src_mask=self.mask)
        return vectors


def make_stage(index: int, plan: Plan) -> nn.Module:
    torch.manual_seed(index)
    if index == 0:
        return First(plan).double()
    if index == 1:
        return Layer(plan).double()
    return nn.Sequential(
        Layer(plan), nn.LayerNorm(plan.width), nn.Linear(plan.width, 128)
    ).double()


def measure(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), following.flatten())


# ----------------------------------------------------------------------------- at a stage


class Stage:
    def __init__(self, index: int, plan: Plan) -> None:
        self.index = index
        self.network = make_stage(index, plan)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)


_stages: dict[str, Stage] = {}


def build(plan: Plan) -> None:
    _stages["here"] = Stage(launch.this_worker().index, plan)


@rpc.functions.async_execution
def go_through(vectors: Tensor, following: Tensor) -> rpc.Future[Tensor]:
    """Computes, and hands on; holds no thread while the later stages work.

    Returns the future of the next stage: its result, the loss, goes back as ours.
    """
    stage = _stages["here"]
    output = stage.network(vectors)
    if stage.index < len(STAGES) - 1:
        name = STAGES[stage.index + 1]
        return rpc.rpc_async(name, go_through, args=(output, following))
    done: rpc.Future[Tensor] = rpc.Future()
    done.set_result(measure(output, following))
    return done


def gradients() -> list[Tensor]:
    return [p.grad for p in _stages["here"].network.parameters() if p.grad is not None]


def learn() -> None:
    _stages["here"].optimizer.step()
    _stages["here"].optimizer.zero_grad()


# ------------------------------------------------------------ at the first stage, that leads


def train(plan: Plan) -> None:
    for name in STAGES:
        rpc.rpc_sync(name, build, args=(plan,))
    print(f"Three stages, {plan.num_micro} micro-batches at once:")
    losses, first_gradients = [], []
    start = time.perf_counter()
    for step, micro in enumerate(batches(plan), start=1):
        # All micro-batches enter the first stage now, one behind the other.
        futures = [rpc.rpc_async(STAGES[0], go_through, args=pair) for pair in micro]
        loss = torch.stack([future.wait() for future in futures]).mean()
        loss.backward()
        if step == 1:
            for name in STAGES:
                first_gradients += rpc.rpc_sync(name, gradients)
        for future in [rpc.rpc_async(name, learn) for name in STAGES]:
            future.wait()
        losses.append(loss.item())
        show_progress(step, plan.num_steps, f"loss {losses[-1]:.3f}")
    took_s = time.perf_counter() - start

    print("The same model in one process:")
    start = time.perf_counter()
    losses_alone, gradients_alone = train_alone(plan)
    took_alone_s = time.perf_counter() - start
    compare(first_gradients, gradients_alone, losses, losses_alone)
    num_letters = plan.num_steps * plan.num_micro * plan.size_micro * plan.length
    print(
        f"    {num_letters / took_s:,.0f} characters per second in three stages, "
        f"{num_letters / took_alone_s:,.0f} in one process, on {os.cpu_count()} cores"
    )


def compare(
    ours: list[Tensor], theirs: list[Tensor], losses: list[float], alone: list[float]
) -> None:
    worst = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)
    )
    check(worst < 1e-12, f"all {len(ours)} gradients are equal, up to {worst:.0e}")
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    check(apart < 1e-6, f"so is every loss, up to {apart:.0e}")
    check(losses[-1] < losses[0], f"it went from {losses[0]:.3f} to {losses[-1]:.3f}")


def train_alone(plan: Plan) -> tuple[list[float], list[Tensor]]:
    """What the stages are compared with."""
    network = nn.Sequential(*(make_stage(index, plan) for index in range(len(STAGES))))
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    losses: list[float] = []
    first_gradients: list[Tensor] = []
    for micro in batches(plan):
        loss = torch.stack([measure(network(x), y) for x, y in micro]).mean()
        loss.backward()
        if not losses:
            first_gradients = [
                p.grad.clone() for p in network.parameters() if p.grad is not None
            ]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first_gradients


# ------------------------------------------------------------------------------- the rest


def show_progress(done: int, total: int, note: str) -> None:
    """A bar that grows in its place, or one line at the end if this is no terminal."""
    line = f"    [{'#' * (30 * done // total):<30}] {done}/{total}  {note}"
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if done == total else "", flush=True)
    elif done == total:
        print(line)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SystemExit(f"    NOT so: {text}")
    print(f"    {text}")


def lead(plan: Plan) -> None:
    if launch.this_worker().index == 0:
        train(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few seconds only")
    plan = SHORT if parser.parse_args().short else FULL
    launch.main(lead, ROLES, (plan,), timeout=LIMIT_S)


if __name__ == "__main__":
    main()
