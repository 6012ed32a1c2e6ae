"""Showing what workers print: line by line, each with the name of its worker."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

__all__ = ["Output", "say"]

_LOOK_S = 0.05
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_MOST_BYTES = 1 << 20


def say(text: str) -> None:
    """Tells the user something in the name of the launcher."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            _write(sys.stderr, f"gradwire: {text}\n")


class Output:
    """Follows files that workers write, and shows their lines.

    Args:
        width: Of the longest name, so that the lines begin below each other.
        use_colours: None: if the stream is a terminal and ``NO_COLOR`` is not set.
    """

    def __init__(self, width: int, use_colours: bool | None = None) -> None:
        self._width = width
        self._use_colours = use_colours
        self._colours: dict[str, int] = {}
        self._closing = threading.Event()
        # Guards all below: the thread that looks, and who adds files or words.
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._thread = threading.Thread(
            target=self._run, name="gradwire-output", daemon=True
        )
        self._thread.start()

    def follow(self, name: str, path: str, stream: TextIO | None) -> None:
        """Shows what a worker writes to a file from now on."""
        if stream is None:
            return  # this process was started without it
        with self._lock:
            self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            self._files.append(_File(name, Path(path), stream))

    def flush(self) -> None:
        """Shows all that there is; lines that have no end yet too."""
        with self._lock:
            self._show_all(to_the_end=True)

    def close(self) -> None:
        """Shows what is left, and ends."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                self._show_all(to_the_end=False)

    def _show_all(self, *, to_the_end: bool) -> None:
        for file in list(self._files):
            try:
                while lines := file.read_lines(to_the_end=to_the_end):
                    prefix = self._prefix(file)
                    _write(file.stream, "".join(f"{prefix}{line}\n" for line in lines))
            except OSError as error:
                # The end of this stream; the workers and their other streams go on.
                ended = file.stream
                self._files = [f for f in self._files if f.stream is not ended]
                if not isinstance(error, BrokenPipeError):
                    say(f"{ended.name} is not shown any more: {error}")

    def _prefix(self, file: _File) -> str:
        text = f"[{file.name}]".ljust(self._width + 3)
        wanted = self._use_colours
        if wanted is None:
            wanted = file.stream.isatty() and "NO_COLOR" not in os.environ
        return f"\033[{self._colours[file.name]}m{text}\033[0m" if wanted else text


class _File:
    """One stream of one worker."""

    def __init__(self, name: str, path: Path, stream: TextIO) -> None:
        self.name = name
        self.stream = stream
        self._path = path
        self._offset = 0
        self._rest: list[bytes] = []  # parts of a line that has no end yet

    def read_lines(self, *, to_the_end: bool) -> list[str]:
        data = b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                # A line may be longer than what is read at once.
                while b"\n" not in data and (data := file.read(_MOST_BYTES)):
                    self._offset += len(data)
                    self._rest.append(data)
        except OSError:
            return []  # not begun yet, or out of reach for now
        if not data and not to_the_end:
            return []
        *lines, rest = b"".join(self._rest).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._rest = [rest]
        return [line.decode(errors="replace") for line in lines]


def _write(stream: TextIO, text: str) -> None:
    """Writes what can be written in the stream's encoding; the rest as escapes."""
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        # What is in its buffer would fail once more when the process ends, and change
        # its exit status.
        with contextlib.suppress(OSError):
            _discard(stream.fileno())
        raise


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)
