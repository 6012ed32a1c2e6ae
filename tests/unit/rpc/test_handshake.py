"""The handshake, with both sides in one process and every byte in the open."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import (
    GradwireError,
    HandshakeRefused,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    VersionMismatch,
)
from gradwire.rpc._handshake import (
    AcceptorHandshake,
    InitiatorHandshake,
    PeerIdentity,
    Refusal,
)

ALICE = PeerIdentity("alice", 0, 11, 1.5, ("shm",))
BOB = PeerIdentity("bob", 1, 22, 2.5)
SECRET = b"swordfish"


def initiator(
    identity: PeerIdentity = ALICE,
    *,
    secret: bytes | None = SECRET,
    same_user: bool = False,
    nonce: bytes | None = b"i" * 32,
    target_rank: int = BOB.rank,
    target_incarnation: int = BOB.incarnation,
    target_name: str | None = None,
) -> InitiatorHandshake:
    return InitiatorHandshake(
        identity,
        target_rank=target_rank,
        target_incarnation=target_incarnation,
        target_name=target_name,
        secret=secret,
        peer_is_same_user=same_user,
        nonce=nonce,
    )


def acceptor(
    identity: PeerIdentity = BOB,
    *,
    secret: bytes | None = SECRET,
    same_user: bool = False,
    nonce: bytes | None = b"a" * 32,
    admit: Callable[[PeerIdentity], Refusal | None] = lambda peer: None,
) -> AcceptorHandshake:
    return AcceptorHandshake(
        identity, secret=secret, peer_is_same_user=same_user, nonce=nonce, admit=admit
    )


def record(kind: int, body: object, *, version: int = 1) -> bytes:
    data = msgspec.msgpack.encode(body)
    header = version.to_bytes(2, "big") + bytes([kind, 0])
    return b"GRADWIRE" + header + len(data).to_bytes(4, "big") + data


def converse(one: InitiatorHandshake, two: AcceptorHandshake) -> None:
    """Lets both talk until both are done."""
    two_says = two.receive(one.start())
    two_says = two.receive(one.receive(two_says))
    assert one.receive(two_says) == b""


# Recorded once. A change of these bytes is a change of the protocol.
GOLDEN_HELLO = bytes.fromhex(
    "4752414457495245000101000000003b98a5616c696365000b0116c420696969"
    "6969696969696969696969696969696969696969696969696969696969cb3ff8"
    "00000000000091a373686d"
)
GOLDEN_CHALLENGE = bytes.fromhex(
    "4752414457495245000102000000005799a3626f620116000bc4206161616161"
    "616161616161616161616161616161616161616161616161616161cb40040000"
    "0000000090c420b7314376f9f634235a14a749e258b4364a8e21a0114856ff51"
    "d73d80a9421157"
)
GOLDEN_PROOF = bytes.fromhex(
    "4752414457495245000103000000002391c420c24b9fe059890d6bf5d39e8b21"
    "96ff772e1f1374b562b522fef7e3cedc77c908"
)
GOLDEN_WELCOME = bytes.fromhex("4752414457495245000104000000000190")
GOLDEN_REFUSED = bytes.fromhex(
    "4752414457495245000105000000000f92a574616b656ea76e6f20726f6f6d"
)


def test_handshake_records_are_golden():
    one, two = initiator(), acceptor()

    hello = one.start()
    challenge = two.receive(hello)
    proof = one.receive(challenge)
    welcome = two.receive(proof)

    assert hello == GOLDEN_HELLO
    assert challenge == GOLDEN_CHALLENGE
    assert proof == GOLDEN_PROOF
    assert welcome == GOLDEN_WELCOME


def test_refused_record_is_golden():
    two = acceptor(admit=lambda peer: Refusal("taken", "no room"))
    two.receive(GOLDEN_HELLO)
    with pytest.raises(HandshakeRefused):
        two.receive(GOLDEN_PROOF)
    assert two.last_words == GOLDEN_REFUSED


@pytest.mark.parametrize(
    ("secret", "same_user"), [(SECRET, False), (SECRET, True), (None, True)]
)
def test_handshake_tells_each_side_who_the_other_is(secret, same_user):
    one = initiator(secret=secret, same_user=same_user, nonce=None)
    two = acceptor(secret=secret, same_user=same_user, nonce=None)

    converse(one, two)

    assert one.done
    assert two.done
    assert one.peer == BOB
    assert two.peer == ALICE
    assert one.leftover == two.leftover == one.last_words == two.last_words == b""


def test_handshake_without_a_secret_has_empty_proofs():
    one = initiator(secret=None, same_user=True)
    two = acceptor(secret=None, same_user=True)
    proof = one.receive(two.receive(one.start()))
    assert proof == record(3, [b""])


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_handshake_takes_any_fragmentation(data):
    one, two = initiator(), acceptor()
    to_two, to_one = one.start(), b""
    while not (one.done and two.done):
        if to_two:
            cut = data.draw(st.integers(1, len(to_two)))
            to_one += two.receive(to_two[:cut])
            to_two = to_two[cut:]
        else:
            cut = data.draw(st.integers(1, len(to_one)))
            to_two += one.receive(to_one[:cut])
            to_one = to_one[cut:]
    assert (one.peer, two.peer) == (BOB, ALICE)


def test_bytes_after_the_handshake_are_left_over():
    one, two = initiator(), acceptor()
    proof = one.receive(two.receive(one.start()))
    one.receive(two.receive(proof + b"frames of one") + b"frames of two")
    assert one.leftover == b"frames of two"
    assert two.leftover == b"frames of one"


def test_any_changed_byte_keeps_the_sides_apart():
    @given(st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 255))
    @settings(max_examples=600, deadline=None)
    def check(which: int, place: int, change: int) -> None:
        one, two = initiator(), acceptor()
        sent = one.start()
        failed = False
        for turn in range(4):
            if turn == which:
                place %= len(sent)
                changed = bytes([sent[place] ^ change])
                sent = sent[:place] + changed + sent[place + 1 :]
            side = two if turn % 2 == 0 else one
            try:
                sent = side.receive(sent)
            except GradwireError:
                failed = True
                assert not side.done
                break
            if not sent:
                break  # a changed length: the side waits for more
        assert not (one.done and two.done)
        assert failed or not sent

    check()


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_or_waited_on(garbage):
    two = acceptor()
    try:
        answer = two.receive(garbage)
    except (RemoteProtocolError, VersionMismatch):
        assert two.last_words == b"" or two.last_words.startswith(b"GRADWIRE")
    else:
        assert answer == b""
        assert b"GRADWIRE".startswith(garbage[:8])
    assert not two.done


@given(st.integers(1, 5), st.binary(max_size=300), st.integers(0, 1))
def test_garbage_body_is_refused(kind, body, side):
    shake: InitiatorHandshake | AcceptorHandshake = acceptor()
    if side:
        one = initiator()
        one.start()
        shake = one
    head = b"GRADWIRE\x00\x01" + bytes([kind, 0]) + len(body).to_bytes(4, "big")
    with pytest.raises((RemoteProtocolError, HandshakeRefused)):
        shake.receive(head + body)
    assert not shake.done


@pytest.mark.parametrize(
    "stranger", [b"G", b"GET / HTTP/1.1\r\n", b"\x80\x04\x95", b"GRADWIRF"]
)
def test_stranger_is_found_out_and_told_nothing(stranger):
    two = acceptor()
    if b"GRADWIRE".startswith(stranger):
        assert two.receive(stranger) == b""
        stranger = b"ET /"
    with pytest.raises(RemoteProtocolError, match="not a gradwire worker"):
        two.receive(stranger)
    assert two.last_words == b""


@pytest.mark.parametrize("length", [4097, 2**31, 2**32 - 1])
def test_huge_length_is_refused_from_the_header_alone(length):
    two = acceptor()
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes"):
        two.receive(b"GRADWIRE\x00\x01\x01\x00" + length.to_bytes(4, "big"))


def test_unfinished_record_holds_little():
    two = acceptor()
    two.receive(b"GRADWIRE\x00\x01\x01\x00" + (4096).to_bytes(4, "big"))
    for _ in range(4095):
        assert two.receive(b"\x91") == b""
    with pytest.raises(RemoteProtocolError):
        two.receive(b"\x91")


@pytest.mark.parametrize("cut", [0, 5, 16, 40])
def test_closed_connection_names_what_was_expected(cut):
    two = acceptor()
    if cut:
        two.receive(initiator().start()[:cut])
    with pytest.raises(PeerLostError, match="HELLO was expected"):
        two.receive(b"")


def test_other_version_is_named_on_both_sides():
    two = acceptor()
    hello = bytearray(initiator().start())
    hello[8:10] = (7).to_bytes(2, "big")
    with pytest.raises(VersionMismatch, match=r"version 1 .* version 7"):
        two.receive(hello)
    answer = bytearray(two.last_words)
    assert b"version" in answer
    answer[8:10] = (7).to_bytes(2, "big")
    one = initiator()
    one.start()
    with pytest.raises(VersionMismatch, match=r"version 1 .* version 7"):
        one.receive(answer)


def refuse_at_challenge(
    one: InitiatorHandshake, two: AcceptorHandshake
) -> tuple[HandshakeRefused, HandshakeRefused]:
    """The errors of both sides when the initiator does not like the challenge."""
    challenge = two.receive(one.start())
    with pytest.raises(HandshakeRefused) as first:
        one.receive(challenge)
    with pytest.raises(HandshakeRefused) as second:
        two.receive(one.last_words)
    assert not one.done
    assert not two.done
    assert two.last_words == b""
    return first.value, second.value


def test_wrong_secret_is_named_on_both_sides():
    ours, theirs = refuse_at_challenge(initiator(), acceptor(secret=b"other"))
    assert ours.code == theirs.code == "secret"
    assert "wrong secret" in str(ours)
    assert "wrong secret" in str(theirs)
    assert ours.worker == "bob"
    assert theirs.worker == "alice"


def test_acceptor_without_the_secret_is_told_to_set_it():
    ours, theirs = refuse_at_challenge(
        initiator(), acceptor(secret=None, same_user=True)
    )
    assert ours.code == theirs.code == "secret"
    assert "requires a cluster secret; set GRADWIRE_SECRET" in str(ours)
    assert "requires a cluster secret; set GRADWIRE_SECRET" in str(theirs)


def test_initiator_without_the_secret_is_told_to_set_it():
    ours, theirs = refuse_at_challenge(
        initiator(secret=None, same_user=True), acceptor()
    )
    assert ours.code == theirs.code == "secret"
    assert "it requires a cluster secret" in str(ours)
    assert "set GRADWIRE_SECRET" in str(ours)
    assert "has no cluster secret" in str(theirs)


@pytest.mark.parametrize("proof", [b"", b"\x00" * 32, b"\x00" * 5])
def test_acceptor_refuses_a_false_proof(proof):
    asked: list[PeerIdentity] = []

    def admit(peer: PeerIdentity) -> None:
        asked.append(peer)

    two = acceptor(admit=admit)
    two.receive(initiator().start())
    with pytest.raises(HandshakeRefused) as caught:
        two.receive(record(3, [proof]))
    assert caught.value.code == "secret"
    assert two.peer is None
    assert asked == []  # nobody unproven gets as far as the policy


def test_acceptor_without_a_secret_refuses_a_proof():
    two = acceptor(secret=None, same_user=True)
    two.receive(initiator(secret=None, same_user=True).start())
    with pytest.raises(HandshakeRefused) as caught:
        two.receive(record(3, [b"x" * 32]))
    assert caught.value.code == "secret"


def test_initiator_without_a_secret_talks_to_the_same_user_only():
    one = initiator(secret=None, same_user=False)
    with pytest.raises(HandshakeRefused, match="same user") as caught:
        one.start()
    assert caught.value.code == "user"


def test_acceptor_without_a_secret_serves_the_same_user_only():
    one = initiator(secret=None, same_user=True)
    two = acceptor(secret=None, same_user=False)
    hello = one.start()
    with pytest.raises(HandshakeRefused) as caught:
        two.receive(hello)
    assert caught.value.code == "user"
    with pytest.raises(HandshakeRefused, match="same user") as caught:
        one.receive(two.last_words)
    assert caught.value.code == "user"


def test_replayed_transcript_is_refused():
    one, two = initiator(), acceptor()
    hello = one.start()
    proof = one.receive(two.receive(hello))
    two.receive(proof)

    again = acceptor(nonce=None)
    again.receive(hello)
    with pytest.raises(HandshakeRefused, match="wrong secret"):
        again.receive(proof)

    fresh = initiator(nonce=None)
    fresh.start()
    with pytest.raises(HandshakeRefused, match="wrong secret"):
        fresh.receive(acceptor().receive(hello))


def test_reflected_proof_is_refused():
    # A stranger that sends the acceptor's own proof back has proven nothing.
    two = acceptor()
    challenge = two.receive(initiator().start())
    with pytest.raises(HandshakeRefused, match="wrong secret"):
        two.receive(record(3, [challenge[-32:]]))


def test_reflected_records_are_refused():
    one, two = initiator(), acceptor()
    hello = one.start()
    challenge = two.receive(hello)
    with pytest.raises(RemoteProtocolError, match="sent HELLO"):
        one.receive(hello)
    with pytest.raises(RemoteProtocolError, match="sent CHALLENGE"):
        two.receive(challenge)


def test_challenge_meant_for_another_worker_is_refused():
    # The acceptor is honest, but a stranger has passed another worker's hello to it.
    carol = ALICE._replace(name="carol", rank=2, incarnation=33)
    one = initiator()
    one.start()
    challenge = acceptor().receive(initiator(carol).start())
    with pytest.raises(HandshakeRefused):
        one.receive(challenge)


@pytest.mark.parametrize(("rank", "incarnation"), [(5, 0), (1, 99)])
def test_hello_for_another_target_is_refused(rank, incarnation):
    one = initiator(target_rank=rank, target_incarnation=incarnation)
    two = acceptor()
    hello = one.start()
    with pytest.raises(HandshakeRefused, match="out of date") as caught:
        two.receive(hello)
    assert caught.value.code == "identity"
    with pytest.raises(HandshakeRefused, match="rank 1, incarnation 22") as caught:
        one.receive(two.last_words)
    assert caught.value.code == "identity"


def test_any_incarnation_is_accepted_if_none_is_asked_for():
    one, two = initiator(target_incarnation=0), acceptor()
    converse(one, two)
    assert one.peer == BOB


def test_other_name_than_expected_is_refused():
    ours, theirs = refuse_at_challenge(initiator(target_name="bert"), acceptor())
    assert ours.code == theirs.code == "identity"
    assert "'bert'" in str(ours)
    assert "'bob'" in str(ours)


def test_policy_sees_the_proven_peer_and_may_refuse():
    asked: list[PeerIdentity] = []

    def admit(peer: PeerIdentity) -> Refusal:
        asked.append(peer)
        return Refusal("taken", "the name 'alice' is taken by rank 3")

    one, two = initiator(), acceptor(admit=admit)
    proof = one.receive(two.receive(one.start()))
    with pytest.raises(HandshakeRefused, match="taken by rank 3"):
        two.receive(proof)
    with pytest.raises(HandshakeRefused, match="taken by rank 3") as caught:
        one.receive(two.last_words)
    assert asked == [ALICE]
    assert caught.value.code == "taken"
    assert caught.value.worker == "bob"
    assert not one.done
    assert not two.done


def test_policy_that_fails_refuses():
    def admit(peer: PeerIdentity) -> None:
        raise ZeroDivisionError

    one, two = initiator(), acceptor(admit=admit)
    proof = one.receive(two.receive(one.start()))
    with pytest.raises(ZeroDivisionError):
        two.receive(proof)
    assert not two.done
    with pytest.raises(HandshakeRefused):
        one.receive(two.last_words)


def test_reason_of_a_stranger_is_cleaned_and_cut():
    one = initiator()
    one.start()
    with pytest.raises(HandshakeRefused) as caught:
        one.receive(record(5, ["nonsense", "a\x1b[31m\nb" + "x" * 3000]))
    text = str(caught.value)
    assert caught.value.code == "protocol"
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize(
    "change",
    [
        {0: "not a name!"},
        {0: "x" * 128},
        {1: -1},
        {1: 2**31},
        {2: 0},
        {2: 2**63},
        {3: -1},
        {4: -1},
        {5: b"short"},
        {6: float("nan")},
        {6: float("inf")},
        {7: ["x" * 65]},
        {7: ["a\nb"]},
        {7: ["a"] * 33},
    ],
)
def test_bad_identity_is_refused(change):
    fields: list[object] = ["alice", 0, 11, 1, 22, b"n" * 32, 1.5, []]
    for place, value in change.items():
        fields[place] = value
    two = acceptor()
    with pytest.raises(RemoteProtocolError, match="bad identity"):
        two.receive(record(1, fields))
    assert two.last_words.startswith(b"GRADWIRE")


@pytest.mark.parametrize(
    "body",
    [
        ["alice", 0, 11, 1, 22, b"n" * 32, 1.5, [], "extra"],
        ["alice", 0, 11, 1, 22, b"n" * 32, 1.5],
        ["alice", "0", 11, 1, 22, b"n" * 32, 1.5, []],
        ["alice", 0, 11, 1, 22, b"n" * 32, 1, []],  # not how we write a float
        {"name": "alice"},
    ],
)
def test_other_shape_is_refused(body):
    with pytest.raises(RemoteProtocolError):
        acceptor().receive(record(1, body))


def test_over_means_over():
    one, two = initiator(), acceptor()
    converse(one, two)
    for side in (one, two):
        with pytest.raises(LocalProtocolError):
            side.receive(b"more")
    with pytest.raises(LocalProtocolError):
        one.start()
    failed = acceptor()
    with pytest.raises(RemoteProtocolError):
        failed.receive(b"junk")
    with pytest.raises(LocalProtocolError):
        failed.receive(b"GRADWIRE")


def test_initiator_speaks_first():
    with pytest.raises(LocalProtocolError):
        initiator().receive(b"GRADWIRE")


def test_empty_secret_is_not_a_secret():
    with pytest.raises(ValueError, match="must not be empty"):
        initiator(secret=b"")


def test_refusal_survives_pickling():
    error = HandshakeRefused("no", worker="bob", code="glare")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.worker, copy.code) == ("no", "bob", "glare")
