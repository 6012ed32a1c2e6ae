"""``python -m gradwire.torch_compat script.py args...`` or ``-m module args...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gradwire.torch_compat._install import install

_USAGE = (
    "usage: python -m gradwire.torch_compat script.py [args...]\n"
    "       python -m gradwire.torch_compat -m module [args...]"
)


def main(arguments: list[str]) -> None:
    """Installs the drop-in, then runs a program as ``python`` would."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(_USAGE)
    install()
    if arguments[0] == "-m":
        if len(arguments) == 1:
            sys.exit(_USAGE)
        # runpy puts the module's file in place of the first entry.
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
