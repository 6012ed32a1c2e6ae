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
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import autograd_work as work
from benchmarks import plots
from benchmarks import rpc as calls
from benchmarks.workers import Group, Library, start_quickly

# Torch is imported by the workers only.

SYSTEMS = calls.SYSTEMS
RESULTS = Path(__file__).parent / "results"
PARTS = ("calls", "local", "growth")

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
        f"chain of {work.NUM_CALLS} hops",
        "ms",
        1e3,
        bar=2.5,
        aim=5,
        num=10,
        num_quick=1,
    ),
    Item(
        "parallel",
        f"{work.NUM_CALLS} parallel calls",
        "ms",
        1e3,
        bar=3,
        aim=6,
        num=10,
        num_quick=1,
    ),
    Item(
        "pipeline",
        f"pipeline, {work.MICRO_BATCHES} micro-batches",
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


# --------------------------------------------------------------------- in this process


class Groups:
    """All workers. Only one group runs at a time, the others are stopped."""

    def __init__(
        self,
        wanted: list[tuple[str, int]],
        folder: str,
        prepare: Callable[[Library], None],
    ) -> None:
        self._groups: dict[tuple[str, int], Group] = {}
        try:
            # One after the other: idle workers of torch slow down the start of others.
            for system, world in wanted:
                group = self._groups[system, world] = Group(system, world, folder)
                group.wait_until_ready()
                for rank in range(world):
                    group.ask(rank, prepare)
                group.pause()
        except BaseException:
            self.kill()
            raise

    def ask(self, system: str, world: int, function: Any, *args: Any) -> Any:
        """Lets worker 0 of the smallest group with so many workers do something."""
        size = min(n for name, n in self._groups if name == system and n >= world)
        group = self._groups[system, size]
        group.resume()
        result = group.ask(0, function, *args)
        group.pause()
        return result

    def ask_us(self, function: Any, *args: Any) -> Any:
        """Lets worker 0 of the pair of gradwire do something."""
        return self.ask("gradwire", 2, function, *args)

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()

    def kill(self) -> None:
        for group in self._groups.values():
            group.kill()


@contextmanager
def running(
    wanted: list[tuple[str, int]], prepare: Callable[[Library], None]
) -> Iterator[Groups]:
    """Groups of fresh workers; at the end they shut down, or are killed."""
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        groups = Groups(wanted, folder, prepare)
        try:
            yield groups
            groups.stop()
        finally:
            groups.kill()


def choose_groups(parts: list[str], quick: bool) -> list[tuple[str, int]]:
    if "calls" not in parts:
        return [("gradwire", 2)]
    # A third worker that idles while two are measured would cost torch time.
    return [(name, world) for world in ((3,) if quick else (2, 3)) for name in SYSTEMS]


def run(parts: list[str], num_rounds: int, quick: bool) -> dict[str, Any]:
    """Samples of the parts: of calls by system, key and round; of the others by round."""
    samples: dict[str, Any] = {
        "calls": {name: {item.key: [] for item in ITEMS} for name in SYSTEMS},
        "local": [],
        "growth": [],
    }
    with running(choose_groups(parts, quick), work.prepare) as groups:
        if "calls" in parts:  # connections, imports, first pages
            for item in ITEMS:
                for name in SYSTEMS:
                    groups.ask(name, item.world, work.check, item.key)
        if "local" in parts:
            samples["num_nodes"] = groups.ask_us(work.count_nodes)
        for number in range(num_rounds):
            if "calls" in parts:
                _run_calls(groups, number, quick, samples["calls"])
            if "local" in parts:
                new = groups.ask_us(work.measure_local, 1 if quick else 4)
                samples["local"].append(new)
            # A third of the rounds is enough here, and takes long enough.
            if "growth" in parts and number % 3 == 0:
                samples["growth"].append(_run_growth(groups, quick))
    return samples


def _run_calls(
    groups: Groups, number: int, quick: bool, samples: dict[str, calls.Samples]
) -> None:
    order = SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]
    for item in ITEMS:
        num = item.num_quick if quick else item.num
        for name in order:
            new = groups.ask(name, item.world, work.measure, item.key, num)
            samples[name][item.key].append(new)


Sweep = dict[str, dict[int, dict[str, float]]]  # by form, number of calls, part


def _run_growth(groups: Groups, quick: bool) -> Sweep:
    counts = COUNTS[: COUNTS.index(50) + 1] if quick else COUNTS
    return {form: groups.ask_us(work.measure_growth, form, counts) for form in FORMS}


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


def _summarise_growth(sweeps: list[Sweep]) -> dict[str, Any]:
    forms: list[dict[str, Any]] = []
    for form, text in FORMS.items():
        rows: list[dict[str, Any]] = [
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
    f"One hop: a context, a remote {work.WIDTH}x{work.WIDTH} linear on a batch of "
    f"{work.BATCH} that needs a gradient itself, backward, the gradient. Without a context "
    "it is compared with torch's explicit one. Chain: each result is the argument of the "
    f"next call. Pipeline: an MLP of {'-'.join(map(str, work.LAYERS))} in two stages on two "
    f"workers, {work.MICRO_BATCHES} micro-batches of {work.MICRO_BATCH} in flight at once, "
    "the loss on a third worker. Times are medians over all rounds; p99 is what 99 of 100 "
    "samples reach or better. The ratio is that of the medians, torch / gradwire; 'by "
    "round' is the median of the ratios of the single rounds."
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


def _verdict(item: dict[str, Any], failure: str) -> str:
    if not item["bar_is_met"]:
        return failure
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
                _verdict(item, "below the bar"),
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
            _verdict(item, "over the bar"),
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


def format_report(result: dict[str, Any], plot: Path | None) -> str:
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
        lines += ["", f"![How cost grows with the number of calls]({plot.name})"]
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
    written[0].write_text(format_report(result, plot))
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
    if options.quick:
        start_quickly()

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
