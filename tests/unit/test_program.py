"""Programs that are started by way of gradwire run as ``python`` runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import _program

LIMIT_S = 50
STARTER = """
import sys
from _program import run_program

run_program(sys.argv[1:])
"""
PROGRAM = """
import atexit, sys, threading

def look(when):
    print(when, sys.modules["__main__"].__dict__ is globals())

def look_when_the_body_has_ended():
    threading.main_thread().join()
    look("thread")

atexit.register(look, "atexit")
spec = getattr(__spec__, "name", None)
print(__name__, __file__, __package__, spec, type(__loader__), type(__builtins__))
print(look.__code__.co_filename, sys.argv, sys.path[0])
threading.Thread(target=look_when_the_body_has_ended).start()
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in the current folder, and a module ``starter`` that needs no torch."""
    on_path = tmp_path / "on_path"
    on_path.mkdir()
    shutil.copy(_program.__file__, on_path)
    (on_path / "starter.py").write_text(STARTER)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("program.py", "package/__main__.py"):
        (tmp_path / name).write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(on_path))
    monkeypatch.chdir(tmp_path)


def run_both(*arguments: str, **env: str) -> list[tuple[int, str, str]]:
    """Status and output of a program that is run by python, and by way of us."""
    both = run(*arguments, **env), run("-m", "starter", *arguments, **env)
    return [(done.returncode, done.stdout, done.stderr) for done in both]


@pytest.mark.parametrize(
    ("arguments", "safe_path"),
    [
        (("program.py", "--flag"), ""),
        (("program.py",), "1"),
        (("-m", "package", "--flag"), ""),
        (("package", "--flag"), ""),
        (("package",), "1"),
    ],
)
@pytest.mark.usefixtures("_programs")
def test_program_finds_itself_as_under_python(arguments, safe_path):
    expected, found = run_both(*arguments, PYTHONSAFEPATH=safe_path)

    assert found == expected
    assert found[0] == 0
    assert found[1].endswith("thread True\natexit True\n")


@pytest.mark.parametrize("arguments", [("missing.py",), ("-m", "missing")])
@pytest.mark.usefixtures("_programs")
def test_missing_program_is_told_as_by_python(arguments):
    expected, found = run_both(*arguments)

    assert found == expected
    assert found[0] != 0


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "status"), [(("--help",), 0), ((), 2)])
def test_usage_is_shown(arguments, status):
    done = run("-m", "gradwire.torch_compat", *arguments)

    assert done.returncode == status
    shown, empty = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
    assert shown.startswith("usage: python -m gradwire.torch_compat script.py")
    assert empty == ""
