"""The command line of the fuzzer; see __main__.py."""

from __future__ import annotations

import argparse
import random
import time

from fuzz.running import run
from fuzz.targets import TARGETS, make_targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many in all")
    parser.add_argument("--seed", type=int, help="a fresh one if left out")
    parser.add_argument("--target", choices=list(TARGETS), help="this one only")
    parser.add_argument("--first", type=int, default=0, help="block to begin with")
    parser.add_argument("--block", type=int, help="this block only")
    chosen = parser.parse_args()
    seed = random.randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}")
    targets = make_targets([chosen.target] if chosen.target else list(TARGETS))
    start = time.monotonic()
    if chosen.block is not None:
        reports = run(targets, seed, 1, chosen.block)
    else:
        reports = run(targets, seed, chosen.inputs, chosen.first)
    took = time.monotonic() - start
    print(*reports, sep="\n")
    total = sum(report.num_inputs for report in reports)
    num_findings = sum(len(report.findings) for report in reports)
    print(f"{total} inputs in {took:.0f} s, seed {seed}: {num_findings} findings")
    return 1 if num_findings else 0
