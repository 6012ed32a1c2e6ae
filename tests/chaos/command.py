"""The command line of chaos runs; see __main__.py."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
import traceback

from chaos.driver import Run
from chaos.kill_points import WHENS, Point
from chaos.sweep import VICTIMS, Sweep
from cluster import ensure_fork_server
from namespaces import Hosts, NotPermitted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, help="decides all faults; printed if drawn")
    parser.add_argument("--workers", type=int, default=3, help="that may be killed")
    parser.add_argument("--owners", type=int, default=2, help="that hold parameters")
    parser.add_argument(
        "--hosts", action="store_true", help="each worker in a network namespace"
    )
    parser.add_argument("--tls", action="store_true", help="hosts speak TLS")
    parser.add_argument(
        "--points", action="store_true", help="instead: die at each message of a step"
    )
    parser.add_argument("--quiet", action="store_true", help="only the summary")
    chosen = parser.parse_args()
    if chosen.points:
        return try_all_points()
    seed = random.randrange(1, 1 << 32) if chosen.seed is None else chosen.seed
    again = f"python -m tests.chaos --minutes {chosen.minutes} --seed {seed}"
    again += f" --workers {chosen.workers} --owners {chosen.owners}"
    again += (" --hosts" if chosen.hosts else "") + (" --tls" if chosen.tls else "")
    print(f"to run it again: {again}", flush=True)
    ensure_fork_server()
    with contextlib.ExitStack() as stack:
        hosts = None
        if chosen.hosts:
            try:
                hosts = Hosts(Run.num_workers(chosen.workers, chosen.owners))
            except NotPermitted as error:
                print(f"skipped: {error}")
                return 0
            stack.callback(hosts.close)
        return play(seed, chosen.minutes * 60, chosen, hosts, again)


def try_all_points() -> int:
    """Kills each worker at each message of a training step."""
    ensure_fork_server()
    failed = []
    with Sweep() as sweep:
        for victim, when in itertools.product(VICTIMS, WHENS):
            for number in itertools.count(1):
                point = Point(when, number)
                try:
                    is_reached = sweep.try_point(victim, point)
                except Exception:
                    traceback.print_exc()
                    failed.append(f"{victim} {point}")
                    sweep.start_anew()
                    continue
                if not is_reached:
                    print(f"{victim}: died {when} each of {number - 1} messages")
                    break
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


def play(
    seed: int,
    seconds: float,
    chosen: argparse.Namespace,
    hosts: Hosts | None,
    again: str,
) -> int:
    def show(line: str) -> None:
        if not chosen.quiet:
            print(line, flush=True)

    run: Run | None = None
    try:
        with Run(
            seed,
            num_stages=chosen.workers,
            num_owners=chosen.owners,
            hosts=hosts,
            tls=chosen.tls and hosts is not None,
            show=show,
        ) as run:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                run.play()
    except Exception:
        if run is not None and chosen.quiet:
            print("\n".join(run.lines))
        traceback.print_exc()
        print(f"FAILED; to run it again: {again}", flush=True)
        return 1
    print(run.summary(), flush=True)
    return 0
