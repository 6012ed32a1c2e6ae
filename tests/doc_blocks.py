"""Runs the Python code that the documentation shows: blocks of pages, and docstrings.

The blocks of a page are one program, from top to bottom. They run on the first worker of
a cluster of their own, in the namespace of the page's module: ``doc_pages/<page>.py``, if
there is one, has what the page takes for granted, and ``WORKERS``, the workers' names. All
workers import it, so they find its functions. If it has a function ``around``, that makes
a context manager for each block, given its code. A comment before a fence says otherwise:

    <!-- block: everywhere -->              on all workers: definitions
    <!-- block: script, 2 processes -->     a program by itself, started as torchrun does
    <!-- block: script, roles a=1 b=2 -->   likewise, as gradwire run does
    <!-- block: notebook -->                in one process, as at a prompt
    <!-- block: not run: the reason -->

A comment behind a ``print`` is what it prints.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import re
import runpy
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.launch._roles import format_roles, parse_roles, worker_of

ROOT = Path(__file__).parents[1]
DEFAULT_WORKERS = ("alice", "bob", "carol")

_FENCE = re.compile(
    r"(?:^<!-- block: (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SCRIPT = re.compile(r"script, (\d+) process(?:es)?")
_ROLES = re.compile(r"script, roles ((?:\w+=\d+ ?)+)")
_NOT_RUN = re.compile(r"not run: (.{8,})")


@dataclass(frozen=True)
class Block:
    """One fence of a page."""

    page: str  # relative to the root of the project
    line: int
    code: str
    everywhere: bool = False
    processes: int = 0
    roles: str = ""
    notebook: bool = False
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def find_pages() -> list[str]:
    """Pages that may have code, relative to the root of the project."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in pages]


def read_blocks(page: str) -> list[Block]:
    """The Python blocks of a page."""
    text = (ROOT / page).read_text()
    return [
        _make_block(
            page,
            text.count("\n", 0, match.start("code")) + 1,
            match["code"],
            match["mark"] or "",
        )
        for match in _FENCE.finditer(text)
    ]


def _make_block(page: str, line: int, code: str, mark: str) -> Block:
    if not mark:
        return Block(page, line, code)
    if mark == "everywhere":
        return Block(page, line, code, everywhere=True)
    if mark == "notebook":
        return Block(page, line, code, processes=1, notebook=True)
    if found := _SCRIPT.fullmatch(mark):
        return Block(page, line, code, processes=int(found[1]))
    if found := _ROLES.fullmatch(mark):
        roles = parse_roles(found[1].split())
        size = sum(roles.values())
        return Block(page, line, code, processes=size, roles=format_roles(roles))
    if found := _NOT_RUN.fullmatch(mark):
        return Block(page, line, code, reason=found[1])
    raise ValueError(f"{page}:{line}: unknown mark of a block: {mark!r}")


# ------------------------------------------------------------------------ blocks of a page


def module_name_of(page: str) -> str:
    name = page.removeprefix("docs/").removesuffix(".md").lower()
    return "doc_pages." + re.sub(r"\W", "_", name)


def workers_of(page: str) -> tuple[str, ...]:
    """Names of the workers that a page needs; its module is not imported here."""
    spec = importlib.util.find_spec(module_name_of(page))
    if spec is None or spec.origin is None:
        return DEFAULT_WORKERS
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            if isinstance(target, ast.Name) and target.id == "WORKERS":
                workers: tuple[str, ...] = ast.literal_eval(statement.value)
                return workers
    return DEFAULT_WORKERS


def load_page(page: str) -> types.ModuleType:
    """On a worker: the module in whose namespace the blocks run."""
    name = module_name_of(page)
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = types.ModuleType(name)
        spec = importlib.util.spec_from_loader(name, loader=None)
        module.__spec__ = spec
    return module


def load_page_on_worker(page: str) -> None:
    """As `load_page`; a module cannot be sent back."""
    load_page(page)


def run_block(block: Block) -> str:
    """On a worker: runs a block and returns what it printed."""
    module = load_page(block.page)
    # On its line, so that tracebacks and warnings show the page.
    source = "\n" * (block.line - 1) + block.code
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, str(ROOT / block.page), "exec", flags, dont_inherit=True)
    output = io.StringIO()
    around = getattr(module, "around", lambda code: contextlib.nullcontext())
    with around(block.code), contextlib.redirect_stdout(output):
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(_run_coroutine(code, module))
        else:
            exec(code, vars(module))
    return output.getvalue()


