"""Where a module lives, as users write it: a worker, and a device of that worker."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from gradwire._ids import check_worker_name

__all__ = ["Placement", "parse_placement"]

_RANK = "rank:"


class Placement(NamedTuple):
    """A worker, by name or rank, and a device there."""

    worker: str | int
    device: str


def parse_placement(text: str) -> Placement:
    """Reads ``worker/device``, ``rank:n/device``, or either of them without the device.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> parse_placement("rank:1/cuda:0")
        Placement(worker=1, device='cuda:0')
    """
    if not isinstance(text, str):
        raise TypeError(f"remote_device must be a str, not {type(text).__name__}")
    worker, slash, device = text.partition("/")
    if not worker or (slash and not device) or "/" in device:
        _refuse(text)
    try:
        device = str(torch.device(device or "cpu"))
    except RuntimeError as error:
        raise ValueError(
            f"remote_device {text!r}: {device!r} is no device of torch, such as 'cpu' or "
            f"'cuda:0'"
        ) from error
    if not worker.startswith(_RANK):
        return Placement(check_worker_name(worker), device)
    rank = worker.removeprefix(_RANK)
    if not (rank.isascii() and rank.isdecimal()):
        _refuse(text)
    return Placement(int(rank), device)


def _refuse(text: str) -> NoReturn:
    raise ValueError(
        'remote_device must be "<worker>/<device>", "rank:<number>/<device>" or either of '
        f'them without "/<device>", which is then the CPU; found {text!r}'
    )
