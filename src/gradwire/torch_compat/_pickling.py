"""Values as bytes and a list of tensors, outside of messages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradwire.wire._pickle import dumps, loads
from gradwire.wire._tensors import TensorTable

__all__ = ["pickle_value", "unpickle_value"]


def pickle_value(value: Any) -> tuple[bytes, list[Tensor]]:
    """The pickle and the tensors of a value."""
    table = TensorTable()
    data = dumps(value, table)
    return data, table.tensors


def unpickle_value(data: bytes, tensors: list[Tensor]) -> Any:
    """The value that `pickle_value` was given."""
    return loads(data, tensors)
