"""Backward through remote calls, beside that of torch RPC, in one run on one machine.

As in benchmarks/rpc.py: fresh processes with one torch thread each, which live through
the whole run; in each of many short rounds both systems do every piece of work, one right
after the other, in changing order; whoever is not at work is stopped (SIGSTOP). Both run
the same program, and before anything is measured its gradients are compared with those
of the same program in one process.

    python benchmarks/autograd.py                   # tables, in a few minutes
    python benchmarks/autograd.py --save            # also into benchmarks/results/
    python benchmarks/autograd.py --quick           # does it run at all
    python benchmarks/autograd.py --only growth     # one part: calls, local, growth

Beside the calls there are two more parts. What a pass adds to the backward of a local
graph, compared with a plain backward of the same graph in the same process. And how the
cost of a context grows with the number of calls in it, as a table and as a plot.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import shlex
import signal
import statistics
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import plots
from benchmarks import rpc as calls

# Torch is imported by the workers only.

SYSTEMS = calls.SYSTEMS
RESULTS = Path(__file__).parent / "results"
PARTS = ("calls", "local", "growth")
LOST_AFTER_S = 600.0  # workers that are stopped must not be taken for lost

BATCH, WIDTH, NUM_CALLS = 32, 256, 10
# The layers of the pipeline: the first three numbers are stage 1, the others stage 2.
LAYERS = (784, 512, 512, 512, 10)
MICRO_BATCHES, MICRO_BATCH = 8, 16
LOCAL_STEPS, LOCAL_SIZE, LOCAL_LEAVES = 1000, 16, 10
LOCAL_BAR, LOCAL_AIM = 10.0, 3.0  # percent
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
FIT_FROM = 10  # with fewer calls the fixed costs of a pass show
LINEAR = 1.1  # the largest exponent that passes for linear


@dataclass(frozen=True)
class Item:
    """A piece of work. A sample is the time of one step, from forward to gradients."""

    key: str
    text: str
    unit: str
    scale: float  # from seconds to the unit
    bar: float
    aim: float | None
    num: int  # steps per round and system
    num_quick: int
    world: int = 2  # number of workers


ITEMS = (
    Item(
        "one_hop",
        "one hop, explicit context",
        "us",
        1e6,
        bar=2.5,
        aim=5,
        num=50,
        num_quick=3,
    ),
    Item(
        "one_hop_plain",
        "one hop, no context",
        "us",
        1e6,
        bar=2.5,
        aim=5,
        num=50,
        num_quick=3,
    ),
    Item(
        "chain",
        f"chain of {NUM_CALLS} hops",
        "ms",
        1e3,
        bar=2.5,
        aim=5,
        num=10,
        num_quick=1,
    ),
    Item(
        "parallel",
        f"{NUM_CALLS} parallel calls",
        "ms",
        1e3,
        bar=3,
        aim=6,
        num=10,
        num_quick=1,
    ),
    Item(
        "pipeline",
        f"pipeline, {MICRO_BATCHES} micro-batches",
        "ms",
        1e3,
        bar=1.5,
        aim=None,
        num=8,
        num_quick=1,
        world=3,
    ),
)

LOCAL_ITEMS = {
    "dict": "dictionary, no remote call",
    "grad": ".grad, no remote call",
    "dict_call": "dictionary, one remote call",
    "grad_call": ".grad, one remote call",
}

FORMS = {
    "side_by_side": "side by side",
    "in_a_row": "in a row",
}


# --------------------------------------------------------------- what is called remotely

_library: Library


@functools.cache
def _modules() -> dict[str, Any]:
    """The same on every worker."""
    import torch
    from torch import nn

    torch.manual_seed(5)
    one, two, three, four, five = LAYERS
    return {
        "linear": nn.Linear(WIDTH, WIDTH),
        "stage1": nn.Sequential(
            nn.Linear(one, two), nn.ReLU(), nn.Linear(two, three), nn.ReLU()
        ),
        "stage2": nn.Sequential(
            nn.Linear(three, four), nn.ReLU(), nn.Linear(four, five)
        ),
    }


def linear(x: Any) -> Any:
    return _modules()["linear"](x)


def scale(x: Any) -> Any:
    return x * 1.0


def stage1(x: Any) -> Any:
    """The first stage hands its activations to the second one, which replies to it."""
    return _library.rpc.rpc_sync("w2", stage2, args=(_modules()["stage1"](x),))


def stage2(x: Any) -> Any:
    return _modules()["stage2"](x)


# ------------------------------------------------------------------ inside the processes


@dataclass(frozen=True)
class Library:
    """What both systems offer under the same names."""

    name: str
    rpc: Any
    autograd: Any


class Programs:
    """What worker 0 does: one method for each piece of work, and what it returns."""

    def __init__(self, library: Library) -> None:
        import torch

        self._rpc, self._autograd = library.rpc, library.autograd
        self._has_plain_backward = library.name != "torch"
        torch.manual_seed(7)
        self._x = torch.randn(BATCH, WIDTH, requires_grad=True)
        self._inputs = torch.randn(MICRO_BATCHES, MICRO_BATCH, LAYERS[0])
        self._targets = torch.randint(LAYERS[-1], (MICRO_BATCHES, MICRO_BATCH))

    def one_hop(self) -> Any:
        with self._autograd.context() as ctx:
            loss = self._rpc.rpc_sync("w1", linear, args=(self._x,)).sum()
            self._autograd.backward(ctx, [loss])
            return self._autograd.get_gradients(ctx)[self._x]

    def one_hop_plain(self) -> Any:
        if not self._has_plain_backward:
            return self.one_hop()
        self._x.grad = None
        self._rpc.rpc_sync("w1", linear, args=(self._x,)).sum().backward()
        return self._x.grad

    def chain(self) -> Any:
        with self._autograd.context() as ctx:
            y = self._x
            for _ in range(NUM_CALLS):
                y = self._rpc.rpc_sync("w1", linear, args=(y,))
            self._autograd.backward(ctx, [y.sum()])
            return self._autograd.get_gradients(ctx)[self._x]

    def parallel(self) -> Any:
        with self._autograd.context() as ctx:
            futures = [
                self._rpc.rpc_async("w1", linear, args=(self._x,))
                for _ in range(NUM_CALLS)
            ]
            loss = sum(future.wait().sum() for future in futures)
            self._autograd.backward(ctx, [loss])
            return self._autograd.get_gradients(ctx)[self._x]

    def pipeline(self) -> Any:
        with self._autograd.context() as ctx:
            futures = [
                self._rpc.rpc_async("w1", stage1, args=(x,)) for x in self._inputs
            ]
            loss = self._loss([future.wait() for future in futures])
            self._autograd.backward(ctx, [loss])
            return self._rpc.rpc_sync("w1", read_gradient, args=(int(ctx),))

    def _loss(self, outputs: list[Any]) -> Any:
        from torch.nn.functional import cross_entropy

        losses = map(cross_entropy, outputs, self._targets)
        return sum(losses) / MICRO_BATCHES

    def check(self, key: str) -> None:
        """Compares what a piece of work returns with what one process computes."""
        import torch

        found = getattr(self, key)()
        torch.testing.assert_close(found, self._expect(key), rtol=1e-4, atol=1e-6)

    def _expect(self, key: str) -> Any:
        import torch

        modules = _modules()
        if key == "pipeline":
            outputs = [modules["stage2"](modules["stage1"](x)) for x in self._inputs]
            (gradient,) = torch.autograd.grad(
                self._loss(outputs), [modules["stage1"][0].bias]
            )
            return gradient
        y = self._x
        for _ in range(NUM_CALLS if key == "chain" else 1):
            y = modules["linear"](y)
        (gradient,) = torch.autograd.grad(y.sum(), self._x)
        return gradient * (NUM_CALLS if key == "parallel" else 1)


def read_gradient(context_id: int) -> Any:
    """The smallest gradient of stage 1; a step ends when it is known."""
    gradients = _library.autograd.get_gradients(context_id)
    return gradients[_modules()["stage1"][0].bias]


class LocalGraph:
    """A graph of 2,000 small nodes on one worker, built anew for each backward."""

    def __init__(self, library: Library) -> None:
        import torch

        self._rpc, self._autograd = library.rpc, library.autograd
        torch.manual_seed(9)
        size = (LOCAL_SIZE, LOCAL_SIZE)
        self._leaves = [
            (torch.randn(size) / math.sqrt(LOCAL_SIZE)).requires_grad_()
            for _ in range(LOCAL_LEAVES)
        ]
        self._start = torch.randn(size)
        self._tiny = torch.ones(4, requires_grad=True)

    def _build(self) -> Any:
        import torch

        y = self._start
        for i in range(LOCAL_STEPS):
            y = torch.tanh(y @ self._leaves[i % LOCAL_LEAVES])
        return y.sum()

    def count_nodes(self) -> int:
        root = self._build().grad_fn
        seen, stack = {root}, [root]
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    stack.append(node)
        return len(seen)

    def time_backward(self, key: str) -> tuple[float, list[Any]]:
        """The time of one backward, and the gradients of the leaves."""
        for leaf in self._leaves:
            leaf.grad = None
        loss = self._build()
        if key == "plain":
            start = time.perf_counter()
            loss.backward()
            return time.perf_counter() - start, [leaf.grad for leaf in self._leaves]
        destination, _, has_call = key.partition("_")
        start = time.perf_counter()
        with self._autograd.context(accumulate=destination) as ctx:
            if has_call:
                result = self._rpc.rpc_sync("w1", scale, args=(self._tiny,))
                loss = loss + result.sum()
                start = time.perf_counter()  # the call's own time is not added cost
            self._autograd.backward(ctx, [loss])
            taken = time.perf_counter() - start
            gradients = self._autograd.get_gradients(ctx)
            if not has_call:
                start = time.perf_counter()
        if not has_call:
            taken += time.perf_counter() - start  # leaving the context counts
        if destination == "grad":
            return taken, [leaf.grad for leaf in self._leaves]
        return taken, [gradients[leaf] for leaf in self._leaves]

    def measure(self, num: int) -> dict[str, list[float]]:
        """Alternates between a plain backward and the others."""
        import torch

        _, expected = self.time_backward("plain")
        for key in LOCAL_ITEMS:
            _, found = self.time_backward(key)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        samples: dict[str, list[float]] = {}
        for number in range(num):
            keys = ["plain", *LOCAL_ITEMS]
            turn = number % len(keys)
            for key in keys[turn:] + keys[:turn]:
                taken, _ = self.time_backward(key)
                samples.setdefault(key, []).append(taken)
        return samples


def measure_growth(
    library: Library, form: str, counts: Sequence[int]
) -> dict[int, dict[str, float]]:
    """The times of contexts with more and more calls; medians for small numbers."""
    for _ in range(3):
        _time_context(library, form, FIT_FROM)
    found = {}
    for count in counts:
        times = [_time_context(library, form, count) for _ in range(1 + 20 // count)]
        found[count] = {
            part: statistics.median(time[part] for time in times) for part in times[0]
        }
    return found


def _time_context(library: Library, form: str, num_calls: int) -> dict[str, float]:
    """The times of the three parts of a context with a number of tiny calls."""
    import torch

    x = torch.ones(4, requires_grad=True)
    call, autograd = library.rpc.rpc_sync, library.autograd
    with autograd.context() as ctx:
        start = time.perf_counter()
        if form == "in_a_row":
            y = x
            for _ in range(num_calls):
                y = call("w1", scale, args=(y,))
            loss, expected = y.sum(), 1.0
        else:
            results = [call("w1", scale, args=(x,)) for _ in range(num_calls)]
            loss, expected = torch.stack(results).sum(), float(num_calls)
        forward = time.perf_counter()
        autograd.backward(ctx, [loss])
        backward = time.perf_counter()
        gradient = autograd.get_gradients(ctx)[x]
        read = time.perf_counter()
    left = time.perf_counter()
    if gradient.tolist() != [expected] * 4:
        raise AssertionError(f"{num_calls} calls {form} had the gradient {gradient}")
    return {
        "forward": forward - start,
        "backward": backward - forward,
        "release": left - read,
    }


def _init(system: str, rank: int, world: int, store: str) -> Library:
    if system == "torch":
        from torch.distributed import autograd as torch_autograd
        from torch.distributed import rpc as torch_rpc

        # It warns about its own use of its own process groups.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.*")
        torch_rpc.init_rpc(
            f"w{rank}",
            rank=rank,
            world_size=world,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=store
            ),
        )
        return Library(system, torch_rpc, torch_autograd)
    from gradwire import autograd, rpc

    rpc.init_rpc(
        f"w{rank}",
        rank,
        world,
        rpc.RpcBackendOptions(init_method=store, lost_after=LOST_AFTER_S),
    )
    return Library(system, rpc, autograd)


def _orders(library: Library) -> dict[str, Callable[..., Any]]:
    """What worker 0 can be asked to do."""
    programs, graph = Programs(library), LocalGraph(library)
    return {
        "check": programs.check,
        "measure": lambda key, num: calls._time_each(getattr(programs, key), num),
        "count_nodes": graph.count_nodes,
        "local": graph.measure,
        "growth": functools.partial(measure_growth, library),
    }


def _serve(system: str, rank: int, world: int, store: str, pipe: Connection) -> None:
    """A worker: does what comes through the pipe, sleeps in between."""
    global _library
    calls._die_with_parent()
    try:
        import torch

        torch.set_num_threads(1)
        _modules()
        _library = _init(system, rank, world, store)
        orders = _orders(_library)
        pipe.send(("ready", None))
        while (order := pipe.recv()) is not None:
            pipe.send(("result", orders[order[0]](*order[1:])))
        _library.rpc.shutdown()
        pipe.send(("stopped", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


# --------------------------------------------------------------------- in this process


class Group(calls.System):
    """Some workers of one system."""

    def __init__(self, name: str, world: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = f"{name} ({world} workers)"
        self._is_stopping = False
        self._pipes = []
        self._processes = []
        store = f"file://{folder}/{name}{world}"
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(name, rank, world, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        for rank in range(len(self._pipes)):
            self._receive(rank, calls.START_S)

    def ask(self, *order: Any) -> Any:
        """Lets worker 0 do something; before and after, the workers are stopped."""
        self._signal(signal.SIGCONT)
        self._pipes[0].send(order)
        result = self._receive(0, calls.SLICE_S)
        self.pause()
        return result

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._is_stopping = True
        try:
            for pipe in self._pipes:
                pipe.send(None)
            for rank in range(len(self._pipes)):
                self._receive(rank, calls.STOP_S)
        finally:
            self.kill()


Groups = dict[tuple[str, int], Group]  # by system and number of workers


@contextmanager
def _running(wanted: list[tuple[str, int]]) -> Iterator[Groups]:
    groups: Groups = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            # One after the other: idle workers of torch slow down the start of others.
            for name, world in wanted:
                group = groups[name, world] = Group(name, world, folder)
                group.wait_until_ready()
                group.pause()
            yield groups
            for group in groups.values():
                group.stop()
        finally:
            for group in groups.values():
                group.kill()


def choose_groups(parts: list[str]) -> list[tuple[str, int]]:
    if "calls" not in parts:
        return [("gradwire", 2)]
    return [(name, world) for world in (2, 3) for name in SYSTEMS]


def run(parts: list[str], num_rounds: int, quick: bool) -> dict[str, Any]:
    """Samples of the parts: of calls by system, key and round; of the others by round."""
    samples: dict[str, Any] = {
        "calls": {name: {item.key: [] for item in ITEMS} for name in SYSTEMS},
        "local": [],
        "growth": [],
    }
    with _running(choose_groups(parts)) as groups:
        ours = groups["gradwire", 2]
        if "calls" in parts:  # connections, imports, first pages
            for item in ITEMS:
                for name in SYSTEMS:
                    groups[name, item.world].ask("check", item.key)
        if "local" in parts:
            samples["num_nodes"] = ours.ask("count_nodes")
        for number in range(num_rounds):
            if "calls" in parts:
                _run_calls(groups, number, quick, samples["calls"])
            if "local" in parts:
                samples["local"].append(ours.ask("local", 1 if quick else 4))
            # A third of the rounds is enough here, and takes long enough.
            if "growth" in parts and number % 3 == 0:
                samples["growth"].append(_run_growth(ours, quick))
    return samples


def _run_calls(
    groups: Groups, number: int, quick: bool, samples: dict[str, calls.Samples]
) -> None:
    order = SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]
    for item in ITEMS:
        num = item.num_quick if quick else item.num
        for name in order:
            new = groups[name, item.world].ask("measure", item.key, num)
            samples[name][item.key].append(new)


def _run_growth(ours: Group, quick: bool) -> dict[str, dict[int, dict[str, float]]]:
    counts = COUNTS[: COUNTS.index(50) + 1] if quick else COUNTS
    return {form: ours.ask("growth", form, counts) for form in FORMS}


# ------------------------------------------------------------------------- the numbers


def summarise(samples: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if all(samples["calls"]["torch"].values()):
        result["items"] = [_summarise_item(item, samples["calls"]) for item in ITEMS]
    if samples["local"]:
        result["local"] = _summarise_local(samples["local"], samples["num_nodes"])
    if samples["growth"]:
        result["growth"] = _summarise_growth(samples["growth"])
    return result


def _summarise_item(item: Item, samples: dict[str, calls.Samples]) -> dict[str, Any]:
    both = {
        name: calls._summary(samples[name][item.key], item.unit, item.scale)
        for name in SYSTEMS
    }
    by_round = [
        statistics.median(torch_) / statistics.median(ours)
        for torch_, ours in zip(
            samples["torch"][item.key], samples["gradwire"][item.key], strict=True
        )
    ]
    ratio = both["torch"]["median"] / both["gradwire"]["median"]
    return {
        "key": item.key,
        "text": item.text,
        **both,
        "ratio": ratio,
        "ratio_by_round": statistics.median(by_round),
        "rounds": by_round,
        "bar": item.bar,
        "aim": item.aim,
        "bar_is_met": ratio >= item.bar,
        "aim_is_met": None if item.aim is None else ratio >= item.aim,
    }


def _summarise_local(
    rounds: list[dict[str, list[float]]], num_nodes: int
) -> dict[str, Any]:
    def summary(key: str) -> dict[str, Any]:
        return calls._summary([samples[key] for samples in rounds], "ms", 1e3)

    plain = summary("plain")
    items = []
    for key, text in LOCAL_ITEMS.items():
        ours = summary(key)
        by_round = [_added(s["plain"], s[key]) for s in rounds]
        # Of the single rounds: what slows the machine down for a while hits both.
        added = statistics.median(by_round)
        items.append(
            {
                "key": key,
                "text": text,
                "plain": plain,
                "gradwire": ours,
                "added_percent": 100 * (ours["median"] / plain["median"] - 1),
                "added_percent_by_round": added,
                "rounds": by_round,
                "bar": LOCAL_BAR,
                "aim": LOCAL_AIM,
                "bar_is_met": added < LOCAL_BAR,
                "aim_is_met": added < LOCAL_AIM,
            }
        )
    return {"num_nodes": num_nodes, "items": items}


def _added(plain: list[float], ours: list[float]) -> float:
    return 100 * (statistics.median(ours) / statistics.median(plain) - 1)


def _summarise_growth(
    sweeps: list[dict[str, dict[int, dict[str, float]]]],
) -> dict[str, Any]:
    forms = []
    for form, text in FORMS.items():
        rows = [
            {
                "calls": count,
                **{
                    part: statistics.median(
                        sweep[form][count][part] for sweep in sweeps
                    )
                    for part in ("forward", "backward", "release")
                },
            }
            for count in sweeps[0][form]
        ]
        exponents = {
            part: fit_exponent([(row["calls"], row[part]) for row in rows])
            for part in ("forward", "backward")
        }
        forms.append({"key": form, "text": text, "rows": rows, "exponents": exponents})
    return {
        "num_sweeps": len(sweeps),
        "fit_from": FIT_FROM,
        "limit": LINEAR,
        "forms": forms,
        "is_linear": all(
            value <= LINEAR for form in forms for value in form["exponents"].values()
        ),
    }


def fit_exponent(points: list[tuple[int, float]]) -> float:
    """The k of t = c n^k, by least squares of the logarithms; 1 is linear."""
    logs = [(math.log(n), math.log(t)) for n, t in points if n >= FIT_FROM]
    slope, _ = statistics.linear_regression([x for x, _ in logs], [y for _, y in logs])
    return slope


# -------------------------------------------------------------------------- the output

CALL_HEADINGS = (
    "work",
    "torch",
    "p99",
    "gradwire",
    "p99",
    "ratio",
    "by round",
    "bar",
    "aim",
    "",
)
LOCAL_HEADINGS = (
    "local graph",
    "plain",
    "gradwire",
    "added",
    "by round",
    "bar",
    "aim",
    "",
)
GROWTH_HEADINGS = ("calls", "forward", "each", "backward", "each", "release", "each")

CALL_NOTE = (
    f"One hop: a context, a remote {WIDTH}x{WIDTH} linear on a {BATCH}x{WIDTH} batch that "
    "needs a gradient itself, backward, the gradient. Without a context it is compared with "
    "torch's explicit one. Chain: each result is the argument of the next call. Pipeline: "
    f"an MLP of {'-'.join(map(str, LAYERS))} in two stages on two workers, the "
    f"{MICRO_BATCHES} micro-batches of {MICRO_BATCH} in flight at once, the loss on a third "
    "worker. Times are medians over all rounds; p99 is what 99 of 100 samples reach or "
    "better. The ratio is that of the medians, torch / gradwire; 'by round' is the median "
    "of the ratios of the single rounds."
)
LOCAL_NOTE = (
    "Backward of a graph of {num_nodes} nodes on one worker, plain and as a pass, in turns. "
    "Without a remote call, opening and leaving the context counts; with one, backward "
    "alone, with all messages and the other worker's part, but not the call. 'added' is "
    "from the medians over all rounds, 'by round' the median of the rounds, and what the "
    "verdict goes by."
)
GROWTH_NOTE = (
    "Tiny calls in one context, made one after the other, each with two messages, each of "
    "which is a wire event on two workers. Side by side: all have the same argument. In a "
    "row: each result is the argument of the next. Medians; number of sweeps: {num_sweeps}. "
    "The exponent k of t = c n^k is fitted from {fit_from} calls on; up to {limit:g} passes "
    "for linear."
)


def _verdict(item: dict[str, Any]) -> str:
    if not item["bar_is_met"]:
        return "below the bar"
    return "aim met" if item["aim_is_met"] else "bar met"


def make_call_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for item in result["items"]:
        unit = item["torch"]["unit"]
        rows.append(
            (
                item["text"],
                calls._number(item["torch"]["median"], unit),
                calls._number(item["torch"]["p99"], unit),
                calls._number(item["gradwire"]["median"], unit),
                calls._number(item["gradwire"]["p99"], unit),
                f"{item['ratio']:.2f}x",
                f"{item['ratio_by_round']:.2f}x",
                f"{item['bar']:g}x",
                "-" if item["aim"] is None else f"{item['aim']:g}x",
                _verdict(item),
            )
        )
    return rows


def make_local_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            item["text"],
            calls._number(item["plain"]["median"], "ms"),
            calls._number(item["gradwire"]["median"], "ms"),
            f"{item['added_percent']:.1f} %",
            f"{item['added_percent_by_round']:.1f} %",
            f"{item['bar']:g} %",
            f"{item['aim']:g} %",
            _verdict(item),
        )
        for item in result["local"]["items"]
    ]


def make_growth_rows(form: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in form["rows"]:
        cells = [str(row["calls"])]
        for part in ("forward", "backward", "release"):
            cells.append(calls._number(row[part] * 1e3, "ms"))
            cells.append(calls._number(row[part] * 1e6 / row["calls"], "us"))
        rows.append(tuple(cells))
    return rows


def _growth_line(growth: dict[str, Any], form: dict[str, Any]) -> str:
    exponents = ", ".join(f"{k} {v:.3f}" for k, v in form["exponents"].items())
    is_linear = all(v <= growth["limit"] for v in form["exponents"].values())
    return f"exponents: {exponents}: {'linear' if is_linear else 'NOT linear'}"


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], str]


def make_tables(result: dict[str, Any]) -> list[Table]:
    """Title, headings, rows and note of each table."""
    tables: list[Table] = []
    if "items" in result:
        rows = make_call_rows(result)
        tables.append(("Beside torch RPC", CALL_HEADINGS, rows, CALL_NOTE))
    if (local := result.get("local")) is not None:
        note = LOCAL_NOTE.format(num_nodes=local["num_nodes"])
        rows = make_local_rows(result)
        tables.append(("Added cost on a local graph", LOCAL_HEADINGS, rows, note))
    if (growth := result.get("growth")) is not None:
        note = GROWTH_NOTE.format(**growth)
        for form in growth["forms"]:
            tables.append(
                (
                    f"How cost grows: calls {form['text']}",
                    GROWTH_HEADINGS,
                    make_growth_rows(form),
                    f"{_growth_line(growth, form)}. {note}",
                )
            )
            note = ""  # once is enough
    return tables


def format_tables(result: dict[str, Any]) -> str:
    return "\n\n".join(_format_table(*table) for table in make_tables(result))


def _format_table(
    title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]], note: str
) -> str:
    all_rows = [headings, *rows]
    widths = [max(len(row[i]) for row in all_rows) for i in range(len(headings))]
    lines = [title, ""]
    for row in all_rows:
        cells = [
            # Numbers to the right; what is done and the verdict to the left.
            cell.ljust(width) if i == 0 or headings[i] == "" else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(3, "-" * max(len(line) for line in lines))
    return "\n".join([*lines, "", *textwrap.wrap(note, 100)])


def format_report(result: dict[str, Any], plot: str | None) -> str:
    """The tables as a page for the folder of results."""
    run_ = result["run"]
    versions = ", ".join(f"{k} {v}" for k, v in run_["versions"].items())
    lines = [
        "# Backward through remote calls, gradwire beside torch RPC",
        "",
        f"- date: {run_['date']}",
        f"- command: `{run_['command']}` ({run_['rounds']} rounds)",
        f"- versions: {versions}",
        f"- CPU: {run_['cpu']['model']}, {run_['cpu']['count']} cores",
    ]
    for title, headings, rows, note in make_tables(result):
        lines += [
            "",
            f"## {title}",
            "",
            "| " + " | ".join(headings) + " |",
            "|---" + "|---:" * (len(headings) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            *textwrap.wrap(note, 100),
        ]
    if plot is not None:
        lines += ["", f"![How cost grows with the number of calls]({plot})"]
    return "\n".join([*lines, ""])


def make_plot(growth: dict[str, Any]) -> str:
    def make_series(factor: Callable[[int], float]) -> list[plots.Series]:
        return [
            plots.Series(
                f"{part}, {form['text']}",
                colour,
                [
                    (row["calls"], row[part] * factor(row["calls"]))
                    for row in form["rows"]
                ],
                is_dashed=form["key"] == "in_a_row",
            )
            for part, colour in (("forward", "#1f77b4"), ("backward", "#d95f02"))
            for form in growth["forms"]
        ]

    return plots.draw(
        [
            plots.Panel(
                "Time of all calls (dotted: linear)",
                "calls in one context",
                "ms",
                make_series(lambda count: 1e3),
                has_log_y=True,
                has_guide=True,
            ),
            plots.Panel(
                "Time per call",
                "calls in one context",
                "us",
                make_series(lambda count: 1e6 / count),
            ),
        ]
    )


def save(result: dict[str, Any]) -> list[Path]:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"autograd_{result['run']['date'][:10]}"
    written = [stem.with_suffix(".md"), stem.with_suffix(".json")]
    plot = None
    if "growth" in result:
        plot = stem.with_suffix(".svg")
        plot.write_text(make_plot(result["growth"]))
        written.append(plot)
    written[0].write_text(format_report(result, plot and plot.name))
    written[1].write_text(json.dumps(result, indent=1) + "\n")
    return written


def describe_run(arguments: list[str], num_rounds: int) -> dict[str, Any]:
    command = shlex.join(["python", "benchmarks/autograd.py", *arguments])
    return {**calls.describe_run(arguments, num_rounds), "command": command}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default 24, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few calls, few rounds")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    num_rounds = options.rounds or (2 if options.quick else 24)
    parts = list(PARTS) if options.only is None else [options.only]
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it

    samples = run(parts, num_rounds, options.quick)
    result = {"run": describe_run(arguments, num_rounds), **summarise(samples)}
    cpu = result["run"]["cpu"]
    print(f"{cpu['model']}, {cpu['count']} cores, {num_rounds} rounds\n")
    print(format_tables(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        for path in save(result):
            print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
