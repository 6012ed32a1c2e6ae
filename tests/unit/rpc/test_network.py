"""Who is in the group, when some are not what they seem or go half-way."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import probes
from gradwire._ids import new_incarnation
from gradwire.errors import NotInitialized, PeerLostError, UnknownWorker
from gradwire.rpc import _network
from gradwire.rpc._agent import Agent
from gradwire.rpc._handshake import PeerIdentity
from strangers import Group, assert_works, initiator, read_to_end, stranger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Unix sockets")


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def usable(agent: Agent) -> list[str]:
    return [peer.info.name for peer in agent.network.peers() if peer.is_usable]


def fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("this step fails")


# ------------------------------------------------------------------------------ the end


def test_connection_that_comes_after_the_end_is_closed(group, monkeypatch):
    first, _, _ = group.couple()
    dial = first.network._dialer.dial

    def dial_late(*args: Any) -> Any:
        found = dial(*args)
        first.close()
        return found

    monkeypatch.setattr(first.network._dialer, "dial", dial_late)

    with pytest.raises(NotInitialized, match="'w0' was shut down while it connected"):
        first.call("w1", operator.add, (1, 2))


# ---------------------------------------------------------------------- names and ranks


@pytest.mark.parametrize("is_connected", [False, True])
def test_living_worker_is_found_by_a_name_that_a_dead_one_had(group, is_connected):
    first, _, _ = group.couple()
    _, living = group.add("b", 2)
    dead = msgspec.structs.replace(
        living, name="b", rank=1, incarnation=new_incarnation(), addresses={}
    )
    other = msgspec.structs.replace(dead, name="a", incarnation=new_incarnation())
    first.network.set_members([living])
    if is_connected:
        assert_works(first, "b")

    first.network.set_members([dead])
    if is_connected:
        assert first.network.find("b").info.id == 2
    first.network.set_members([other, living])

    assert first.network.find("a").info.id == 1
    assert first.network.find("b").info.id == 2
    assert_works(first, "b")


def test_name_of_a_worker_that_is_forgotten_goes_to_its_namesake(group):
    first, _, _ = group.couple()
    _, living = group.add("b", 2)
    stale = msgspec.structs.replace(
        living, rank=1, incarnation=new_incarnation(), addresses={}
    )
    first.network.set_members([living, stale])

    first.network.forget(stale)

    assert_works(first, "b")


# ------------------------------------------------------------------------------- ghosts


def test_who_goes_before_it_is_connected_was_never_there(group):
    first, _ = group.add("w0", 0)
    ghost = PeerIdentity("ghost", 1, new_incarnation(), time.monotonic())

    assert first.network._admit(ghost) is None
    first.network._on_abandoned(ghost)

    assert usable(first) == ["w0"]
    with pytest.raises(UnknownWorker, match="'ghost'"):
        first.network.is_complete()
        first.call("ghost", operator.add, (1, 2))
    assert first.network._guests == {}


def test_who_cannot_be_connected_was_never_there(group, monkeypatch):
    first, _, record = group.couple()
    first.network.forget(first.network.find(2).record)
    with monkeypatch.context() as patch:
        patch.setattr(_network, "Link", fail)
        with stranger(record) as sock:
            handshake = initiator(record, None, name="ghost")
            sock.sendall(handshake.start())
            sock.sendall(handshake.receive(sock.recv(1 << 16)))
            read_to_end(sock)  # it is shown out

    probes.wait_until(lambda: usable(first) == ["w0", "w1"], "the ghost is forgotten")
    assert_works(first, "w1")


def test_place_of_a_lost_worker_is_given_back_to_it(group):
    first, second, _ = group.couple()
    assert_works(first, "w1")
    lost = first.network.find("w1")
    second.close()
    probes.wait_until(lambda: lost.is_mourned, "it is lost")
    for _ in range(2):  # the second takes the place of the first, which never came
        ghost = PeerIdentity("w1", 1, new_incarnation(), time.monotonic())
        assert first.network._admit(ghost) is None

    first.network._on_abandoned(ghost)

    assert first.network.find("w1") is lost
    assert first.network._guests == {}
    with pytest.raises(PeerLostError, match="'w1'"):
        first.call("w1", operator.add, (1, 2))


def test_member_of_the_group_stays_one_if_it_goes_before_it_is_connected(group):
    first, _ = group.add("w0", 0)
    _, record = group.add("w1", 1)
    identity = PeerIdentity("w1", 1, record.incarnation, time.monotonic())
    assert first.network._admit(identity) is None
    first.network.set_members([record])

    first.network._on_abandoned(identity)

    assert_works(first, "w1")
