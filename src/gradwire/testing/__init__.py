"""Test suites for those who extend gradwire; they need pytest."""

from __future__ import annotations

import pytest

# Before the import, so that a failed assertion shows its values.
pytest.register_assert_rewrite(
    "gradwire.testing._channel_suite", "gradwire.testing.transport_suite"
)

from gradwire.testing.transport_suite import TransportSuite  # noqa: E402

__all__ = ["TransportSuite"]
