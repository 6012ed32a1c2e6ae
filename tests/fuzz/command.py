"""The command line of the fuzzer; see __main__.py."""

from __future__ import annotations

import argparse
import random
import time

from fuzz.running import Report, bounded_memory, run, run_block
from fuzz.targets import TARGETS, make_targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many in all")
    parser.add_argument("--seed", type=int, help="a fresh one if left out")
    parser.add_argument("--target", choices=list(TARGETS), help="this one only")
    parser.add_argument("--block", type=int, help="repeat one block of one target")
    chosen = parser.parse_args()
    seed = random.randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}")
    targets = make_targets([chosen.target] if chosen.target else list(TARGETS))
    start = time.monotonic()
    if chosen.block is not None:
        reports = [Report(target.name) for target in targets]
        with bounded_memory():
            for target, report in zip(targets, reports, strict=True):
                run_block(target, seed, chosen.block, report)
    else:
        reports = run(targets, seed, chosen.inputs)
    took = time.monotonic() - start
    for report in reports:
        print(report)
        for finding in report.findings:
            print(f"FINDING {finding}")
    total = sum(report.num_inputs for report in reports)
    num_findings = sum(len(report.findings) for report in reports)
    print(f"{total} inputs in {took:.0f} s, seed {seed}: {num_findings} findings")
    return 1 if num_findings else 0
