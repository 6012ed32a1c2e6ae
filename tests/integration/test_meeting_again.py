"""Two workers that lose each other and both live: they may meet again."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch

import functions
import probes
import worker_process
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import ConnectTimeout, OwnerLost, PeerLostError

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]

SOON_S = 10.0


# ------------------------------------------------------------------- run by workers


def call(to: str) -> int:
    total: int = rpc.rpc_sync(to, functions.add, (1, 2), timeout=SOON_S)
    return total


def meet(name: str) -> int:
    rpc.wait_for_worker(name, SOON_S)
    return call(name)


def sleep_and_meet(name: str) -> int:
    """Nobody else in this process runs between the stop and the search."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SOON_S)
    try:
        os.kill(os.getpid(), signal.SIGSTOP)
        rpc.wait_for_worker(name, SOON_S)
    finally:
        sys.setswitchinterval(before)
    return call(name)


def has_lost(name: str) -> bool:
    return name not in [info.name for info in rpc.get_workers()]


_news: list[tuple[str, str]] = []


def listen() -> None:
    rpc.on_worker_lost(lambda info, _: _news.append((info.name, "lost")))
    rpc.on_worker_joined(lambda info: _news.append((info.name, "joined")))


def await_news(name: str, number: int) -> list[str]:
    def news() -> list[str]:
        return [what for about, what in _news if about == name]

    probes.wait_until(lambda: len(news()) >= number, f"{number} news of {name}")
    return news()


_kept: dict[str, Any] = {}


def keep_reference(to: str) -> None:
    _kept["rref"] = rpc.remote(to, functions.add, (torch.ones(2), 1))
    assert _kept["rref"].to_here().tolist() == [2, 2]


def use_reference() -> None:
    rref = _kept.pop("rref")
    for use in (
        rref.to_here,
        rref.rpc_sync().sum,
        lambda: rpc.rpc_sync("w2", functions.echo, (rref,)),
    ):
        with pytest.raises(OwnerLost, match="'w1'"):
            use()


def open_context(to: str) -> None:
    manager = autograd.context()
    weight = torch.ones(2, requires_grad=True)
    ctx = manager.__enter__()
    y = rpc.rpc_sync(to, functions.add, (weight, 1))
    _kept["context"] = manager, ctx, y


def use_context(to: str) -> None:
    manager, ctx, y = _kept.pop("context")
    with pytest.raises(PeerLostError, match=f"'{to}'"):
        ctx.backward(y.sum())
    with pytest.raises(PeerLostError, match=f"'{to}'"):
        rpc.rpc_sync(to, functions.add, (y, 1))
    manager.__exit__(None, None, None)


def differentiate(to: str) -> list[float]:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    with autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync(to, torch.mul, (weight, weight)).sum())
        return list(ctx.gradients()[weight].tolist())


