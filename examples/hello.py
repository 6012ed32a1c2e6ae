"""Three workers that call each other: ``python examples/hello.py``.

The script starts three workers, as processes of their own. Alice asks, bob and carol only
answer. All functions that are called remotely are ordinary functions of this file: workers
find them by name.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time

import torch

from gradwire import launch, rpc

ROLES = {"alice": 1, "bob": 1, "carol": 1}
NUM_CALLS = 300
LIMIT_S = 60.0


# ------------------------------------------------------------- what the others can do


def greet(who: str) -> str:
    me = rpc.get_worker_info()
    return f"hello {who}, this is {me.name} (rank {me.id}), process {os.getpid()}"


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def scale_elsewhere(to: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    """A call inside a call."""
    return rpc.rpc_sync(to, scale, args=(x, factor))


def divide(a: int, b: int) -> float:
    return a / b


async def gather(x: torch.Tensor, others: list[str]) -> torch.Tensor:
    """Waits for several workers at once, and holds no thread while it waits."""
    parts = await asyncio.gather(
        *(_await(rpc.rpc_async(to, scale, args=(x, 10.0))) for to in others)
    )
    return torch.stack(parts).sum(dim=0)


async def _await(future: rpc.Future[torch.Tensor]) -> torch.Tensor:
    return await future


def total(x: torch.Tensor) -> float:
    return float(x.sum())


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


# --------------------------------------------------------------------- what alice does


def show() -> None:
    print("A call that waits for its result:")
    print("   ", rpc.rpc_sync("bob", greet, args=("alice",)))

    print("Two calls at the same time, to different workers:")
    x = torch.arange(4.0)
    futures = [rpc.rpc_async(to, scale, args=(x, 2.0)) for to in ("bob", "carol")]
    print("   ", [future.wait().tolist() for future in futures])

    print("A nested call: alice asks bob, and bob asks carol:")
    nested = rpc.rpc_sync("bob", scale_elsewhere, args=("carol", x, 3.0))
    print("   ", nested.tolist())

    print("An `async def` function, on carol, that asks the other two and adds up:")
    added = rpc.rpc_sync("carol", gather, args=(x, ["alice", "bob"]))
    print("   ", added.tolist())

    print("A function that raises there raises here, with its own type:")
    try:
        rpc.rpc_sync("carol", divide, args=(1, 0))
    except ZeroDivisionError as error:
        worker, trace = error.worker, error.remote_traceback  # type: ignore[attr-defined]
        print(f"    ZeroDivisionError from worker {worker!r}; the last lines there:")
        for line in trace.rstrip().splitlines()[-3:]:
            print(f"    | {line}")

    print("A tensor of 64 MiB:")
    large = torch.ones(64 << 18)
    for _ in range(3):  # the first time its pages are new
        start = time.perf_counter()
        result = rpc.rpc_sync("bob", total, args=(large,))
        took_s = time.perf_counter() - start
    info = rpc.get_debug_info()
    way = "shared memory" if info["segments"] else "the socket"
    print(
        f"    bob's sum is {result:.0f}; it went through {way} "
        f"({info['transports']['bob']}) in {took_s * 1e3:.1f} ms"
    )


def measure() -> None:
    small = torch.ones(256)
    print(f"Latency over {NUM_CALLS} calls each, tensors of 1 KiB:")
    print(f"    {'call':<34}{'median':>11}{'p99':>11}")
    for text, function, args in (
        ("Python function on bob", echo, (small,)),
        ("torch.add on bob", torch.add, (small, small)),
        ("Python function on bob, by carol", scale_elsewhere, ("carol", small, 2.0)),
    ):
        samples = []
        for _ in range(NUM_CALLS):
            start = time.perf_counter()
            rpc.rpc_sync("bob", function, args=args)
            samples.append((time.perf_counter() - start) * 1e6)
        p99 = sorted(samples)[int(0.99 * NUM_CALLS) - 1]
        print(f"    {text:<34}{statistics.median(samples):>8.0f} us{p99:>8.0f} us")


def tour() -> None:
    print(f"Three workers are there: {', '.join(w.name for w in rpc.get_workers())}.")
    show()
    measure()


def main() -> None:
    launch.main({"alice": tour}, ROLES, timeout=LIMIT_S)


if __name__ == "__main__":
    main()
