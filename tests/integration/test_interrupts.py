"""SIGINT at any moment: the call ends, and everything else goes on as if nothing were."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import operator
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch

import api_functions as api
import functions as targets
import probes
import rref_functions as rrefs
from cluster import Cluster, Handle
from gradwire import autograd, rpc
from gradwire.errors import GradwireError
from gradwire.rpc._rref_dialing import OwnerDialer
from gradwire.rpc.extension import current_agent

pytestmark = pytest.mark.multiproc

ENOUGH = 300
"""How many interrupts have to hit inside of calls."""

LIMIT_S = 20.0

STEP = 2
LARGE_STEP = 7  # for what has many points
"""Every so many-th point is tried, from a random one on, to save time."""


# ------------------------------------------------------------------- run by workers


@dataclass
class Report:
    """What happened in a worker that was interrupted."""

    num_hits: int = 0
    num_results: int = 0
    num_results_elsewhere: int = 0
    problems: list[str] = field(default_factory=list)


class _Interrupter:
    """Turns SIGINT into KeyboardInterrupt, at most once for each `armed`."""

    def __init__(self) -> None:
        self._armed = False
        self.num_hits = 0

    def __enter__(self) -> _Interrupter:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        # Signals may still come: ignored, until the process ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.num_hits += 1
            raise KeyboardInterrupt

    def run(self, function: Callable[[], Any]) -> tuple[bool, Any]:
        """Runs a function that may be interrupted; whether it came to its end."""
        try:
            self._armed = True
            value = function()
            self._armed = False
        except KeyboardInterrupt:
            return False, None
        return True, value


def _call_sync(to: str, number: int) -> Any:
    return rpc.rpc_sync(to, targets.echo, (number,), timeout=LIMIT_S)


def _call_async(to: str, number: int) -> Any:
    return rpc.rpc_async(to, targets.echo, (number,), timeout=LIMIT_S).wait()


def _call_many(to: str, number: int) -> Any:
    futures = [rpc.rpc_async(to, targets.echo, (number + i,)) for i in range(20)]
    return (
        futures[0].wait()
        + sum(f.wait() for f in futures)
        - sum(f.wait() for f in futures)
    )


def _call_pair(to: str, number: int) -> Any:
    futures = [rpc.rpc_async(to, targets.echo, (number,)) for _ in range(2)]
    return max(future.wait() for future in futures)


def _call_several(to: str, number: int) -> Any:
    starts = [
        operator.methodcaller(
            "begin_call", worker, targets.echo, (number,), None, LIMIT_S
        )
        for worker in (to, rpc.get_worker_info().name)
    ]
    return max(o.result() for o in current_agent().call_all(starts))


def _call_with_tensor(nbytes: int) -> Callable[[str, int], Any]:
    def call(to: str, number: int) -> Any:
        sent = torch.full((nbytes // 8,), number)
        received = rpc.rpc_sync(to, targets.echo, (sent,), timeout=LIMIT_S)
        assert torch.equal(sent, received)
        return number

    return call


def _call_and_backward(to: str, number: int) -> Any:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    rpc.rpc_sync(to, torch.mul, (x, number), timeout=LIMIT_S).sum().backward()
    assert x.grad is not None
    return x.grad[0].item()


def _call_in_context(to: str, number: int) -> Any:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as ctx:
        y = rpc.rpc_sync(to, torch.mul, (x, number), timeout=LIMIT_S)
        ctx.backward(y.sum())
        return ctx.gradients()[x][0].item()


def _make_and_fetch(to: str, number: int) -> Any:
    return rpc.remote(to, targets.echo, (number,)).to_here()


def _drop_and_look(to: str, number: int) -> Any:
    """What finalisers have left to do is done by who looks."""
    found = rpc.remote(to, targets.echo, (number,)).to_here()
    rpc.get_debug_info()
    return found


KINDS: dict[str, Callable[[str, int], Any]] = {
    "sync": _call_sync,
    "async": _call_async,
    "many": _call_many,
    "pair": _call_pair,
    "several": _call_several,
    "small tensor": _call_with_tensor(64 << 10),
    "large tensor": _call_with_tensor(512 << 10),
    "backward": _call_and_backward,
    "context": _call_in_context,
    "remote": _make_and_fetch,
    "drop": _drop_and_look,
}


def call_under_fire(to: str, kinds: list[str], enough: int) -> Report:
    """Calls until enough interrupts have hit, on the main thread and beside it."""
    report = Report()
    done = threading.Event()

    def call_beside() -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                if _call_sync(to, -number) != -number:
                    report.problems.append(f"another thread's call {number} is wrong")
                if _call_async(to, -number) != -number:
                    report.problems.append(f"another thread's call {number} is wrong")
            except BaseException as error:
                report.problems.append(f"another thread's call {number}: {error!r}")
                return
            report.num_results_elsewhere += 2

    beside = threading.Thread(target=call_beside)
    deadline = time.monotonic() + LIMIT_S
    with _Interrupter() as interrupter:
        beside.start()
        number = 0
        while interrupter.num_hits < enough and time.monotonic() < deadline:
            number += 1
            call = KINDS[kinds[number % len(kinds)]]
            try:
                ended, value = interrupter.run(lambda: call(to, number))  # noqa: B023
            except Exception as error:
                report.problems.append(f"call {number}: {error!r}")
                break
            if ended:
                report.num_results += 1
                if value != number:
                    report.problems.append(f"call {number} returned {value!r}")
    done.set()
    beside.join(LIMIT_S)
    if beside.is_alive():
        report.problems.append("another thread's call hangs")
    report.num_hits = interrupter.num_hits
    return report


# A signal's handler runs when the interpreter looks for it: after a call, at the begin of
# a function, and when a loop goes round. The tests below interrupt at each such point of
# the package, one after the other; random signals rarely find the narrow ones.

_PACKAGE = os.path.dirname(os.path.dirname(rpc.__file__ or ""))
_TRACED = (_PACKAGE, threading.__file__)
_END_OF_CONTEXT = autograd.context.__exit__.__code__


def _looks_for_signals(name: str) -> bool:
    return name.startswith(("CALL", "RESUME")) or "JUMP_BACKWARD" in name


@functools.cache
def _find_points(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that follow a look for signals.

    The interpreter raises where it looks. So those are left out at which an exception
    would go elsewhere, as behind the last call of a `with` block.
    """
    instructions = list(dis.get_instructions(code))
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler_at(offset: int) -> int | None:
        found = [e.target for e in table if e.start <= offset < e.end]
        return found[0] if found else None

    return frozenset(
        after.offset
        for before, after in itertools.pairwise(instructions)
        if _looks_for_signals(before.opname)
        and handler_at(before.offset) == handler_at(after.offset)
        # A context stays open if the end of its block is interrupted before it begins.
        and (before.opname != "RESUME" or code is not _END_OF_CONTEXT)
    )


