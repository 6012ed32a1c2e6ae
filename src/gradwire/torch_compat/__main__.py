"""``python -m gradwire.torch_compat script.py args...`` or ``-m module args...``."""

from __future__ import annotations

import sys

from gradwire._program import run_program
from gradwire.torch_compat._install import install

_USAGE = (
    "usage: python -m gradwire.torch_compat script.py [args...]\n"
    "       python -m gradwire.torch_compat -m module [args...]"
)


def main(arguments: list[str]) -> None:
    """Installs the drop-in, then runs a program as ``python`` would."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if not arguments or arguments == ["-m"]:
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    install()
    run_program(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
