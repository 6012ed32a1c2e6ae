"""The command line of the conformance run; see __main__.py."""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from conformance.torch_suites import suites as wheel
from conformance.torch_suites.lists import Exclusions, read_names, write_passing
from conformance.torch_suites.report import Report
from conformance.torch_suites.runner import run_all

_HERE = Path(__file__).parent
FAST_SHARE = 0.3
CHANCES = 4
"""How often an unsteady test is tried."""
UNSTEADY_LIMIT_S = 15.0


def main() -> int:
    chosen = _parse_arguments()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    wheel.prepare(with_torch=chosen.torch)
    suites = _load(chosen.names)
    every = wheel.tests_of(suites)
    excluded = Exclusions.read(_HERE / "exclusions.txt")
    passing = read_names(_HERE / "passing.txt")
    unsteady = read_names(_HERE / "unsteady.txt")
    _check_names(chosen.names, passing | set(excluded.reasons) | unsteady, every)

    tests = _select(chosen.names, every)
    if not chosen.excluded and not chosen.torch:
        tests = [test for test in tests if test not in excluded.reasons]
    if chosen.fast:
        tests = _some_of([t for t in tests if t in passing and t not in unsteady])
    tests *= chosen.again
    report = Report(every, excluded, passing, chosen.lines)
    start = time.monotonic()
    chances = dict.fromkeys(unsteady, CHANCES)
    limits = {
        test: min(chosen.limit, UNSTEADY_LIMIT_S) if test in unsteady else chosen.limit
        for test in tests
    }
    while tests:
        again = []
        for result in run_all(tests, suites, chosen.at_once, limits):
            chances[result.test] = chances.get(result.test, 1) - 1
            if result.outcome == "failed" and chances[result.test] > 0:
                again.append(result.test)
            else:
                report.add(result)
        tests = again
    report.print_summary(time.monotonic() - start)
    if chosen.update:
        write_passing(_HERE / "passing.txt", passing, report)
    return 1 if report.regressions() and not chosen.torch else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.torch_suites")
    add = parser.add_argument
    add("names", nargs="*", help="suites, or single tests; default: all")
    add("--fast", action="store_true", help="a part of the passing ones")
    add("--torch", action="store_true", help="against torch itself")
    add("--excluded", action="store_true", help="run excluded ones too")
    add("--update", action="store_true", help="rewrite the list of passing ones")
    add("--at-once", type=int, default=2, help="tests side by side")
    add("--limit", type=float, default=60.0, help="seconds for one test")
    add("--lines", type=int, default=12, help="of each failure; 0: all")
    add("--again", type=int, default=1, help="run each so many times")
    return parser.parse_args()


def _load(names: list[str]) -> dict[str, wheel.Suite]:
    wanted = {name.partition(".")[0] for name in names} or set(wheel.SUITES)
    if unknown := wanted - set(wheel.SUITES):
        raise SystemExit(
            f"no such suite: {sorted(unknown)}; known: {list(wheel.SUITES)}"
        )
    return {name: wheel.load(name) for name in wheel.SUITES if name in wanted}


def _check_names(chosen: list[str], listed: set[str], every: list[str]) -> None:
    """A list with a name that no test has would never be noticed otherwise."""
    suites = {test.partition(".")[0] for test in every}
    listed = {test for test in listed if test.partition(".")[0] in suites}
    listed |= {name for name in chosen if "." in name}
    if missing := listed - set(every):
        raise SystemExit(f"not in this version of torch: {sorted(missing)}")


def _select(names: list[str], every: list[str]) -> list[str]:
    if not names:
        return every
    return [test for test in every if test in names or test.partition(".")[0] in names]


def _some_of(tests: list[str]) -> list[str]:
    """The same part every time, from each suite."""
    by_suite: dict[str, list[str]] = {}
    for test in tests:
        by_suite.setdefault(test.partition(".")[0], []).append(test)
    chooser = random.Random(0)
    return [
        test
        for some in by_suite.values()
        for test in chooser.sample(some, max(1, round(FAST_SHARE * len(some))))
    ]
