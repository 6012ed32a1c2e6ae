"""What security and heartbeats cost a call once the connection is there: nothing.

Times cannot show this on a machine that others use, so system calls are counted, and the
code that ran is looked at.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

import pytest

import syscalls
from certificates import Office
from gradwire import rpc

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(sys.platform != "linux", reason="counts with strace"),
]

NUM_CALLS = 200
SECRET = "a secret of this test"
# Long enough for no heartbeat to fall into the time of the calls.
CALM = {"lost_after": 400.0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": CALM,
    "secret": {**CALM, "secret": SECRET},
    "lost_after": {"lost_after": 4000.0},
    "safe": {**CALM, "secret": SECRET, "serializer": "safe"},
}
# Waiting: how often depends on how quick the other side is.
WAITING = {
    "clock_gettime",
    "clock_nanosleep",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "futex",
    "gettid",
    "poll",
    "ppoll",
    "restart_syscall",
    "sched_yield",
    "timerfd_settime",
}
# The harness tells the worker what to do, and a new thread of the pool begins.
OTHERS = {
    *("read", "write", "clone", "clone3", "rseq", "set_robust_list"),
    *("mmap", "munmap", "mprotect", "madvise", "brk", "rt_sigprocmask"),
    *("sched_getaffinity", "exit"),
}
IDLE_FUNCTIONS = (
    ("_rounds.py", "_tick"),
    ("_rounds.py", "_round"),
    ("_link.py", "keep_house"),
)
IDLE_CODE = (
    "_handshake.py",
    "_handshake_records.py",
    "_connect.py",
    "_records.py",
    "_tls.py",
    "hmac.py",
    "ssl.py",
)


@rpc.export
def add(a: int, b: int) -> int:
    return a + b


def call_often(to: str, count: int = NUM_CALLS) -> float:
    start = time.monotonic()
    for _ in range(count):
        rpc.rpc_sync(to, add, (1, 2))
    return time.monotonic() - start


def count_signal_handlers() -> int:
    """Mostly one, Python's own for Ctrl-C; none in the background of a shell."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    return sum(callable(signal.getsignal(number)) for number in numbers)


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_a_call_costs_one_write_and_one_read_on_each_side(make_cluster, name):
    syscalls.require_strace()
    workers = make_cluster(2, CONFIGURATIONS[name])
    workers.run(1, what_ran)  # imports this module, and so exports
    workers.run(0, call_often, "w1")
    num_handlers = workers.run(0, count_signal_handlers)
    for rank in range(2):
        with syscalls.counted(workers.pid(rank)) as counts:
            workers.run(0, call_often, "w1")
        print(name, "caller" if rank == 0 else "callee", dict(counts.most_common()))
        assert counts["sendto"] + counts["sendmsg"] == NUM_CALLS
        # Now and then a reader finds that another thread was quicker.
        num_reads = counts["recvmsg"] + counts["recvfrom"]
        assert NUM_CALLS <= num_reads <= 1.1 * NUM_CALLS
        # The caller puts signal handlers off while it is at work.
        num_put_off = num_handlers if rank == 0 else 0
        assert counts["rt_sigaction"] == 2 * NUM_CALLS * num_put_off
        rest = set(counts) - WAITING - OTHERS
        assert rest <= {"sendto", "sendmsg", "recvmsg", "recvfrom", "rt_sigaction"}


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_tls_costs_one_more_read_and_no_more_writes(make_cluster, tmp_path, scheme):
    syscalls.require_strace()
    options = {**CALM, "transports": (scheme,), "bind_address": "127.0.0.1"}
    options |= (
        {"tls": Office(tmp_path).options()} if scheme == "tls" else {"secret": SECRET}
    )
    workers = make_cluster(2, options)
    workers.run(0, call_often, "w1")
    for rank in range(2):
        with syscalls.counted(workers.pid(rank)) as counts:
            workers.run(0, call_often, "w1")
        print(scheme, "caller" if rank == 0 else "callee", dict(counts.most_common()))
        # The harness reads and writes a little as well.
        num_writes = counts["sendto"] + counts["sendmsg"] + counts["write"]
        assert NUM_CALLS <= num_writes <= NUM_CALLS + 5
        # OpenSSL reads the head of a record, and then the rest.
        num_reads = counts["recvmsg"] + counts["recvfrom"] + counts["read"]
        reads_per_call = 2 if scheme == "tls" else 1
        assert NUM_CALLS <= num_reads <= 1.1 * reads_per_call * NUM_CALLS


def test_heartbeats_come_by_the_clock_and_not_by_the_call(make_cluster):
    syscalls.require_strace()
    lost_after = 2.0
    workers = make_cluster(2, {"lost_after": lost_after})
    workers.run(0, call_often, "w1")
    start = time.monotonic()
    with syscalls.counted(workers.pid(0)) as counts:
        workers.run(0, call_often, "w1", 5 * NUM_CALLS)
    took = time.monotonic() - start

    num_heartbeats = counts["sendto"] + counts["sendmsg"] - 5 * NUM_CALLS
    assert 0 <= num_heartbeats <= took / (lost_after / 8) + 2


# -------------------------------------------------------------------- which code runs


_ran: Counter[tuple[str, str]] = Counter()
_watched: set[int] = set()


def _note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call":
        code = frame.f_code
        _ran[os.path.basename(code.co_filename), code.co_name] += 1


def _watch_this_thread() -> None:
    if threading.get_ident() not in _watched:
        _watched.add(threading.get_ident())
        sys.setprofile(_note)


@rpc.export
def add_watched(a: int, b: int) -> int:
    _watch_this_thread()
    return a + b


def call_watched(to: str) -> None:
    for _ in range(NUM_CALLS):
        rpc.rpc_sync(to, add_watched, (1, 2))
    _watch_this_thread()
    try:
        for _ in range(NUM_CALLS):
            rpc.rpc_sync(to, add_watched, (1, 2))
    finally:
        sys.setprofile(None)


def what_ran() -> dict[tuple[str, str], int]:
    return dict(_ran)


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_no_code_of_security_or_heartbeats_runs_in_a_call(make_cluster, name):
    workers = make_cluster(2, CONFIGURATIONS[name])
    workers.run(1, what_ran)  # imports this module, and so exports
    workers.run(0, call_watched, "w1")
    caller, callee = (workers.run(rank, what_ran) for rank in range(2))

    # Both saw the calls: this looks at the right threads.
    assert caller["_calling.py", "call"] == NUM_CALLS
    assert callee["_serving.py", "serve"] > NUM_CALLS / 2
    for ran in (caller, callee):
        assert [place for place in ran if place[0] in IDLE_CODE] == []
        assert [place for place in ran if place in IDLE_FUNCTIONS] == []
    # The caller reads its answer itself: no work is handed to another thread.
    assert ("_pool.py", "submit") not in caller
