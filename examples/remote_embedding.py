"""DDP trainers and an embedding on two servers: ``python examples/remote_embedding.py``.

The table of an embedding is often too large for one host, and only a few of its rows are
used by a batch. Here two servers have half of the rows each; two trainers send them the
numbers of the rows they need, and get sums back. The rest of the network is small: each
trainer has a copy, and torch's DistributedDataParallel keeps the copies the same. One
optimizer steps all of it: sparse gradients on the servers, averaged ones on the trainers.

The words are made of scikit-learn's images of digits: place and brightness of a pixel are
one word, an image is a bag of them. The result is compared with the same training in one
process. (It is equal up to rounding: the order in which the gradients of two trainers are
added is not fixed.) ``--short`` trains for a few seconds only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradwire import autograd, launch, rpc
from gradwire.optim import DistributedOptimizer

ROLES = {"trainer": 2, "server": 2}
TRAINERS = ("trainer:0", "trainer:1")
SERVERS = ("server:0", "server:1")
LEVELS = 5  # of brightness; the darkest is no word
NUM_WORDS = 64 * (LEVELS - 1)
NO_WORD = -1
ROWS = NUM_WORDS // len(SERVERS)
WIDTH = 32
NUM_TEST = 360
BATCH = 24  # both trainers together
RATE = 0.3
LIMIT_S = 300.0


class Plan(NamedTuple):
    epochs: int
    num_images: int
    threshold: float


FULL = Plan(epochs=8, num_images=1797, threshold=0.9)
SHORT = Plan(epochs=1, num_images=700, threshold=0.1)


# ---------------------------------------------------------------------- data and networks


class Data(NamedTuple):
    words: Tensor  # up to 64 of each image
    labels: Tensor

    def take(self, chosen: Tensor | slice) -> Data:
        return Data(self.words[chosen], self.labels[chosen])


def load(num_images: int) -> tuple[Data, Data]:
    """Images as bags of words: to learn from, and to test."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )[:num_images]
    pixels = torch.tensor(digits.data, dtype=torch.long)[order] // 4
    words = (pixels - 1) + (LEVELS - 1) * torch.arange(64)
    words[pixels == 0] = NO_WORD
    all_ = Data(words, torch.tensor(digits.target)[order])
    return all_.take(slice(NUM_TEST, None)), all_.take(slice(NUM_TEST))


def make_shard(number: int) -> nn.EmbeddingBag:
    torch.manual_seed(number)
    table = torch.randn(ROWS, WIDTH, dtype=torch.float64) / 20
    return nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)


def make_top() -> nn.Module:
    torch.manual_seed(len(SERVERS))
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def split(words: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Which rows of each shard a batch needs, and where its images begin in them."""
    parts = []
    for number in range(len(SERVERS)):
        is_there = words // ROWS == number
        counts = is_there.sum(dim=1)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)[:-1]])
        parts.append((words[is_there] - number * ROWS, starts))
    return parts


def batches(data: Data, epochs: int) -> Iterator[Data]:
    """All of the same size, which can be halved."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        order = torch.randperm(len(data.labels), generator=generator)
        for chosen in order.split(BATCH):
            if len(chosen) == BATCH:
                yield data.take(chosen)


# --------------------------------------------------------------------------- at a server


_shards: list[nn.EmbeddingBag] = []


def build_shard(number: int) -> rpc.RRef[Tensor]:
    """Makes this server's part of the table; returns a reference for optimizers."""
    _shards[:] = [make_shard(number)]
    return rpc.RRef(_shards[0].weight)


def look_up(rows: Tensor, starts: Tensor) -> Tensor:
    """Sums of rows; differentiable, and the gradient of the table is sparse."""
    sums: Tensor = _shards[0](rows, starts)
    return sums


# -------------------------------------------------------------------------- at a trainer


def embed(words: Tensor) -> Tensor:
    """Asks both servers at once."""
    futures = [
        rpc.rpc_async(name, look_up, args=part)
        for name, part in zip(SERVERS, split(words), strict=True)
    ]
    first, second = [future.wait() for future in futures]
    return first + second


def train(plan: Plan, port: int, tables: list[rpc.RRef[Tensor]]) -> list[Tensor]:
    """What both trainers do at the same time; returns the weights of the top."""
    me = launch.this_worker().index
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=me, world_size=len(TRAINERS))
    try:
        top = DistributedDataParallel(make_top())
        data, test = load(plan.num_images)
        # Each trainer steps the tables with its own gradients, so by half of the rate.
        optimizers = [
            DistributedOptimizer(torch.optim.SGD, tables, lr=RATE / len(TRAINERS)),
            DistributedOptimizer(
                torch.optim.SGD, [rpc.RRef(p) for p in top.parameters()], lr=RATE
            ),
        ]
        num_steps = len(data.labels) // BATCH * plan.epochs
        for step, batch in enumerate(batches(data, plan.epochs), start=1):
            mine = batch.take(slice(me, None, len(TRAINERS)))
            with autograd.context() as ctx:
                loss = cross_entropy(top(embed(mine.words)), mine.labels)
                ctx.backward(loss)
                dist.barrier()  # nobody changes a table that another still reads
                for optimizer in optimizers:
                    optimizer.step(ctx)
                dist.barrier()
            if me == 0 and (step % 10 == 0 or step == num_steps):
                accuracy = measure(top.module, test)
                show_progress(step, num_steps, f"accuracy {accuracy:.3f}")
        if me == 0:
            check(accuracy > plan.threshold, f"the accuracy is above {plan.threshold}")
        return [p.detach() for p in top.parameters()]
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def measure(top: nn.Module, test: Data) -> float:
    found = top(embed(test.words)).argmax(dim=1)
    return (found == test.labels).double().mean().item()


# ------------------------------------------------------------- at the trainer that leads


def lead(plan: Plan) -> None:
    if launch.this_worker().name != TRAINERS[0]:
        return
    tables = [
        rpc.rpc_sync(name, build_shard, args=(number,))
        for number, name in enumerate(SERVERS)
    ]
    print("Two DDP trainers, and an embedding of which two servers have a half each:")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    futures = [
        rpc.rpc_async(name, train, args=(plan, store.port, tables), timeout=0)
        for name in TRAINERS
    ]
    tops = [future.wait() for future in futures]
    check(all(map(torch.equal, *tops)), "both trainers end with the same network")

    print("The same in one process:")
    alone = train_alone(plan)
    ours = [table.to_here().detach() for table in tables] + tops[0]
    apart = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(ours, alone, strict=True)
    )
    check(apart < 1e-9, f"tables and network are equal, up to {apart:.0e}")


def train_alone(plan: Plan) -> list[Tensor]:
    """What they are compared with."""
    shards = [make_shard(number) for number in range(len(SERVERS))]
    top = make_top()
    weights = [shard.weight for shard in shards] + list(top.parameters())
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for batch in batches(load(plan.num_images)[0], plan.epochs):
        first, second = (
            shard(*part) for shard, part in zip(shards, split(batch.words), strict=True)
        )
        optimizer.zero_grad()
        cross_entropy(top(first + second), batch.labels).backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few seconds only")
    plan = SHORT if parser.parse_args().short else FULL
    launch.main({"trainer": lead}, ROLES, (plan,), timeout=LIMIT_S)


if __name__ == "__main__":
    main()
