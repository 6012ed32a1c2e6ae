"""The command ``gradwire`` (or ``python -m gradwire``) and its sub-commands.

A sub-command is a module with ``add_to(commands)``, which adds its parser and sets
``run`` on it: a function of the parsed arguments that returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gradwire._cli import _certs, _doctor, _run
from gradwire.errors import GradwireError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="gradwire",
        description="Remote calls and distributed autograd for PyTorch.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (_run, _doctor, _certs):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (GradwireError, ValueError, OSError) as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 1
    return status
