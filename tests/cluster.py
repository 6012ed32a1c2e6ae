"""Real worker processes for tests, cheap to start and bounded in time.

Importing torch takes more than a second, so workers are forked from a server process
that has imported it once. Each worker calls ``init_rpc`` and then runs on its main
thread, one after the other, the functions that the test sends through a pipe. The pipe
has nothing to do with gradwire: the harness keeps working when the code under test hangs.

    with Cluster(2) as cluster:
        assert cluster.run(0, functions.add, 1, 2) == 3

Invariants:
1. No wait is unbounded. One that reaches its limit raises an error that carries the
   stacks of all workers.
2. A worker outlives neither its `Cluster` nor the test process.
3. A worker that dies without the test's doing makes `Cluster.close` raise.

The workers' side is worker_process.py; what they run for tests is in functions.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import leaks
import worker_process

START_S = 30.0
RUN_S = 30.0
CLOSE_S = 15.0
JOIN_S = 5.0
# One read or write on a pipe: only a worker that stops half-way gets near it.
PIPE_S = 10.0

_context = multiprocessing.get_context("forkserver")
# pytest is among them because a function in a test file brings it in.
# The compiler's package takes seconds to import; checkpointing needs it too.
_context.set_forkserver_preload(["torch", "torch._dynamo", "gradwire.rpc", "pytest"])

# What the fork server keeps open in the test process for good.
fork_server_fds: set[int] = set()
fork_server_pids: set[int] = set()


class ClusterError(Exception):
    """Workers did not behave; the text says which, and where they are stuck."""


class WorkerTimeout(ClusterError, TimeoutError):
    """A worker did not answer the test in time."""


class WorkerDied(ClusterError):
    """A worker ended while the test waited for it."""


class RemoteTraceback(Exception):
    """Cause of an exception that came from a worker: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def ensure_fork_server() -> None:
    """Starts the server that workers are forked from, unless it is running."""
    before = leaks.take_snapshot()
    multiprocessing.forkserver.ensure_running()
    after = leaks.take_snapshot()
    fork_server_fds.update(_new_descriptors(before, after))
    fork_server_pids.update(after.children - before.children)


def _new_descriptors(before: leaks.Snapshot, after: leaks.Snapshot) -> set[int]:
    # Compares targets too: a number may have been closed and taken again in between.
    return {fd for fd, _ in after.descriptors.items() - before.descriptors.items()}


