"""Test suites for those who extend gradwire; they need pytest."""

from __future__ import annotations

from gradwire.testing.transport_suite import TransportSuite

__all__ = ["TransportSuite"]
