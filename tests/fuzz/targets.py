"""The targets by name."""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.frames import Frames
from fuzz.handshakes import Handshakes
from fuzz.messages import Messages
from fuzz.records import Records
from fuzz.running import Target
from fuzz.safe import Safe

TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (Frames, Handshakes, Messages, Records, Safe)
}


def make_targets(names: Iterable[str]) -> list[Target]:
    return [TARGETS[name]() for name in names]
