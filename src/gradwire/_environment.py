"""What the environment says of a worker's place in its group; pure.

torchrun, and most other launchers, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Where these are not set, they follow from what SLURM (srun) and Kubernetes (Jobs with
indexed completion) set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["find_variable", "first_host"]

_FIRST_PORT = 20_000
_NUM_PORTS = 20_000
_DEFAULT_PORT = 29_500  # the one that torch uses

_FALLBACKS = {
    "RANK": ("SLURM_PROCID", "JOB_COMPLETION_INDEX"),
    "WORLD_SIZE": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def find_variable(name: str, environ: Mapping[str, str]) -> str | None:
    """A variable of torchrun's, or what takes its place.

    Args:
        name: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` or ``MASTER_PORT``.
        environ: The environment.

    Example:
        >>> find_variable("MASTER_ADDR", {"SLURM_JOB_NODELIST": "gpu[03-07]"})
        'gpu03'
    """
    if found := environ.get(name):
        return found
    if name == "MASTER_ADDR":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        return first_host(nodes) if nodes else None
    if name == "MASTER_PORT":
        return _find_port(environ)
    for fallback in _FALLBACKS.get(name, ()):
        if found := environ.get(fallback):
            return found
    return None


def _find_port(environ: Mapping[str, str]) -> str | None:
    # Jobs that share a host must not meet at one port, so it follows from the job.
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdecimal():
        return str(_FIRST_PORT + int(job) % _NUM_PORTS)
    return str(_DEFAULT_PORT) if "JOB_COMPLETION_INDEX" in environ else None


def first_host(nodes: str) -> str:
    """The first of a list of hosts as SLURM writes it.

    Example:
        >>> first_host("gpu[03-07,12],login"), first_host("a1,a2")
        ('gpu03', 'a1')
    """
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        return nodes
    before, number, after = match.groups()
    return f"{before}{number or ''}{after or ''}"
