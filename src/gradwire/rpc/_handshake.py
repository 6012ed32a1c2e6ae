"""The handshake that comes before anything else on a connection; pure, no I/O, no clock.

Who connects (the initiator) and who was connected to (the acceptor) prove to each other
that they hold the cluster secret, and say who they are:

    initiator                                   acceptor
    HELLO      identity, nonce             ->
               <-   identity, nonce, proof      CHALLENGE
    PROOF      proof                       ->
               <-                               WELCOME

Either side may send REFUSED (a code and a reason) in place of its next record.

Invariants:
1. Nothing is unpickled, and no more than one unfinished record (4112 bytes) is held.
2. A proof covers the role of its maker and all bytes that went before it, with fresh
   nonces of both sides; so a proof cannot be replayed or reflected.
3. Every body must be encoded the one way that we encode it; two different byte strings
   never mean the same record.
4. ``peer`` is None until the peer is proven and admitted.

Inside of TLS a secret is not needed: then a certificate says which names the peer may
bear, and whoever bears another one is refused.

The proofs say who connects. They do not protect what is sent afterwards; that is TLS's
job.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gradwire._ids import check_rank
from gradwire.errors import (
    GradwireError,
    HandshakeRefused,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    VersionMismatch,
)
from gradwire.rpc._handshake_records import (
    CERTIFICATE,
    CLOSING,
    GLARE,
    HEADER,
    IDENTITY,
    MAGIC,
    MAX_BODY_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    PROTOCOL_VERSION,
    REFUSAL_CODES,
    SAFE,
    SECRET,
    SERIALIZER,
    TAKEN,
    USER,
    VERSION,
    VERSION_END,
    Body,
    Challenge,
    Hello,
    Kind,
    PeerIdentity,
    Proof,
    Refusal,
    Refused,
    Welcome,
    check_identity,
    check_incarnation,
    check_nonce,
    pack,
    printable,
    refusal_of_serializer,
)

__all__ = [
    "CERTIFICATE",
    "CLOSING",
    "GLARE",
    "IDENTITY",
    "MAX_BODY_BYTES",
    "PROTOCOL",
    "PROTOCOL_VERSION",
    "REFUSAL_CODES",
    "SAFE",
    "SECRET",
    "SERIALIZER",
    "TAKEN",
    "USER",
    "VERSION",
    "AcceptorHandshake",
    "InitiatorHandshake",
    "PeerIdentity",
    "Refusal",
]

_REMEDY = "set GRADWIRE_SECRET or GRADWIRE_SECRET_FILE to the same value on all workers"

Admit = Callable[[PeerIdentity], Refusal | None]
ObjectionTo = Callable[[str], str | None]
"""Why the certificate of the peer does not allow it this name; None if it does."""

_BodyT = TypeVar("_BodyT", bound=Body)


class _Handshake(ABC):
    """What both sides share: cutting bytes into records, and failing in one place."""

    def __init__(
        self,
        identity: PeerIdentity,
        *,
        secret: bytes | None,
        peer_is_same_user: bool,
        objection_to: ObjectionTo | None,
        nonce: bytes | None = None,
    ) -> None:
        check_identity(identity)
        if secret is not None and not secret:
            raise ValueError("a secret must not be empty; use None for 'no secret'")
        self._identity = identity
        self._secret = secret
        self._peer_is_same_user = peer_is_same_user
        self._objection_to = objection_to
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        check_nonce(self._nonce)
        self._buffer = b""
        self._hello = b""
        self._has_shown_magic = False  # has sent our magic, so it understands a refusal
        self._claimed: PeerIdentity | None = None
        self._peer: PeerIdentity | None = None
        self._failed = False
        self._leftover = b""
        self._last_words = b""

    @property
    def done(self) -> bool:
        """Whether the handshake has succeeded on this side."""
        return self._peer is not None

    @property
    def peer(self) -> PeerIdentity | None:
        """The proven identity of the other side; None until ``done``."""
        return self._peer

    @property
    def leftover(self) -> bytes:
        """Bytes that came after the handshake; they belong to the frames."""
        return self._leftover

    @property
    def last_words(self) -> bytes:
        """After a failure: what to send, if anything, before closing."""
        return self._last_words

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Takes bytes from the peer and returns the bytes to send back.

        Args:
            data: Any piece of what the peer sent; empty means that it has closed.

        Returns:
            What to send now, often nothing.

        Raises:
            HandshakeRefused: One side refused the other.
            VersionMismatch: The peer speaks another version.
            RemoteProtocolError: The peer is not a gradwire worker, or a broken one.
            PeerLostError: ``data`` was empty.
            LocalProtocolError: The handshake is over already, or has not started.
        """
        if self._is_over() or not self._has_started():
            raise LocalProtocolError(
                "a handshake takes bytes after it has started and before it has ended"
            )
        try:
            if not data:
                raise PeerLostError(
                    f"{self._peer_text()} closed the connection during the handshake, "
                    f"while {self._awaited()} was expected",
                    worker=self._peer_name(),
                )
            self._buffer += bytes(data)
            reply = b""
            while self._peer is None and (record := self._next_record()) is not None:
                reply += self._handle(*record)
            if self._peer is not None:
                self._leftover, self._buffer = self._buffer, b""
            return reply
        except BaseException as error:
            self._failed = True
            self._peer = None
            self._buffer = b""
            if isinstance(error, VersionMismatch):
                self._prepare_refusal(VERSION, str(error))
            elif isinstance(error, RemoteProtocolError) and self._has_shown_magic:
                self._prepare_refusal(PROTOCOL, str(error))
            raise

    def _is_over(self) -> bool:
        return self._failed or self._peer is not None

    @abstractmethod
    def _has_started(self) -> bool: ...

    @abstractmethod
    def _awaited(self) -> str:
        """Names the records that may come next, for messages."""

    @abstractmethod
    def _handle(self, kind: Kind, record: bytes) -> bytes:
        """Acts on one whole record and returns the answer."""

    def _next_record(self) -> tuple[Kind, bytes] | None:
        # The checks need no more bytes than they look at: a stranger that sends
        # three bytes of another protocol and waits is found out at once.
        start = self._buffer[: len(MAGIC)]
        if start != MAGIC[: len(start)]:
            raise RemoteProtocolError(
                f"the other end of this connection is not a gradwire worker: expected a "
                f"record that starts with {MAGIC!r}, found {start!r}; check the address"
            )
        if len(self._buffer) < VERSION_END:
            return None
        self._has_shown_magic = True
        version = int.from_bytes(self._buffer[len(MAGIC) : VERSION_END], "big")
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"worker {self._identity.name!r} speaks version {PROTOCOL_VERSION} of "
                f"the gradwire protocol, the other end speaks version {version}; "
                "install the same release of gradwire on all workers"
            )
        if len(self._buffer) < HEADER.size:
            return None
        _, _, code, reserved, length = HEADER.unpack_from(self._buffer)
        if reserved != 0 or code not in Kind.__members__.values():
            raise RemoteProtocolError(
                f"{self._peer_text()} sent a handshake record of unknown kind "
                f"({code}, {reserved}), while {self._awaited()} was expected"
            )
        if length > MAX_BODY_BYTES:
            raise RemoteProtocolError(
                f"{self._peer_text()} announced a handshake record of {length} bytes, "
                f"at most {MAX_BODY_BYTES} are allowed"
            )
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        record, self._buffer = self._buffer[:end], self._buffer[end:]
        return Kind(code), record

    def _decode(self, record: bytes, cls: type[_BodyT]) -> _BodyT:
        data = record[HEADER.size :]
        try:
            body = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise RemoteProtocolError(
                f"{self._peer_text()} sent a handshake record whose body is not a "
                f"{cls.__name__.upper()}: {error}"
            ) from error
        if msgspec.msgpack.encode(body) != data:
            raise RemoteProtocolError(
                f"{self._peer_text()} sent a handshake record that is not in the "
                "canonical encoding"
            )
        return body

    def _take_identity(self, body: Hello) -> None:
        identity = PeerIdentity(
            body.name, body.rank, body.incarnation, body.clock, tuple(body.features)
        )
        try:
            check_identity(identity)
            check_nonce(body.nonce)
            check_rank(body.target_rank)
            check_incarnation(body.target_incarnation, least=0)
        except (ValueError, TypeError) as error:
            raise RemoteProtocolError(
                f"the other end of this connection presented a bad identity: {error}"
            ) from error
        self._claimed = identity

    def _unexpected(self, kind: Kind) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"{self._peer_text()} sent {kind.name}, while {self._awaited()} was expected",
            worker=self._peer_name(),
        )

    def _on_refused(self, record: bytes) -> HandshakeRefused:
        """The error for a REFUSED record; its text comes from an unproven peer."""
        body = self._decode(record, Refused)
        code = body.code if body.code in REFUSAL_CODES else PROTOCOL
        return HandshakeRefused(
            f"{self._peer_text()} refused worker {self._identity.name!r} ({code}): "
            f"{printable(body.reason)}",
            worker=self._peer_name(),
            code=code,
        )

    def _refuse(self, code: str, told: str, raised: str | None = None) -> GradwireError:
        """Prepares a refusal: ``told`` to the peer, ``raised`` (or the same) here."""
        self._prepare_refusal(code, told)
        return HandshakeRefused(
            f"worker {self._identity.name!r} refused {self._peer_text()} ({code}): "
            f"{raised or told}",
            worker=self._peer_name(),
            code=code,
        )

    def _prepare_refusal(self, code: str, reason: str) -> None:
        self._last_words = pack(Kind.REFUSED, Refused(code, printable(reason)))

    def _prove(self, role: bytes, *parts: bytes) -> bytes:
        """The proof of one role over all that went before; empty without a secret."""
        if self._secret is None:
            return b""
        return hmac.new(self._secret, role + b"".join(parts), hashlib.sha256).digest()

    def _check_proof(self, found: bytes, expected: bytes) -> None:
        if hmac.compare_digest(found, expected):
            return
        if self._secret is None:
            raise self._refuse(
                SECRET,
                f"worker {self._identity.name!r} has no cluster secret; {_REMEDY}",
                f"it requires a cluster secret and this worker has none; {_REMEDY}",
            )
        if not found:
            raise self._refuse(
                SECRET, f"this worker requires a cluster secret; {_REMEDY}"
            )
        raise self._refuse(
            SECRET,
            f"wrong secret: the proof does not fit this worker's secret; {_REMEDY}",
        )

    def _check_user(self) -> None:
        is_vouched_for = self._peer_is_same_user or self._objection_to is not None
        if self._secret is None and not is_vouched_for:
            raise self._refuse(
                USER,
                "without a cluster secret only TLS and Unix sockets between processes of "
                f"the same user are allowed; {_REMEDY}",
            )

    def _check_serializer(self) -> None:
        if self._claimed is None:
            raise AssertionError("compared with a peer that has not presented itself")
        refusal = refusal_of_serializer(self._identity, self._claimed)
        if refusal is not None:
            raise self._refuse(refusal.code, refusal.reason)

    def _check_certificate(self, name: str) -> None:
        if self._objection_to is None:
            return
        objection = self._objection_to(name)
        if objection is not None:
            raise self._refuse(CERTIFICATE, objection)

    def _peer_text(self) -> str:
        if self._claimed is None:
            return "the other end of this connection"
        return f"worker {self._claimed.name!r} (rank {self._claimed.rank})"

    def _peer_name(self) -> str | None:
        return None if self._claimed is None else self._claimed.name

    def _hello_fields(self, rank: int, incarnation: int) -> dict[str, Any]:
        """The fields of HELLO and CHALLENGE, for a peer of this rank and incarnation."""
        return {
            "name": self._identity.name,
            "rank": self._identity.rank,
            "incarnation": self._identity.incarnation,
            "target_rank": rank,
            "target_incarnation": incarnation,
            "nonce": self._nonce,
            "clock": float(self._identity.clock),
            "features": list(self._identity.features),
        }