def differentiate_by(middle: str, last: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(last, torch.mul, (x, x)) + x


def retry_by(middle: str, last: str) -> tuple[int, list[float]]:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    count = 0

    def step(ctx: autograd.Context) -> list[float]:
        nonlocal count
        count += 1
        y = rpc.rpc_sync(middle, differentiate_by, (middle, last, weight))
        ctx.backward(y.sum())
        return list(ctx.gradients()[weight].tolist())

    return count, autograd.retry(step, 5, 0.01, timeout=SOON_S)


@rpc.functions.idempotent
def multiply(x: int, y: int) -> int:
    return x * y


def multiply_elsewhere(to: str) -> int:
    product: int = rpc.rpc_sync(to, multiply, (6, 7), timeout=SOON_S)
    return product


@rpc.functions.idempotent
def double(x: Any) -> Any:
    return x[0] * 2


_futures: list[rpc.Future[Any]] = []
_sent: list[torch.Tensor] = []


def double_later(num: int) -> int:
    """Calls a worker that is lost; returns how many threads there are then."""
    argument = torch.ones(2, requires_grad=True)
    container = [argument]
    with torch.no_grad():
        _futures[:] = [
            rpc.rpc_async("w1", double, (container,), timeout=SOON_S)
            for _ in range(num)
        ]
    container.clear()
    _sent[:] = [argument]
    return threading.active_count()


def change_what_was_sent() -> None:
    with torch.no_grad():
        _sent[0].mul_(100)


def doubled() -> list[Any]:
    return [future.wait() for future in _futures]


def leftovers() -> dict[str, Any]:
    gc.collect()  # errors that were caught hold frames
    info = rpc.get_debug_info()
    references = {key: info[key] for key in info if "rref" in key or "fork" in key}
    return {**autograd.get_debug_info(), **references}


# ----------------------------------------------------------------------------- tests


def part(cluster: Cluster, rank: int) -> None:
    """One worker and all others lose each other."""
    cluster.run(rank, worker_process.cut_connections)
    name = f"w{rank}"
    for other in {0, 1, 2} - {rank}:
        _until(cluster, other, name)
        _until(cluster, rank, f"w{other}")


def _until(cluster: Cluster, rank: int, name: str) -> None:
    probes.wait_until(lambda: cluster.run(rank, has_lost, name), f"{name} is lost")


def _until_nothing_is_left(cluster: Cluster, rank: int) -> None:
    found: dict[str, Any] = {}

    def is_clean() -> bool:
        found.clear()
        found.update(cluster.run(rank, leftovers))
        return not any(found.values())

    try:
        probes.wait_until(is_clean, f"nothing is left on w{rank}", SOON_S)
    except AssertionError:
        pytest.fail(f"left on w{rank}: {found}")


@pytest.fixture
def three(make_cluster):
    cluster = make_cluster(3)
    for rank in (0, 1, 2):
        for name in ("w0", "w1", "w2"):
            cluster.run(rank, call, name)
    return cluster


@pytest.mark.parametrize(("seeker", "sought"), [(0, 1), (1, 0)])
def test_workers_that_lost_each_other_meet_when_one_asks(three, seeker, sought):
    for rank in (0, 1):
        three.run(rank, listen)
    part(three, 1)
    for rank, name in ((0, "w1"), (1, "w0"), (1, "w2")):
        with pytest.raises(PeerLostError, match=f"'{name}'"):
            three.run(rank, call, name)

    assert three.run(seeker, meet, f"w{sought}") == 3

    assert three.run(sought, call, f"w{seeker}") == 3
    for rank, name in ((0, "w1"), (1, "w0")):
        assert three.run(rank, await_news, name, 2) == ["lost", "joined"]
    with pytest.raises(PeerLostError, match="'w2'"):  # nobody has asked for that one
        three.run(1, call, "w2")


def test_workers_that_seek_each_other_at_once_find_each_other(three):
    for _ in range(40):
        part(three, 1)
        seeking = [three.start(0, meet, "w1"), three.start(1, meet, "w0")]
        assert [handle.result(2 * SOON_S) for handle in seeking] == [3, 3]
        assert three.run(2, meet, "w1") == 3


def test_references_to_a_lost_owner_stay_lost_though_it_is_back(three):
    three.run(0, keep_reference, "w1")
    part(three, 1)
    assert three.run(0, meet, "w1") == 3
    assert three.run(2, meet, "w1") == 3

    three.run(0, use_reference)

    three.run(0, keep_reference, "w1")  # a new one is as good as ever
    three.run(0, _kept_is_dropped)
    for rank in (0, 1, 2):
        _until_nothing_is_left(three, rank)


def _kept_is_dropped() -> None:
    _kept.clear()


def test_contexts_of_the_time_before_stay_broken(three):
    three.run(0, open_context, "w1")
    part(three, 1)
    assert three.run(0, meet, "w1") == 3

    three.run(0, use_context, "w1")

    assert three.run(0, differentiate, "w1") == [4, 6]
    assert three.run(1, differentiate, "w0") == [4, 6]
    for rank in (0, 1):
        _until_nothing_is_left(three, rank)


def test_retry_brings_all_together_whom_a_step_needs(three):
    part(three, 1)

    # w0 finds w1 again, and has w1 find w2 again.
    assert three.run(0, retry_by, "w1", "w2")[1] == [5, 7]


def test_idempotent_calls_find_a_worker_again_by_themselves(three):
    part(three, 1)

    assert three.run(0, multiply_elsewhere, "w1") == 42


def test_idempotent_calls_are_sent_again_as_they_were(three):
    assert three.run(0, meet, "w1") == 3
    three.kill(1)
    _until(three, 0, "w1")
    before = three.run(0, double_later, 1)
    assert three.run(0, double_later, 50) <= before + 3
    three.restart(1)

    found = three.run(0, doubled)

    assert all(torch.equal(x, torch.full((2,), 2.0)) for x in found)
    assert not any(x.requires_grad for x in found)


def test_idempotent_call_whose_tensor_was_changed_is_not_sent_again(three):
    assert three.run(0, meet, "w1") == 3
    three.kill(1)
    _until(three, 0, "w1")
    three.run(0, double_later, 1)
    three.run(0, change_what_was_sent)
    three.restart(1)

    with pytest.raises(PeerLostError, match="changed in place"):
        three.run(0, doubled)


def test_worker_that_had_to_be_restarted_can_be_found_again_too(three):
    three.kill(1)
    three.restart(1)
    assert three.run(0, meet, "w1") == 3
    part(three, 1)

    # It has dialled the others; they know from it where it listens.
    assert three.run(0, meet, "w1") == 3
    assert three.run(2, meet, "w1") == 3


def test_sleeper_finds_those_again_who_took_it_for_dead(make_cluster):
    cluster = make_cluster(2, {"lost_after": 0.5})
    assert cluster.run(1, call, "w0") == 3
    cluster.stop(1)
    _until(cluster, 0, "w1")
    cluster.cont(1)

    with pytest.raises(PeerLostError, match="meet again"):
        cluster.run(1, call, "w0")

    assert cluster.run(1, meet, "w0") == 3
    assert cluster.run(0, call, "w1") == 3


def test_sleeper_that_has_not_heard_of_its_loss_yet_finds_others(make_cluster):
    cluster = make_cluster(2, {"lost_after": 0.5})
    assert cluster.run(1, call, "w0") == 3
    sleeper = cluster.start(1, sleep_and_meet, "w0")
    _until(cluster, 0, "w1")
    cluster.cont(1)

    assert sleeper.result(2 * SOON_S) == 3
    assert cluster.run(0, call, "w1") == 3


def test_worker_that_is_stopped_does_not_count_as_there(make_cluster):
    cluster = make_cluster(2)
    assert cluster.run(0, call, "w1") == 3
    cluster.stop(1)

    with pytest.raises(ConnectTimeout, match=r"'w1'.*does not answer"):
        cluster.run(0, rpc.wait_for_worker, "w1", 0.3)
    seeker = cluster.start(0, meet, "w1")
    cluster.cont(1)

    assert seeker.result(2 * SOON_S) == 3


def test_worker_that_is_there_is_found_without_any_time(three):
    assert three.run(0, rpc.wait_for_worker, "w1", 0).name == "w1"


def test_dead_worker_is_sought_in_vain(three):
    three.kill(1)
    _until(three, 0, "w1")

    with pytest.raises(ConnectTimeout, match="'w1'"):
        three.run(0, rpc.wait_for_worker, "w1", 0.6)
    with pytest.raises(PeerLostError, match="'w1'"):
        three.run(0, call, "w1")
