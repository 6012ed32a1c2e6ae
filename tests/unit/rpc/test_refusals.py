"""Whether a worker that has proven itself may come in."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from gradwire._config import RpcBackendOptions
from gradwire._ids import WorkerInfo
from gradwire.errors import ConnectError
from gradwire.rpc._connect import Dialer, limits_of, refusal_for
from gradwire.rpc._handshake import CLOSING, GLARE, IDENTITY, TAKEN, PeerIdentity
from gradwire.rpc._host import HostIdentity
from gradwire.rpc._peer import Peer
from gradwire.rpc._records import WorkerRecord
from gradwire.transport import get_transport

LINK: Any = object()  # only its presence counts


def make_peer(
    name: str = "w1",
    rank: int = 1,
    incarnation: int = 11,
    *,
    connected: bool = False,
    dialing: bool = False,
    lost: bool = False,
) -> Peer:
    peer = Peer(WorkerInfo(name, rank), incarnation, 1000)
    if connected:
        assert peer.attach(LINK)
    peer.is_dialing = dialing
    if lost:
        peer.end("it closed the connection")
    return peer


def refuse(
    name: str = "w1",
    rank: int = 1,
    incarnation: int = 11,
    *,
    own_rank: int = 0,
    known: Peer | None = None,
    namesake: Peer | None = None,
    is_closing: bool = False,
    world_size: int = 4,
) -> tuple[str, str] | None:
    return refusal_for(
        PeerIdentity(name, rank, incarnation, 0.0),
        own_rank=own_rank,
        own_name=f"w{own_rank}",
        known=known,
        namesake=namesake,
        is_closing=is_closing,
        world_size=world_size,
    )


def code(refusal: tuple[str, str] | None) -> str | None:
    return refusal[0] if refusal else None


def test_unknown_worker_is_let_in():
    assert refuse() is None


def test_member_without_connection_is_let_in():
    peer = make_peer()

    assert refuse(known=peer, namesake=peer) is None


def test_closing_worker_refuses_everybody():
    refusal = refuse(is_closing=True)

    assert code(refusal) == CLOSING
    assert refusal is not None
    assert "'w0' is shutting down" in refusal[1]


def test_rank_outside_of_the_group_is_refused():
    refusal = refuse("w9", 9)

    assert code(refusal) == IDENTITY
    assert refusal is not None
    assert "rank 9" in refusal[1]
    assert "4 workers" in refusal[1]


@pytest.mark.parametrize(("name", "rank"), [("w0", 1), ("w1", 0), ("w0", 0)])
def test_our_own_name_or_rank_is_taken(name, rank):
    assert code(refuse(name, rank)) == TAKEN


def test_second_worker_with_the_same_name_and_rank_is_refused():
    peer = make_peer(connected=True)

    refusal = refuse(incarnation=12, known=peer, namesake=peer)

    assert code(refusal) == TAKEN
    assert refusal is not None
    assert "taken by worker 'w1' of rank 1" in refusal[1]


def test_same_rank_under_another_name_is_refused():
    assert code(refuse("impostor", 1, 12, known=make_peer(connected=True))) == TAKEN


def test_same_name_with_another_rank_is_refused():
    assert code(refuse("w1", 2, 12, namesake=make_peer(connected=True))) == TAKEN


def test_restarted_worker_is_let_in_after_the_loss_of_the_old_one():
    old = make_peer(connected=True, lost=True)

    assert refuse(incarnation=12, known=old, namesake=old) is None


def test_restarted_worker_is_let_in_if_the_old_one_was_never_connected():
    old = make_peer()

    assert refuse(incarnation=12, known=old, namesake=old) is None


def test_worker_that_was_declared_lost_may_come_back():
    lost = make_peer(lost=True)
    lost.is_mourned = True

    assert refuse(known=lost, namesake=lost) is None


@pytest.mark.parametrize(("own_rank", "expected"), [(0, GLARE), (2, None)])
def test_of_two_that_seek_each_other_the_lower_rank_wins(own_rank, expected):
    lost = make_peer(lost=True)
    lost.is_mourned = lost.is_dialing = True

    assert code(refuse(own_rank=own_rank, known=lost, namesake=lost)) == expected


def test_worker_that_is_being_declared_lost_has_to_wait():
    lost = make_peer(lost=True)

    refusal = refuse(known=lost, namesake=lost)

    assert code(refusal) == TAKEN
    assert refusal is not None
    assert "declared lost" in refusal[1]
    assert "it closed the connection" in refusal[1]


def test_second_connection_of_the_same_life_is_glare():
    peer = make_peer(connected=True)

    assert code(refuse(known=peer, namesake=peer)) == GLARE


@pytest.mark.parametrize(("own_rank", "expected"), [(0, GLARE), (2, None)])
def test_of_two_that_dial_at_once_the_lower_rank_wins(own_rank, expected):
    peer = make_peer(dialing=True)

    assert code(refuse(own_rank=own_rank, known=peer, namesake=peer)) == expected


# --------------------------------------------------------------- choice of transport


def make_record(host: HostIdentity, **addresses: str) -> WorkerRecord:
    return WorkerRecord(
        "w1", 1, 11, 2, host.boot_id, host.network_namespace, addresses, True
    )


HERE = HostIdentity("boot", "1")
OTHER_NAMESPACE = HostIdentity("boot", "2")
OTHER_HOST = HostIdentity("other", "1")
BOTH = {"unix": "label", "tcp": "10.0.0.1:80"}


def make_dialer(
    schemes: tuple[str, ...] = ("unix", "tcp"),
    secret: bytes | None = b"secret",
    host: HostIdentity = HERE,
) -> Dialer:
    def identify() -> PeerIdentity:
        return PeerIdentity("w0", 0, 10, 0.0)

    transports = {scheme: get_transport(scheme) for scheme in schemes}
    return Dialer(identify, secret, RpcBackendOptions(), transports, host)


@pytest.mark.parametrize(
    ("host", "scheme"), [(HERE, "unix"), (OTHER_NAMESPACE, "tcp"), (OTHER_HOST, "tcp")]
)
def test_transport_follows_from_where_the_worker_is(host, scheme):
    assert make_dialer().choose(make_record(host, **BOTH)) == scheme


def test_host_that_does_not_identify_itself_is_another_one():
    nobody = HostIdentity("", "")

    assert make_dialer(host=nobody).choose(make_record(nobody, **BOTH)) == "tcp"


def test_order_of_transports_is_the_order_of_preference():
    assert make_dialer(("tcp", "unix")).choose(make_record(HERE, **BOTH)) == "tcp"


def test_transport_must_be_offered():
    assert make_dialer().choose(make_record(HERE, tcp="10.0.0.1:80")) == "tcp"


def test_no_common_transport_is_a_clear_error():
    with pytest.raises(ConnectError, match=r"same host.*offers tcp.*has unix") as error:
        make_dialer(("unix",)).choose(make_record(HERE, tcp="10.0.0.1:80"))

    assert error.value.worker == "w1"


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_other_host_without_a_way_says_what_to_do(secret):
    dialer = make_dialer(("unix",), secret=secret)

    with pytest.raises(
        ConnectError, match=r"another host.*gradwire certs.*allow_plain_tcp=True"
    ):
        dialer.choose(make_record(OTHER_HOST, unix="label"))


def test_worker_at_whose_address_nobody_listens_may_have_ended():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    record = make_record(HERE, tcp=address)

    with pytest.raises(
        ConnectError, match=r"'w1'.*nobody listens there: has that worker ended\?"
    ):
        make_dialer(("tcp",)).dial(record, time.monotonic() + 5.0)


def test_limits_come_from_the_options():
    options = RpcBackendOptions(
        max_head_bytes=1,
        max_frame_bytes=2,
        shared_memory_min_bytes=3,
        shared_memory_keep_bytes=4,
    )

    limits = limits_of(options)

    assert limits.max_head_bytes == 1
    assert limits.max_frame_bytes == 2
    assert limits.shared_memory_min_bytes == 3
    assert limits.shared_memory_keep_bytes == 4


@pytest.mark.parametrize(
    ("serializer", "is_same_user", "shares"),
    [("pickle", False, True), ("safe", False, False), ("safe", True, True)],
)
def test_memory_is_shared_only_with_those_who_reach_it_anyway(
    serializer, is_same_user, shares
):
    options = RpcBackendOptions(serializer=serializer)

    assert limits_of(options, is_same_user=is_same_user).shares_memory is shares
