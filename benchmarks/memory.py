"""Whether workers grow: resident sizes early and late in a long run of large calls.

Two fresh processes with one torch thread each. One calls the other again and again with
a tensor and gets one of the same size back. The resident size of both is taken after the
first thousand calls, on the way, and at the end.

    python benchmarks/memory.py                       # 20,000 calls of 1 MiB
    python benchmarks/memory.py --calls 3000 --mib 4
    python benchmarks/memory.py --save                # also into benchmarks/results/

The exit status is 1 if a worker has grown by more than the limit between the first mark
and the end.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Torch is imported by the workers only.

MIB = 1 << 20
NAMES = ("caller", "callee")
LOOKS = 10  # marks between the first and the last
START_S = 120.0
RESULTS = Path(__file__).parent / "results"


def read_resident() -> int:
    """Physical memory of this process, mapped segments included."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe_worker() -> dict[str, int]:
    from gradwire import rpc

    info = rpc.get_debug_info()
    return {
        "resident": read_resident(),
        **{key: info.get(key, 0) for key in ("threads", "segments", "segment_bytes")},
    }


def echo(tensor: Any) -> Any:
    return tensor


def make_calls(start: int, stop: int, num_bytes: int) -> None:
    import torch

    from gradwire import rpc

    for i in range(start, stop):
        sent = torch.full((num_bytes,), i % 251, dtype=torch.uint8)
        received = rpc.rpc_sync(NAMES[1], echo, args=(sent,))
        if received.shape != sent.shape or int(received[-1]) != i % 251:
            raise AssertionError(f"call {i} returned something else")


def serve(rank: int, store: str, pipe: Connection) -> None:
    """A worker: runs what comes through the pipe, on its main thread."""
    import torch

    from gradwire import rpc

    torch.set_num_threads(1)
    rpc.init_rpc(
        NAMES[rank],
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{store}"),
    )
    pipe.send(None)
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    rpc.shutdown()


def ask(pipe: Connection, function: Any, *args: Any) -> Any:
    pipe.send((function, args))
    good, value = pipe.recv()
    if not good:
        raise RuntimeError(f"a worker failed:\n{value}")
    return value


def choose_marks(num_first: int, num_calls: int) -> list[int]:
    step = (num_calls - num_first) / LOOKS
    return [num_first, *(num_first + round(step * (i + 1)) for i in range(LOOKS))]


def run(num_calls: int, num_first: int, num_bytes: int) -> list[dict[str, Any]]:
    """What both workers were like, mark by mark."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gradwire-memory-") as folder:
        workers = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, f"{folder}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            workers.append((process, ours))
        pipes = [pipe for _, pipe in workers]
        for pipe in pipes:
            if not pipe.poll(START_S):
                raise RuntimeError(f"the workers did not start within {START_S} s")
            pipe.recv()
        rows: list[dict[str, Any]] = []
        done = 0
        start = time.monotonic()
        for mark in choose_marks(num_first, num_calls):
            ask(pipes[0], make_calls, done, mark, num_bytes)
            done = mark
            row: dict[str, Any] = {"calls": done, "seconds": time.monotonic() - start}
            for name, pipe in zip(NAMES, pipes, strict=True):
                row[name] = ask(pipe, describe_worker)
            rows.append(row)
        for pipe in pipes:
            pipe.send(None)
        for process, pipe in workers:
            process.join(START_S)
            pipe.close()
    return rows


def find_growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By how many percent each worker has grown since the first mark."""
    return {
        name: 100 * (rows[-1][name]["resident"] / rows[0][name]["resident"] - 1)
        for name in NAMES
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    head = f"{'calls':>8} {'seconds':>8}" + "".join(f"{n + ' MiB':>14}" for n in NAMES)
    lines = [head + f"{'segments':>10}"]
    for row in rows:
        sizes = "".join(f"{row[name]['resident'] / MIB:>14.1f}" for name in NAMES)
        lines.append(
            f"{row['calls']:>8} {row['seconds']:>8.1f}{sizes}"
            f"{row[NAMES[0]]['segments']:>10}"
        )
    growth = find_growth(rows)
    lines.append(
        f"{'growth':>17}" + "".join(f"{growth[name]:>12.2f} %" for name in NAMES)
    )
    return "\n".join(lines)


def save(result: dict[str, Any], table: str) -> list[Path]:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"memory_{result['date'][:10]}"
    written = [stem.with_suffix(".md"), stem.with_suffix(".json")]
    lines = [
        "# Resident sizes in a long run of large calls",
        "",
        f"- date: {result['date']}",
        f"- command: `{result['command']}`",
        f"- tensors of {result['mib']} MiB, there and back",
        f"- limit: {result['limit_percent']} %",
        "",
        "```",
        table,
        "```",
        "",
    ]
    written[0].write_text("\n".join(lines))
    written[1].write_text(json.dumps(result, indent=1) + "\n")
    return written


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--mib", type=float, default=1.0, help="size of a tensor")
    parser.add_argument("--first", type=int, help="first mark; default: a twentieth")
    parser.add_argument("--limit", type=float, default=5.0, help="allowed growth in %%")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    num_first = options.first or max(options.calls // 20, 1)
    if not num_first < options.calls:
        parser.error("there must be more calls after the first mark")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it

    rows = run(options.calls, num_first, round(options.mib * MIB))
    growth = find_growth(rows)
    is_good = all(value <= options.limit for value in growth.values())
    result = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/memory.py", *arguments]),
        "mib": options.mib,
        "limit_percent": options.limit,
        "growth_percent": growth,
        "is_good": is_good,
        "rows": rows,
    }
    table = format_table(rows)
    print(table)
    print(json.dumps({key: result[key] for key in result if key != "rows"}))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        for path in save(result, table):
            print(f"wrote {os.path.relpath(path)}")
    if not is_good:
        print(f"a worker has grown by more than {options.limit} %", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
