"""What a worker says of itself in the rendezvous store, and how much of it we believe.

Values from the store are untrusted: they are parsed as JSON into one fixed shape, every
field is checked, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from gradwire._config import SERIALIZERS
from gradwire._ids import MAX_RANK, WorkerInfo, check_rank, check_worker_name
from gradwire.errors import RemoteProtocolError
from gradwire.rpc._handshake_records import printable

__all__ = [
    "WorkerRecord",
    "encode_record",
    "membership_digest",
    "parse_introduction",
    "parse_record",
]

MAX_RECORD_BYTES = 4096
MAX_ADDRESSES = 8
MAX_ADDRESS_LENGTH = 256


class WorkerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of a group, as the others need to know it before they can connect.

    Attributes:
        name: Name of the worker.
        rank: Its rank.
        incarnation: Tells this life of the worker from others.
        world_size: How many workers it was told that there are.
        boot_id: Tells hosts, and boots of one host, apart.
        network_namespace: Inode number of its network namespace, as text.
        addresses: Where it listens: scheme of the transport to address.
        active: Whether it has joined its group already.
        serializer: How it sends values, see `RpcBackendOptions`.
    """

    name: str
    rank: int
    incarnation: int
    world_size: int
    boot_id: str
    network_namespace: str
    addresses: dict[str, str]
    active: bool = False
    serializer: str = "pickle"


def encode_record(record: WorkerRecord) -> str:
    """The text of a record in the store; checked as strictly as one that comes in."""
    data = msgspec.json.encode(record)
    try:
        _check(record, data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"this worker's own record is not valid: {error}") from error
    return data.decode()


def parse_record(data: bytes, key: str = "worker/?") -> WorkerRecord:
    """Reads a record from the store.

    Args:
        data: The value that the store holds.
        key: Where it holds it, for the error message.

    Raises:
        RemoteProtocolError: This is not the record of a worker.
    """
    try:
        return _read(data)
    except ValueError as error:
        shown = f"{data[:40]!r}{'...' if len(data) > 40 else ''}"
        raise RemoteProtocolError(
            f"the rendezvous store must hold the record of a gradwire worker under "
            f"{key!r}, found {shown}: {error}; is the store shared with another program?"
        ) from error


def parse_introduction(data: bytes, info: WorkerInfo, incarnation: int) -> WorkerRecord:
    """Reads the record that a worker has sent of itself.

    Args:
        data: What it has sent.
        info: Who it has proven to be.
        incarnation: And in which life.

    Raises:
        RemoteProtocolError: This is not its record.
    """
    try:
        record = _read(data)
        found = (record.name, record.rank, record.incarnation)
        if found != (*info, incarnation):
            raise ValueError(
                f"it is about worker {record.name!r} of rank {record.rank}"
            )
    except ValueError as error:
        raise RemoteProtocolError(
            f"worker {info.name!r} (rank {info.id}) must introduce itself with its own "
            f"record, found another: {error}",
            worker=info.name,
        ) from error
    return record


def _read(data: bytes) -> WorkerRecord:
    """Raises ``ValueError``, with a printable text, if this is not a record."""
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"it has {len(data)} bytes, above {MAX_RECORD_BYTES}")
        record = msgspec.json.decode(data, type=WorkerRecord)
        _check(record, data)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(printable(str(error))) from error
    return record


def membership_digest(records: Iterable[WorkerRecord]) -> str:
    """Stands for one exact set of workers, each in one exact life."""
    members = sorted((record.rank, record.incarnation) for record in records)
    return hashlib.sha256(msgspec.json.encode(members)).hexdigest()


def _check(record: WorkerRecord, data: bytes) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"it has {len(data)} bytes, above {MAX_RECORD_BYTES}")
    check_worker_name(record.name)
    check_rank(record.rank)
    if not 1 <= record.incarnation < 2**63:
        raise ValueError(f"incarnation {record.incarnation} is out of range")
    if not 1 <= record.world_size <= MAX_RANK:
        raise ValueError(f"world_size {record.world_size} is out of range")
    if record.rank >= record.world_size:
        raise ValueError(
            f"rank {record.rank} is not below world_size {record.world_size}"
        )
    if len(record.addresses) > MAX_ADDRESSES:
        raise ValueError(
            f"it has {len(record.addresses)} addresses, above {MAX_ADDRESSES}"
        )
    if record.serializer not in SERIALIZERS:
        raise ValueError(f"serializer {record.serializer[:40]!r} is unknown")
    texts = {"boot_id": record.boot_id, "network_namespace": record.network_namespace}
    for scheme, address in record.addresses.items():
        texts |= {f"scheme {scheme!r}": scheme, f"address of {scheme!r}": address}
    for what, text in texts.items():
        if len(text) > MAX_ADDRESS_LENGTH or not (
            text.isascii() and text.isprintable()
        ):
            raise ValueError(
                f"{what} must be at most {MAX_ADDRESS_LENGTH} printable ASCII characters"
            )
