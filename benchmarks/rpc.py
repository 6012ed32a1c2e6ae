"""Remote calls beside those of ``torch.distributed.rpc``, in one run on one machine.

Both systems have two workers each, fresh processes with one torch thread. All of them
live through the whole run, but only one pair runs at a time. Idle workers of torch keep
polling, with a good part of a core each, so the pair that is not at work is stopped
(SIGSTOP). The run consists of short rounds, and in each round every piece of work is
done by both systems, one right after the other, in changing order. So whatever else the
machine does hits both alike, and the ratio of a single round is worth something too.

    python benchmarks/rpc.py                    # a table, in about a minute
    python benchmarks/rpc.py --save             # also into benchmarks/results/
    python benchmarks/rpc.py --quick            # does it run at all; the numbers mean little

Beside them stands what the machine itself can do: bytes that go back and forth over a
Unix socket between two Python processes, and a copy in memory that was used before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import multiprocessing
import os
import platform
import shlex
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Torch is imported by the workers only: this process and the partner of the raw socket
# start without it.

KIB, MIB = 1 << 10, 1 << 20
IN_FLIGHT = 200
START_S = 120.0
SLICE_S = 120.0
STOP_S = 30.0
SETTLE_S = 0.005  # lets threads that look for more work go to sleep
RESULTS = Path(__file__).parent / "results"

SYSTEMS = ("torch", "gradwire")


@dataclass(frozen=True)
class Item:
    """A piece of work. A sample is the time of one call, or a number of calls per second."""

    key: str
    text: str
    unit: str
    scale: float  # from seconds (or calls per second) to the unit
    bar: float
    aim: float
    num: int  # calls per round and system
    num_quick: int
    more_is_better: bool = False
    limit: str | None = None  # the key of what the machine itself can do


ITEMS = (
    Item(
        "python_1kib",
        "Python function, 1 KiB, round trip",
        "us",
        1e6,
        bar=3,
        aim=5,
        num=400,
        num_quick=20,
        limit="socket_1kib",
    ),
    Item(
        "add_1kib",
        "torch.add, two of 1 KiB, round trip",
        "us",
        1e6,
        bar=2,
        aim=4,
        num=400,
        num_quick=20,
        limit="socket_1kib",
    ),
    Item(
        "in_flight",
        f"calls per second, {IN_FLIGHT} in flight",
        "/s",
        1.0,
        bar=4,
        aim=8,
        num=3000,
        num_quick=600,
        more_is_better=True,
    ),
    Item(
        "one_way_64mib",
        "64 MiB, one way",
        "ms",
        1e3,
        bar=3,
        aim=5,
        num=8,
        num_quick=2,
        limit="copy_64mib",
    ),
    Item(
        "one_way_1mib",
        "1 MiB, one way",
        "us",
        1e6,
        bar=1.5,
        aim=3,
        num=150,
        num_quick=5,
        limit="copy_1mib",
    ),
)


@dataclass(frozen=True)
class Limit:
    """What the machine can do without any of the two."""

    key: str
    text: str
    unit: str
    scale: float
    num: int
    num_quick: int


LIMITS = (
    Limit("socket_1kib", "raw Unix socket, 1 KiB, round trip", "us", 1e6, 400, 20),
    Limit("copy_64mib", "memory copy, 64 MiB, warm", "ms", 1e3, 8, 2),
    Limit("copy_1mib", "memory copy, 1 MiB, warm", "us", 1e6, 150, 5),
)


# --------------------------------------------------------------- what is called remotely


def echo(tensor: Any) -> Any:
    return tensor


def take(tensor: Any) -> None:
    return None


# ------------------------------------------------------------------ inside the processes


def _measure(rpc: Any, key: str, num: int) -> list[float]:
    """Does one piece of work ``num`` times from worker 0 to worker 1."""
    import torch

    small = torch.ones(KIB // 4)
    if key == "python_1kib":
        return _time_each(lambda: rpc.rpc_sync("w1", echo, args=(small,)), num)
    if key == "add_1kib":
        other = torch.ones(KIB // 4)
        return _time_each(
            lambda: rpc.rpc_sync("w1", torch.add, args=(small, other)), num
        )
    if key == "in_flight":
        return _time_flood(lambda: rpc.rpc_async("w1", echo, args=(small,)), num)
    size = {"one_way_64mib": 64 * MIB, "one_way_1mib": MIB}[key]
    large = torch.ones(size // 4)
    return _time_each(lambda: rpc.rpc_sync("w1", take, args=(large,)), num)


def _time_each(work: Callable[[], object], num: int) -> list[float]:
    # The other system had the machine a moment ago: caches, and the CPU's clock.
    for _ in range(max(1, num // 10)):
        work()
    samples = []
    for _ in range(num):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return samples


def _time_flood(begin: Callable[[], Any], num: int) -> list[float]:
    """Calls per second, one sample for each `IN_FLIGHT` calls that were answered."""
    window = deque(begin() for _ in range(IN_FLIGHT))
    samples = []
    start = time.perf_counter()
    for count in range(1, num + 1):
        window.popleft().wait()
        window.append(begin())
        if count % IN_FLIGHT == 0:
            now = time.perf_counter()
            samples.append(IN_FLIGHT / (now - start))
            start = now
    while window:
        window.popleft().wait()
    return samples


def _init(system: str, rank: int, store: str) -> Any:
    if system == "torch":
        from torch.distributed import rpc as torch_rpc

        # It warns about its own use of its own process groups.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.*")
        torch_rpc.init_rpc(
            f"w{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
                init_method=store
            ),
        )
        return torch_rpc
    from gradwire import rpc

    if system == "safe":
        import torch

        for function in (echo, take, torch.add):
            rpc.export(function)
    options = rpc.RpcBackendOptions(init_method=store, **_gradwire_options(system))
    rpc.init_rpc(f"w{rank}", rank, 2, options)
    return rpc


def _gradwire_options(system: str) -> dict[str, Any]:
    """What makes gradwire use one transport (see tls.py) or one mode (see safe.py)."""
    if system == "gradwire":
        return {}
    if system == "safe":
        return {"serializer": "safe"}
    options: dict[str, Any] = {
        "transports": (system,),
        "advertise_address": "127.0.0.1",
    }
    if system == "tcp":
        options["secret"] = "of a benchmark"
    return options


def _serve(system: str, rank: int, store: str, pipe: Connection) -> None:
    """A worker: does what comes through the pipe, sleeps in between."""
    _die_with_parent()
    try:
        import torch

        torch.set_num_threads(1)
        rpc = _init(system, rank, store)
        pipe.send(("ready", None))
        while (order := pipe.recv()) is not None:
            pipe.send(("samples", _measure(rpc, *order)))
        rpc.shutdown()
        pipe.send(("stopped", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _die_with_parent() -> None:
    """A worker that is stopped does not notice by itself that the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _send_back(sock: socket.socket) -> None:
    """The partner of the raw socket."""
    with sock:
        while data := sock.recv(KIB, socket.MSG_WAITALL):
            sock.sendall(data)


