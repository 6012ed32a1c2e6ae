"""``gradwire run``: starts a program as a group of workers with roles."""

from __future__ import annotations

import argparse
from typing import Any

from gradwire.errors import UsageError
from gradwire.launch import _roles

__all__ = ["add_to"]

_DESCRIPTION = """\
Starts a program as a group of workers, on torch's own elastic launcher:

  gradwire run --role ps=1 --role trainer=3 train.py --lr 0.1

Each worker is a process. gradwire.rpc.init_rpc() needs no arguments in it, and
gradwire.launch.this_worker() tells its name and role: here ps, trainer:0, trainer:1 and
trainer:2, with ranks in this order. Several hosts: run the same command on each, with
--nnodes and --rdzv-endpoint, and with certificates (gradwire certs), or, on a network that
is yours alone, with GRADWIRE_ALLOW_PLAIN_TCP=1 and the same GRADWIRE_SECRET.
"""

_TORCH_OPTIONS = {
    "node-rank": "rank of this host; without it the hosts agree on an order",
    "rdzv-endpoint": "where the hosts meet: HOST:PORT of one of them; needed if there are several",
    "rdzv-id": "name of the job, if several meet at one place",
    "local-addr": "address of this host that the others reach",
}


def add_to(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="start a program as a group of workers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="NAME=COUNT",
        help="a role and its number of workers, on all hosts together; repeat it. "
        "Without any the role is worker, with --nproc-per-node workers on each host",
    )
    parser.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="number of hosts"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="workers on this host"
    )
    for name, text in _TORCH_OPTIONS.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all workers are started again after one has failed",
    )
    parser.add_argument("--log-dir", help="keep what the workers print there")
    parser.add_argument(
        "-m", "--module", action="store_true", help="the program is a module's name"
    )
    parser.add_argument("program", help="script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # The launcher of torch takes a second to import.
    from gradwire.launch._run import Job, run_job  # noqa: PLC0415

    _check_at_least(1, "--nnodes", options.nnodes)
    _check_at_least(1, "--nproc-per-node", options.nproc_per_node)
    _check_at_least(0, "--max-restarts", options.max_restarts)
    if options.nnodes > 1 and not options.rdzv_endpoint:
        raise UsageError(
            f"{options.nnodes} hosts need a place to meet: pass --rdzv-endpoint HOST:PORT, "
            "with the name of one of the hosts and a free port there, the same on each host"
        )
    num_here = options.nproc_per_node
    roles = (
        _roles.parse_roles(options.role)
        if options.role
        else _roles.check_roles({"worker": (num_here or 1) * options.nnodes})
    )
    torch_options = [
        f"--{name}={value}"
        for name in _TORCH_OPTIONS
        if (value := getattr(options, name.replace("-", "_"))) is not None
    ]
    if torch_options:
        backend = "c10d" if options.node_rank is None else "static"
        torch_options.append(f"--rdzv-backend={backend}")
    return run_job(
        Job(
            roles,
            [*(["-m"] if options.module else []), options.program, *options.arguments],
            options.nnodes,
            num_here,
            torch_options,
            options.max_restarts,
            options.log_dir,
        )
    )


def _check_at_least(least: int, name: str, found: int | None) -> None:
    if found is not None and found < least:
        raise UsageError(f"{name} must be at least {least}, found {found}")
