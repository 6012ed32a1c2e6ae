"""Many workers, many calls, and readers that do not read; the command is load.py."""

from __future__ import annotations

import argparse
import collections
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import probes
from cluster import Cluster, ensure_fork_server
from gradwire import autograd, rpc

LIMIT_S = 120.0

# ------------------------------------------------------------------------ many workers

_weight = torch.linspace(-1, 1, 16, dtype=torch.double).reshape(4, 4).requires_grad_()
_served: collections.Counter[str] = collections.Counter()
_served_lock = threading.Lock()  # guards _served; handlers on any thread


def echo(value: Any) -> Any:
    with _served_lock:
        _served["echo"] += 1
    return value


def forward(names: list[str], x: torch.Tensor) -> torch.Tensor:
    """Multiplies here, and then on each of the workers named, one behind the other."""
    with _served_lock:
        _served["forward"] += 1
    y = torch.tanh(x @ _weight)
    return rpc.rpc_sync(names[0], forward, (names[1:], y)) if names else y


def count_served() -> dict[str, int]:
    return dict(_served)


@dataclass
class Work:
    """What one worker has done."""

    calls: int = 0
    forwards: int = 0
    passes: int = 0
    errors: list[str] = field(default_factory=list)


def work(seed: int, names: list[str], seconds: float) -> Work:
    """Calls others, and goes back through them, until the time is over."""
    me = rpc.get_worker_info().name
    draw = random.Random(f"{seed}/{me}")
    done = Work()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            kind = draw.random()
            if kind < 0.5:
                value = draw.random()
                to = draw.choice(names)
                done.calls += 1
                assert rpc.rpc_sync(to, echo, (value,), timeout=LIMIT_S) == value
            elif kind < 0.8:
                chosen = [draw.choice(names) for _ in range(10)]
                done.calls += len(chosen)
                futures = [
                    rpc.rpc_async(to, echo, (torch.full((8,), i),), timeout=LIMIT_S)
                    for i, to in enumerate(chosen)
                ]
                for i, future in enumerate(futures):
                    assert torch.equal(future.wait(), torch.full((8,), i))
            else:
                _go_forth_and_back([draw.choice(names) for _ in range(3)], done)
        except Exception as error:
            done.errors.append(f"{me}: {type(error).__name__}: {error}")
            if len(done.errors) > 3:
                break
    return done


