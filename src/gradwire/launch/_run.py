"""``gradwire run``: torch's elastic launcher, with roles, readable output and one secret.

The launcher of torch starts, watches and restarts the processes, on one host or on
several. Added here: names (see `_roles`), the output of the workers with these names
before each line, the traceback of the worker that failed first, and a cluster secret.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from gradwire._config import (
    ROLES_VARIABLE,
    RpcBackendOptions,
    find_secret,
    find_tls,
)
from gradwire.errors import GradwireError, LaunchError, UsageError
from gradwire.launch._output import Output, say
from gradwire.launch._roles import format_roles, worker_of
from gradwire.launch._spawn import describe_end

__all__ = ["Job", "run_job"]

_END_S = 5  # for workers that are asked to end
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Job:
    """What ``gradwire run`` was asked for.

    Attributes:
        roles: Roles and their numbers of workers, on all hosts together.
        program: Script and arguments, or ``-m``, module and arguments.
        num_nodes: How many hosts take part; each runs this command.
        workers_per_node: How many of the workers run on this host. None: an equal part.
        torch_options: Further options of torch's launcher, as on its command line.
        max_restarts: How often all workers are started again after one has failed.
        log_folder: Where what workers print is kept. None: nowhere.
    """

    roles: Mapping[str, int]
    program: Sequence[str]
    num_nodes: int = 1
    workers_per_node: int | None = None
    torch_options: Sequence[str] = ()
    max_restarts: int = 0
    log_folder: str | None = None

    def num_here(self) -> int:
        """How many workers run on this host."""
        total = sum(self.roles.values())
        if self.workers_per_node is not None:
            if self.num_nodes == 1:
                self.check_size(self.workers_per_node)
            return self.workers_per_node
        if total % self.num_nodes:
            raise UsageError(
                f"{total} workers cannot be dealt out evenly to {self.num_nodes} hosts; say "
                "on each host how many run there: --nproc-per-node N"
            )
        return total // self.num_nodes

    def check_size(self, found: int) -> None:
        """All hosts together must start the workers of the roles: no more, no fewer."""
        total = sum(self.roles.values())
        if found != total:
            raise UsageError(
                f"the roles {format_roles(self.roles)} have {total} workers on all hosts "
                f"together, but {found} are started: the numbers of --nproc-per-node must "
                f"add up to {total}"
            )


def run_job(job: Job) -> int:
    """Starts the workers and waits for them.

    Returns:
        The exit status: 0, or that of the first worker that failed.

    Raises:
        UsageError: The job cannot be run as it was described.
    """
    _check_program(job.program)
    num_here = job.num_here()
    _ensure_secret(job.num_nodes)
    os.environ[ROLES_VARIABLE] = format_roles(job.roles)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What it has to say is said below, once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before there are workers it just ends this process, also where torch waits
        # outside of Python; then torch has its own handlers.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    names = [worker_of(job.roles, r).name for r in range(sum(job.roles.values()))]
    output = Output(max(map(len, names)))
    logs = _Logs(job, output)
    try:
        return _launch(job, num_here, logs, output)
    finally:
        output.close()
        logs.close()


def _check_program(program: Sequence[str]) -> None:
    if not program:
        raise UsageError(
            "gradwire run needs a script: gradwire run --role w=2 train.py"
        )
    if program[0] != "-m" and not Path(program[0]).exists():  # it may be a folder
        raise UsageError(f"there is no script {program[0]!r}")


def _ensure_secret(num_nodes: int) -> None:
    """All workers get one secret; between hosts only the user can hand it out."""
    options = RpcBackendOptions()
    if find_secret(options) is not None or find_tls(options) is not None:
        return
    if num_nodes > 1:
        raise UsageError(
            "workers on several hosts need certificates (GRADWIRE_TLS_CA, _CERT and _KEY; "
            "gradwire certs makes them), or GRADWIRE_ALLOW_PLAIN_TCP=1 and one secret: set "
            "GRADWIRE_SECRET, or GRADWIRE_SECRET_FILE, to the same on every host "
            "(python -c 'import secrets; print(secrets.token_hex(32))' makes one)"
        )
    os.environ["GRADWIRE_SECRET"] = secrets.token_hex(32)


def _launch(job: Job, num_here: int, logs: _Logs, output: Output) -> int:
    arguments = get_args_parser().parse_args(
        [
            f"--nnodes={job.num_nodes}",
            f"--nproc-per-node={num_here}",
            f"--max-restarts={job.max_restarts}",
            # Else torch makes one that stays.
            f"--log-dir={os.devnull}",
            *(
                job.torch_options
                or ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
            ),
            "--",
            job.program[0],
        ]
    )
    if job.num_nodes > 1:
        say(f"waits for all {job.num_nodes} hosts at {arguments.rdzv_endpoint}")
    config, _, _ = config_from_args(arguments)
    config.run_id = config.run_id or "gradwire"
    config.logs_specs = logs
    config.shutdown_timeout = _END_S
    # One that is ignored, as with nohup, stays so.
    config.signals_to_handle = ",".join(
        one.name for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN
    )
    command = ["-u", "-m", "gradwire.launch._worker", str(os.getpid()), *job.program]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        output.flush()
        return logs.report(error.failures)
    except SignalException as error:
        output.flush()
        name = signal.Signals(error.sigval).name
        say(f"ended by {name}; all workers are ended")
        return 128 + int(error.sigval)
    except GradwireError:
        raise
    except (RuntimeError, TimeoutError, ConnectionError) as error:
        raise LaunchError(f"the launcher of torch failed: {error}") from error
    return 0


class _Logs(DefaultLogsSpecs):
    """Where workers write, and who shows it.

    The temporary folder is made with the first workers: a signal that comes earlier ends
    this process, and would leave it behind.
    """

    def __init__(self, job: Job, output: Output) -> None:
        super().__init__(log_dir=job.log_folder or os.devnull, redirects=Std.ALL)
        self._temporary: str | None = None
        self._job = job
        self._output = output
        self._names: dict[int, str] = {}  # by rank
        self._error_files: dict[int, str] = {}  # by rank
        self._attempt = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch before it starts the workers, once more at each restart."""
        if self._attempt:
            self._output.flush()
            self.report({})
            say(
                f"all workers are started again ({self._attempt} of "
                f"{self._job.max_restarts})"
            )
        self._attempt += 1
        for env in envs.values():
            self._job.check_size(int(env["WORLD_SIZE"]))
        if self._job.log_folder is None and self._temporary is None:
            self._temporary = self._root_log_dir = tempfile.mkdtemp(prefix="gradwire-")
        destination: LogsDest = super().reify(envs)
        self._error_files = {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            name = worker_of(self._job.roles, rank).name
            self._names[rank] = name
            self._error_files[rank] = destination.error_files[local_rank]
            self._output.follow(name, destination.stdouts[local_rank], sys.stdout)
            self._output.follow(name, destination.stderrs[local_rank], sys.stderr)
        return destination

    def close(self) -> None:
        """Takes the temporary folder away."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def report(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Says who failed, the first with its traceback; returns its exit status."""
        reports = [
            _Failure(self._names.get(rank, f"rank {rank}"), failures.get(rank), found)
            for rank, path in self._error_files.items()
            if (found := _read(path)) is not None or rank in failures
        ]
        # Those that the launcher has ended after the first failure are of no interest.
        reports = [r for r in reports if not r.was_asked_to_end] or reports
        reports.sort(key=lambda failure: failure.order)
        if not reports:
            return 1
        first, *others = reports
        say(f"worker {first.name!r} failed first{first.how}:\n\n{first.trace}".rstrip())
        for other in others:
            say(f"worker {other.name!r} failed then{other.how}: {other.text}")
        return first.status


@dataclass(frozen=True)
class _Failure:
    """How one worker failed."""

    name: str
    process: ProcessFailure | None
    report: dict[str, Any] | None

    @property
    def order(self) -> tuple[bool, float]:
        # One that died without a word is the cause of the losses that others report.
        if self.report is None:
            return False, 0.0
        return bool(self.report.get("is_loss")), float(self.report.get("at", 0.0))

    @property
    def was_asked_to_end(self) -> bool:
        return self.report is None and self.status_of_process == -signal.SIGTERM

    @property
    def how(self) -> str:
        return "" if self.process is None else f" (process {self.process.pid})"

    @property
    def text(self) -> str:
        if self.report is None:
            return f"it {describe_end(self.status_of_process)}"
        return str(self.report["message"]["message"]).partition("\n")[0]

    @property
    def trace(self) -> str:
        if self.report is None:
            return f"it {describe_end(self.status_of_process)}"
        return str(self.report["message"]["extraInfo"]["py_callstack"])

    @property
    def status_of_process(self) -> int:
        return 1 if self.process is None else int(self.process.exitcode)

    @property
    def status(self) -> int:
        code = self.status_of_process
        return code if code > 0 else 128 - code


def _read(path: str) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text())
        report["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report
