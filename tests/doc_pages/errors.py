"""What docs/errors.md takes for granted."""

from __future__ import annotations

from gradwire import rpc  # noqa: F401

WORKERS = ("w0", "w1")


def divide(a: int, b: int) -> float:
    return a / b
