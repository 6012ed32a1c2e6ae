"""Decorators for functions that are called remotely, under torch's name."""

from __future__ import annotations

from gradwire.rpc.functions import async_execution

__all__ = ["async_execution"]