# --------------------------------------------------------------------- in this process


class System:
    """The two workers of one system."""

    def __init__(self, name: str, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._is_stopping = False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(name, rank, f"file://{folder}/{name}", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        for rank in range(2):
            self._receive(rank, START_S)

    def pause(self) -> None:
        time.sleep(SETTLE_S)
        self._signal(signal.SIGSTOP)

    def measure(self, key: str, num: int) -> list[float]:
        """Does a piece of work; before and after, the workers are paused."""
        self._signal(signal.SIGCONT)
        self._pipes[0].send((key, num))
        samples: list[float] = self._receive(0, SLICE_S)
        self.pause()
        return samples

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, number)

    def stop(self) -> None:
        """Lets the workers shut down; whoever does not is killed."""
        self._signal(signal.SIGCONT)
        self._is_stopping = True
        try:
            for pipe in self._pipes:
                pipe.send(None)
            for rank in range(2):
                self._receive(rank, STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0 if self._is_stopping else 0.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _receive(self, rank: int, limit_s: float) -> Any:
        text = f"worker {rank} of {self.name}"
        if not self._pipes[rank].poll(limit_s):
            raise SystemExit(f"{text} did not answer within {limit_s:.0f} s")
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            raise SystemExit(f"{text} died") from None
        if kind == "error":
            raise SystemExit(f"{text} failed:\n{value}")
        return value


def _filled(size: int) -> Any:
    memory = (ctypes.c_char * size)()
    ctypes.memset(memory, 1, size)
    return memory


class Machine:
    """What the machine can do: a socket to another process, and memory."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = context.Process(
                target=_send_back, args=(theirs,), daemon=True
            )
            self._process.start()
        self._memory: dict[int, tuple[Any, Any]] = {}

    def measure(self, key: str, num: int) -> list[float]:
        if key == "socket_1kib":
            return _time_each(self._exchange, num)
        size = {"copy_64mib": 64 * MIB, "copy_1mib": MIB}[key]
        if size not in self._memory:
            self._memory[size] = (_filled(size), _filled(size))
        source, target = self._memory[size]
        return _time_each(lambda: ctypes.memmove(target, source, size), num)

    def _exchange(self) -> None:
        self._sock.sendall(b"x" * KIB)
        if len(self._sock.recv(KIB, socket.MSG_WAITALL)) != KIB:
            raise SystemExit("the partner of the raw socket died")

    def stop(self) -> None:
        self._sock.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def _running(folder: str) -> Iterator[tuple[dict[str, System], Machine]]:
    systems: dict[str, System] = {}
    machine = None
    try:
        machine = Machine()
        for name in SYSTEMS:
            systems[name] = System(name, folder)
        for system in systems.values():
            system.wait_until_ready()
        for system in systems.values():
            system.pause()
        yield systems, machine
        for system in systems.values():
            system.stop()
    finally:
        for system in systems.values():
            system.kill()
        if machine is not None:
            machine.stop()


Samples = dict[str, list[list[float]]]  # by key: a list for each round


def run(num_rounds: int, quick: bool) -> tuple[dict[str, Samples], Samples]:
    """Samples by system, and those of the machine."""
    samples: dict[str, Samples] = {name: {} for name in SYSTEMS}
    limits: Samples = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _running(folder) as (systems, machine),
    ):
        for name in SYSTEMS:  # connections, imports, first pages
            for item in ITEMS:
                systems[name].measure(item.key, item.num_quick)
        for number in range(num_rounds):
            order = SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]
            for item in ITEMS:
                num = item.num_quick if quick else item.num
                for name in order:
                    new = systems[name].measure(item.key, num)
                    samples[name].setdefault(item.key, []).append(new)
            for limit in LIMITS:
                num = limit.num_quick if quick else limit.num
                new = machine.measure(limit.key, num)
                limits.setdefault(limit.key, []).append(new)
    return samples, limits


def run_in_turns(
    names: tuple[str, ...],
    start: Callable[[str, str], System],
    num_rounds: int,
    quick: bool,
) -> dict[str, Samples]:
    """Samples of systems that are measured in turns, by name.

    Args:
        names: The systems, in the order in which they are started.
        start: Starts one, with its name and a folder to meet in.
        num_rounds: How often all of it is measured.
        quick: Fewer samples.
    """
    samples: dict[str, Samples] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        systems = {}
        for name in names:
            systems[name] = start(name, folder)
            stack.callback(systems[name].kill)
            systems[name].wait_until_ready()
            for item in ITEMS:  # connections, imports, first pages
                systems[name].measure(item.key, item.num_quick)
        for number in range(num_rounds):
            order = names if number % 2 == 0 else names[::-1]
            for item in ITEMS:
                num = item.num_quick if quick else item.num
                for name in order:
                    new = systems[name].measure(item.key, num)
                    samples[name].setdefault(item.key, []).append(new)
        for system in systems.values():
            system.stop()
    return samples


# ------------------------------------------------------------------------- the numbers


def _quantile(values: list[float], q: float) -> float:
    """The smallest value that at least the part ``q`` of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]


def _summary(
    rounds: list[list[float]], unit: str, scale: float, more_is_better: bool = False
) -> dict[str, Any]:
    values = [value * scale for samples in rounds for value in samples]
    return {
        "unit": unit,
        "median": statistics.median(values),
        # The value that 99 of 100 samples reach or better.
        "p99": _quantile(values, 0.01 if more_is_better else 0.99),
        "num_samples": len(values),
    }


def summarise(samples: dict[str, Samples], limits: Samples) -> dict[str, Any]:
    machine = {
        limit.key: {
            "text": limit.text,
            **_summary(limits[limit.key], limit.unit, limit.scale),
        }
        for limit in LIMITS
    }
    items = []
    for item in ITEMS:
        both = {
            name: _summary(
                samples[name][item.key], item.unit, item.scale, item.more_is_better
            )
            for name in SYSTEMS
        }
        by_round = [
            _ratio(item, statistics.median(torch_), statistics.median(ours))
            for torch_, ours in zip(
                samples["torch"][item.key], samples["gradwire"][item.key], strict=True
            )
        ]
        ratio = _ratio(item, both["torch"]["median"], both["gradwire"]["median"])
        items.append(
            {
                "key": item.key,
                "text": item.text,
                **both,
                "ratio": ratio,
                "ratio_by_round": statistics.median(by_round),
                "rounds": by_round,
                "bar": item.bar,
                "aim": item.aim,
                "bar_is_met": ratio >= item.bar,
                "aim_is_met": ratio >= item.aim,
                "limit": None if item.limit is None else machine[item.limit]["median"],
            }
        )
    return {"items": items, "limits": list(machine.values())}


def _ratio(item: Item, torch_: float, ours: float) -> float:
    return ours / torch_ if item.more_is_better else torch_ / ours


def describe_run(arguments: list[str], num_rounds: int) -> dict[str, Any]:
    """When, how and on what this was measured."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/rpc.py", *arguments]),
        "rounds": num_rounds,
        "versions": {
            "gradwire": metadata.version("gradwire"),
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cpu": {"model": _cpu_model(), "count": _cpu_count()},
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -------------------------------------------------------------------------- the output

HEADINGS = (
    "work",
    "torch",
    "p99",
    "gradwire",
    "p99",
    "limit",
    "ratio",
    "by round",
    "bar",
    "aim",
    "",
)


def make_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for item in result["items"]:
        unit = item["torch"]["unit"]
        limit = "-" if item["limit"] is None else _number(item["limit"], unit)
        verdict = "below the bar"
        if item["bar_is_met"]:
            verdict = "aim met" if item["aim_is_met"] else "bar met"
        rows.append(
            (
                item["text"],
                _number(item["torch"]["median"], unit),
                _number(item["torch"]["p99"], unit),
                _number(item["gradwire"]["median"], unit),
                _number(item["gradwire"]["p99"], unit),
                limit,
                f"{item['ratio']:.2f}x",
                f"{item['ratio_by_round']:.2f}x",
                f"{item['bar']:g}x",
                f"{item['aim']:g}x",
                verdict,
            )
        )
    return rows


def _number(value: float, unit: str) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2
    return f"{value:.{digits}f} {unit}"


def _limit_lines(result: dict[str, Any]) -> list[str]:
    return [
        f"{limit['text']}: median {_number(limit['median'], limit['unit'])}, "
        f"p99 {_number(limit['p99'], limit['unit'])}"
        for limit in result["limits"]
    ]


NOTES = (
    "Beside each p99 stands the median, over all rounds. The ratio is that of the medians, "
    "torch /",
    "gradwire (calls per second: gradwire / torch); 'by round' is the median of the ratios "
    "of the single",
    "rounds. p99 is what 99 of 100 samples reach or better. The limit is what the machine "
    "does without",
    "either: a raw Unix socket, or a copy in warm memory.",
)


def format_table(result: dict[str, Any]) -> str:
    rows = [HEADINGS, *make_rows(result)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join([*lines, "", *_limit_lines(result), "", *NOTES])


def format_report(result: dict[str, Any]) -> str:
    """The table as a page for the folder of results."""
    run_, rows = result["run"], make_rows(result)
    versions = ", ".join(f"{k} {v}" for k, v in run_["versions"].items())
    lines = [
        "# Remote calls, gradwire beside torch RPC",
        "",
        f"- date: {run_['date']}",
        f"- command: `{run_['command']}` ({run_['rounds']} rounds)",
        f"- versions: {versions}",
        f"- CPU: {run_['cpu']['model']}, {run_['cpu']['count']} cores",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" + "|---:" * (len(HEADINGS) - 2) + "|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"- {line}" for line in _limit_lines(result)),
        "",
        *NOTES,
        "",
    ]
    return "\n".join(lines)


def save(result: dict[str, Any]) -> list[Path]:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"rpc_{result['run']['date'][:10]}"
    written = [stem.with_suffix(".md"), stem.with_suffix(".json")]
    written[0].write_text(format_report(result))
    written[1].write_text(json.dumps(result, indent=1) + "\n")
    return written


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default 25, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few calls, few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    num_rounds = options.rounds or (2 if options.quick else 25)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it

    samples, limits = run(num_rounds, options.quick)
    result = {
        "run": describe_run(arguments, num_rounds),
        **summarise(samples, limits),
    }
    cpu = result["run"]["cpu"]
    print(f"{cpu['model']}, {cpu['count']} cores, {num_rounds} rounds\n")
    print(format_table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        for path in save(result):
            print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