def _is_final(frame: FrameType | None) -> bool:
    """Whether it runs for a finaliser: Python itself swallows what is raised there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class _Tracer:
    """Sends SIGINT to the process when the main thread comes to its n-th point."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = 0
        self.where = ""

    def on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_TRACED) or _is_final(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_step

    def _on_step(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in _find_points(frame.f_code):
            self._count += 1
            if self._count == self._number:
                file = os.path.basename(frame.f_code.co_filename)
                self.where = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
        return self._on_step


def interrupt_everywhere(to: str, kind: str, first: int, step: int) -> tuple[int, str]:
    """The number of the last point, and what went wrong after one of them."""
    call = KINDS[kind]
    call(to, 1)
    with _Interrupter() as interrupter:
        for number in itertools.count(first, step):
            tracer = _Tracer(number)
            problem = ""
            sys.settrace(tracer.on_call)
            try:
                if interrupter.run(lambda: call(to, 2))[0]:
                    problem = "the interrupt was swallowed"
            except Exception as error:
                problem = f"the call failed: {error!r}"
            finally:
                sys.settrace(None)
            if not tracer.where:
                return number, problem if "failed" in problem else ""
            problem = problem or _find_problem(to, is_quiet_in[kind])
            if problem:
                return number, f"{problem} (point {number}, {tracer.where})"
    raise AssertionError("a count without end has ended")


def _find_problem(to: str, is_quiet: Callable[[], bool]) -> str:
    for call in (_call_sync, _call_async, KINDS["large tensor"]):
        start = time.monotonic()
        try:
            if call(to, 3) != 3:
                return "a later call returned something else"
        except GradwireError as error:
            return f"a later call failed: {error!r}"
        if time.monotonic() - start > 2.0:
            return "a later call was slow"
    try:
        probes.wait_until(is_quiet, "nothing is in flight", limit_s=3.0)
    except AssertionError as error:
        return f"{error}: {rpc.get_debug_info()}"
    return ""


def is_quiet() -> bool:
    info = rpc.get_debug_info()
    return info["client_active_calls"] == info["inflight_bytes"] == 0


def is_quiet_after_backward() -> bool:
    counts = autograd.get_debug_info()
    return is_quiet() and not any(counts.values())


def is_quiet_after_remote() -> bool:
    return is_quiet() and not rpc.get_debug_info()["user_rrefs"]


is_quiet_in = dict.fromkeys(KINDS, is_quiet) | {
    "backward": is_quiet_after_backward,
    "context": is_quiet_after_backward,
    "remote": is_quiet_after_remote,
    "drop": is_quiet_after_remote,
}


# What is read here interrupts the program that waits for it, and holds its reader up.
_may_read_on = threading.Event()


class ReadSlowly:
    """Interrupts who waits for it when it arrives, and comes when that is over."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_slowly, ()


def _read_slowly() -> None:
    if threading.current_thread() is not threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
        _may_read_on.wait(LIMIT_S)


def double_slowly(x: torch.Tensor) -> tuple[torch.Tensor, ReadSlowly]:
    return x * 2, ReadSlowly()


def interrupt_while_another_thread_reads_the_answer(to: str) -> float:
    """The gradient of a later call of the same context."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    beside = threading.Thread(
        target=rpc.rpc_sync, args=(to, targets.block_until_set, ("beside",))
    )
    with autograd.context() as ctx, _Interrupter() as interrupter:
        beside.start()
        rpc.rpc_sync(to, targets.wait_until_blocked, ("beside",), timeout=LIMIT_S)
        ended = True
        while ended:  # this thread may have read it itself
            ended, _ = interrupter.run(lambda: rpc.rpc_sync(to, double_slowly, (x,)))
        _may_read_on.set()
        rpc.rpc_sync(to, targets.set_event, ("beside",), timeout=LIMIT_S)
        beside.join(LIMIT_S)
        y = rpc.rpc_sync(to, torch.mul, (x, 3.0), timeout=LIMIT_S)
        autograd.backward(ctx, [y.sum()], timeout=LIMIT_S / 2)
        return ctx.gradients()[x][0].item()


def interrupt_passes_everywhere(
    to: str, is_plain: bool, first: int, step: int
) -> tuple[int, str]:
    """As `interrupt_everywhere`, for passes alone, after which the context goes on."""
    with _Interrupter() as interrupter:
        for number in itertools.count(first, step):
            tracer = _Tracer(number)
            x = torch.tensor([1.0, 2.0], requires_grad=True)

            def run_pass(loss: torch.Tensor) -> None:
                if is_plain:
                    loss.backward()
                else:
                    autograd.backward(ctx, [loss], timeout=LIMIT_S / 4)

            with autograd.context() as ctx:
                loss, _other = (
                    rpc.rpc_sync(to, torch.mul, (x, factor), timeout=LIMIT_S).sum()
                    for factor in (3.0, 5.0)
                )
                sys.settrace(tracer.on_call)
                try:
                    interrupter.run(lambda: run_pass(loss))  # noqa: B023
                finally:
                    sys.settrace(None)
                where = f"(point {number}, {tracer.where})"
                try:
                    run_pass(rpc.rpc_sync(to, torch.mul, (x, 7.0)).sum())
                except GradwireError as error:
                    return number, f"{error!r} {where}"
                found = x.grad if is_plain else ctx.gradients()[x]
            assert found is not None
            if found[0].item() not in (7.0, 10.0):
                return number, f"{found} {where}"
            if not tracer.where:
                return number, ""
    raise AssertionError("a count without end has ended")


def drop_under_fire(to: str) -> int:
    """How many times a signal has come while references died."""
    hits = []

    def interrupt(*_: object) -> None:
        hits.append(1)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10):
            rrefs = [rpc.remote(to, targets.echo, (number,)) for number in range(200)]
            for rref in rrefs:
                rref.to_here()
            del rref
            number_before = len(hits)
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                rrefs.clear()
                while len(hits) == number_before:
                    pass
    finally:
        signal.signal(signal.SIGALRM, before)
    return len(hits)


