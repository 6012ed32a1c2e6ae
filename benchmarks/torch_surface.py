"""References, optimizer and parameter server, beside those of torch, in one run.

As in benchmarks/autograd.py: both systems in turns, in fresh processes with one torch
thread each, and whoever is not at work is stopped. Three workers on two cores take longer
or shorter for minutes, by where the system has put them: so there are new processes every
few rounds.

    python benchmarks/torch_surface.py             # a table, in about two minutes
    python benchmarks/torch_surface.py --save      # also into benchmarks/results/
    python benchmarks/torch_surface.py --quick     # does it run at all
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import autograd
from benchmarks import rpc as calls
from benchmarks import torch_surface_work as work
from benchmarks.autograd import Item
from benchmarks.workers import start_quickly

WORLD = 3
ROUNDS_OF_A_SET = 8  # of processes

ITEMS = (
    Item(
        "remote_to_here",
        "remote + to_here, 1 KiB",
        "us",
        1e6,
        bar=3,
        aim=None,
        num=100,
        num_quick=3,
        world=WORLD,
    ),
    Item(
        "method",
        "method of a reference",
        "us",
        1e6,
        bar=3,
        aim=None,
        num=100,
        num_quick=3,
        world=WORLD,
    ),
    Item(
        "optimizer",
        f"optimizer step, SGD, 2 owners, {work.NUM_PARAMETERS} parameters",
        "us",
        1e6,
        bar=2,
        aim=None,
        num=20,
        num_quick=2,
        world=WORLD,
    ),
    Item(
        "server",
        "parameter server, step of 2 trainers",
        "ms",
        1e3,
        bar=2,
        aim=None,
        num=20,
        num_quick=2,
        world=WORLD,
    ),
)

NOTE = (
    "The reference's method adds two numbers. The optimizer step is timed alone, without "
    f"the pass before it. Parameter server: an MLP of {work.INPUTS}-{work.HIDDEN}-"
    f"{work.CLASSES} whose parameters live on the server, batches of {work.BATCH}; two "
    "trainers at the same time, each of which fetches the parameters, computes, runs "
    "backward and lets its optimizer step; the time per step of both. Times are medians "
    f"over all rounds, with new processes for every {ROUNDS_OF_A_SET} of them; p99 is what "
    "99 of 100 samples reach or better. The ratio is that of the medians, torch / "
    "gradwire; 'by round' is the median of the ratios of the rounds."
)


def run(num_rounds: int, quick: bool) -> dict[str, calls.Samples]:
    """Samples by system, key and round."""
    samples: dict[str, calls.Samples] = {
        name: {item.key: [] for item in ITEMS} for name in autograd.SYSTEMS
    }
    for first in range(0, num_rounds, ROUNDS_OF_A_SET):
        rounds = range(first, min(first + ROUNDS_OF_A_SET, num_rounds))
        _run_set(rounds, quick, samples)
    return samples


def _run_set(rounds: range, quick: bool, samples: dict[str, calls.Samples]) -> None:
    """Some rounds, with processes of their own."""
    wanted = [(name, WORLD) for name in autograd.SYSTEMS]
    with autograd.running(wanted, work.prepare) as groups:
        for item in ITEMS:  # connections, imports, first pages
            for name in autograd.SYSTEMS:
                groups.ask(name, item.world, work.check, item.key)
        for number in rounds:
            order = autograd.SYSTEMS if number % 2 == 0 else autograd.SYSTEMS[::-1]
            for item in ITEMS:
                num = item.num_quick if quick else item.num
                for name in order:
                    new = groups.ask(name, item.world, work.measure, item.key, num)
                    samples[name][item.key].append(new)


def describe_run(arguments: list[str], num_rounds: int) -> dict[str, Any]:
    command = shlex.join(["python", "benchmarks/torch_surface.py", *arguments])
    return {**calls.describe_run(arguments, num_rounds), "command": command}


def format_report(result: dict[str, Any]) -> str:
    """The table as a page for the folder of results."""
    run_ = result["run"]
    versions = ", ".join(f"{k} {v}" for k, v in run_["versions"].items())
    headings = autograd.CALL_HEADINGS
    return "\n".join(
        [
            "# References, optimizer, parameter server, gradwire beside torch",
            "",
            f"- date: {run_['date']}",
            f"- command: `{run_['command']}` ({run_['rounds']} rounds)",
            f"- versions: {versions}",
            f"- CPU: {run_['cpu']['model']}, {run_['cpu']['count']} cores",
            "",
            "| " + " | ".join(headings) + " |",
            "|---" + "|---:" * (len(headings) - 1) + "|",
            *("| " + " | ".join(r) + " |" for r in autograd.make_call_rows(result)),
            "",
            *textwrap.wrap(NOTE, 100),
            "",
        ]
    )


def save(result: dict[str, Any]) -> list[Path]:
    autograd.RESULTS.mkdir(exist_ok=True)
    stem = autograd.RESULTS / f"torch_surface_{result['run']['date'][:10]}"
    written = [stem.with_suffix(".md"), stem.with_suffix(".json")]
    written[0].write_text(format_report(result))
    written[1].write_text(json.dumps(result, indent=1) + "\n")
    return written


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default 32, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few calls, few rounds")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    num_rounds = options.rounds or (2 if options.quick else 32)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it
    if options.quick:
        start_quickly()

    samples = run(num_rounds, options.quick)
    items = [autograd._summarise_item(item, samples) for item in ITEMS]
    result: dict[str, Any] = {
        "run": describe_run(arguments, num_rounds),
        "items": items,
    }
    cpu = result["run"]["cpu"]
    print(f"{cpu['model']}, {cpu['count']} cores, {num_rounds} rounds\n")
    rows = autograd.make_call_rows(result)
    print(autograd._format_table("Beside torch", autograd.CALL_HEADINGS, rows, NOTE))
    if options.save:
        for path in save(result):
            print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
