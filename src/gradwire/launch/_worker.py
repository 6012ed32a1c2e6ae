"""What runs in a worker that ``gradwire run`` has started: the user's program.

An exception that ends the program is not printed here, where it would be lost among what
the others print: it is written to the file that the launcher has named, which shows it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire import _program
from gradwire._config import NAME_VARIABLE
from gradwire.errors import PeerLostError
from gradwire.launch._child import end_after
from gradwire.launch._roles import this_worker

__all__ = ["main"]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_LOOK_S = 0.5


def main(arguments: list[str]) -> None:
    """Runs a program under the name that follows from the rank.

    Args:
        arguments: The process id of the launcher, then the program and its arguments.
    """
    launcher, *program = arguments
    end_after(functools.partial(_wait_for_end_of, int(launcher)))
    os.environ[NAME_VARIABLE] = this_worker().name
    try:
        _program.run_program(program)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if not _record(error):
            raise
        sys.exit(1)


def _wait_for_end_of(parent: int) -> None:
    # The parent may be gone already; a process that has none is given another one.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)


def _record(error: Exception) -> bool:
    """Writes an exception where the launcher looks for it."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    error = error.with_traceback(_of_the_program(error.__traceback__))
    trace = "".join(traceback.format_exception(error))
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    report: dict[str, Any] = {
        "message": {
            "message": f"{type(error).__name__}: {text}",
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time()))},
        },
        "at": time.monotonic(),
        "is_loss": isinstance(error, PeerLostError),
    }
    Path(path).write_text(json.dumps(report))
    return True


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our own frames and those of runpy.

    Of a program that cannot be compiled nothing is left, and its error says where it is.
    """
    ours = (__file__, _program.__file__)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in ours and "runpy" not in name:
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
