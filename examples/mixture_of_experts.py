"""Experts that may die while they learn: ``python examples/mixture_of_experts.py``.

A gate looks at every image (scikit-learn's handwritten digits) and sends it to one of
several experts, small networks that are workers of their own. Gate and experts learn
together. In the middle of a step one expert is killed. Another process takes its name and
its place, gets the weights that the lost one had, and the step is run again: nobody else
has to be started anew, and nothing has been learnt twice.

So the losses must be those of one process in which nobody dies, to the last bit. This program
starts its experts itself, in a group without a fixed size, because it also has to
replace them. ``--short`` trains for a few seconds only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Several workers share this machine: one torch thread each, set before torch starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradwire import autograd, rpc
from gradwire.optim import DistributedOptimizer

NUM_TEST = 360
BATCH = 48
RATE = 0.5
LIMIT_S = 60.0


class Plan(NamedTuple):
    num_experts: int
    num_steps: int
    killed_in: int  # the step
    threshold: float  # for the accuracy


FULL = Plan(num_experts=3, num_steps=300, killed_in=150, threshold=0.93)
SHORT = Plan(num_experts=2, num_steps=12, killed_in=6, threshold=0.2)


# ------------------------------------------------------------------------ data, networks


class Data(NamedTuple):
    images: Tensor
    labels: Tensor


def load() -> tuple[Data, Data]:
    """All digits, in an order that is always the same: to learn from, and to test."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(0)
    )
    images = torch.tensor(digits.data)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (
        Data(images[NUM_TEST:], labels[NUM_TEST:]),
        Data(images[:NUM_TEST], labels[:NUM_TEST]),
    )


def batches(data: Data, num_steps: int) -> Iterator[Data]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        chosen = torch.randint(len(data.labels), (BATCH,), generator=generator)
        yield Data(data.images[chosen], data.labels[chosen])


def make_gate(num_experts: int) -> nn.Linear:
    torch.manual_seed(100)
    return nn.Linear(64, num_experts).double()


def make_expert(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)).double()


def predict(
    gate: nn.Module, images: Tensor, ask: Callable[[list[Tensor]], list[Tensor]]
) -> Tensor:
    """Sends each image to the expert that the gate finds best.

    How sure the gate is scales the answer: that is how it learns.
    """
    chances = gate(images).softmax(dim=1)
    trust, best = chances.max(dim=1)
    num_experts = chances.shape[1]
    rows = [torch.nonzero(best == number).squeeze(1) for number in range(num_experts)]
    answers = ask([images[chosen] for chosen in rows])
    order = torch.cat(rows).argsort()
    logits: Tensor = torch.cat(answers)[order] * trust.unsqueeze(1)
    return logits


# --------------------------------------------------------------------------- at an expert

_expert: dict[str, nn.Sequential] = {}
_is_over = threading.Event()


def serve(number: int, store: str) -> None:
    """The process of an expert: joins the group, and answers until it is told to stop."""
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=store, init_timeout=LIMIT_S)
    rpc.init_rpc(f"expert:{number}", world_size="open", rpc_backend_options=options)
    _is_over.wait()
    rpc.shutdown()


def build(number: int, weights: list[Tensor] | None) -> list[rpc.RRef[Tensor]]:
    """Makes the network: a new one, or with the weights of one that was lost."""
    network = _expert["here"] = make_expert(number)
    if weights is not None:
        with torch.no_grad():
            for parameter, weight in zip(network.parameters(), weights, strict=True):
                parameter.copy_(weight)
    return [rpc.RRef(parameter) for parameter in network.parameters()]


def answer(images: Tensor) -> Tensor:
    logits: Tensor = _expert["here"](images)
    return logits


def copy_weights() -> list[Tensor]:
    return [weight.detach() for weight in _expert["here"].parameters()]


def stop() -> None:
    _is_over.set()


# ---------------------------------------------------------------------------- at the gate


