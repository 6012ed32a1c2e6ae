"""Groups that change: workers that join, leave, are lost and come back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functions
import probes
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import (
    ConnectTimeout,
    EncodeError,
    OwnerLost,
    PeerLostError,
    ShutdownTimeout,
    UnknownWorker,
    UsageError,
)
from on_worker import on_worker

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]

SOON_S = 5.0
NOTICED_S = 2.0


# ------------------------------------------------------------------- run by workers


def join(
    name: str, url: str, rank: int | None = None, **options: Any
) -> rpc.WorkerInfo:
    options = {"init_timeout": 20.0, **options}
    rpc.init_rpc(
        name,
        rank,
        "open",
        rpc.RpcBackendOptions(init_method=url, **options),
    )
    return rpc.get_worker_info()


def names() -> list[str]:
    return [info.name for info in rpc.get_workers()]


def call(to: str, *args: Any) -> Any:
    return rpc.rpc_sync(to, functions.add, args, timeout=SOON_S)


_news: list[tuple[str, ...]] = []
_changed = threading.Condition()  # guards _news; callbacks on pool threads
_subscriptions: list[Any] = []


def _note(*news: str) -> None:
    with _changed:
        _news.append(news)
        _changed.notify_all()


def subscribe() -> None:
    _subscriptions.append(
        rpc.on_worker_lost(lambda info, reason: _note("lost", info.name, reason))
    )
    _subscriptions.append(rpc.on_worker_joined(lambda info: _note("joined", info.name)))


def subscribe_wrongly() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("this callback fails")

    rpc.on_worker_joined(fail)
    rpc.on_worker_joined(lambda info: sys.exit(info.name))
    rpc.on_worker_lost(lambda info, reason: sys.exit(reason))
    with pytest.raises(TypeError, match="callable"):
        rpc.on_worker_lost("no function")  # type: ignore[arg-type]


def unsubscribe() -> None:
    for subscription in _subscriptions:
        subscription.remove()
        subscription.remove()


def await_news(count: int) -> list[tuple[str, ...]]:
    with _changed:
        assert _changed.wait_for(lambda: len(_news) >= count, SOON_S), _news
        return list(_news)


def answer_newcomers() -> None:
    """Calls each newcomer as soon as it is told of."""
    rpc.on_worker_joined(lambda info: _note("answered", str(call(info.name, 1, 2))))


def wait_for(name: str, timeout: float, **kwargs: Any) -> tuple[str, float]:
    start = time.monotonic()
    info = rpc.wait_for_worker(name, timeout, **kwargs)
    assert call(info.name, 1, 1) == 2
    return info.name, time.monotonic() - start


def leave(timeout: float = 0) -> None:
    rpc.shutdown(timeout=timeout)


def leave_late(timeout: float) -> str:
    with pytest.raises(ShutdownTimeout) as caught:
        rpc.shutdown(timeout=timeout)
    return str(caught.value)


@rpc.functions.idempotent
def multiply(x: int, y: int, wait_for: str | None = None) -> int:
    if wait_for is not None:
        functions.block_until_set(wait_for)
    return x * y


def multiply_elsewhere(to: str, asynchronous: bool, *args: Any) -> Any:
    if asynchronous:
        return rpc.rpc_async(to, multiply, args, timeout=20).wait()
    return rpc.rpc_sync(to, multiply, args, timeout=20)


@rpc.functions.idempotent
def ask_a_third(to: str) -> int:
    return call(to, 1, 2)


def lose_a_third(to: str, third: str) -> float:
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=third):
        rpc.rpc_sync(to, ask_a_third, (third,), timeout=20)
    return time.monotonic() - start


_rrefs: list[Any] = []


def keep_reference(to: str) -> None:
    _rrefs.append(rpc.remote(to, torch.ones, (2,)))
    _rrefs[-1].to_here()


def use_reference() -> None:
    with pytest.raises(OwnerLost):
        _rrefs[-1].to_here(timeout=SOON_S)
    _rrefs.clear()


_steps = 0


def count_steps() -> int:
    return _steps


def train(to: str, stop_event: str) -> int:
    """Backward passes until the test says so; each gradient is that of one process."""
    global _steps
    x = torch.arange(4.0, requires_grad=True)
    while not functions.get_event(stop_event).is_set():
        with autograd.context() as ctx:
            y = rpc.rpc_sync(to, torch.mul, (x, x))
            ctx.backward(y.sum())
            assert torch.equal(autograd.get_gradients(ctx)[x], 2 * x.detach())
        _steps += 1
    return _steps


# ------------------------------------------------------------------------- fixtures


@pytest.fixture
def processes(make_cluster: Callable[..., Cluster]) -> Callable[[int], list[Cluster]]:
    """Makes processes that belong to no group yet; each is a cluster of one."""

    def make(number: int) -> list[Cluster]:
        clusters = [make_cluster(1) for _ in range(number)]
        for cluster in clusters:
            cluster.run(0, leave)
        return clusters

    return make


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def run(process: Cluster, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return process.run(0, function, *args, **kw)


# ------------------------------------------------------------------- joining, leaving


def test_workers_join_one_after_the_other_and_get_ranks(processes, store):
    workers = processes(3)

    infos = [run(w, join, f"w{i}", store) for i, w in enumerate(workers)]

    assert [info.id for info in infos] == [0, 1, 2]
    for worker in workers:
        assert run(worker, names) == ["w0", "w1", "w2"]
        assert [run(worker, call, to, 1, 2) for to in ("w0", "w1", 2)] == [3, 3, 3]


def test_workers_that_join_at_once_all_know_each_other(processes, store):
    workers = processes(4)

    joining = [w.start(0, join, f"w{i}", store) for i, w in enumerate(workers)]

    ranks = [handle.result().id for handle in joining]
    assert sorted(ranks) == [0, 1, 2, 3]
    for worker in workers:
        assert sorted(run(worker, names)) == ["w0", "w1", "w2", "w3"]


def test_worker_leaves_and_the_others_go_on(processes, store):
    first, second, third = processes(3)
    for name, worker in (("a", first), ("b", second), ("c", third)):
        run(worker, join, name, store)

    run(second, leave)

    probes.wait_until(lambda: run(first, names) == ["a", "c"], "b has left")
    assert run(first, call, "c", 1, 2) == 3
    with pytest.raises(PeerLostError, match=r"'b' \(rank 1\) has left the group"):
        run(first, call, "b", 1, 2)
    # It may come back, and keeps its rank.
    assert run(second, join, "b", store).id == 1
    assert run(first, call, "b", 1, 2) == 3
    assert run(third, names) == ["a", "b", "c"]


def test_group_may_become_empty_and_begin_again(processes, store):
    (worker,) = processes(1)
    for _ in range(2):
        assert run(worker, join, "lonely", store).id == 0
        assert run(worker, call, "lonely", 1, 2) == 3
        run(worker, leave)


def test_training_goes_on_while_workers_come_and_go(processes, store):
    trainer, server, visitor = processes(3)
    run(trainer, join, "trainer", store)
    run(server, join, "server", store)
    training = trainer.start(0, train, "server", "enough")

    steps = 0
    for _ in range(3):
        run(visitor, join, "visitor", store)
        assert run(visitor, call, "trainer", 1, 2) == 3
        run(visitor, leave)
        run(visitor, join, "visitor", store)
        steps = run(visitor, rpc_count_steps, "trainer", steps + 5)
        run(visitor, leave)
    run(server, set_event_on, "trainer", "enough")

    assert training.result() >= steps


def rpc_count_steps(to: str, at_least: int) -> int:
    deadline = time.monotonic() + SOON_S
    while (steps := rpc.rpc_sync(to, count_steps)) < at_least:
        assert time.monotonic() < deadline, steps
    return steps


def set_event_on(to: str, event: str) -> None:
    rpc.rpc_sync(to, functions.set_event, (event,))


def test_leaving_waits_for_own_work_and_says_what_it_was(processes, store):
    first, second = processes(2)
    run(first, join, "a", store)
    run(second, join, "b", store)
    calling = second.start(0, call_blocking, "a", "leaver")

    text = run(first, leave_late_when_busy, 0.3)

    assert "worker 'a' waited 0.3 s" in text
    assert "block_until_set for 'b'" in text
    with pytest.raises(PeerLostError, match="'a'"):
        calling.result()
    run(first, functions.set_event, "leaver")


def call_blocking(to: str, event: str) -> Any:
    return rpc.rpc_sync(to, functions.block_until_set, (event,), timeout=20)


def leave_late_when_busy(timeout: float) -> str:
    deadline = time.monotonic() + SOON_S
    while not rpc.get_debug_info()["server_active_calls"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return leave_late(timeout)


# ------------------------------------------------------------------------- conflicts


def test_name_of_a_living_worker_is_refused(processes, store):
    first, second = processes(2)
    run(first, join, "same", store)

    with pytest.raises(UsageError, match="'same' of rank 0 is in the group and alive"):
        run(second, join, "same", store)
    assert run(first, call, "same", 1, 2) == 3


def test_rank_of_another_name_is_refused(processes, store):
    first, second = processes(2)
    run(first, join, "a", store, 3)

    with pytest.raises(UsageError, match="rank 3 belongs to worker 'a'"):
        run(second, join, "b", store, 3)
    assert run(second, join, "b", store).id == 0
    run(second, leave)
    with pytest.raises(UsageError, match="'b' belongs to rank 0 in this group"):
        run(second, join, "b", store, 5)


def test_groups_with_and_without_a_size_do_not_mix(processes, store):
    first, second = processes(2)
    run(first, join, "a", store, 0)

    with pytest.raises(UsageError, match="world_size='open'"):
        run(second, join_closed, "b", store, 1, 2)


def join_closed(name: str, url: str, rank: int, size: int) -> None:
    options = rpc.RpcBackendOptions(init_method=url, init_timeout=5.0)
    rpc.init_rpc(name, rank, size, options)


def test_other_words_for_the_world_size_are_refused(processes, store):
    (worker,) = processes(1)
    with pytest.raises(UsageError, match="number of workers or 'open', found 'many'"):
        run(worker, join_with_size, store, "many")


def join_with_size(url: str, size: Any) -> None:
    rpc.init_rpc("w", 0, size, rpc.RpcBackendOptions(init_method=url))


def test_worker_with_another_secret_is_kept_out(processes, store):
    first, second = processes(2)
    run(first, join, "a", store, secret="one")

    with pytest.raises(Exception, match="secret"):
        run(second, join, "b", store, secret="another")
    assert run(first, names) == ["a"]


# ----------------------------------------------------------------- crashes and comebacks


def test_crashed_worker_comes_back_and_all_are_told_in_order(processes, store):
    first, second, third, spare = processes(4)
    for name, worker in (("a", first), ("b", second), ("c", third)):
        run(worker, join, name, store)
    for worker in (first, third):
        run(worker, subscribe)
        run(worker, keep_reference, "b")

    second.kill(0)
    for worker in (first, third):
        kind, name, reason = run(worker, await_news, 1)[0]
        assert (kind, name) == ("lost", "b")
        assert reason
    assert run(spare, join, "b", store).id == 1

    for worker in (first, third):
        assert [n[:2] for n in run(worker, await_news, 2)] == [
            ("lost", "b"),
            ("joined", "b"),
        ]
        assert run(worker, call, "b", 1, 2) == 3
        run(worker, use_reference)  # of the earlier life: lost for good
    assert run(spare, names) == ["a", "b", "c"]


def test_newcomer_can_be_called_from_the_callback(processes, store):
    first, second = processes(2)
    run(first, join, "a", store)
    run(first, answer_newcomers)

    run(second, join, "b", store)

    assert run(first, await_news, 1) == [("answered", "3")]


def test_callbacks_end_with_their_subscription_and_may_fail(processes, store):
    first, second = processes(2)
    run(first, join, "a", store)
    run(first, subscribe_wrongly)
    run(first, subscribe)
    run(second, join, "b", store)
    assert run(first, await_news, 1) == [("joined", "b")]

    run(first, unsubscribe)
    run(second, leave)
    probes.wait_until(lambda: run(first, names) == ["a"], "b has left")
    assert run(first, await_news, 1) == [("joined", "b")]


def test_end_of_a_worker_that_was_never_called_is_told(make_cluster):
    cluster = make_cluster(3)
    cluster.run(0, subscribe)

    cluster.kill(2)

    assert cluster.run(0, await_news, 1)[0][:2] == ("lost", "w2")
    cluster.restart(2)
    assert cluster.run(0, await_news, 2)[1] == ("joined", "w2")


def test_worker_that_slept_too_long_is_told_that_it_is_lost(make_cluster):
    cluster = make_cluster(2, {"lost_after": 0.5})
    cluster.run(0, subscribe)
    assert cluster.run(1, call, "w0", 1, 2) == 3

    cluster.stop(1)
    cluster.run(0, await_news, 1)
    cluster.cont(1)

    with pytest.raises(
        PeerLostError, match=r"declared this worker \('w1'\) lost"
    ) as caught:
        cluster.run(1, call, "w0", 1, 2)
    assert "nothing was heard of it" in str(caught.value)
    assert "rpc.wait_for_worker" in str(caught.value)
    assert "started anew" in str(caught.value)


def test_newcomer_finds_a_worker_later_that_was_out_of_reach(processes, store):
    first, second, third = processes(3)
    run(first, join, "a", store)
    run(second, join, "b", store)
    second.stop(0)
    run(third, join, "c", store, connect_timeout=0.5)
    assert run(third, names) == ["a", "c"]
    with pytest.raises(PeerLostError, match=r"'b'.*does not answer"):
        run(third, call, "b", 1, 2)

    second.cont(0)

    assert run(third, wait_for, "b", SOON_S)[0] == "b"
    assert run(second, call, "c", 1, 2) == 3


def test_stale_entries_of_dead_workers_do_not_hold_up_newcomers(processes, store):
    first, second, third = processes(3)
    run(first, join, "a", store)
    run(second, join, "b", store)
    first.kill(0)

    start = time.monotonic()
    run(third, join, "c", store)

    assert time.monotonic() - start < SOON_S
    assert run(third, names) == ["b", "c"]


# ------------------------------------------------------------------------- waiting for


def test_waiting_ends_when_the_worker_joins(processes, store):
    first, second = processes(2)
    run(first, join, "a", store)
    waiting = first.start(0, wait_for, "b", SOON_S)

    run(second, join, "b", store)

    assert waiting.result()[0] == "b"


def test_waiting_for_a_lost_worker_ends_when_it_is_back(make_cluster):
    cluster = make_cluster(2)
    assert cluster.run(0, call, "w1", 1, 2) == 3
    cluster.kill(1)
    probes.wait_until(lambda: cluster.run(0, names) == ["w0"], "w1 is lost")
    waiting = cluster.start(0, wait_for, "w1", 20.0)

    cluster.restart(1)

    assert waiting.result()[0] == "w1"


def test_another_worker_of_the_role_will_do(processes, store):
    first, second = processes(2)
    run(first, join, "trainer:0", store)
    run(second, join, "server:1", store)
    waiting = second.start(0, wait_for, "trainer:7", SOON_S, or_role=True)

    assert waiting.result()[0] == "trainer:0"


def test_waiting_in_vain_names_the_worker(cluster):
    with pytest.raises(ConnectTimeout, match=r"'nobody' was waited for 0\.1 s"):
        cluster.run(0, wait_for, "nobody", 0.1)
    with pytest.raises(ValueError, match="timeout"):
        cluster.run(0, wait_for, "nobody", -1)
    with pytest.raises(UnknownWorker):
        cluster.run(0, call, "nobody", 1, 2)


# ------------------------------------------------------------------------ sending again


@pytest.mark.parametrize("asynchronous", [False, True])
def test_idempotent_call_survives_a_crash(make_cluster, asynchronous):
    cluster = make_cluster(2)
    calling = cluster.start(
        0, multiply_elsewhere, "w1", asynchronous, 6, 7, "never set"
    )
    cluster.run(1, wait_until_busy)

    cluster.kill(1)
    cluster.restart(1)
    cluster.run(1, functions.set_event, "never set")

    assert calling.result() == 42


@pytest.mark.parametrize("asynchronous", [False, True])
def test_idempotent_call_of_a_lost_worker_waits_for_it(make_cluster, asynchronous):
    cluster = make_cluster(2)
    assert cluster.run(0, call, "w1", 1, 2) == 3
    cluster.kill(1)
    calling = cluster.start(0, multiply_elsewhere, "w1", asynchronous, 6, 7)

    cluster.restart(1)

    assert calling.result() == 42


def wait_until_busy() -> None:
    deadline = time.monotonic() + SOON_S
    while not rpc.get_debug_info()["server_active_calls"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_idempotent_call_fails_with_the_loss_when_nobody_comes_back(make_cluster):
    cluster = make_cluster(2)
    assert cluster.run(0, call, "w1", 1, 2) == 3
    cluster.kill(1)

    assert cluster.run(0, fail_to_multiply, "w1", 0.3) < 0.3 + NOTICED_S


def fail_to_multiply(to: str, timeout: float) -> float:
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=to):
        rpc.rpc_sync(to, multiply, (1, 2), timeout=timeout)
    with pytest.raises(PeerLostError, match=to):
        rpc.rpc_async(to, multiply, (1, 2), timeout=timeout).wait()
    return time.monotonic() - start - timeout


def test_loss_of_a_third_worker_is_no_reason_to_call_again(make_cluster):
    cluster = make_cluster(3)
    assert cluster.run(1, call, "w2", 1, 2) == 3
    cluster.kill(2)

    assert cluster.run(0, lose_a_third, "w1", "w2") < NOTICED_S


@rpc.functions.idempotent
def shared(first: list[Any], second: list[Any]) -> tuple[bool, bool]:
    return first is second, first[0] is first


@on_worker(0)
def test_idempotent_call_keeps_what_its_arguments_share():
    ring: list[Any] = []
    ring.append(ring)

    for args in ((ring, ring), (ring, [ring])):
        found = rpc.rpc_async("w1", shared, args).wait()
        assert found == rpc.rpc_sync("w1", shared, args)
        assert found == (args[0] is args[1], True)


@on_worker(0)
def test_idempotent_call_that_cannot_be_sent_raises_at_once():
    args: Any = 5
    with pytest.raises(TypeError, match="args must be a tuple"):
        rpc.rpc_async("w1", multiply, args)
    with pytest.raises(EncodeError, match="lock"):
        rpc.rpc_async("w1", multiply, (threading.Lock(),))


def test_idempotent_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match="marks a function"):
        rpc.functions.idempotent(3)  # type: ignore[type-var, arg-type]
