"""Memory of backwards through remote calls: whether workers grow, and how high they peak.

The soak: thousands of contexts in a row, each with a backward, on three workers that call
each other, with the cyclic collector switched off. A third of them has an explicit context
and a dictionary of gradients, a third a plain backward in a context, a third no context.
A handler keeps its last output, with its graph, until the next call. Resident sizes are
taken after the first contexts, on the way, and at the end.

The peak: one step with large activations, there and back, in fresh processes, with torch
RPC and with gradwire.

    python benchmarks/autograd_memory.py               # 3,000 contexts; 64 MiB activations
    python benchmarks/autograd_memory.py --only peak   # one part: soak, peak
    python benchmarks/autograd_memory.py --save        # also into benchmarks/results/

The exit status is 1 if a worker has grown by more than the limit between the first mark
and the end, if anything of a context is left, or if a peak is too high.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import rpc as calls
from benchmarks.workers import (
    Group,
    Library,
    running,
    start_quickly,
    this_library,
)

# Torch is imported by the workers only.

MIB = 1 << 20
RESULTS = Path(__file__).parent / "results"
PARTS = ("soak", "peak")
WORLD = 3  # of the soak: the driver calls worker 1, which calls worker 2
BATCH, WIDTH = 32, 256
LOOKS = 9  # marks between the first and the last
EMPTY_S = 10.0  # after so long the last messages must have arrived
NUM_STEPS = (1, 3)  # peaks are read after so many steps
SYSTEMS = {
    "torch": ("torch", True),
    "gradwire": ("gradwire", True),
    "no context": ("gradwire", False),
}


def read_status() -> dict[str, int]:
    """Sizes of this process, in bytes: VmRSS, VmHWM (its peak) and RssFile among them."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


# --------------------------------------------------------------------------- the soak

_kept: list[Any] = []


