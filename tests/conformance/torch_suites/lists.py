"""The lists beside this file: tests that pass, are left out, or are not steady."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.torch_suites.report import Report

__all__ = ["Exclusions", "read_names", "write_passing"]


@dataclass(frozen=True)
class Exclusions:
    """Tests that are not run, with the reason of each: ``Suite.test  reason``."""

    reasons: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Exclusions:
        reasons = {}
        for line in _lines(path):
            test, _, reason = line.partition(" ")
            if not reason.strip():
                raise ValueError(f"{path.name}: no reason is given for {test}")
            reasons[test] = reason.strip()
        return cls(reasons)


def read_names(path: Path) -> set[str]:
    """One test per line, as ``Suite.test``."""
    return set(_lines(path))


def write_passing(path: Path, earlier: set[str], report: Report) -> None:
    """Takes over what a run has found; tests that did not run stay as they are."""
    found = (earlier - report.ran()) | report.passed()
    path.write_text("".join(f"{test}\n" for test in sorted(found)))


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]