def wait_and_be_interrupted(to: str, sync: bool) -> float:
    """When the interrupt ended the wait, on the clock that all processes share."""
    with _Interrupter() as interrupter:

        def wait() -> None:
            if sync:
                rpc.rpc_sync(to, targets.block_until_set, ("held",), timeout=LIMIT_S)
            else:
                rpc.rpc_async(to, targets.block_until_set, ("held",)).wait()

        ended, _ = interrupter.run(wait)
    assert not ended
    return time.monotonic()


# ------------------------------------------------------------------------- the tests


def fire_until_done(cluster: Cluster, rank: int, handle: Handle, seed: int) -> Report:
    """Sends signals at random moments while the worker runs; what it reports."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    pid = cluster.pid(rank)
    done = threading.Event()

    def fire() -> None:
        # The worker ignores them before its handler is there.
        while not done.wait(chance.uniform(0.0, 0.004)):
            os.kill(pid, signal.SIGINT)

    shooter = threading.Thread(target=fire)
    shooter.start()
    try:
        report: Report = handle.result(LIMIT_S + 10)
    finally:
        done.set()
        shooter.join()
    return report


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    "kinds",
    [
        ["sync"],
        ["async"],
        ["many"],
        ["several"],
        ["small tensor"],
        ["large tensor"],
    ],
    ids=lambda kinds: kinds[0].replace(" ", "_"),
)
def test_interrupts_leave_connection_and_other_calls_alone(make_cluster, kinds):
    cluster = make_cluster(2)
    cluster.run(0, ignore_interrupts)
    handle = cluster.start(0, call_under_fire, "w1", kinds, ENOUGH)

    report = fire_until_done(cluster, 0, handle, random.randrange(1 << 32))

    assert report.problems == []
    assert report.num_hits >= ENOUGH
    assert report.num_results_elsewhere > 20
    # The one connection that there was is still there, in both directions.
    assert cluster.run(0, _call_sync, "w1", 7) == 7
    assert cluster.run(1, _call_sync, "w0", 8) == 8
    for rank in (0, 1):
        info = cluster.run(rank, rpc.get_debug_info)
        assert info["workers_lost"] == 0


def test_interrupted_calls_are_forgotten_when_their_answer_comes(make_cluster):
    cluster = make_cluster(2)
    cluster.run(0, ignore_interrupts)
    handle = cluster.start(0, call_under_fire, "w1", list(KINDS), ENOUGH)

    report = fire_until_done(cluster, 0, handle, random.randrange(1 << 32))

    assert report.problems == []
    probes.wait_until(lambda: cluster.run(0, is_quiet), "nothing is in flight")


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="knows where Python 3.11 looks for signals"
)
@pytest.mark.skipif(
    sys.implementation.name != "cpython", reason="knows where CPython looks for signals"
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("sync", {}, id="sync"),
        pytest.param("async", {}, id="async"),
        pytest.param("several", {}, id="several"),
        pytest.param("pair", {"max_inflight_bytes": 1}, id="credit"),
        pytest.param("small tensor", {}, id="small_tensor"),
        pytest.param("large tensor", {}, id="shared_memory"),
        pytest.param("large tensor", {"shared_memory_min_bytes": 1 << 30}, id="stream"),
        pytest.param("backward", {}, id="backward"),
        pytest.param("context", {}, id="context"),
        pytest.param("remote", {}, id="remote"),
        pytest.param("drop", {}, id="drop"),
    ],
)
def test_interrupt_is_safe_at_every_point(make_cluster, kind, options):
    cluster = make_cluster(2, {"rpc_timeout": 8.0, **options})
    step = LARGE_STEP if kind in ("backward", "context") else STEP
    first = random.randint(1, step)
    print(f"every point from {first} on in steps of {step}")

    last, problem = cluster.run(0, interrupt_everywhere, "w1", kind, first, step)

    assert problem == ""
    assert last > 50


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or sys.implementation.name != "cpython",
    reason="knows where CPython 3.11 looks for signals",
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["explicit", "plain"])
def test_context_goes_on_after_a_pass_that_was_interrupted_anywhere(
    make_cluster, is_plain
):
    cluster = make_cluster(2)
    first = random.randint(1, LARGE_STEP)
    print(f"every point from {first} on in steps of {LARGE_STEP}")

    last, problem = cluster.run(
        0, interrupt_passes_everywhere, "w1", is_plain, first, LARGE_STEP
    )

    assert problem == ""
    assert last > 50


def test_signals_while_references_die_keep_none_of_them(make_cluster):
    """Python swallows what a handler raises in a finaliser, which then has done nothing."""
    cluster = make_cluster(2)

    assert cluster.run(0, drop_under_fire, "w1") == 10

    probes.wait_until(lambda: cluster.run(0, is_quiet_after_remote), "all are gone")
    probes.wait_until(
        lambda: cluster.run(1, rpc.get_debug_info)["forks"] == 0, "there, too"
    )


def test_call_is_given_up_while_another_thread_reads_its_answer(make_cluster):
    cluster = make_cluster(2)

    found = cluster.run(0, interrupt_while_another_thread_reads_the_answer, "w1")

    assert found == 3.0


def receive_while_dialing_is_interrupted() -> list[float]:
    """Gets a reference from w1 whose owner, w2, is still to be called."""
    connect = OwnerDialer.connect

    def interrupted(self: OwnerDialer, owner: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        connect(self, owner)

    with patch.object(OwnerDialer, "connect", interrupted):
        rref = rpc.rpc_sync("w1", rrefs.make_remote, ("w2", torch.ones, 2))
        value: torch.Tensor = rref.to_here()
    return value.tolist()


def test_answer_is_not_read_twice_when_its_references_have_to_be_announced(
    make_cluster,
):
    cluster = make_cluster(3)

    assert cluster.run(0, receive_while_dialing_is_interrupted) == [1.0, 1.0]

    def has_none_left() -> bool:
        infos = [cluster.run(rank, rpc.get_debug_info) for rank in range(3)]
        return all(info["forks"] == 0 for info in infos)

    probes.wait_until(has_none_left, "no reference is left")


@pytest.mark.parametrize("sync", [True, False])
def test_interrupt_ends_a_wait_at_once(make_cluster, sync):
    cluster = make_cluster(2)
    cluster.run(0, ignore_interrupts)
    waiting = cluster.start(0, wait_and_be_interrupted, "w1", sync)
    cluster.run(1, targets.wait_until_blocked, "held")

    # The request is there, so the caller waits or is about to.
    start = time.monotonic()
    os.kill(cluster.pid(0), signal.SIGINT)
    end = waiting.result()

    assert end - start < 1.0
    cluster.run(1, targets.set_event, "held")
    assert cluster.run(0, _call_sync, "w1", 1) == 1


def wait_and_call_in_handler(workers: list[str], name: str) -> tuple[str, list[str]]:
    """Waits for w1, and in the middle of that calls these, one after the other.

    The last thing that the signal handler does lets w1 answer.
    """
    answers: list[str] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        for worker in workers:
            answers.append(
                rpc.rpc_sync(worker, targets.echo, (worker,), timeout=LIMIT_S)
            )
        rpc.rpc_sync("w1", targets.set_event, (name,), timeout=LIMIT_S)

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        answer = rpc.rpc_sync("w1", targets.block_until_set, (name,), timeout=LIMIT_S)
    finally:
        signal.signal(signal.SIGUSR2, before)
    return answer, answers


@pytest.mark.parametrize(
    "workers", [["w1"], ["w1", "w1"], ["w2"], ["w2", "w1"], ["w0", "w1", "w2"]], ids=str
)
def test_signal_handler_may_call_while_its_thread_waits(cluster, workers):
    name = f"{workers} in a handler"
    waiting = cluster.start(0, wait_and_call_in_handler, workers, name)
    cluster.run(1, targets.wait_until_blocked, name)
    cluster.run(1, api.call, "w0", api.wait_until_main_thread_waits)

    os.kill(cluster.pid(0), signal.SIGUSR2)

    assert waiting.result() == (name, workers)