class Experts:
    """The experts as the gate knows them: processes, copies of weights, an optimizer."""

    def __init__(self, gate: nn.Module, plan: Plan, store: str) -> None:
        self._gate = gate
        self._store = store
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[str, Any] = {}
        self._copies: dict[str, list[Tensor]] = {}
        self._parameters: dict[str, list[rpc.RRef[Tensor]]] = {}
        self.names = [f"expert:{number}" for number in range(plan.num_experts)]
        self.optimizer: DistributedOptimizer
        self.num_lost = 0

    def start(self, name: str) -> None:
        number = int(name.partition(":")[2])
        process = self._context.Process(
            target=serve, args=(number, self._store), name=name, daemon=True
        )
        process.start()
        self._processes[name] = process

    def replace(self, worker: rpc.WorkerInfo, reason: str) -> None:
        """Called when a worker was lost."""
        self.num_lost += 1
        self.start(worker.name)

    def prepare(self, worker: rpc.WorkerInfo) -> None:
        """Gives an expert its network, and everybody an optimizer that knows of it."""
        number = int(worker.name.partition(":")[2])
        weights = self._copies.get(worker.name)
        self._parameters[worker.name] = rpc.rpc_sync(worker, build, (number, weights))
        if len(self._parameters) == len(self.names):
            parameters: list[rpc.RRef[Tensor]] = [
                rpc.RRef(weight) for weight in self._gate.parameters()
            ]
            for name in self.names:
                parameters += self._parameters[name]
            self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)

    def ask(self, images: list[Tensor]) -> list[Tensor]:
        """Asks all at once."""
        futures = [
            rpc.rpc_async(name, answer, args=(part,))
            for name, part in zip(self.names, images, strict=True)
        ]
        return [future.wait() for future in futures]

    def save(self) -> None:
        """Keeps a copy of all weights, for an expert that has to be replaced."""
        futures = {name: rpc.rpc_async(name, copy_weights) for name in self.names}
        self._copies = {name: future.wait() for name, future in futures.items()}

    def kill(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGKILL)

    def end(self) -> None:
        for name in self.names:
            rpc.rpc_sync(name, stop)
        for process in self._processes.values():
            process.join(LIMIT_S)


def train(plan: Plan, store: str) -> None:
    gate = make_gate(plan.num_experts)
    experts = Experts(gate, plan, store)
    for name in experts.names:
        experts.start(name)
    for name in experts.names:
        experts.prepare(rpc.wait_for_worker(name, LIMIT_S))
    experts.save()
    watch = rpc.on_worker_lost(experts.replace)
    data, test = load()
    victim = experts.names[-1]
    losses, attempts = [], []

    print(f"A gate and {plan.num_experts} experts learn; {victim} will be killed:")
    for number, batch in enumerate(batches(data, plan.num_steps), start=1):

        def step(
            ctx: autograd.Context, batch: Data = batch, number: int = number
        ) -> float:
            attempts.append(number)
            logits = predict(gate, batch.images, experts.ask)
            loss = cross_entropy(logits, batch.labels)
            if number == plan.killed_in and attempts.count(number) == 1:
                experts.kill(victim)
            ctx.backward(loss)
            experts.optimizer.step(ctx)  # on all workers, or on none
            return loss.item()

        start = time.perf_counter()
        losses.append(autograd.retry(step, timeout=LIMIT_S, recover=experts.prepare))
        if number == plan.killed_in:
            lost_s = time.perf_counter() - start
        experts.save()
        show_progress(number, plan.num_steps, f"loss {losses[-1]:.4f}")
    watch.remove()
    check(experts.num_lost == 1, f"{victim} was killed in step {plan.killed_in}")
    again = attempts.count(plan.killed_in)
    check(again > 1, f"that step was run {again} times, and took {lost_s:.1f} s")
    with torch.no_grad():
        found = predict(gate, test.images, experts.ask).argmax(dim=1)
    accuracy = (found == test.labels).double().mean().item()
    check(accuracy > plan.threshold, f"the accuracy is {accuracy:.3f}")
    experts.end()

    print("The same in one process, in which nobody dies:")
    check(train_alone(plan, data) == losses, "all losses are the same, to the last bit")


def train_alone(plan: Plan, data: Data) -> list[float]:
    """What they are compared with."""
    gate = make_gate(plan.num_experts)
    experts = [make_expert(number) for number in range(plan.num_experts)]
    weights = [*gate.parameters(), *(w for e in experts for w in e.parameters())]
    optimizer = torch.optim.SGD(weights, lr=RATE)

    def ask(images: list[Tensor]) -> list[Tensor]:
        return [expert(part) for expert, part in zip(experts, images, strict=True)]

    losses = []
    for batch in batches(data, plan.num_steps):
        loss = cross_entropy(predict(gate, batch.images, ask), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        options = rpc.RpcBackendOptions(init_method=store, init_timeout=LIMIT_S)
        rpc.init_rpc("gate", world_size="open", rpc_backend_options=options)
        try:
            train(plan, store)
        finally:
            rpc.shutdown(timeout=LIMIT_S)


if __name__ == "__main__":
    main()
