"""Records of workers, as somebody may have left them in the rendezvous store."""

from __future__ import annotations

import random

import msgspec

import mutations
from fuzz.running import Finding, Target
from gradwire._ids import check_rank, check_worker_name
from gradwire.errors import RemoteProtocolError
from gradwire.rpc._records import WorkerRecord, encode_record, parse_record

_BOOT = "5e0a7d3c-0000-4000-8000-000000000000"
_CORPUS = [
    encode_record(record).encode()
    for record in (
        WorkerRecord("w0", 0, 1, 1, _BOOT, "4026531840", {"unix": "gradwire-1"}),
        WorkerRecord(
            "trainer:3",
            3,
            2**63 - 1,
            64,
            _BOOT,
            "4026531840",
            {"unix": "gradwire-99-abc", "tcp": "10.0.0.7:12345"},
            active=True,
        ),
        WorkerRecord("a" * 127, 2**31 - 2, 7, 2**31 - 1, "", "", {"tcp": "[::1]:1"}),
        WorkerRecord("none", 1, 5, 2, _BOOT, "1", {}),
    )
]
_DEEP = msgspec.Raw(b"[" * 1500 + b"]" * 1500)


class Records(Target):
    name = "records"
    errors = (RemoteProtocolError,)

    def make(self, choice: random.Random) -> bytes:
        data = choice.choice(_CORPUS)
        kind = choice.random()
        if kind < 0.5:
            return mutations.mutate(data, choice, _CORPUS)
        tree = mutations.mutate_value(msgspec.json.decode(data), choice, _DEEP)
        encoded = msgspec.json.encode(tree)
        return encoded if kind < 0.9 else mutations.mutate(encoded, choice, _CORPUS)

    def sound_inputs(self) -> list[bytes]:
        return _CORPUS

    def feed(self, given: bytes) -> str:
        record = parse_record(given)
        check_worker_name(record.name)
        check_rank(record.rank)
        if not 0 <= record.rank < record.world_size:
            raise Finding(f"a record with a rank outside of its group: {record}")
        if parse_record(encode_record(record).encode()) != record:
            raise Finding(f"a record that changes when it is written: {record}")
        return "accepted"
