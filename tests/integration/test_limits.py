"""One peer asks for too much: it gets an error, and nobody else notices."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import probes
import safe_functions as fn
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.errors import LimitExceeded
from on_worker import on_worker

pytestmark = pytest.mark.multiproc

CALLS, NBYTES, CONTEXTS, RREFS = 8, 1 << 20, 4, 6
LIMITS = {
    "max_peer_calls": CALLS,
    "max_peer_bytes": NBYTES,
    "max_peer_contexts": CONTEXTS,
    "max_peer_rrefs": RREFS,
}


@pytest.fixture(scope="module", params=["pickle", "safe"])
def limited(request):
    with Cluster(3, {**LIMITS, "serializer": request.param}) as made:
        for rank in range(3):
            made.run(rank, fn.worker_name)  # its exports are there from now on
        yield made


def on_limited_worker(body: Any) -> Any:
    return on_worker(0, fixture="limited")(body)


def assert_others_are_served() -> None:
    """w2 can still ask w1."""
    arguments = ("w1", "add", torch.ones(1), torch.ones(1))
    assert rpc.rpc_sync("w2", fn.ask_by_short_name, arguments) == 2


def check(error: LimitExceeded, limit: str) -> None:
    for fact in ("'w0'", "'w1'", limit, str(LIMITS[limit])):
        assert fact in str(error)


@on_limited_worker
def test_too_many_open_calls_are_refused():
    waiting = [rpc.rpc_async("w1", fn.wait_for_gate) for _ in range(CALLS)]
    probes.wait_until(
        lambda: rpc.rpc_sync("w2", fn.ask_active, ("w1",)) >= CALLS, "all are open"
    )

    for _ in range(3):
        with pytest.raises(LimitExceeded) as caught:
            rpc.rpc_sync("w1", fn.worker_name)
        check(caught.value, "max_peer_calls")
    assert_others_are_served()

    rpc.rpc_sync("w2", fn.ask_to_open_gate, ("w1",))
    assert all(future.wait() for future in waiting)
    assert rpc.rpc_sync("w1", fn.worker_name) == "w1"
    rpc.rpc_sync("w1", fn.close_gate)


@on_limited_worker
def test_too_many_bytes_are_refused():
    half = torch.zeros(NBYTES * 3 // 5, dtype=torch.uint8)
    with pytest.raises(LimitExceeded) as caught:
        rpc.rpc_sync("w1", fn.take, (torch.zeros(NBYTES, dtype=torch.uint8),))
    check(caught.value, "max_peer_bytes")

    waiting = rpc.rpc_async("w1", fn.wait_for_gate, (half,))
    probes.wait_until(
        lambda: rpc.rpc_sync("w2", fn.ask_active, ("w1",)) >= 1, "it is open"
    )
    with pytest.raises(LimitExceeded):
        rpc.rpc_sync("w1", fn.take, (half,))
    assert_others_are_served()
    rpc.rpc_sync("w1", fn.open_gate)
    assert waiting.wait()

    # A request counts until its answer is written: a moment longer than we wait for it.
    quarter = half[: NBYTES // 4].clone()
    for _ in range(20):
        rpc.rpc_sync("w1", fn.take, (quarter,))
    rpc.rpc_sync("w1", fn.close_gate)


@on_limited_worker
def test_too_many_contexts_of_calls_are_refused():
    x = torch.ones(2, requires_grad=True)
    graphs = [rpc.rpc_sync("w1", fn.scale, (x,)) for _ in range(CONTEXTS)]

    with pytest.raises(LimitExceeded) as caught:
        rpc.rpc_sync("w1", fn.scale, (x,))
    check(caught.value, "max_peer_contexts")
    assert_others_are_served()
    assert rpc.rpc_sync("w1", fn.scale, (x.detach(),)).tolist() == [2, 2]

    torch.stack(graphs).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 * CONTEXTS, 2 * CONTEXTS]
    del graphs
    gc.collect()
    rpc.rpc_sync("w1", fn.scale, (x,)).sum().backward()


@on_limited_worker
def test_too_many_explicit_contexts_are_refused():
    x = torch.ones(2, requires_grad=True)
    opened = []
    for _ in range(CONTEXTS):
        context = autograd.context()
        opened.append(context)
        context.__enter__()
        rpc.rpc_sync("w1", fn.scale, (x,))
    with autograd.context() as ctx:
        with pytest.raises(LimitExceeded) as caught:
            rpc.rpc_sync("w1", fn.scale, (x,))
        check(caught.value, "max_peer_contexts")
        # That worker takes no part in the context, so no pass over it can succeed.
        loss = rpc.rpc_sync("w2", fn.scale, (x,)).sum()
        with pytest.raises(LimitExceeded):
            autograd.backward(ctx, [loss])
    with autograd.context() as ctx:  # others go on
        loss = rpc.rpc_sync("w2", fn.scale, (x,)).sum()
        autograd.backward(ctx, [loss])
        assert autograd.get_gradients(ctx)[x].tolist() == [2, 2]
    assert_others_are_served()
    for context in reversed(opened):
        context.__exit__(None, None, None)
    probes.wait_until(
        lambda: rpc.rpc_sync("w1", fn.num_contexts) == 0, "w1 has dropped them"
    )
    with autograd.context() as ctx:
        autograd.backward(ctx, [rpc.rpc_sync("w1", fn.scale, (x,)).sum()])


@on_limited_worker
def test_too_many_references_are_refused():
    made = [rpc.remote("w1", fn.Counter, (number,)) for number in range(RREFS)]
    assert [rref.rpc_sync().add() for rref in made] == list(range(1, RREFS + 1))

    with pytest.raises(LimitExceeded) as caught:
        rpc.remote("w1", fn.Counter).to_here()
    check(caught.value, "max_peer_rrefs")
    with pytest.raises(LimitExceeded) as caught:
        rpc.rpc_sync("w1", fn.refer, (1,))
    check(caught.value, "max_peer_rrefs")
    assert_others_are_served()

    del made[3:]
    gc.collect()
    probes.wait_until(
        lambda: rpc.rpc_sync("w1", fn.num_forks) == 3, "w1 has forgotten some"
    )
    assert rpc.remote("w1", fn.refer, (3,)) is not None
    del made
    gc.collect()
    probes.wait_until(lambda: rpc.rpc_sync("w1", fn.num_forks) == 0, "none is left")


@on_limited_worker
def test_references_that_a_third_worker_is_given_count_for_it():
    made = [rpc.remote("w1", fn.Counter) for _ in range(RREFS)]
    rpc.rpc_sync("w2", fn.keep, tuple(made))
    own = rpc.RRef(torch.ones(1))

    with pytest.raises(LimitExceeded, match="max_peer_rrefs"):
        rpc.rpc_sync("w2", fn.keep, (made[0],))
    assert rpc.rpc_sync("w2", fn.keep, (own,)) == RREFS + 1

    rpc.rpc_sync("w2", fn.drop_all)
    del made, own
    gc.collect()
    probes.wait_until(lambda: rpc.rpc_sync("w1", fn.num_forks) == 0, "none is left")


@on_limited_worker
def test_a_worker_does_not_limit_itself():
    x = torch.ones(2, requires_grad=True)
    graphs = [rpc.rpc_sync("w0", fn.scale, (x,)) for _ in range(2 * CONTEXTS)]
    values = [rpc.remote("w0", fn.Counter) for _ in range(2 * RREFS)]
    big = torch.zeros(2 * NBYTES, dtype=torch.uint8)
    rpc.rpc_sync("w0", fn.take, (big,))
    waiting = [rpc.rpc_async("w0", fn.wait_for_gate) for _ in range(2 * CALLS)]
    rpc.rpc_sync("w0", fn.open_gate)
    assert all(future.wait() for future in waiting)
    fn.close_gate()
    assert len(graphs) + len(values) > 0
