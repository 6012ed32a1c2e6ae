"""Snapshots as bytes and as files: whole or not at all, and only the last two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import rpc
from gradwire.errors import SnapshotError
from gradwire.optim import _places
from gradwire.optim._places import DiskPlace, Shelf
from gradwire.optim._protocol import Mark
from gradwire.optim._snapshot_format import Content, check_readable, pack, unpack
from gradwire.rpc import WorkerInfo
from optim_functions import assert_same

ONE, TWO, THREE = Mark(1, 10), Mark(2, 20), Mark(3, 30)


@pytest.fixture(autouse=True)
def _is_a_worker(monkeypatch):
    """Messages name the worker, and there is no agent here."""
    monkeypatch.setattr(_places, "get_worker_info", lambda: WorkerInfo("w1", 1))
    assert not rpc.is_initialized()


def make_content() -> Content:
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(4.0)}, "note": 7}
    options: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}]
    return Content([torch.arange(4.0, dtype=torch.float64)], state, options, "Adam")


# ----------------------------------------------------------------------------------- bytes


def test_content_survives():
    content = make_content()

    found = unpack(pack(content), "here")

    assert_same(found.parameters, content.parameters)
    assert_same(found.state[0], content.state[0])
    assert found.state["note"] == 7
    assert found.options == content.options
    assert found.optimizer == "Adam"


def test_any_damage_is_noticed():
    packed = pack(make_content())
    for place in (0, 10, len(packed) // 3, len(packed) // 2, len(packed) - 1):
        damaged = bytearray(packed)
        damaged[place] ^= 1
        with pytest.raises(SnapshotError, match="somewhere"):
            unpack(bytes(damaged), "somewhere")
    for length in (0, 5, 40, len(packed) - 1):
        with pytest.raises(SnapshotError, match="somewhere"):
            unpack(packed[:length], "somewhere")


class Runs:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def test_nothing_in_a_snapshot_is_run():
    packed = pack(make_content()._replace(state={0: Runs()}))

    with pytest.raises(SnapshotError, match="cannot be read"):
        unpack(packed, "here")
    with pytest.raises(SnapshotError, match="state of Adam cannot be kept"):
        check_readable(packed, "Adam")


# ----------------------------------------------------------------------------------- files


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_files_are_those_that_are_to_be_kept(tmp_path):
    place = DiskPlace(str(tmp_path / "made"), "opt-0-w1")

    place.save(ONE, b"one", None)
    place.save(TWO, b"two", ONE)
    assert place.marks() == [ONE, TWO]
    place.save(THREE, b"three", TWO)

    assert place.marks() == [TWO, THREE]
    assert place.load(TWO) == b"two"
    assert place.load(THREE) == b"three"
    place.drop_others({TWO})
    assert files_in(tmp_path / "made") == ["opt-0-w1.2.20.snapshot"]


def test_snapshots_of_others_are_left_alone(tmp_path):
    place = DiskPlace(str(tmp_path), "opt-0-w1")
    for key in ("opt-0-w11", "opt-1-w1", "other-0-w1"):
        DiskPlace(str(tmp_path), key).save(ONE, b"theirs", None)
    (tmp_path / "opt-0-w1.x.snapshot").write_bytes(b"not ours")

    place.save(TWO, b"mine", None)
    place.drop_others(set())

    assert place.marks() == []
    assert len(files_in(tmp_path)) == 4


def test_unfinished_file_is_not_a_snapshot(tmp_path):
    place = DiskPlace(str(tmp_path), "opt-0-w1")
    (tmp_path / "opt-0-w1.1.10.snapshot.unfinished").write_bytes(b"half")

    assert place.marks() == []
    with pytest.raises(
        SnapshotError, match=r"after 1 steps, is not there.*steps: none"
    ):
        place.load(ONE)
    place.save(TWO, b"two", None)

    assert files_in(tmp_path) == ["opt-0-w1.2.20.snapshot"]


def test_failed_write_leaves_the_old_ones(tmp_path, monkeypatch):
    place = DiskPlace(str(tmp_path), "opt-0-w1")
    place.save(ONE, b"one", None)

    def fail(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        place.save(TWO, b"two", ONE)

    assert place.marks() == [ONE]
    assert place.load(ONE) == b"one"


def test_files_are_private(tmp_path):
    place = DiskPlace(str(tmp_path), "opt-0-w1")

    place.save(ONE, b"one", None)

    assert (tmp_path / "opt-0-w1.1.10.snapshot").stat().st_mode & 0o077 == 0


def test_missing_directory_has_no_snapshots(tmp_path):
    assert DiskPlace(str(tmp_path / "nowhere"), "opt-0-w1").marks() == []


# --------------------------------------------------------------------------------- shelves


def test_shelf_keeps_what_it_is_told_to():
    shelf = Shelf()

    shelf.put(ONE, torch.ones(1), None)
    shelf.put(TWO, torch.ones(2), ONE)
    shelf.put(THREE, torch.ones(3), TWO)

    assert shelf.marks() == [TWO, THREE]
    assert shelf.get(ONE) is None
    found = shelf.get(THREE)
    assert found is not None
    assert len(found) == 3
