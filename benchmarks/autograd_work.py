"""What benchmarks/autograd.py lets workers do: the same programs for both systems."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import rpc as calls
from benchmarks.workers import Library, this_library

# Torch is imported by the workers only.

BATCH, WIDTH, NUM_CALLS = 32, 256, 10
# The layers of the pipeline: the first three numbers are stage 1, the others stage 2.
LAYERS = (784, 512, 512, 512, 10)
MICRO_BATCHES, MICRO_BATCH = 8, 16
LOCAL_STEPS, LOCAL_SIZE, LOCAL_LEAVES = 1000, 16, 10
LOCAL_KINDS = ("dict", "grad", "dict_call", "grad_call")


# --------------------------------------------------------------- what is called remotely


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
    return this_library().rpc.rpc_sync("w2", stage2, args=(_modules()["stage1"](x),))


def stage2(x: Any) -> Any:
    return _modules()["stage2"](x)


# ------------------------------------------------- what worker 0 does


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
    gradients = this_library().autograd.get_gradients(context_id)
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
        for key in LOCAL_KINDS:
            _, found = self.time_backward(key)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        samples: dict[str, list[float]] = {}
        for number in range(num):
            keys = ["plain", *LOCAL_KINDS]
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
        _time_context(library, form, 10)
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


# --------------------------------------------------------------- what it is asked to do


def prepare(library: Library) -> None:
    """For all workers: makes the modules, before calls may do so at the same time."""
    _modules()


@functools.cache
def _programs(library: Library) -> Programs:
    return Programs(library)


@functools.cache
def _local_graph(library: Library) -> LocalGraph:
    return LocalGraph(library)


def check(library: Library, key: str) -> None:
    _programs(library).check(key)


def measure(library: Library, key: str, num: int) -> list[float]:
    return calls._time_each(getattr(_programs(library), key), num)


def count_nodes(library: Library) -> int:
    return _local_graph(library).count_nodes()


def measure_local(library: Library, num: int) -> dict[str, list[float]]:
    return _local_graph(library).measure(num)