class InitiatorHandshake(_Handshake):
    """The side that opened the connection.

    Args:
        identity: Who this worker is.
        target_rank: Rank of the worker that this connection is meant for.
        target_incarnation: Its incarnation, 0 for any.
        target_name: Its name, None for any.
        secret: The cluster secret, None if there is none.
        peer_is_same_user: Whether the kernel vouches that the peer is a process of this
            user on this host. Without a secret it must be, or have a certificate.
        objection_to: What the peer's certificate has against a name; None if there is
            no certificate.
        nonce: Fixed random bytes, for tests.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        *,
        target_rank: int,
        target_incarnation: int = 0,
        target_name: str | None = None,
        secret: bytes | None,
        peer_is_same_user: bool,
        objection_to: ObjectionTo | None = None,
        nonce: bytes | None = None,
    ) -> None:
        super().__init__(
            identity,
            secret=secret,
            peer_is_same_user=peer_is_same_user,
            objection_to=objection_to,
            nonce=nonce,
        )
        check_rank(target_rank)
        check_incarnation(target_incarnation, least=0)
        self._target_rank = target_rank
        self._target_incarnation = target_incarnation
        self._target_name = target_name
        self._proof_sent = False

    def start(self) -> bytes:
        """Returns the first record to send.

        Raises:
            HandshakeRefused: There is no secret and the peer is not of the same user.
        """
        if self._is_over() or self._has_started():
            raise LocalProtocolError("a handshake starts once")
        try:
            self._check_user()
        except HandshakeRefused:
            self._failed = True
            raise
        fields = self._hello_fields(self._target_rank, self._target_incarnation)
        self._hello = pack(Kind.HELLO, Hello(**fields))
        return self._hello

    def _has_started(self) -> bool:
        return bool(self._hello)

    def _awaited(self) -> str:
        return "WELCOME or REFUSED" if self._proof_sent else "CHALLENGE or REFUSED"

    def _handle(self, kind: Kind, record: bytes) -> bytes:
        if kind is Kind.REFUSED:
            raise self._on_refused(record)
        if not self._proof_sent and kind is Kind.CHALLENGE:
            return self._on_challenge(record)
        if self._proof_sent and kind is Kind.WELCOME:
            self._decode(record, Welcome)
            self._peer = self._claimed
            return b""
        raise self._unexpected(kind)

    def _on_challenge(self, record: bytes) -> bytes:
        body = self._decode(record, Challenge)
        self._take_identity(body)
        unproven = pack(Kind.CHALLENGE, msgspec.structs.replace(body, proof=b""))
        # First the proof: what a stranger says of itself is not worth comparing.
        self._check_proof(body.proof, self._prove(b"acceptor", self._hello, unproven))
        self._check_target(body)
        self._check_certificate(body.name)
        self._proof_sent = True
        proof = self._prove(b"initiator", self._hello, record)
        return pack(Kind.PROOF, Proof(proof))

    def _check_target(self, body: Challenge) -> None:
        me = self._identity
        if (body.target_rank, body.target_incarnation) != (me.rank, me.incarnation):
            raise self._refuse(
                IDENTITY,
                f"the challenge was made for rank {body.target_rank}, incarnation "
                f"{body.target_incarnation}, not for rank {me.rank}, incarnation "
                f"{me.incarnation}",
            )
        if (
            body.rank != self._target_rank
            or self._target_incarnation not in (0, body.incarnation)
            or self._target_name not in (None, body.name)
        ):
            name = (
                "any worker" if self._target_name is None else repr(self._target_name)
            )
            raise self._refuse(
                IDENTITY,
                f"expected {name}, rank {self._target_rank}, incarnation "
                f"{self._target_incarnation or 'any'} at this address, found "
                f"{body.name!r}, rank {body.rank}, incarnation {body.incarnation}; it was "
                "restarted, or the address is out of date",
            )
        self._check_serializer()


class AcceptorHandshake(_Handshake):
    """The side that was connected to.

    Args:
        identity: Who this worker is.
        admit: Asked once, after the peer has proven itself; returns why the peer must
            not come in (its name is taken, we are closing, ...) or None.
        secret: The cluster secret, None if there is none.
        peer_is_same_user: Whether the kernel vouches that the peer is a process of this
            user on this host. Without a secret it must be, or have a certificate.
        objection_to: What the peer's certificate has against a name; None if there is
            no certificate.
        nonce: Fixed random bytes, for tests.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        *,
        admit: Admit,
        secret: bytes | None,
        peer_is_same_user: bool,
        objection_to: ObjectionTo | None = None,
        nonce: bytes | None = None,
    ) -> None:
        super().__init__(
            identity,
            secret=secret,
            peer_is_same_user=peer_is_same_user,
            objection_to=objection_to,
            nonce=nonce,
        )
        self._admit = admit
        self._challenge = b""

    def _has_started(self) -> bool:
        return True

    def _awaited(self) -> str:
        return "PROOF or REFUSED" if self._challenge else "HELLO"

    def _handle(self, kind: Kind, record: bytes) -> bytes:
        if kind is Kind.REFUSED:
            raise self._on_refused(record)
        if not self._challenge and kind is Kind.HELLO:
            return self._on_hello(record)
        if self._challenge and kind is Kind.PROOF:
            return self._on_proof(record)
        raise self._unexpected(kind)

    def _on_hello(self, record: bytes) -> bytes:
        body = self._decode(record, Hello)
        self._take_identity(body)
        self._check_user()
        self._check_certificate(body.name)
        me = self._identity
        if body.target_rank != me.rank or body.target_incarnation not in (
            0,
            me.incarnation,
        ):
            raise self._refuse(
                IDENTITY,
                f"the connection is meant for rank {body.target_rank}, incarnation "
                f"{body.target_incarnation or 'any'}, but this is worker {me.name!r}, "
                f"rank {me.rank}, incarnation {me.incarnation}; it was restarted, or "
                "the address is out of date",
            )
        self._hello = record
        fields = self._hello_fields(body.rank, body.incarnation)
        unproven = pack(Kind.CHALLENGE, Challenge(**fields, proof=b""))
        proof = self._prove(b"acceptor", record, unproven)
        self._challenge = pack(Kind.CHALLENGE, Challenge(**fields, proof=proof))
        return self._challenge

    def _on_proof(self, record: bytes) -> bytes:
        body = self._decode(record, Proof)
        expected = self._prove(b"initiator", self._hello, self._challenge)
        self._check_proof(body.proof, expected)
        if self._claimed is None:
            raise AssertionError("a challenge was sent before the peer's identity came")
        self._check_serializer()
        try:
            refusal = self._admit(self._claimed)
        except Exception:
            self._prepare_refusal(CLOSING, "the worker failed to decide on this peer")
            raise
        if refusal is not None:
            raise self._refuse(refusal.code, refusal.reason)
        self._peer = self._claimed
        return pack(Kind.WELCOME, Welcome())
