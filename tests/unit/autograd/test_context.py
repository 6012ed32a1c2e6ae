"""What one side of a context says of it to others, and what it remembers of messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.autograd._context import ContextName, Side
from gradwire.autograd._engine import Destination
from gradwire.autograd._messages import CallHeader, encode_header, key_of_context
from gradwire.autograd._passes import PassId, PassKind

ME, PEER, OTHER = 0, 1, 2


def make_side(*, into_grad: bool = False, holds_weakly: bool = False) -> Side:
    exchange: Any = SimpleNamespace(me=ME, describe=str)
    name = ContextName(key_of_context(ME, 5), 77)
    return Side(
        exchange, name, "a context", holds_weakly=holds_weakly, into_grad=into_grad
    )


def described(side: Side, peer: int = PEER) -> bytes:
    """The header of a call, made anew."""
    header = CallHeader(0)
    side.describe_call(peer, header)
    return encode_header(header)


def run_pass(side: Side, *, retain: bool) -> None:
    kind = PassKind(Destination.INTO_DICTIONARY, retain, False)
    pass_, _ = side.state.start(kind)
    side.state.local_end()
    for peer in list(pass_.told):
        side.state.on_done(pass_.id, peer)


# ---------------------------------------------------------- what is said of it with calls


@pytest.mark.parametrize("into_grad", [False, True])
def test_calls_say_the_same_until_something_changes(into_grad):
    side = make_side(into_grad=into_grad)

    first = side.introduce(PEER)

    assert first.header == described(side)
    assert side.introduce(PEER) is first


@pytest.mark.parametrize("retain", [False, True])
def test_calls_say_which_pass_has_begun(retain):
    side = make_side()
    before = side.introduce(PEER).header

    for _ in range(2):
        run_pass(side, retain=retain)
        after = side.introduce(PEER).header
        assert after == described(side)
        assert after != before
        before = after


def test_calls_say_which_pass_has_begun_elsewhere():
    side = make_side()
    before = side.introduce(PEER).header

    with side.lock:
        side.join(PEER, (PEER, 3), 2)

    after = side.introduce(PEER).header
    assert after == described(side)
    assert after != before


def test_calls_say_which_pass_has_failed_before_it_began_here():
    side = make_side()
    before = side.introduce(PEER).header

    side.state.fail(PassId(PEER, 0), "it failed")

    after = side.introduce(PEER).header
    assert after == described(side)
    assert after != before


def test_calls_say_where_gradients_go_also_if_that_is_known_late():
    side = make_side()
    before = side.introduce(PEER).header

    side.into_grad = True

    after = side.introduce(PEER).header
    assert after == described(side)
    assert after != before


def test_each_worker_that_is_called_is_known_from_then_on():
    side = make_side()

    for peer in (PEER, OTHER, PEER, ME):
        side.introduce(peer)

    assert side.state.known == {PEER, OTHER}
    side.state.lose(PEER, "it is lost")
    side.introduce(PEER)
    assert side.state.known == {PEER, OTHER}


# --------------------------------------------------------------------------- what it notes


def test_leaf_that_is_handed_out_is_noted_as_any_reply():
    leaf = torch.ones(2, requires_grad=True)
    short, long = make_side(), make_side()

    for after in (None, (PEER, 0), (PEER, 1)):
        handed_out = short.hand_out(PEER, leaf, after, 0)
        with long.lock:
            long.join(PEER, after, 0)
            arrival = long.num_requests
            long.num_requests += 1
        announced = long.announce_send(PEER, [(leaf, None)], arrival)
        assert handed_out == announced

    found, expected = short.peek_leaves(), long.peek_leaves()
    assert found is not None and expected is not None
    for (message, leaving), (other, others) in zip(found, expected, strict=True):
        assert leaving == others
        for name in ("event", "peer", "num_tensors", "reply_to", "urgency"):
            assert getattr(message, name) == getattr(other, name)
    assert short.state.known == long.state.known == {PEER}
    assert short.state.begun == long.state.begun
    assert short.num_sends == long.num_sends
    assert short.num_requests == long.num_requests


def test_sender_of_a_message_is_known_from_then_on():
    side = make_side()

    for number, peer in enumerate((PEER, OTHER, PEER, ME)):
        side.record_recv(peer, number, None, [torch.ones(2)], may_wait=True)

    assert side.state.known == {PEER, OTHER}
    assert [recv.peer for recv in side.recvs] == [PEER, OTHER, PEER, ME]


@pytest.mark.parametrize("holds_weakly", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_history_is_the_same_on_a_thread_that_is_known_to_be_clean(mode, holds_weakly):
    packed: list[torch.Tensor] = []
    tensors = [torch.ones(2) for _ in range(2)]

    for tensor, is_clean in zip(tensors, (False, True), strict=True):
        side = make_side(holds_weakly=holds_weakly)
        with (
            mode(),
            torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: _),
        ):
            side.record_recv(PEER, 3, None, [tensor], is_clean=is_clean)

    assert not packed
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    for node in nodes:
        assert node.name() == "RecvBackward"
        assert (node.message.peer, node.message.number) == (PEER, 3)
    assert len({len(node.next_functions) for node in nodes}) == 1


def test_newcomer_takes_over_how_far_the_sender_is():
    side = make_side()

    side.record_recv(PEER, 0, (PEER, 4), [torch.ones(2)])

    assert side.state.begun == PassId(PEER, 4)
