"""The thread of ``async def`` targets."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import pytest
import torch

from gradwire.errors import NotInitialized
from gradwire.rpc._event_loop import EventLoop, Target
from gradwire.rpc._torch_modes import Modes

LIMIT_S = 10.0


class Request:
    """Takes down its answer."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._is_answered = threading.Event()

    def succeed(self, value: Any) -> None:
        self.value = value
        self._is_answered.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._is_answered.set()

    def result(self) -> Any:
        assert self._is_answered.wait(LIMIT_S), "nobody has answered"
        if self.error is not None:
            raise self.error
        return self.value


def start(loop: EventLoop, coroutine: Coroutine[Any, Any, Any]) -> Request:
    request = Request()
    target = Target(coroutine, Modes(is_grad_enabled=True))
    loop.run(target, contextvars.copy_context(), request)
    return request


@contextlib.contextmanager
def running_loop() -> Iterator[EventLoop]:
    loop = EventLoop("test", lambda work: work())
    start(loop, answer()).result()
    thread = loop._thread
    assert thread is not None
    try:
        yield loop
    finally:
        loop.close(LIMIT_S)
        thread.join(LIMIT_S)
    assert not thread.is_alive()


async def answer() -> int:
    return 1


def test_loop_that_was_closed_is_not_started_again():
    loop = EventLoop("test", lambda work: work())
    loop.close(1.0)
    before = threading.active_count()

    request = start(loop, answer())

    assert isinstance(request.error, NotInitialized)
    assert "worker 'test' was shut down" in str(request.error)
    assert threading.active_count() == before


# ------------------------------------------------------------------------------ exits


async def leave(how: type[BaseException], *, after_a_step: bool) -> NoReturn:
    if after_a_step:
        await asyncio.sleep(0)
    raise how


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt])
def test_target_that_exits_fails_alone(how, after_a_step, caplog):
    with running_loop() as loop:
        with pytest.raises(how):
            start(loop, leave(how, after_a_step=after_a_step)).result()

        assert start(loop, answer()).result() == 1
    assert caplog.records == []


async def start_what_leaves(how: type[BaseException]) -> bool:
    task = asyncio.ensure_future(leave(how, after_a_step=False))
    while not task.done():
        await asyncio.sleep(0)
    return isinstance(task.exception(), how)


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt])
def test_task_of_a_target_that_exits_leaves_the_loop_alone(how, caplog):
    with running_loop() as loop:
        assert start(loop, start_what_leaves(how)).result()

        assert start(loop, answer()).result() == 1
    assert "worker test goes on" in caplog.text


async def stop_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 2


def test_target_that_stops_the_loop_does_not_end_it():
    with running_loop() as loop:
        assert start(loop, stop_the_loop()).result() == 2
        assert start(loop, answer()).result() == 1


# -------------------------------------------------------------------- modes of torch

Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
}


def find_modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


async def look() -> tuple[object, ...]:
    return find_modes()


class Meeting:
    """Two targets, whose blocks overlap: the first to come is the first to go."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._first_may_go = asyncio.Event()
        self._second_may_go = asyncio.Event()

    async def first(self) -> tuple[object, ...]:
        with self._mode():
            await self._first_may_go.wait()
            inside = find_modes()
        self._second_may_go.set()
        return inside

    async def second(self) -> tuple[object, ...]:
        with self._mode():
            self._first_may_go.set()
            await self._second_may_go.wait()
            return find_modes()


@pytest.mark.parametrize("name", MODES)
def test_blocks_of_targets_that_overlap_do_not_meet(name):
    with MODES[name]():
        expected = find_modes()
    meeting = Meeting(MODES[name])
    with running_loop() as loop:
        first = start(loop, meeting.first())
        between = start(loop, look())
        second = start(loop, meeting.second())

        assert first.result() == expected
        assert second.result() == expected
        assert between.result() == find_modes()
        assert start(loop, look()).result() == find_modes()


async def look_from_a_task() -> tuple[object, ...]:
    with torch.no_grad():
        return await asyncio.create_task(look())


def test_task_begins_with_the_modes_of_who_starts_it():
    with torch.no_grad():
        expected = find_modes()
    with running_loop() as loop:
        assert start(loop, look_from_a_task()).result() == expected
        assert start(loop, look()).result() == find_modes()


async def multiply_before_and_after(weight: torch.Tensor) -> list[float]:
    before = torch.mm(torch.ones(1, 1), weight)
    await asyncio.sleep(0)  # others may change it meanwhile, as an optimizer does
    weight.data.fill_(5)
    return [before.item(), torch.mm(torch.ones(1, 1), weight).item()]


def test_casts_of_weights_are_not_kept_while_a_target_waits():
    weight = torch.ones(1, 1, requires_grad=True)
    request = Request()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        modes = Modes(is_grad_enabled=True)
    with running_loop() as loop:
        target = Target(multiply_before_and_after(weight), modes)
        loop.run(target, contextvars.copy_context(), request)

        assert request.result() == [1, 5]


# -------------------------------------------------------------------------------- end


class Patient:
    """Starts a task in the background, which takes its time when it is cancelled."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._wait())
        await asyncio.sleep(0)

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append("cancelled")
            for _ in range(5):
                await asyncio.sleep(0)
            self.seen.append("tidied up")


def test_close_ends_what_targets_have_started_in_the_background(caplog):
    patient = Patient()
    with running_loop() as loop:
        start(loop, patient.start()).result()
    assert patient.seen == ["cancelled", "tidied up"]

    del patient
    gc.collect()
    assert "pending" not in caplog.text


async def close_from_inside(loop: EventLoop) -> int:
    loop.close(LIMIT_S)
    return 3


def test_target_may_close_its_own_loop():
    with running_loop() as loop:
        assert start(loop, close_from_inside(loop)).result() == 3
