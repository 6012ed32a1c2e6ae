"""Processes that a program starts have the drop-in as well.

A process that is forked has it anyway. One that is spawned is a new interpreter, which
runs the program's main module again; the data that ``multiprocessing`` prepares it with
is unpickled before that, and `install` comes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

__all__ = ["install_in_children"]

_KEY = "gradwire_torch_compat"


class _Installation:
    """Unpickling it installs the drop-in."""

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install

    def __reduce__(self) -> Any:
        return self._install, ()


def install_in_children(install: Callable[[], None]) -> None:
    """Has ``install`` called in every process that this one spawns from now on."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {_KEY: _Installation(install), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data
