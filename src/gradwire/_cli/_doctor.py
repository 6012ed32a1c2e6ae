"""``gradwire doctor``: what is wrong here, and how far the other workers are."""

from __future__ import annotations

import argparse
import os
from typing import Any

from gradwire.errors import GradwireError

__all__ = ["add_to"]

_DESCRIPTION = """\
Looks at this host (versions, interfaces, ports, memory, secret), then measures how
fast workers call each other: two of its own on this host, or, if a launcher starts it,
all workers of the group:

  gradwire doctor
  gradwire run --role worker=4 -m gradwire doctor
"""

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
_LIMIT_S = 120.0
_FAR_CLOCK_S = 1.0


def add_to(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this host, and measure the way to other workers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="look only, start no workers"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # The checks import all of gradwire.
    from gradwire._config import NAME_VARIABLE, RpcBackendOptions  # noqa: PLC0415
    from gradwire.launch._checks import check_host  # noqa: PLC0415

    is_member = NAME_VARIABLE in os.environ
    num_bad = 0
    for finding in check_host(RpcBackendOptions()):
        num_bad += finding.level == "bad"
        print(f"{_MARKS[finding.level]} {finding.what}: {finding.found}")
        if finding.remedy:
            print(f"       -> {finding.remedy}")
    if options.no_measure:
        return 1 if num_bad else 0
    try:
        lines = _measure_group() if is_member else _measure_own_pair()
    except GradwireError as error:
        # Without the traceback of another process, if it has one.
        why = error.args[0] if error.args else error
        lines = [(True, f"BAD  {'group' if is_member else 'workers'}: {why}")]
    for is_bad, line in lines:
        num_bad += is_bad
        print(line)
    return 1 if num_bad else 0


def _measure_group() -> list[tuple[bool, str]]:
    """As the member of a group that a launcher has started."""
    from gradwire import rpc  # noqa: PLC0415

    rpc.init_rpc()
    lines = _measure_all()
    rpc.shutdown(timeout=_LIMIT_S)
    return lines


def _measure_own_pair() -> list[tuple[bool, str]]:
    """With two workers on this host."""
    from gradwire import launch  # noqa: PLC0415
    from gradwire._config import TLS_VARIABLES  # noqa: PLC0415

    for variable in TLS_VARIABLES:
        # The certificate is for a worker of the job; these two have other names.
        os.environ.pop(variable, None)
    found = launch.spawn(
        {"doctor": _measure_all},
        {"doctor": 1, "patient": 1},
        timeout=_LIMIT_S,
        start_method="spawn",
    )
    lines: list[tuple[bool, str]] = found["doctor"]
    return lines


def _measure_all() -> list[tuple[bool, str]]:
    """Lines for all other workers; one worker after the other measures."""
    from gradwire import rpc  # noqa: PLC0415
    from gradwire.launch._measure import measure  # noqa: PLC0415

    me = rpc.get_worker_info()
    lines = []
    for info in rpc.get_workers():
        if info == me:
            continue
        found = measure(info.name)
        if found.problem:
            lines.append((True, f"BAD  to {info.name}: {found.problem}"))
            continue
        is_far = abs(found.clock_skew_s) > _FAR_CLOCK_S
        lines.append(
            (
                is_far,
                f"{'BAD ' if is_far else 'ok  '} to {info.name} by {found.transport}: "
                f"{found.latency_s * 1e6:.0f} us a call, "
                f"{found.bytes_per_s / 2**30:.2f} GiB/s, clock {found.clock_skew_s:+.3f} s"
                + ("\n       -> set the clocks of both hosts (NTP)" if is_far else ""),
            )
        )

    return lines
