"""Running a user's program as ``python`` would, after something was prepared for it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

__all__ = ["run_program"]


def run_program(arguments: list[str]) -> None:
    """Runs ``script.py args...`` or ``-m module args...`` as ``__main__``."""
    if arguments[0] == "-m":
        # runpy puts the module's file in place of the first entry.
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
