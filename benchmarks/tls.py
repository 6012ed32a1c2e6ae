"""Calls by TLS beside the same calls by plain TCP, in one run on one machine.

Two workers for each transport, on loopback; all that ``rpc.py`` says about rounds and
pauses holds here, too. For TLS a certificate is made, with ``gradwire certs``.

    python benchmarks/tls.py                    # a table, in about half a minute
    python benchmarks/tls.py --save             # also into benchmarks/results/
    python benchmarks/tls.py --quick            # does it run at all; the numbers mean little
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for a start as a script

from benchmarks import rpc as calls

TRANSPORTS = ("tcp", "tls")
BARS = {"one_way_64mib": 0.5}  # of the speed of plain TCP
HEADINGS = ("call", "tcp", "tcp p99", "tls", "tls p99", "ratio", "by round", "bar")


def make_certificate(folder: str) -> None:
    """Makes a certificate for all workers, and puts it into the environment."""
    command = [sys.executable, "-m", "gradwire", "certs", "--out", folder]
    subprocess.run([*command, "--worker", "w*"], check=True, stdout=subprocess.DEVNULL)
    os.environ["GRADWIRE_TLS_CA"] = f"{folder}/ca.pem"
    os.environ["GRADWIRE_TLS_CERT"] = f"{folder}/wany.pem"
    os.environ["GRADWIRE_TLS_KEY"] = f"{folder}/wany.key"


def start(name: str, folder: str) -> calls.System:
    """Workers of one transport; only those of TLS may see the certificate."""
    if name == "tls":
        make_certificate(f"{folder}/certs")
    return calls.System(name, folder)


def run(num_rounds: int, quick: bool) -> dict[str, calls.Samples]:
    """Samples by transport."""
    # Plain TCP first: beside certificates it is refused.
    return calls.run_in_turns(TRANSPORTS, start, num_rounds, quick)


def summarise(samples: dict[str, calls.Samples]) -> list[dict[str, Any]]:
    """One entry for each piece of work; the ratio is the speed of TLS over TCP's."""
    items = []
    for item in calls.ITEMS:
        both = {
            name: calls._summary(
                samples[name][item.key], item.unit, item.scale, item.more_is_better
            )
            for name in TRANSPORTS
        }
        by_round = [
            calls._ratio(item, statistics.median(tcp), statistics.median(tls))
            for tcp, tls in zip(
                samples["tcp"][item.key], samples["tls"][item.key], strict=True
            )
        ]
        items.append(
            {
                "key": item.key,
                "text": item.text,
                **both,
                "ratio": calls._ratio(
                    item, both["tcp"]["median"], both["tls"]["median"]
                ),
                "ratio_by_round": statistics.median(by_round),
                "rounds": by_round,
                "bar": BARS.get(item.key),
            }
        )
    return items


def make_rows(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for item in items:
        numbers = [
            calls._number(item[name][what], item[name]["unit"])
            for name in TRANSPORTS
            for what in ("median", "p99")
        ]
        bar = "" if item["bar"] is None else f"{item['bar']:g}x"
        if bar:
            bar += " met" if item["ratio"] >= item["bar"] else " missed"
        ratios = f"{item['ratio']:.2f}x", f"{item['ratio_by_round']:.2f}x"
        rows.append((item["text"], *numbers, *ratios, bar))
    return rows


def format_report(result: dict[str, Any]) -> str:
    """A page for the folder of results; also what is printed."""
    about = result["run"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    return "\n".join(
        [
            "# Remote calls by TLS, beside plain TCP",
            "",
            f"- date: {about['date']}",
            f"- command: `{about['command']}` ({about['rounds']} rounds)",
            f"- versions: {versions}",
            f"- CPU: {about['cpu']['model']}, {about['cpu']['count']} cores",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in make_rows(result["items"])),
            "",
            "The ratio is the speed of TLS over that of TCP, of the medians; 'by round' is",
            "the median of the ratios of the single rounds.",
            "",
        ]
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="default 15, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="few calls, few rounds")
    parser.add_argument(
        "--save", action="store_true", help="write a report to benchmarks/results/"
    )
    options = parser.parse_args(arguments)
    num_rounds = options.rounds or (2 if options.quick else 15)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, which inherit it
    for variable in ("CA", "CERT", "KEY"):
        os.environ.pop(f"GRADWIRE_TLS_{variable}", None)

    items = summarise(run(num_rounds, options.quick))
    about = calls.describe_run(arguments, num_rounds)
    about["command"] = about["command"].replace("rpc.py", "tls.py")
    result = {"run": about, "items": items}
    print(format_report(result))
    if options.save:
        stem = calls.RESULTS / f"tls_{about['date'][:10]}"
        stem.with_suffix(".md").write_text(format_report(result))
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