@functools.cache
def _linear(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(WIDTH, WIDTH)


def hidden(x: Any, uses_kept: bool) -> Any:
    """A handler of worker 1 that keeps one output between calls."""
    y = _linear(1)(x).relu()
    if uses_kept:
        y = y + _kept[0]
    _kept[:] = [y]
    return this_library().rpc.rpc_sync("w2", output, args=(y,))


def output(x: Any) -> Any:
    """A handler of worker 2."""
    return _linear(2)(x).sum()


def _forward(rpc: Any, x: Any, num_calls: int) -> Any:
    """In a context the second call uses what the first one left on worker 1."""
    return sum(
        rpc.rpc_sync("w1", hidden, args=(x, number > 0)) for number in range(num_calls)
    )


def _forward_alone(x: Any, num_calls: int) -> Any:
    loss, kept = 0, 0
    for _ in range(num_calls):
        kept = _linear(1)(x).relu() + kept
        loss = loss + _linear(2)(kept).sum()
    return loss


def _make_input() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def make_contexts(library: Library, start: int, stop: int) -> None:
    """Contexts with the three kinds of backward in turn; each gradient is looked at."""
    import torch

    rpc, autograd = library.rpc, library.autograd
    x = _make_input()
    expected = {
        num_calls: torch.autograd.grad(_forward_alone(x, num_calls), x)[0]
        for num_calls in (1, 2)
    }
    for number in range(start, stop):
        x.grad = None
        num_calls = 2
        if number % 3 == 0:
            with autograd.context():
                _forward(rpc, x, num_calls).backward()
                found = x.grad
        elif number % 3 == 1:
            num_calls = 1
            _forward(rpc, x, num_calls).backward()
            found = x.grad
        else:
            with autograd.context() as ctx:
                loss = _forward(rpc, x, num_calls)
                autograd.backward(ctx, [loss])
                found = autograd.get_gradients(ctx)[x]
        if not torch.allclose(found, expected[num_calls], rtol=1e-4, atol=1e-5):
            raise AssertionError(f"context {number} has wrong gradients")


def start_soak(library: Library) -> None:
    gc.collect()
    gc.disable()
    _linear(1), _linear(2)


def describe_worker(library: Library) -> dict[str, Any]:
    sizes = read_status()
    return {
        "resident": sizes["VmRSS"],
        # Without pages of files, which the system may take away.
        "own": sizes["VmRSS"] - sizes["RssFile"],
        "counts": library.autograd.get_debug_info(),
    }


def forget_kept(library: Library) -> None:
    _kept.clear()


def end_soak(library: Library) -> dict[str, Any]:
    """What is left when all contexts are over, and what only the collector can free."""
    deadline = time.monotonic() + EMPTY_S
    while any((counts := library.autograd.get_debug_info()).values()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return {"counts": counts, "cyclic_garbage": gc.collect()}


def choose_marks(num_first: int, num_contexts: int) -> list[int]:
    step = (num_contexts - num_first) / LOOKS
    return [num_first, *(num_first + round(step * (i + 1)) for i in range(LOOKS))]


def run_soak(num_contexts: int, num_first: int, limit_percent: float) -> dict[str, Any]:
    with running("gradwire", WORLD) as group:
        _ask_all(group, start_soak)
        rows: list[dict[str, Any]] = []
        done, start = 0, time.monotonic()
        for mark in choose_marks(num_first, num_contexts):
            group.ask(0, make_contexts, done, mark)
            done = mark
            rows.append(
                {
                    "contexts": done,
                    "seconds": time.monotonic() - start,
                    "workers": _ask_all(group, describe_worker),
                }
            )
        _ask_all(group, forget_kept)
        end = _ask_all(group, end_soak)
    return summarise_soak(rows, end, limit_percent)


def _ask_all(group: Group, function: Any, *args: Any) -> list[Any]:
    return [group.ask(rank, function, *args) for rank in range(group.world)]


def summarise_soak(
    rows: list[dict[str, Any]], end: list[dict[str, Any]], limit_percent: float
) -> dict[str, Any]:
    first, last = rows[0]["workers"], rows[-1]["workers"]
    growth = [
        # Also if files' pages were taken away meanwhile, own memory may not grow.
        100 * max(b["resident"] - a["resident"], b["own"] - a["own"]) / a["resident"]
        for a, b in zip(first, last, strict=True)
    ]
    is_empty = not any(value for worker in end for value in worker["counts"].values())
    return {
        "rows": rows,
        "end": end,
        "growth_percent": growth,
        "limit_percent": limit_percent,
        "is_empty": is_empty,
        "is_good": is_empty and all(value <= limit_percent for value in growth),
    }


def format_soak(soak: dict[str, Any]) -> str:
    names = [f"w{rank}" for rank in range(WORLD)]
    lines = [
        f"{'contexts':>9} {'seconds':>8}"
        + "".join(f"{name + ' MiB':>10}" for name in names)
        + "".join(f"{name + ' own':>10}" for name in names)
        + f"{'live':>12}{'kept alive':>12}"
    ]
    for row in soak["rows"]:
        workers = row["workers"]
        cells = [f"{worker['resident'] / MIB:>10.1f}" for worker in workers]
        cells += [f"{worker['own'] / MIB:>10.1f}" for worker in workers]
        for key, width in (("contexts", 12), ("released_contexts_kept_alive", 12)):
            counts = "/".join(str(worker["counts"][key]) for worker in workers)
            cells.append(f"{counts:>{width}}")
        lines.append(f"{row['contexts']:>9} {row['seconds']:>8.1f}{''.join(cells)}")
    growth = "".join(f"{value:>8.2f} %" for value in soak["growth_percent"])
    lines.append(f"{'growth':>18}{growth}  (limit {soak['limit_percent']:g} %)")
    for name, worker in zip(names, soak["end"], strict=True):
        counts = ", ".join(f"{key} {value}" for key, value in worker["counts"].items())
        lines.append(
            f"{name} at the end: {counts}; left to the collector: "
            f"{worker['cyclic_garbage']} objects"
        )
    return "\n".join(lines)


# --------------------------------------------------------------------------- the peak


@functools.cache
def _weight() -> Any:
    import torch

    return torch.nn.Parameter(torch.ones(1))


def activate(x: Any) -> Any:
    """A handler of worker 1: two activations, one of them goes back."""
    return (x * _weight()).tanh()


def make_steps(library: Library, num_bytes: int, has_context: bool, num: int) -> None:
    """Steps whose activations have a size; the last one's are dropped as well."""
    import torch

    data = torch.full((num_bytes // 4,), 0.5)
    for _ in range(num):
        _weight().grad = None
        if has_context:
            with library.autograd.context() as ctx:
                loss = _activate_remotely(library, data)
                library.autograd.backward(ctx, [loss])
                gradient = library.autograd.get_gradients(ctx)[_weight()]
        else:
            loss = _activate_remotely(library, data)
            loss.backward()
            gradient = _weight().grad
        if not 0.3 < float(gradient) < 0.5:  # 0.5 * (1 - tanh(0.5) ** 2) = 0.393
            raise AssertionError(f"the gradient is {float(gradient)}")


def _activate_remotely(library: Library, data: Any) -> Any:
    sent = data * _weight()
    return library.rpc.rpc_sync("w1", activate, args=(sent,)).mean()


def read_sizes(library: Library) -> dict[str, int]:
    sizes = read_status()
    return {"resident": sizes["VmRSS"], "peak": sizes["VmHWM"]}


def measure_peak(system: str, has_context: bool, num_bytes: int) -> dict[str, Any]:
    """Sizes of both workers before the steps, and their peaks after some."""
    with running(system, 2) as group:
        group.ask(0, make_steps, 1024, has_context, 1)  # connections, first imports
        found: dict[str, Any] = {"before": _ask_all(group, read_sizes)}
        done = 0
        for num in NUM_STEPS:
            group.ask(0, make_steps, num_bytes, has_context, num - done)
            done = num
            found[str(num)] = _ask_all(group, read_sizes)
    return found


def run_peak(num_bytes: int, num_repeats: int, limit: float) -> dict[str, Any]:
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for _ in range(num_repeats):
        for name, (system, has_context) in SYSTEMS.items():
            samples[name].append(measure_peak(system, has_context, num_bytes))
    return summarise_peak(samples, num_bytes, limit)


def summarise_peak(
    samples: dict[str, list[dict[str, Any]]], num_bytes: int, limit: float
) -> dict[str, Any]:
    def find(name: str, when: str, rank: int, key: str) -> float:
        return statistics.median(found[when][rank][key] for found in samples[name])

    rows: list[dict[str, Any]] = []
    for rank, worker in enumerate(("caller", "callee")):
        for num in NUM_STEPS:
            peaks = {name: find(name, str(num), rank, "peak") for name in SYSTEMS}
            rows.append(
                {
                    "worker": worker,
                    "steps": num,
                    "before": {
                        name: find(name, "before", rank, "resident") for name in SYSTEMS
                    },
                    "peaks": peaks,
                    "ratios": {
                        name: peaks[name] / peaks["torch"]
                        for name in SYSTEMS
                        if name != "torch"
                    },
                }
            )
    return {
        "activation_bytes": num_bytes,
        "num_repeats": len(samples["torch"]),
        "limit": limit,
        "rows": rows,
        "is_good": all(
            ratio <= limit for row in rows for ratio in row["ratios"].values()
        ),
    }


def format_peak(peak: dict[str, Any]) -> str:
    heads = [f"{name + ' MiB':>16}" for name in SYSTEMS]
    lines = [f"{'worker':<8}{'':<14}{''.join(heads)}{'ratio':>9}{'no context':>12}"]
    for row in peak["rows"]:
        if row["steps"] == NUM_STEPS[0]:
            sizes = "".join(f"{row['before'][n] / MIB:>16.1f}" for n in SYSTEMS)
            lines.append(f"{row['worker']:<8}{'before':<14}{sizes}")
        sizes = "".join(f"{row['peaks'][n] / MIB:>16.1f}" for n in SYSTEMS)
        ratios = row["ratios"]
        lines.append(
            f"{row['worker']:<8}{'peak, ' + str(row['steps']) + ' steps':<14}{sizes}"
            f"{ratios['gradwire']:>8.2f}x{ratios['no context']:>11.2f}x"
        )
    lines.append(f"limit of the ratios: {peak['limit']:g}x")
    return "\n".join(lines)


# -------------------------------------------------------------------------- the output


def format_tables(result: dict[str, Any]) -> str:
    parts = []
    if "soak" in result:
        parts += ["Contexts in a row, resident sizes (own: without pages of files)", ""]
        parts += [format_soak(result["soak"]), ""]
    if "peak" in result:
        size = result["peak"]["activation_bytes"] / MIB
        parts += [f"Peak resident sizes with activations of {size:g} MiB", ""]
        parts += [format_peak(result["peak"]), ""]
    return "\n".join(parts).rstrip()


def save(result: dict[str, Any]) -> list[Path]:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"autograd_memory_{result['run']['date'][:10]}"
    written = [stem.with_suffix(".md"), stem.with_suffix(".json")]
    run_ = result["run"]
    versions = ", ".join(f"{k} {v}" for k, v in run_["versions"].items())
    lines = [
        "# Memory of backwards through remote calls",
        "",
        f"- date: {run_['date']}",
        f"- command: `{run_['command']}`",
        f"- versions: {versions}",
        f"- limits kept: {'yes' if result['is_good'] else 'NO'}",
        "",
        "```",
        format_tables(result),
        "```",
        "",
    ]
    written[0].write_text("\n".join(lines))
    written[1].write_text(json.dumps(result, indent=1) + "\n")
    return written


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, help="default 3000, or 60 with --quick")
    parser.add_argument("--first", type=int, help="first mark; default: a tenth")
    parser.add_argument("--limit", type=float, default=3.0, help="allowed growth in %%")
    parser.add_argument("--mib", type=float, help="activations; default 64, or 8")
    parser.add_argument("--repeats", type=int, help="of the peak; default 3, or 1")
    parser.add_argument(
        "--ratio", type=float, default=1.2, help="allowed peak / torch's"
    )
    parser.add_argument("--only", choices=PARTS, help="one part instead of both")
    parser.add_argument("--quick", action="store_true", help="does it run at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    quick = options.quick
    num_contexts = options.contexts or (60 if quick else 3000)
    num_first = options.first or max(num_contexts // 10, 1)
    if not num_first < num_contexts:
        parser.error("there must be more contexts after the first mark")
    num_bytes = round((options.mib or (8 if quick else 64)) * MIB)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it
    if quick:
        start_quickly()

    result: dict[str, Any] = {}
    if options.only != "peak":
        result["soak"] = run_soak(num_contexts, num_first, options.limit)
    if options.only != "soak":
        num_repeats = options.repeats or (1 if quick else 3)
        result["peak"] = run_peak(num_bytes, num_repeats, options.ratio)
    command = shlex.join(["python", "benchmarks/autograd_memory.py", *arguments])
    is_good = all(part["is_good"] for part in result.values())
    result["is_good"] = is_good
    result["run"] = {**calls.describe_run(arguments, 0), "command": command}
    del result["run"]["rounds"]
    print(format_tables(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        for path in save(result):
            print(f"wrote {os.path.relpath(path)}")
    if not is_good:
        print("a limit was not kept", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
