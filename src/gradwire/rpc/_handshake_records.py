"""The records of the handshake: their bytes, their limits, and what they may say.

A record is a fixed header (magic, version, kind, a zero byte, body length) and a small
msgpack body. The magic and the version stay where they are in every version to come.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import NamedTuple

import msgspec

from gradwire._ids import check_rank, check_worker_name
from gradwire.errors import LocalProtocolError

__all__ = [
    "CERTIFICATE",
    "CLOSING",
    "GLARE",
    "HEADER",
    "IDENTITY",
    "MAGIC",
    "MAX_BODY_BYTES",
    "NONCE_BYTES",
    "PROTOCOL",
    "PROTOCOL_VERSION",
    "REFUSAL_CODES",
    "SAFE",
    "SECRET",
    "SERIALIZER",
    "TAKEN",
    "USER",
    "VERSION",
    "VERSION_END",
    "Body",
    "Challenge",
    "Hello",
    "Kind",
    "PeerIdentity",
    "Proof",
    "Refusal",
    "Refused",
    "Welcome",
    "check_identity",
    "check_incarnation",
    "check_nonce",
    "pack",
    "printable",
    "refusal_of_serializer",
]

MAGIC = b"GRADWIRE"
PROTOCOL_VERSION = 1
MAX_BODY_BYTES = 4096
NONCE_BYTES = 32
MAX_FEATURES = 32
MAX_FEATURE_LENGTH = 64
MAX_REASON_LENGTH = 400

SECRET = "secret"
USER = "user"
CERTIFICATE = "certificate"
VERSION = "version"
IDENTITY = "identity"
TAKEN = "taken"
GLARE = "glare"
CLOSING = "closing"
SERIALIZER = "serializer"
PROTOCOL = "protocol"
REFUSAL_CODES = frozenset(
    {
        SECRET,
        USER,
        CERTIFICATE,
        VERSION,
        IDENTITY,
        TAKEN,
        GLARE,
        CLOSING,
        SERIALIZER,
        PROTOCOL,
    }
)

SAFE = "safe"
"""The feature of a worker that unpickles nothing."""

HEADER = struct.Struct(">8sHBBI")  # magic, version, kind, zero, body length
VERSION_END = len(MAGIC) + 2
_MAX_INCARNATION = 2**63 - 1


class PeerIdentity(NamedTuple):
    """Who a worker says it is.

    Attributes:
        name: Name of the worker.
        rank: Its rank in the group.
        incarnation: Tells this life of the worker from others.
        clock: Its monotonic clock, in seconds, when it made this identity.
        features: Optional parts of the protocol that it can speak.
    """

    name: str
    rank: int
    incarnation: int
    clock: float
    features: tuple[str, ...] = ()


class Refusal(NamedTuple):
    """Why a peer is turned away: one of the codes of this module, and a sentence."""

    code: str
    reason: str


class Kind(enum.IntEnum):
    """What a record is, as a byte on the wire."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all bodies share: their shape on the wire."""


class Hello(Body, frozen=True):
    """The initiator presents itself."""

    name: str
    rank: int
    incarnation: int
    target_rank: int
    target_incarnation: int
    nonce: bytes
    clock: float
    features: list[str]


class Challenge(Hello, frozen=True):
    """The acceptor presents itself, with its proof."""

    proof: bytes


class Proof(Body, frozen=True):
    """The proof of the initiator."""

    proof: bytes


class Welcome(Body, frozen=True):
    """The acceptor lets the initiator in."""


class Refused(Body, frozen=True):
    """One side turns the other away."""

    code: str
    reason: str


def pack(kind: Kind, body: Body) -> bytes:
    """The bytes of a record."""
    data = msgspec.msgpack.encode(body)
    if len(data) > MAX_BODY_BYTES:
        raise LocalProtocolError(
            f"a {kind.name} record may have {MAX_BODY_BYTES} bytes, this one has "
            f"{len(data)}"
        )
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(data)) + data


def printable(text: str) -> str:
    """Makes text of a stranger fit for a log: one line of bounded length."""
    clean = "".join(c if c.isprintable() else " " for c in text[:MAX_REASON_LENGTH])
    return clean + "..." if len(text) > MAX_REASON_LENGTH else clean


def check_incarnation(value: int, *, least: int = 1) -> None:
    """Raises ``ValueError`` if this is not an incarnation."""
    if not least <= value <= _MAX_INCARNATION:
        raise ValueError(
            f"an incarnation must be between {least} and {_MAX_INCARNATION}, "
            f"found {value}"
        )


def check_identity(identity: PeerIdentity) -> None:
    """Raises ``ValueError`` or ``TypeError`` if nobody can have this identity."""
    check_worker_name(identity.name)
    check_rank(identity.rank)
    check_incarnation(identity.incarnation)
    if not math.isfinite(identity.clock):
        raise ValueError(f"a clock must be a finite number, found {identity.clock}")
    if len(identity.features) > MAX_FEATURES:
        raise ValueError(
            f"a worker may have {MAX_FEATURES} features, found {len(identity.features)}"
        )
    for feature in identity.features:
        if not (
            0 < len(feature) <= MAX_FEATURE_LENGTH
            and feature.isascii()
            and feature.isprintable()
        ):
            raise ValueError(
                f"a feature must be 1 to {MAX_FEATURE_LENGTH} printable ASCII "
                f"characters, found {printable(feature)!r}"
            )


def refusal_of_serializer(own: PeerIdentity, other: PeerIdentity) -> Refusal | None:
    """Why two workers that send values in different ways cannot be in one group."""
    ours, theirs = (
        "safe" if SAFE in identity.features else "pickle" for identity in (own, other)
    )
    if ours == theirs:
        return None
    return Refusal(
        SERIALIZER,
        f"worker {own.name!r} has the option serializer={ours!r}, worker {other.name!r} "
        f"has serializer={theirs!r}; give all workers of a group the same",
    )


def check_nonce(nonce: bytes) -> None:
    """Raises ``ValueError`` if this is not a nonce."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce must have {NONCE_BYTES} bytes, found {len(nonce)}")
