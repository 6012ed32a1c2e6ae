"""The log of this layer; what goes wrong in writing it stays there.

Handlers and filters of the user's program run inside a call of the log. One that raises,
say because the disk is full, must not end a thread of ours or leave a caller without its
answer.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback

__all__ = ["log"]

_logger = logging.getLogger("gradwire.rpc")
_FRAMES = 3  # from the logger to whoever called us: shown as the place of a record


class _Log:
    """The methods of a logger that are used here."""

    def debug(
        self, text: str, *args: object, exc_info: BaseException | None = None
    ) -> None:
        self._write(logging.DEBUG, text, args, exc_info)

    def info(self, text: str, *args: object) -> None:
        self._write(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        self._write(logging.WARNING, text, args)

    def exception(self, text: str, *args: object) -> None:
        self._write(logging.ERROR, text, args, True)

    def _write(
        self,
        level: int,
        text: str,
        args: tuple[object, ...],
        exc_info: BaseException | bool | None = None,
    ) -> None:
        if not _logger.isEnabledFor(level):
            return
        try:
            _logger.log(level, text, *args, exc_info=exc_info, stacklevel=_FRAMES)
        except Exception:
            # As the handlers of the standard library do; stderr may be full as well.
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()


log = _Log()
"""The log of this layer, ``gradwire.rpc`` among the loggers."""
