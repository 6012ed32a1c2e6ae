"""Contexts that lose a member, or their opener, end on everybody who took part."""

from __future__ import annotations

import pytest
import torch

import autograd_functions as fn
import functions
import probes
from cluster import Cluster
from gradwire import autograd, rpc
from gradwire.autograd._api import current_exchange
from gradwire.autograd._messages import PassStart, key_of_context
from gradwire.errors import PeerLostError
from gradwire.transport import Frame

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]

_weight = torch.ones(3, requires_grad=True)


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x * _weight


def call_both(first: str, second: str, x: torch.Tensor) -> torch.Tensor:
    """Calls one worker, and then another that will be lost."""
    y: torch.Tensor = rpc.rpc_sync(first, multiply, (x,))
    z: torch.Tensor = rpc.rpc_sync(second, multiply, (y,))
    return z


def open_and_call() -> None:
    fn.open_context()
    x = torch.ones(3, requires_grad=True)
    fn.keep("y", fn.inside(rpc.rpc_sync, "w1", call_both, ("w2", "w3", x)))


def leave() -> None:
    fn.drop("y")
    fn.close_contexts()


def num_contexts() -> int:
    return int(autograd.get_debug_info()["contexts"])


def wait_until_none_is_left(cluster: Cluster, *ranks: int) -> None:
    def are_none() -> bool:
        return not any(cluster.run(rank, num_contexts) for rank in ranks)

    probes.wait_until(are_none, f"none of {ranks} has a context", 5.0)


def test_end_of_a_context_passes_through_a_worker_that_broke_it(make_cluster):
    """w0 knows w1 only; w1 has dropped the context because w3 is lost; w2 must hear."""
    cluster = make_cluster(4)
    cluster.run(0, open_and_call)
    cluster.kill(3)
    probes.wait_until(
        lambda: cluster.run(1, num_contexts) == 0, "w1 has dropped the context"
    )

    cluster.run(0, leave)

    wait_until_none_is_left(cluster, 0, 1, 2)


def test_context_whose_opener_dies_ends_on_workers_that_it_never_called(make_cluster):
    cluster = make_cluster(4)
    cluster.run(0, open_and_call)

    cluster.kill(0)

    wait_until_none_is_left(cluster, 1, 2, 3)


def call_chain(names: list[str], x: torch.Tensor) -> torch.Tensor:
    """Each calls the next."""
    if not names:
        return multiply(x)
    y: torch.Tensor = rpc.rpc_sync(names[0], call_chain, (names[1:], x))
    return y


def open_and_call_chain() -> None:
    fn.open_context()
    x = torch.ones(3, requires_grad=True)
    fn.keep("y", fn.inside(rpc.rpc_sync, "w1", call_chain, (["w2", "w3"], x)))


def test_context_ends_behind_a_member_that_was_the_only_way_to_it(make_cluster):
    """w3 is known to w2 only, and w2 to w1 only, which dies: no release reaches them."""
    cluster = make_cluster(4)
    cluster.run(0, open_and_call_chain)
    assert cluster.run(3, num_contexts) == 1

    cluster.kill(1)

    wait_until_none_is_left(cluster, 2, 3)
    cluster.run(0, leave)
    wait_until_none_is_left(cluster, 0)


def wait_until_lost(name: str) -> None:
    def is_lost() -> bool:
        try:
            rpc.rpc_sync(name, functions.echo, (1,))
        except PeerLostError:
            return True
        return False

    probes.wait_until(is_lost, f"{name} is lost")


def call_again(with_history: bool) -> None:
    """A call to a member that has dropped the context because of the loss."""
    x = torch.ones(3, requires_grad=with_history)
    with pytest.raises(PeerLostError, match="w3"):
        fn.inside(rpc.rpc_sync, "w1", multiply, (x,))
    plain = fn.inside(rpc.rpc_sync, "w1", functions.add, (1, 2))
    assert plain == 3


@pytest.mark.parametrize("with_history", [False, True])
def test_no_history_is_lost_in_a_context_that_a_member_has_dropped(
    make_cluster, with_history
):
    cluster = make_cluster(4)
    cluster.run(0, open_and_call)
    cluster.kill(3)
    probes.wait_until(
        lambda: cluster.run(1, num_contexts) == 0, "w1 has dropped the context"
    )

    cluster.run(0, call_again, with_history)
    cluster.run(0, leave)


def get_weight() -> torch.Tensor:
    return _weight


def fetch(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    """Has no history but that of the value."""
    return rref.to_here() * 2


def fetch_there() -> None:
    value = rpc.remote("w2", get_weight)
    with pytest.raises(PeerLostError, match="w3"):
        fn.inside(rpc.rpc_sync, "w1", fetch, (value,))
    # What records nothing goes on.
    assert fn.inside(rpc.rpc_sync, "w1", functions.add, (1, 2)) == 3


def test_reference_is_not_fetched_without_history_in_a_broken_context(make_cluster):
    cluster = make_cluster(4)
    cluster.run(0, open_and_call)
    cluster.kill(3)
    probes.wait_until(
        lambda: cluster.run(1, num_contexts) == 0, "w1 has dropped the context"
    )

    cluster.run(0, fetch_there)
    cluster.run(0, leave)


def multiply_later(x: torch.Tensor) -> torch.Tensor:
    functions.block_until_set("go on")
    return multiply(x)


def call_both_late(first: str, second: str, x: torch.Tensor) -> torch.Tensor:
    """Calls a worker that will be lost, and then one whose answer comes after that."""
    rpc.rpc_sync(first, multiply, (x,))
    y: torch.Tensor = rpc.rpc_sync(second, multiply_later, (torch.ones(3),))
    return y.sum()


def call_late() -> None:
    with autograd.context(), pytest.raises(PeerLostError, match="w3"):
        rpc.rpc_sync("w1", call_both_late, ("w3", "w2", torch.ones(3)))


def test_answer_that_comes_when_the_context_is_broken_does_not_lose_history(
    make_cluster,
):
    cluster = make_cluster(4)
    calling = cluster.start(0, call_late)
    cluster.run(2, functions.wait_until_blocked, "go on")
    cluster.kill(3)
    probes.wait_until(
        lambda: cluster.run(1, num_contexts) == 0, "w1 has dropped the context"
    )
    cluster.run(2, functions.set_event, "go on")

    calling.result()


def hear_late_of_a_pass(name: str) -> int:
    """What a lost worker had said of a pass was waiting for a thread until now."""
    exchange = current_exchange()
    peer = exchange.agent.network.find(name)
    opener = exchange.agent.network.find("w2")
    key = key_of_context(opener.info.id, 7)
    start = PassStart(key, opener.incarnation, opener.info.id, 0, 1, False, False)
    exchange.on_start(peer, start, Frame(b"", []))
    return num_contexts()


def test_pass_that_a_lost_worker_had_told_of_leaves_no_context(make_cluster):
    cluster = make_cluster(3)
    cluster.run(0, rpc.rpc_sync, "w1", functions.echo, (1,))
    cluster.kill(1)
    cluster.run(0, wait_until_lost, "w1")

    assert cluster.run(0, hear_late_of_a_pass, "w1") == 0
