"""Calls with ``serializer="safe"`` beside the same calls with pickles, in one run.

All that ``rpc.py`` says about rounds and pauses holds here, too. Both workers run as the
same user, so memory is shared in both modes.

    python benchmarks/safe.py                   # a table, in about half a minute
    python benchmarks/safe.py --quick           # does it run at all; the numbers mean little
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import rpc as calls

MODES = ("gradwire", "safe")
HEADINGS = ("call", "pickle", "safe", "ratio", "by round")


def run(num_rounds: int, quick: bool) -> dict[str, calls.Samples]:
    """Samples by mode."""
    return calls.run_in_turns(MODES, calls.System, num_rounds, quick)


def make_rows(samples: dict[str, calls.Samples]) -> list[tuple[str, ...]]:
    """The ratio is the speed of the safe mode over that of pickles."""
    rows = []
    for item in calls.ITEMS:
        both = [
            calls._summary(
                samples[name][item.key], item.unit, item.scale, item.more_is_better
            )
            for name in MODES
        ]
        by_round = [
            calls._ratio(item, statistics.median(pickled), statistics.median(safe))
            for pickled, safe in zip(
                *(samples[name][item.key] for name in MODES), strict=True
            )
        ]
        ratio = calls._ratio(item, both[0]["median"], both[1]["median"])
        rows.append(
            (
                item.text,
                *(calls._number(found["median"], found["unit"]) for found in both),
                f"{ratio:.2f}x",
                f"{statistics.median(by_round):.2f}x",
            )
        )
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default 15, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few calls, few rounds")
    options = parser.parse_args(arguments)
    num_rounds = options.rounds or (2 if options.quick else 15)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it
    for row in (HEADINGS, *make_rows(run(num_rounds, options.quick))):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
