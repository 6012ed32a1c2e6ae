"""The command line of the oracle; see __main__.py."""

from __future__ import annotations

import argparse
import random
import time

from oracle.generator import make_program
from oracle.programs import MODES
from oracle.running import LIMIT_S, ProgramFailed, Workers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle")
    parser.add_argument("--mode", choices=list(MODES), help="one mode only")
    parser.add_argument("--seed", type=int, help="one program only, or the first seed")
    parser.add_argument("--count", type=int, help="how many programs")
    parser.add_argument(
        "--shrink", action="store_true", help="look for a smaller program that fails"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one")
    chosen = parser.parse_args()
    modes = chosen.mode or MODES
    workers = Workers(chosen.limit)
    try:
        if chosen.seed is not None and chosen.count is None:
            return _run_one(workers, modes, chosen.seed, chosen.shrink)
        first = random.randrange(1, 1 << 32) if chosen.seed is None else chosen.seed
        return _run_many(workers, modes, first, chosen.count or 100)
    finally:
        workers.close()


def _run_many(workers: Workers, modes: str, first: int, count: int) -> int:
    print(f"{count} programs, modes {modes}, seeds {first} to {first + count - 1}")
    failed = []
    totals: dict[str, int] = {}
    start = time.monotonic()
    for number in range(count):
        mode, seed = modes[number % len(modes)], first + number
        try:
            counts = workers.check(mode, seed)
        except ProgramFailed as error:
            failed.append((mode, seed))
            print(f"FAILED: mode {mode}, seed {seed}\n{error}\n", flush=True)
            continue
        for name, amount in counts.items():
            totals[name] = totals.get(name, 0) + amount
        if (number + 1) % 1000 == 0:
            print(f"{number + 1} programs, {len(failed)} failed", flush=True)
    took = time.monotonic() - start
    print(f"{count} programs in {took:.0f} s, {len(failed)} failed; compared: {totals}")
    for mode, seed in failed:
        print(f"failed: python -m tests.oracle --mode {mode} --seed {seed}")
    return 1 if failed else 0


def _run_one(workers: Workers, modes: str, seed: int, shrinks: bool) -> int:
    failed = False
    for mode in modes:
        print(make_program(mode, seed))
        try:
            print(f"as in one process: {workers.check(mode, seed)}")
        except ProgramFailed as error:
            failed = True
            print(f"FAILED: mode {mode}, seed {seed}\n{error}\n", flush=True)
            if shrinks:
                _shrink(workers, mode, seed, error)
    return int(failed)


def _shrink(workers: Workers, mode: str, seed: int, failure: ProgramFailed) -> None:
    """Takes out one step after the other, for as long as the program fails like that."""
    whole = make_program(mode, seed)
    taken_out: set[int] = set()
    size = -1
    while size != len(taken_out):
        size = len(taken_out)
        # Calls have higher numbers than what they run: big pieces first.
        for one in sorted(whole.without(taken_out).removable(), reverse=True):
            if one not in whole.without(taken_out).removable():
                continue  # gone with its call
            try:
                workers.check(mode, seed, taken_out | {one})
            except ProgramFailed as error:
                if error.kind == failure.kind:
                    taken_out.add(one)
                    failure = error
    print(f"smallest: without {sorted(taken_out)}\n{failure}")
