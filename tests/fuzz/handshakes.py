"""The handshake, in both roles, against strangers and against holders of the secret.

With fixed nonces there is exactly one stream of bytes that is let in. A stranger who
changes any byte of it must stay outside; that is the main property here.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import msgspec

import mutations
from fuzz.running import Finding, Target
from gradwire.errors import (
    GradwireError,
    HandshakeRefused,
    RemoteProtocolError,
    VersionMismatch,
)
from gradwire.rpc._handshake import (
    AcceptorHandshake,
    InitiatorHandshake,
    ObjectionTo,
    PeerIdentity,
)
from gradwire.rpc._handshake_records import (
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    PROTOCOL_VERSION,
    Kind,
    Refusal,
    check_identity,
)

SECRET = b"the secret of the fuzzer"
_DIALER = PeerIdentity("w1", 1, 11, 5.0, ("shm",))
_SERVER = PeerIdentity("w0", 0, 10, 7.5)
_DEEP = msgspec.Raw(b"\x91" * 3000 + b"\xc0")
_MAX_RECORD = HEADER.size + MAX_BODY_BYTES


class Attempt(NamedTuple):
    """An input: who is attacked, with or without knowing the secret."""

    role: str
    has_secret: bool
    has_certificate: bool  # of the one that is attacking, for its own name
    knows_secret: bool
    data: bytes
    cuts: tuple[int, ...]


def _objection_of(owner: PeerIdentity) -> ObjectionTo:
    return lambda name: None if name == owner.name else "the certificate is another's"


def _initiator(
    secret: bytes | None, objection_to: ObjectionTo | None = None
) -> InitiatorHandshake:
    return InitiatorHandshake(
        _DIALER,
        target_rank=0,
        secret=secret,
        peer_is_same_user=objection_to is None,
        objection_to=objection_to,
        nonce=b"i" * 32,
    )


def _acceptor(
    secret: bytes | None,
    admitted: list[PeerIdentity],
    objection_to: ObjectionTo | None = None,
) -> AcceptorHandshake:
    def admit(peer: PeerIdentity) -> Refusal | None:
        admitted.append(peer)
        return None

    return AcceptorHandshake(
        _SERVER,
        admit=admit,
        secret=secret,
        peer_is_same_user=objection_to is None,
        objection_to=objection_to,
        nonce=b"a" * 32,
    )


def _record(secret: bytes | None) -> dict[str, bytes]:
    """All that each role hears in a sound handshake."""
    initiator, acceptor = _initiator(secret), _acceptor(secret, [])
    hello = initiator.start()
    challenge = acceptor.receive(hello)
    proof = initiator.receive(challenge)
    welcome = acceptor.receive(proof)
    initiator.receive(welcome)
    return {"acceptor": hello + proof, "initiator": challenge + welcome}


class Handshakes(Target):
    name = "handshake"
    errors = (RemoteProtocolError, HandshakeRefused, VersionMismatch)

    def __init__(self) -> None:
        self._sound = {True: _record(SECRET), False: _record(None)}
        self._all = [
            *self._sound[True].values(),
            *self._sound[False].values(),
            _pack(Kind.REFUSED, ["taken", "reason"]),
        ]

    def make(self, choice: random.Random) -> Attempt:
        role = choice.choice(("acceptor", "initiator"))
        has_secret = choice.random() < 0.8
        knows = choice.random() < 0.3
        sound = self._sound[has_secret][role]
        if choice.random() < 0.5:
            data = mutations.mutate(sound, choice, self._all)
        else:
            data = _change_records(sound, choice)
        if knows and role == "acceptor":
            data = _prove(data, SECRET if has_secret else None)
        num_cuts = choice.choice((0, 0, 1, 3, 9))
        cuts = tuple(int(choice.random() * 600) for _ in range(num_cuts))
        return Attempt(role, has_secret, choice.random() < 0.3, knows, data, cuts)

    def feed(self, given: Attempt) -> str:
        secret = SECRET if given.has_secret else None
        admitted: list[PeerIdentity] = []
        handshake: InitiatorHandshake | AcceptorHandshake
        if given.role == "acceptor":
            owner = _DIALER
            objection = _objection_of(owner) if given.has_certificate else None
            handshake = _acceptor(secret, admitted, objection)
        else:
            owner = _SERVER
            objection = _objection_of(owner) if given.has_certificate else None
            handshake = _initiator(secret, objection)
            handshake.start()
        edges = sorted({0, len(given.data), *given.cuts})
        rest = b""
        try:
            for begin, end in itertools.pairwise(edges):
                piece = given.data[begin:end]
                if handshake.done:
                    rest += piece
                elif piece:
                    handshake.receive(piece)
                if len(handshake._buffer) > _MAX_RECORD:
                    raise Finding(f"{len(handshake._buffer)} bytes are held")
        except GradwireError:
            if handshake.done or handshake.peer is not None:
                raise Finding("failed, and done all the same") from None
            _check_last_words(handshake.last_words)
            raise
        if admitted and not handshake.done:
            raise Finding("somebody was admitted, and the handshake is not done")
        if not handshake.done:
            return "unfinished"
        peer = handshake.peer
        if peer is None:
            raise Finding("done, and nobody is there")
        check_identity(peer)
        if given.has_certificate and peer.name != owner.name:
            raise Finding(f"{peer} was let in with the certificate of {owner}")
        if not given.has_secret or given.knows_secret:
            return "let in, which it may"
        taken = given.data[: len(given.data) - len(handshake.leftover) - len(rest)]
        if taken != self._sound[True][given.role]:
            raise Finding(f"a stranger was let in: {taken!r}")
        return "let in, unchanged"


def _check_last_words(words: bytes) -> None:
    if words and not (len(words) <= _MAX_RECORD and words.startswith(MAGIC)):
        raise Finding(f"strange last words: {words!r}")


def _pack(kind: int, body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(data)) + data


def _change_records(data: bytes, choice: random.Random) -> bytes:
    """Changes values inside the bodies; lengths are made to fit again."""
    changed = b""
    while data:
        _, version, kind, zero, length = HEADER.unpack_from(data)
        body = data[HEADER.size : HEADER.size + length]
        data = data[HEADER.size + length :]
        if choice.random() < 0.7:
            tree = mutations.mutate_value(msgspec.msgpack.decode(body), choice, _DEEP)
            body = msgspec.msgpack.encode(tree)
            length = len(body)
        if choice.random() < 0.1:
            kind = choice.choice((0, 1, 2, 3, 4, 5, 6, 255))
        if choice.random() < 0.03:
            length = choice.choice(mutations.EDGES) % 2**32
        if choice.random() < 0.03:
            version = choice.choice(mutations.EDGES) % 2**16
        if choice.random() < 0.03:
            zero = choice.choice(mutations.EDGES) % 256
        changed += HEADER.pack(MAGIC, version, kind, zero, length) + body
    return changed


def _prove(data: bytes, secret: bytes | None) -> bytes:
    """Puts the proof that fits a changed HELLO behind it, as a holder of the secret can."""
    if len(data) < HEADER.size:
        return data
    end = HEADER.size + HEADER.unpack_from(data)[4]
    hello = data[:end]
    probe = _acceptor(secret, [])
    try:
        challenge = probe.receive(hello)
    except GradwireError:
        return data
    if not challenge:
        return data
    proof = probe._prove(b"initiator", hello, challenge)
    return hello + _pack(Kind.PROOF, [proof]) + data[end:]
