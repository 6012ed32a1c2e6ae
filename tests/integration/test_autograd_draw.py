"""Pictures of graphs that real workers have recorded."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator

import pytest
import torch

import autograd_functions as fn
import autograd_handlers as handlers
import safe_functions
from autograd_functions import parameter
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.autograd._outline import gather
from gradwire.errors import UsageError
from on_worker import on_worker

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    if "safe_group" in request.fixturenames:
        yield
    else:
        yield from fn.clean(request)


def texts_of(svg: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("has_context", [False, True])
@on_worker(0)
def test_nested_call_is_drawn_with_all_its_messages(has_context):
    x = parameter("x")
    scope = autograd.context() if has_context else contextlib.nullcontext()
    with scope:
        y = rpc.rpc_sync("w1", handlers.affine_relay, ("w2", handlers.affine, x))
        picture = autograd.draw(y.sum(), title="nested")
        parts = gather([y.sum()])

        ends = {
            (part.worker, event.is_send, event.peer)
            for part in parts.values()
            for event in part.events
        }
        assert ends == {
            ("w0", True, 1),
            ("w1", False, 0),
            ("w1", True, 2),
            ("w2", False, 1),
            ("w2", True, 1),
            ("w1", False, 2),
            ("w1", True, 0),
            ("w0", False, 1),
        }
        texts = texts_of(picture)
        assert "3 workers, 4 messages with tensors that get gradients" in str(texts)
        assert texts.count("affine") == texts.count("affine_relay") == 2
        assert texts.count("3\u00d73 float64") == 4
        # A weight and a bias, for what w1 sends on, and what w2 makes of it.
        assert texts.count(f"2 leaves, {2 * fn.SIZE**2} numbers") == 2
        del y, scope
    gc.collect()


@on_worker(0)
def test_drawing_leaves_the_graph_as_it_was():
    x = parameter("x")
    y = rpc.rpc_sync("w1", handlers.affine, (x,)).sum()
    before = rpc.rpc_sync("w1", autograd.get_debug_info)

    first = autograd.draw(y)

    assert autograd.draw(y) == first
    assert rpc.rpc_sync("w1", autograd.get_debug_info) == before
    y.backward()
    assert x.grad is not None


@on_worker(0)
def test_graph_without_calls_or_after_its_backward_is_refused():
    x = parameter("x")
    y = rpc.rpc_sync("w1", handlers.affine, (x,)).sum()
    y.backward()

    with pytest.raises(UsageError, match="draw it before"):
        autograd.draw(y)
    with pytest.raises(UsageError, match="no call in the graph"):
        autograd.draw([(x * x).sum(), x])
    with pytest.raises(TypeError, match="must be tensors, found str at 1"):
        autograd.draw([x, "loss"])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def safe_group() -> Iterator[Cluster]:
    with Cluster(3, {"serializer": "safe"}) as made:
        for rank in range(3):
            made.run(rank, safe_functions.worker_name)  # now it is imported there
        yield made


@on_worker(0, fixture="safe_group")
def test_workers_without_trust_tell_only_those_who_took_part():
    for worker in ("w1", "w2"):
        rpc.rpc_sync(worker, safe_functions.build, (0, 2, 2))
    x = torch.ones(3, 2, requires_grad=True)
    y = rpc.rpc_sync("w1", safe_functions.forward_via, (x, "w2")).sum()

    parts = gather([y])

    # w1 tells; w2 does not know us: its messages are known from w1.
    assert len(parts[1].events) == 4
    assert parts[2].events == ()
    assert "3 workers, 4 messages" in autograd.draw(y)
    del y
    gc.collect()