def _go_forth_and_back(chain: list[str], done: Work) -> None:
    x = torch.rand(2, 4, dtype=torch.double, requires_grad=True)
    done.forwards += len(chain)
    with autograd.context() as ctx:
        y = rpc.rpc_sync(chain[0], forward, (chain[1:], x), timeout=LIMIT_S)
        ctx.backward(y.sum(), timeout=LIMIT_S)
        found = ctx.gradients()[x]
    done.passes += 1
    y = x
    weight = _weight.detach()
    for _ in chain:
        y = torch.tanh(y @ weight)
    (expected,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(found, expected), f"{found} is not {expected}"


def run_many_workers(number: int, seconds: float, seed: int = 1) -> str:
    """Mixed calls and passes between all workers; raises if anything went wrong."""
    names = [f"w{rank}" for rank in range(number)]
    options = {"lost_after": 60.0, "init_timeout": LIMIT_S, "num_worker_threads": 4}
    start = time.monotonic()
    with Cluster(number, options, start_timeout=LIMIT_S) as cluster:
        ready_s = time.monotonic() - start
        handles = [
            cluster.start(rank, work, seed, names, seconds) for rank in range(number)
        ]
        done = [handle.result(seconds + LIMIT_S) for handle in handles]
        errors = [error for one in done for error in one.errors]
        assert not errors, "\n".join(errors[:20])
        served: collections.Counter[str] = collections.Counter()
        for rank in range(number):
            served.update(cluster.run(rank, count_served))
        calls = sum(one.calls for one in done)
        forwards = sum(one.forwards for one in done)
        passes = sum(one.passes for one in done)
        assert dict(served) == {"echo": calls, "forward": forwards}, (served, calls)
        connections = sum(
            cluster.run(rank, rpc.get_debug_info)["connections"]
            for rank in range(number)
        )
        for rank in range(number):
            cluster.run(rank, _wait_until_idle)
    return (
        f"{number} workers (ready in {ready_s:.1f} s), {seconds:.0f} s: {calls} calls, "
        f"{passes} passes over {forwards} hops, {connections} ends of connections, "
        "no error"
    )


def _wait_until_idle() -> None:
    def is_idle() -> bool:
        info = rpc.get_debug_info()
        keys = ("client_active_calls", "server_active_calls", "inflight_bytes")
        return not any(info[key] for key in keys) and not any(
            autograd.get_debug_info().values()
        )

    probes.wait_until(is_idle, "this worker holds nothing")


# -------------------------------------------------------------------------- many calls

_seen: dict[str, bytearray] = {}
_num_doubled = 0


def expect(caller: str, number: int) -> None:
    _seen[caller] = bytearray(number)


def note(caller: str, index: int) -> int:
    global _num_doubled
    seen = _seen[caller]
    if seen[index]:
        _num_doubled += 1
    seen[index] = 1
    return index


def count_seen() -> tuple[dict[str, int], int]:
    return {caller: sum(seen) for caller, seen in _seen.items()}, _num_doubled


def flood(to: str, number: int, window: int = 2000) -> float:
    """Makes so many calls, each once; checks all answers. Returns seconds."""
    me = rpc.get_worker_info().name
    rpc.rpc_sync(to, expect, (me, number))
    waiting: collections.deque[tuple[int, rpc.Future[int]]] = collections.deque()
    start = time.monotonic()

    def take() -> None:
        index, future = waiting.popleft()
        found = future.wait()
        assert found == index, f"call {index} got the answer {found}"

    for index in range(number):
        waiting.append((index, rpc.rpc_async(to, note, (me, index), timeout=LIMIT_S)))
        if len(waiting) >= window:
            take()
    while waiting:
        take()
    return time.monotonic() - start


def run_many_calls(number: int) -> str:
    """Two callers and two callees, crosswise; nothing may be lost or come twice."""
    each = number // 4
    with Cluster(4, {"lost_after": 60.0}) as cluster:
        start = time.monotonic()
        limit = 60.0 + number / 500
        for shift in (2, 3):
            handles = [
                cluster.start(rank, flood, f"w{(rank + shift - 2) % 2 + 2}", each)
                for rank in (0, 1)
            ]
            for handle in handles:
                handle.result(limit)
        took = time.monotonic() - start
        for rank in (2, 3):
            seen, doubled = cluster.run(rank, count_seen)
            assert seen == {"w0": each, "w1": each}, f"w{rank} has seen {seen}"
            assert doubled == 0, f"{doubled} calls came twice to w{rank}"
    return (
        f"{4 * each} small calls in {took:.0f} s ({4 * each / took:.0f} a second): none "
        "lost, none doubled"
    )


# ------------------------------------------------------------------------- slow readers

INFLIGHT_BYTES = 8 << 20
# The size of a process jumps by some dozen MiB when a thread or a library needs pages for
# the first time; what matters is that it does not follow what is sent.
MARGIN_BYTES = 96 << 20
_kept_bytes = 0


def keep_count(payload: torch.Tensor) -> int:
    global _kept_bytes
    with _served_lock:
        _kept_bytes += payload.nbytes
    return payload.nbytes


def count_kept() -> int:
    return _kept_bytes


_flood: dict[str, Any] = {}


def flood_with_payloads(to: str, nbytes: int, number: int) -> None:
    """Sends much more than may be in flight, on a thread of its own."""
    probes.reset_peak()
    _flood.update(before=probes.resident_bytes(), sent=0, answered=0, error=None)

    def run() -> None:
        try:
            futures = []
            for index in range(number):
                payload = torch.full((nbytes,), index % 250, dtype=torch.uint8)
                futures.append(rpc.rpc_async(to, keep_count, (payload,), timeout=0))
                _flood["sent"] += 1
            for future in futures:
                _flood["answered"] += future.wait() == nbytes
        except BaseException as error:
            _flood["error"] = repr(error)

    thread = threading.Thread(target=run)
    _flood["thread"] = thread
    thread.start()


def see_flood() -> dict[str, Any]:
    found = {key: value for key, value in _flood.items() if key != "thread"}
    return {
        **found,
        "peak": probes.peak_bytes(),
        "inflight": rpc.get_debug_info()["inflight_bytes"],
        "alive": _flood["thread"].is_alive(),
    }


def run_slow_reader(total_mib: int, nbytes: int = 32 << 10) -> str:
    """The reader is stopped while much is sent to it; the sender has to wait."""
    number = (total_mib << 20) // nbytes
    options = {"lost_after": 600.0, "max_inflight_bytes": INFLIGHT_BYTES}
    with Cluster(2, options) as cluster:
        cluster.run(0, flood_with_payloads, "w1", nbytes, 8)
        probes.wait_until(lambda: not cluster.run(0, see_flood)["alive"], "warm-up")
        cluster.stop(1)
        cluster.run(0, flood_with_payloads, "w1", nbytes, number)
        # It stands still when it is out of credit.
        sent = -1
        while (now := cluster.run(0, see_flood))["sent"] != sent:
            sent = now["sent"]
            probes.pass_time(0.3)
        assert now["error"] is None and now["alive"], now
        assert sent < number, f"all {number} payloads were sent to a stopped reader"
        assert now["inflight"] <= INFLIGHT_BYTES, now
        cluster.cont(1)
        probes.wait_until(
            lambda: not cluster.run(0, see_flood)["alive"], "all is sent", LIMIT_S
        )
        end = cluster.run(0, see_flood)
        assert end["error"] is None and end["answered"] == number, end
        assert cluster.run(1, count_kept) == (number + 8) * nbytes
        growth = end["peak"] - end["before"]
        assert growth < INFLIGHT_BYTES + MARGIN_BYTES, f"grew by {growth >> 20} MiB"
        cluster.disturbed = False  # it goes on as if nothing had happened
    return (
        f"slow reader: of {number} payloads of {nbytes >> 10} KiB {sent} were sent while "
        f"it stood still; the sender grew by {growth >> 20} MiB for {total_mib} MiB"
    )


# ------------------------------------------------------------------------ command line


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.load")
    parser.add_argument("--workers", type=int, help="how many workers")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long")
    parser.add_argument("--calls", type=int, help="how many small calls")
    parser.add_argument("--slow-mib", type=int, help="how much for a slow reader")
    chosen = parser.parse_args()
    everything = not (chosen.workers or chosen.calls or chosen.slow_mib)
    ensure_fork_server()
    if chosen.workers or everything:
        print(run_many_workers(chosen.workers or 64, chosen.seconds), flush=True)
    if chosen.calls or everything:
        print(run_many_calls(chosen.calls or 1_000_000), flush=True)
    if chosen.slow_mib or everything:
        for nbytes in (32 << 10, 1 << 20):
            print(run_slow_reader(chosen.slow_mib or 512, nbytes), flush=True)
    return 0
