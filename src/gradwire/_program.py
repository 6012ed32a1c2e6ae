"""Running a user's program as ``python`` would, after something was prepared for it."""

from __future__ import annotations

import builtins
import io
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["run_program"]


def run_program(arguments: list[str]) -> None:
    """Runs ``script.py args...`` or ``-m module args...`` as ``__main__``.

    The program's module stays in ``sys.modules`` when its body has ended: threads, handlers
    of ``atexit`` and calls of other workers still need its functions. A program that cannot
    be found is told in one line and ends the process, with the status of ``python``.
    """
    main = ModuleType("__main__")
    # Which the interpreter gives to modules that it runs itself.
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        _replace_first_on_path(Path.cwd())
        _run_module(arguments[1], alter_argv=True)
        return
    sys.argv = list(arguments)
    path = Path(arguments[0]).absolute()
    if pkgutil.get_importer(str(path)) is None:
        _replace_first_on_path(path.resolve().parent)
        _run_script(main, str(path))
    else:
        # A folder or a zip file, whose __main__.py is run and needs it on the path.
        _replace_first_on_path(path, even_if_safe=True)
        _run_module("__main__", alter_argv=False)


def _run_script(main: ModuleType, path: str) -> None:
    try:
        code, loader = _read_script(path)
    except OSError as error:
        text = f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}]"
        print(text, error.strerror, file=sys.stderr)
        sys.exit(2)
    main.__file__, main.__loader__ = path, loader
    main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _read_script(path: str) -> tuple[CodeType, SourceFileLoader | SourcelessFileLoader]:
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path)
        code = compiled.get_code("__main__")
        assert code is not None
        return code, compiled
    with io.open_code(path) as file:
        # Not with the __future__ imports of this module.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return code, SourceFileLoader("__main__", path)


def _run_module(name: str, *, alter_argv: bool) -> None:
    # What the interpreter itself calls for -m, folders and zip files; the functions that
    # runpy documents take the module away again at its end.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _replace_first_on_path(entry: Path, *, even_if_safe: bool = False) -> None:
    """Has a program's entry in place of the one of ``python -m``, which started us.

    With ``-P`` or ``-I`` there is none, and most programs get none.
    """
    is_safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if not is_safe:
        del sys.path[0]
    if not is_safe or even_if_safe:
        sys.path.insert(0, str(entry))