@dataclass
class _Worker:
    name: str
    process: Any  # typeshed has no common base for the processes of the contexts
    connection: multiprocessing.connection.Connection
    stacks: Path
    # All that this worker keeps open in the test process.
    fds: set[int]
    # The test killed it, or allowed it to die.
    may_be_dead: bool = False
    stopped: bool = False
    next_call: int = worker_process.READY + 1
    # Guards the receiving side: connection reads, replies, lost. Taken by every test
    # thread that waits for a result of this worker.
    lock: threading.Lock = field(default_factory=threading.Lock)
    replies: dict[int, worker_process.Reply] = field(default_factory=dict)
    lost: bool = False

    def receive(self, call_id: int, timeout: float) -> worker_process.Reply:
        """Waits for one reply and keeps the others; raises EOFError if the worker died."""
        deadline = time.monotonic() + timeout
        while True:
            with self.lock:
                if call_id in self.replies:
                    return self.replies.pop(call_id)
                if self.lost:
                    raise EOFError
                # In slices, so that several threads can wait for the same worker.
                remaining = min(deadline - time.monotonic(), 0.05)
                try:
                    if self.connection.poll(max(remaining, 0)):
                        reply: worker_process.Reply = pickle.loads(
                            self.connection.recv_bytes()
                        )
                        self.replies[reply.call_id] = reply
                        continue
                except (EOFError, OSError):
                    self.lost = True
                    continue
            if time.monotonic() >= deadline:
                raise TimeoutError

    def has_answered(self, call_id: int) -> bool:
        """Whether `receive` would return, or raise EOFError, at once."""
        try:
            reply = self.receive(call_id, 0.0)
        except TimeoutError:
            return False
        except EOFError:
            return True
        with self.lock:
            self.replies[call_id] = reply
        return True

    def dispose(self) -> None:
        self.connection.close()
        self.process.join(JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(JOIN_S)
        self.process.close()


class Handle:
    """A function that is running, or waiting its turn, in a worker."""

    def __init__(
        self, cluster: Cluster, worker: _Worker, call_id: int, text: str
    ) -> None:
        self._cluster = cluster
        self._worker = worker
        self._call_id = call_id
        self._text = text

    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self._worker.has_answered(self._call_id)

    def result(self, timeout: float = RUN_S) -> Any:
        """The value that the function returned; raises what it raised.

        Raises:
            WorkerTimeout: The worker did not finish in time; with all stacks.
            WorkerDied: The worker ended instead of answering.
        """
        worker = self._worker
        try:
            reply = worker.receive(self._call_id, timeout)
        except TimeoutError:
            raise WorkerTimeout(
                f"worker {worker.name!r} did not finish {self._text} within {timeout} s\n"
                + self._cluster.dump_stacks()
            ) from None
        except EOFError:
            raise WorkerDied(
                f"worker {worker.name!r} died during {self._text}, "
                + _describe_end(worker)
            ) from None
        if reply.error is not None:
            raise reply.error from RemoteTraceback(reply.error_text)
        return reply.value


class Cluster:
    """A group of worker processes that have called ``init_rpc``.

    Args:
        world_size: How many workers.
        options: Arguments for ``RpcBackendOptions`` of every worker.
        names: Names by rank; ``w0``, ``w1`` and so on if left out.
        init_method: Where workers meet; a file of their own if left out.
        secret: The cluster's secret.
        start_timeout: Limit for all workers to be ready.
        namespaces: Network namespaces by rank, for workers that play hosts.

    Raises:
        Exception: Whatever ``init_rpc`` raised in the first worker that failed.
    """

    def __init__(
        self,
        world_size: int,
        options: dict[str, Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        init_method: str | None = None,
        secret: str | bytes | None = None,
        start_timeout: float = START_S,
        namespaces: Sequence[str] | None = None,
    ) -> None:
        self.world_size = world_size
        self.names = list(names or (f"w{rank}" for rank in range(world_size)))
        if len(self.names) != world_size:
            raise ValueError(f"{world_size} workers, but {len(self.names)} names")
        self._namespaces = list(namespaces or ())
        ensure_fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="gradwire-test-"))
        self._options = {
            "init_method": init_method or f"file://{self._folder}/store",
            **({} if secret is None else {"secret": secret}),
            **(options or {}),
        }
        self._num_started = 0
        self._closed = False
        # Whether the test has killed, stopped or restarted a worker.
        self.disturbed = False
        self._workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self._workers.append(self._fork(rank))
            self._wait_until_ready(self._workers, start_timeout)
        except BaseException:
            self._kill_all()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close(graceful=not self.disturbed)
            return
        # The workers may be in any state; the error that brought us here matters more.
        with contextlib.suppress(ClusterError):
            self.close(graceful=False)

    def run(
        self,
        rank: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = RUN_S,
        **kwargs: Any,
    ) -> Any:
        """Runs a function on the main thread of a worker and returns its result."""
        return self.start(rank, function, *args, **kwargs).result(timeout)

    def start(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Handle:
        """Like `run`, without waiting. A worker runs one function after the other."""
        if self._closed:
            raise ClusterError("the cluster is closed")
        worker = self._workers[rank]
        body = pickle.dumps((function, args, kwargs))
        call_id = worker.next_call
        worker.next_call += 1
        text = getattr(function, "__qualname__", repr(function))
        try:
            worker.connection.send_bytes(
                pickle.dumps(worker_process.Call(call_id, body))
            )
        except BlockingIOError:
            raise WorkerTimeout(
                f"worker {worker.name!r} does not take {text}\n" + self.dump_stacks()
            ) from None
        except OSError:
            pass  # it is dead, and the handle will say so with its exit code
        return Handle(self, worker, call_id, text)

    def pid(self, rank: int) -> int:
        """Process id of a worker."""
        pid: int = self._workers[rank].process.pid
        return pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal that may end the worker; waits for the end after SIGKILL."""
        worker = self._workers[rank]
        self.disturbed = worker.may_be_dead = True
        os.kill(worker.process.pid, signum)
        if signum == signal.SIGKILL:
            self.wait_dead(rank)

    def wait_dead(self, rank: int, timeout: float = JOIN_S) -> int:
        """Waits until a worker has ended, which is then no failure; its exit code."""
        worker = self._workers[rank]
        self.disturbed = worker.may_be_dead = True
        worker.process.join(timeout)
        code: int | None = worker.process.exitcode
        if code is None:
            raise WorkerTimeout(
                f"worker {worker.name!r} is still alive after {timeout} s\n"
                + self.dump_stacks()
            )
        return code

    def stop(self, rank: int) -> None:
        """Freezes a worker (SIGSTOP) and waits until all its threads stand still."""
        worker = self._workers[rank]
        self.disturbed = worker.stopped = True
        os.kill(worker.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + JOIN_S
        while not _is_frozen(worker.process.pid):
            if time.monotonic() > deadline:
                raise WorkerTimeout(f"worker {worker.name!r} does not stop")
            time.sleep(0.001)

    def cont(self, rank: int) -> None:
        """Lets a frozen worker go on (SIGCONT)."""
        worker = self._workers[rank]
        os.kill(worker.process.pid, signal.SIGCONT)
        worker.stopped = False

    def restart(self, rank: int, timeout: float = START_S) -> None:
        """Starts a new process under the same name and rank, with the same store."""
        self.begin_restart(rank).result(timeout)

    def begin_restart(self, rank: int, *first: Any) -> Handle:
        """Like `restart`, without waiting; the result comes when the worker is ready.

        Args:
            rank: Which worker.
            first: A function that it calls before ``init_rpc``, and its arguments.
        """
        if self._workers[rank].process.is_alive():
            self.kill(rank)
        self.disturbed = True
        self._workers[rank].dispose()
        self._workers[rank] = worker = self._fork(rank, first)
        return Handle(self, worker, worker_process.READY, "init_rpc")

    def is_healthy(self) -> bool:
        """Whether nobody disturbed it and every worker can call its neighbour."""
        if self._closed or self.disturbed:
            return False
        try:
            calls = [
                self.start(rank, worker_process.call_neighbour, self.names[rank - 1])
                for rank in range(self.world_size)
            ]
            for call in calls:
                call.result(worker_process.HEALTH_S)
        except Exception:
            return False
        return True

    def fds(self) -> set[int]:
        """Descriptors that this cluster holds open in the test process."""
        if self._closed:
            return set()
        return set().union(*(worker.fds for worker in self._workers))

    def pids(self) -> set[int]:
        """Process ids of all workers."""
        if self._closed:
            return set()
        return {worker.process.pid for worker in self._workers}

    def dump_stacks(self) -> str:
        """Where every thread of every worker is just now, as text."""
        if self._closed:
            return "(the cluster is closed)"
        earlier = {worker.name: _read(worker.stacks) for worker in self._workers}
        asked = set()
        for worker in self._workers:
            # Before the file exists nobody handles the signal, and it would kill.
            if (
                worker.process.is_alive()
                and not worker.stopped
                and worker.stacks.exists()
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGUSR1)
                    asked.add(worker.name)
        parts = []
        for worker in self._workers:
            parts.append(f"--- {worker.name} ({_describe_state(worker)})")
            if worker.name in asked:
                parts.append(_read_when_settled(worker.stacks, earlier[worker.name]))
        return "\n".join(parts)

    def close(self, graceful: bool = True) -> None:
        """Shuts all live workers down and waits for their processes.

        Raises:
            ClusterError: A worker failed to shut down, left something behind, died on
                its own, or had to be killed.
        """
        if self._closed:
            return
        problems: list[str] = []
        try:
            calls = []
            for rank, worker in enumerate(self._workers):
                if worker.stopped:
                    worker.may_be_dead = True
                    worker.process.kill()
                elif worker.process.is_alive():
                    calls.append(
                        self.start(rank, worker_process.shut_down, graceful, CLOSE_S)
                    )
                elif not worker.may_be_dead:
                    problems.append(f"worker {worker.name!r}: " + _describe_end(worker))
            deadline = time.monotonic() + CLOSE_S
            for call in calls:
                try:
                    call.result(max(deadline - time.monotonic(), 0.0))
                except WorkerDied as error:
                    if not call._worker.may_be_dead:
                        problems.append(str(error))
                except Exception as error:
                    # Shows the cause as well, which is the traceback in the worker.
                    text = "".join(traceback.format_exception(error))
                    problems.append(f"worker {call._worker.name!r}: {text}")
            problems += self._join_all()
        finally:
            self._kill_all()
        if problems:
            raise ClusterError("\n".join(problems))

    def _join_all(self) -> list[str]:
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + JOIN_S
        problems = []
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0.0))
            if worker.process.is_alive() and not worker.may_be_dead:
                problems.append(
                    f"worker {worker.name!r} did not exit and was killed\n"
                    + self.dump_stacks()
                )
        return problems

    def _kill_all(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
        for worker in self._workers:
            worker.dispose()
        self._closed = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fork(self, rank: int, first: tuple[Any, ...] = ()) -> _Worker:
        name = self.names[rank]
        self._num_started += 1
        stacks = self._folder / f"{name.replace(':', '_')}.{self._num_started}.stacks"
        setup = worker_process.Settings(
            name,
            rank,
            self.world_size,
            self._options,
            stacks,
            self._namespaces[rank] if self._namespaces else None,
            first,
        )
        before = leaks.take_snapshot()
        ours, theirs = _context.Pipe()
        with theirs:
            process = _context.Process(
                target=worker_process.serve,
                args=(theirs, setup),
                name=name,
                daemon=True,
            )
            process.start()
        _limit_blocking(ours)
        fds = _new_descriptors(before, leaks.take_snapshot())
        return _Worker(name, process, ours, stacks, fds)

    def _wait_until_ready(self, workers: list[_Worker], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: worker for worker in workers}
        while waiting:
            remaining = max(deadline - time.monotonic(), 0.0)
            ready = multiprocessing.connection.wait(list(waiting), remaining)
            if not ready:
                late = ", ".join(worker.name for worker in waiting.values())
                raise WorkerTimeout(
                    f"not ready within {timeout} s: {late}\n" + self.dump_stacks()
                )
            # The first that fails is the cause; the others only wait for it.
            for connection in ready:
                worker = waiting.pop(connection)  # type: ignore[call-overload]
                Handle(self, worker, worker_process.READY, "init_rpc").result(PIPE_S)


def _limit_blocking(connection: multiprocessing.connection.Connection) -> None:
    limit = struct.pack("ll", int(PIPE_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _is_frozen(pid: int) -> bool:
    # The kernel stops the threads one by one, some time after the signal was sent.
    for task in Path(f"/proc/{pid}/task").iterdir():
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        if state not in "Tt":
            return False
    return True


def _describe_state(worker: _Worker) -> str:
    if not worker.process.is_alive():
        return f"dead, exit code {worker.process.exitcode}"
    return f"pid {worker.process.pid}, " + ("stopped" if worker.stopped else "alive")


def _describe_end(worker: _Worker) -> str:
    worker.process.join(JOIN_S)
    text = f"exit code {worker.process.exitcode}"
    stacks = _read(worker.stacks)
    return f"{text}\n{stacks}" if stacks else text


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read_when_settled(path: Path, earlier: str) -> str:
    # The end of a dump cannot be seen, so wait until it has not grown for a moment.
    deadline = time.monotonic() + 1.0
    text = _read(path)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        more = _read(path)
        if more != earlier and more == text:
            break
        text = more
    return text[len(earlier) :].rstrip()
