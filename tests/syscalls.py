"""System calls of a running process, counted by strace."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import probes

_LINE = re.compile(r"^\d+\s+(?:<\.\.\. )?(\w+)(?:\(| resumed)")
_RESUMED = re.compile(r"^\d+\s+<\.\.\. ")


def require_strace() -> None:
    """Skips the test where processes cannot be traced."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            ["strace", "-f", "-o", f"{folder}/out", "true"],
            capture_output=True,
            check=False,
            timeout=20,
        )
    if found.returncode:
        pytest.skip(f"processes cannot be traced here: {found.stderr[:200]!r}")


@contextlib.contextmanager
def counted(pid: int) -> Iterator[Counter[str]]:
    """Counts the system calls of a process and its threads while the block runs."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-p", str(pid), "-o", str(path)],
            stderr=subprocess.PIPE,
        )
        try:
            probes.wait_until(lambda: _is_traced(pid), "strace has attached")
            begin = path.stat().st_size if path.exists() else 0
            yield counts
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate(timeout=20)
        text = path.read_bytes()[begin:].decode(errors="replace")
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and not _RESUMED.match(line):
            counts[found[1]] += 1


def _is_traced(pid: int) -> bool:
    """Whether every thread of the process has a tracer."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = (task / "status").read_text()
            if re.search(r"^TracerPid:\t0$", status, re.M):
                return False
    return True