async def _run_coroutine(code: types.CodeType, module: types.ModuleType) -> None:
    await types.FunctionType(code, vars(module))()


def check_output(block: Block, output: str) -> None:
    """Compares what a block printed with the comments behind its prints."""
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", block.code, re.MULTILINE)
    found = [line.strip() for line in output.splitlines()]
    remaining = iter(found)
    for line in expected:
        if line.strip() not in remaining:
            raise AssertionError(
                f"{block.place}: the page says that it prints {line!r}; it printed {found}"
            )


# -------------------------------------------------------------------------------- scripts


def environment_of(block: Block, rank: int, port: int) -> dict[str, str]:
    """What the launcher of a script sets."""
    if block.notebook:
        return {}
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(block.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if block.roles:
        roles = parse_roles(block.roles.split(","))
        environment["GRADWIRE_ROLES"] = block.roles
        environment["GRADWIRE_NAME"] = worker_of(roles, rank).name
    return environment


def run_script(
    block: Block, path: str, environment: dict[str, str], output: str
) -> None:
    """In a process of its own: runs a program as ``python path`` would."""
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if block.notebook:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(block.code, "<notebook>", "exec"), vars(main))
    else:
        runpy.run_path(path, run_name="__main__")


# ---------------------------------------------------------------------------- docstrings

MODULES = (
    "gradwire",
    "gradwire.rpc",
    "gradwire.rpc.functions",
    "gradwire.autograd",
    "gradwire.optim",
    "gradwire.nn",
    "gradwire.errors",
    "gradwire.launch",
    "gradwire.torch_compat",
)
EXTENSION_POINTS = ("gradwire.transport",)
"""Shown as well, for those who extend gradwire: their pages have the examples."""
_SHARED = (
    "gradwire.rpc",
    "gradwire.autograd",
    "gradwire.optim",
    "gradwire.errors",
    "gradwire.launch",
)

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Documented:
    """A public name of a module, or with an empty name the module itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def get(self) -> Any:
        module = importlib.import_module(self.module)
        return getattr(module, self.name) if self.name else module

    def examples(self) -> list[doctest.Example]:
        text = inspect.getdoc(self.get()) or ""
        section = re.search(r"^Example:\n(.*)", text, re.MULTILINE | re.DOTALL)
        return doctest.DocTestParser().get_examples(section[1]) if section else []


def find_documented() -> list[Documented]:
    """Every public name, each once, and the modules."""
    found = [Documented(module, "") for module in MODULES]
    seen = set()
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            entry = Documented(module, name)
            value = entry.get()
            if not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                found.append(entry)
    return found


def names_for_examples(module: str) -> dict[str, Any]:
    """What examples use without importing it: torch, and what gradwire exports."""
    import torch

    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    names |= {"asyncio": asyncio, "os": os, "time": time}
    for shared in (*_SHARED, module):
        exporting = importlib.import_module(shared)
        for name in exporting.__all__:
            value = getattr(exporting, name)
            if not inspect.ismodule(value):
                names[name] = value
    names["__name__"] = "__main__"
    return names


def run_examples(documented: Documented) -> str:
    """On a worker: runs the examples of a docstring; the report of what went wrong."""
    names = names_for_examples(documented.module)
    test = doctest.DocTest(
        documented.examples(), names, str(documented), None, None, None
    )
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_FLAGS)
    runner.run(test, out=report.append)
    return "".join(report)


def run_examples_alone(documented: Documented, folder: Path, limit_s: float) -> str:
    """Like `run_examples`, in a process that is no worker and may become one."""
    context = multiprocessing.get_context("forkserver")
    report = folder / "report"
    arguments = (documented, str(folder / "store"), str(report))
    process = context.Process(target=_write_report, args=arguments)
    process.start()
    try:
        process.join(limit_s)
        code = process.exitcode
    finally:
        process.kill()
        process.join()
        process.close()
    return report.read_text() if report.exists() else f"exit code {code}"


def _write_report(documented: Documented, store: str, report: str) -> None:
    from gradwire import _config

    # Examples say nothing of where to meet: torchrun would, and here a file does.
    defaults: Any = _config.RpcBackendOptions.__init__.__kwdefaults__
    defaults["init_method"] = f"file://{store}"
    Path(report).write_text(run_examples(documented))
