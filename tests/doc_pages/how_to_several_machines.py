"""What docs/how-to/several-machines.md takes for granted."""

from __future__ import annotations

from gradwire import rpc  # noqa: F401

WORKERS = ("worker0", "worker1")
