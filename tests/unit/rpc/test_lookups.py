"""What is answered on the short way, and what is left to the long one."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.rpc._interceptors import Interceptor
from gradwire.rpc._lookups import Lookups
from gradwire.rpc._turn import Turn, set_turn
from gradwire.transport import Frame
from gradwire.wire import (
    FLAT_TUPLE,
    Body,
    Call,
    Reply,
    decode_control,
    decode_value,
    encode,
)

TENSOR = torch.arange(6.0).reshape(2, 3)


class Layer(Interceptor):
    name = "layer"
    sees_all_calls = True

    def __init__(self) -> None:
        self.lookups = {"find": lambda _: TENSOR}


class Link:
    """Keeps what is sent."""

    clock_offset = 0.0

    def __init__(self) -> None:
        self.connection = SimpleNamespace(num_queued=0)
        self.sent: list[tuple[bytes, bool]] = []

    def send(self, head: bytes, *, hold: bool) -> None:
        self.sent.append((head, hold))


def make_lookups() -> Lookups:
    return Lookups((Layer(),), max_calls=4)


def ask(lookups: Lookups, link: Any, *args: Any, held: int = 0, **changes: Any) -> bool:
    """Whether a call is answered on the short way."""
    call = Call(7, target="find", **changes)
    head = encode(call, args).head
    message: Any = decode_control(head)[0]
    peer: Any = SimpleNamespace(held=SimpleNamespace(calls=held))
    look_up = lookups.by_target["find"]
    return lookups.serve(look_up, link, peer, message, Frame(head, []))


@pytest.fixture
def _at_turn():
    """The current thread serves what it has just read."""
    yield
    set_turn(None)


def begin_turn(link: Any) -> Turn:
    turn = Turn(link)
    turn.serving_since = time.monotonic()
    set_turn(turn)
    return turn


def test_what_is_there_is_answered():
    lookups, link = make_lookups(), Link()

    assert ask(lookups, link, 1)

    ((head, hold),) = link.sent
    reply, _ = decode_control(head)
    assert isinstance(reply, Reply)
    assert reply.id == 7
    assert torch.equal(decode_value(reply, head, [])[0], TENSOR)
    assert not hold
    assert lookups.num_served == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"style": 1},
        {"headers": {"another": b""}},
        {"headers": {"layer": b"for more than this"}},
        {"held": 4},
    ],
)
def test_what_is_not_simple_is_left_to_the_long_way(odd):
    lookups, link = make_lookups(), Link()

    assert not ask(lookups, link, 1, **odd)
    assert not ask(lookups, link, TENSOR)

    assert link.sent == []
    assert lookups.num_served == 0


def test_answers_that_the_peer_does_not_read_count():
    lookups, link = make_lookups(), Link()
    link.connection.num_queued = 2

    assert ask(lookups, link, held=1)
    assert not ask(lookups, link, held=2)


@pytest.mark.usefixtures("_at_turn")
@pytest.mark.parametrize("whose", ["nobody's", "another's", "the link's"])
def test_late_call_is_left_to_the_long_way(whose):
    lookups, link = make_lookups(), Link()
    if whose != "nobody's":
        turn = begin_turn(link if whose == "the link's" else Link())
        turn.serving_since -= 0.0 if whose == "the link's" else 1e6
    now = time.monotonic()

    assert not ask(lookups, link, deadline=now - 1.0)
    assert ask(lookups, link, deadline=now + 60.0)

    link.clock_offset = 100.0  # the peer's clock goes before ours
    assert not ask(lookups, link, deadline=now + 60.0)


@pytest.mark.usefixtures("_at_turn")
def test_answer_is_held_if_more_was_read_at_the_same_time():
    lookups, link = make_lookups(), Link()
    turn = begin_turn(link)
    turn.rest.append(Frame(b"", []))

    assert ask(lookups, link)
    assert ask(lookups, other := Link())

    assert (link.sent[0][1], other.sent[0][1]) == (True, False)


def test_calls_of_many_threads_are_all_counted():
    lookups = make_lookups()

    def ask_often() -> None:
        link = Link()
        for _ in range(200):
            assert ask(lookups, link)

    threads = [threading.Thread(target=ask_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert lookups.num_served == 800


@pytest.mark.parametrize("refs", [[], [0], [-1, -1], [5]], ids=str)
def test_what_is_malformed_is_left_to_the_long_way(refs):
    lookups, link = make_lookups(), Link()
    call = Call(7, target="find", body=Body(FLAT_TUPLE, [1], refs))
    head = encode(call).head
    peer: Any = SimpleNamespace(held=SimpleNamespace(calls=0))
    look_up: Any = lookups.by_target["find"]
    any_link: Any = link

    is_served = lookups.serve(look_up, any_link, peer, call, Frame(head, []))

    assert not is_served
    assert link.sent == []


def test_what_has_something_behind_it_is_left_to_the_long_way():
    lookups, link = make_lookups(), Link()
    call = Call(7, target="find", body=Body(FLAT_TUPLE, [1], [-1]))
    head = encode(call).head
    peer: Any = SimpleNamespace(held=SimpleNamespace(calls=0))
    look_up: Any = lookups.by_target["find"]
    any_link: Any = link

    assert lookups.serve(look_up, any_link, peer, call, Frame(head, []))
    assert not lookups.serve(look_up, any_link, peer, call, Frame(head + b"more", []))
    assert len(link.sent) == 1
