"""What ``gradwire doctor`` looks at on one host. Each check says what it found.

A check only looks: it changes nothing, opens nothing for others, and never raises.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from gradwire._config import RpcBackendOptions, find_secret, find_tls
from gradwire._environment import find_variable
from gradwire.errors import GradwireError
from gradwire.rpc.extension import find_address, num_cores, rendezvous_host
from gradwire.transport import get_transport
from gradwire.transport._tls_credentials import load_credentials

__all__ = ["Finding", "check_host"]

Level = Literal["ok", "note", "bad"]

_OLDEST_TORCH = (2, 11)
_TESTED_TORCH = (2, 13)
_SHORT_SECRET = 16
_FEW_DESCRIPTORS = 1024
_LITTLE_MEMORY = 1 << 30
_REACH_S = 3.0
_LARGEST_PORT = 0xFFFF


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def check_host(options: RpcBackendOptions) -> list[Finding]:
    """All that can be told without another worker."""
    findings: list[Finding] = []
    checks: list[Callable[[RpcBackendOptions], Iterator[Finding]]] = [
        _check_versions,
        _check_cores,
        _check_transports,
        _check_descriptors,
        _check_memory,
        _check_address,
        _check_port,
        _check_meeting_place,
        _check_secret,
        _check_tls,
    ]
    for check in checks:
        try:
            findings += check(options)
        except (GradwireError, OSError, ValueError) as error:
            what = check.__name__.removeprefix("_check_")
            findings.append(Finding("bad", what, str(error)))
    return findings


def _check_versions(options: RpcBackendOptions) -> Iterator[Finding]:
    del options
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", python)
    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _OLDEST_TORCH:
        yield Finding("bad", "torch", torch.__version__, "install torch 2.11 or later")
    elif numbers > _TESTED_TORCH:
        yield Finding(
            "note",
            "torch",
            torch.__version__,
            "newer than any that gradwire was tested with (2.13)",
        )
    else:
        yield Finding("ok", "torch", torch.__version__)


def _check_cores(options: RpcBackendOptions) -> Iterator[Finding]:
    del options
    cores = num_cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        yield Finding(
            "note",
            "threads",
            f"{cores} cores, OMP_NUM_THREADS is not set",
            "each worker uses all cores: with several on this host set OMP_NUM_THREADS "
            "(gradwire run and launch.spawn set it to 1)",
        )
    else:
        yield Finding("ok", "threads", f"{cores} cores, OMP_NUM_THREADS={threads}")


def _check_transports(options: RpcBackendOptions) -> Iterator[Finding]:
    names = options.transports or ("unix", "tls", "tcp")
    for name in names:
        transport = get_transport(name)
        if not transport.is_available():
            yield Finding("note", f"transport {name}", "not on this platform")
        elif name == "unix" and not transport.capabilities.shared_memory:
            yield Finding(
                "note",
                "shared memory",
                "not on this platform",
                "large tensors go through sockets, several times slower",
            )
        else:
            yield Finding("ok", f"transport {name}", "there")


def _check_descriptors(options: RpcBackendOptions) -> Iterator[Finding]:
    del options
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_DESCRIPTORS:
        yield Finding(
            "bad",
            "descriptors",
            f"{soft} allowed",
            f"each connection and each lent segment takes one: ulimit -n {hard}",
        )
    else:
        yield Finding("ok", "descriptors", f"{soft} allowed")


def _check_memory(options: RpcBackendOptions) -> Iterator[Finding]:
    free = _free_memory()
    if free is None:
        return
    text = f"{free / 2**30:.1f} GiB free"
    keep = options.shared_memory_keep_bytes
    if free < _LITTLE_MEMORY:
        yield Finding(
            "note",
            "memory",
            text,
            f"one connection keeps up to {keep >> 20} MiB of shared memory for its next "
            "tensors: lower RpcBackendOptions(shared_memory_keep_bytes=...)",
        )
    else:
        yield Finding("ok", "memory", text)
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        yield Finding(
            "ok",
            "/dev/shm",
            f"{size / 2**30:.1f} GiB; not used: segments are anonymous memory",
        )


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free.split()[1]) << 10


def _check_address(options: RpcBackendOptions) -> Iterator[Finding]:
    names = ", ".join(name for _, name in socket.if_nameindex())
    address = find_address(options, rendezvous_host(options))
    if address.startswith("127.") or address == "::1":
        yield Finding(
            "note",
            "address",
            f"{address} (interfaces: {names})",
            "only workers on this host reach it; between hosts set "
            "RpcBackendOptions(interface=...) or advertise_address=...",
        )
    else:
        yield Finding("ok", "address", f"{address} (interfaces: {names})")


def _check_port(options: RpcBackendOptions) -> Iterator[Finding]:
    address = options.bind_address or find_address(options, rendezvous_host(options))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, options.port))
        except OSError as error:
            yield Finding(
                "bad",
                "port",
                f"cannot listen on {address} port {options.port}: {error.strerror}",
                "end the process that holds it, or choose another port",
            )
            return
    yield Finding("ok", "port", f"{options.port or 'any'} on {address} can be used")


def _check_meeting_place(options: RpcBackendOptions) -> Iterator[Finding]:
    if not options.init_method.startswith("env://"):
        return
    host = find_variable("MASTER_ADDR", os.environ)
    port = find_variable("MASTER_PORT", os.environ)
    if not host or not port:
        yield Finding(
            "note",
            "meeting place",
            "MASTER_ADDR and MASTER_PORT are not set",
            "a launcher sets them: gradwire run, torchrun, srun",
        )
        return
    if not port.isdecimal() or int(port) > _LARGEST_PORT:
        yield Finding(
            "bad",
            "meeting place",
            f"MASTER_PORT is {port!r}",
            f"set it to the number of a port, up to {_LARGEST_PORT}",
        )
        return
    try:
        socket.getaddrinfo(host, int(port))
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, ValueError) as error:
        is_mine = find_variable("RANK", os.environ) in (None, "0")
        yield Finding(
            "note" if is_mine else "bad",
            "meeting place",
            f"nobody answers at {host}:{port}: {error}",
            "rank 0 serves it once it is started; is the name right, and does a firewall "
            "let the port through?",
        )
    else:
        yield Finding("ok", "meeting place", f"{host}:{port} answers")


def _check_secret(options: RpcBackendOptions) -> Iterator[Finding]:
    secret = find_secret(options)
    if secret is None:
        yield Finding(
            "note",
            "secret",
            "none",
            "workers of one user on one host need none; between hosts they need "
            "certificates (gradwire certs makes them), or GRADWIRE_ALLOW_PLAIN_TCP=1 and "
            "the same GRADWIRE_SECRET everywhere",
        )
        return
    if len(secret) < _SHORT_SECRET:
        yield Finding(
            "bad",
            "secret",
            f"only {len(secret)} bytes",
            "it can be guessed: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    else:
        yield Finding("ok", "secret", f"{len(secret)} bytes")
    path = os.environ.get("GRADWIRE_SECRET_FILE")
    if path and Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Finding(
            "bad",
            "secret file",
            f"{path} can be read by others",
            f"chmod 600 {path}",
        )


def _check_tls(options: RpcBackendOptions) -> Iterator[Finding]:
    tls = find_tls(options)
    if tls is None:
        yield Finding(
            "note",
            "tls",
            "no certificates",
            "between hosts they are needed, unless the network is trusted "
            "(RpcBackendOptions(allow_plain_tcp=True)): gradwire certs makes them",
        )
        return
    try:
        load_credentials(tls)
    except GradwireError as error:
        yield Finding("bad", "tls", str(error), "gradwire certs makes new ones")
    else:
        yield Finding("ok", "tls", f"{tls.certificate} is signed by {tls.ca}")
