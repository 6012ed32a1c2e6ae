"""Pages that promise something name the tests that show it; those must exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["SECURITY.md", "docs/failures.md", "docs/security.md", "tests/fuzz/README.md"]
# A test, a file or folder of tests, or a test in a file.
_NAMED = re.compile(r"`(tests/[\w/]+(?:\.py)?)?(?:::)?(test_\w+)?`")


@cache
def all_tests() -> dict[str, set[str]]:
    """Names of test functions by their file."""
    return {
        str(path.relative_to(ROOT)): {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        }
        for path in (ROOT / "tests").rglob("*.py")
    }


def named_in(text: str) -> list[tuple[str, str]]:
    """File and function, one of which may be empty."""
    return [pair for pair in _NAMED.findall(text) if any(pair)]


def exists(file: str, function: str) -> bool:
    if file and not (ROOT / file).exists():
        return False
    if not function:
        return True
    files = [file] if file else list(all_tests())
    return any(function in all_tests().get(one, ()) for one in files)


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page):
    named = named_in((ROOT / page).read_text(encoding="utf-8"))

    assert named
    assert [one for one in named if not exists(*one)] == []


def test_names_that_do_not_exist_are_found():
    text = "`test_nothing_of_the_kind`, `tests/unit/nowhere.py`, `tests/cluster.py`"

    assert [exists(*one) for one in named_in(text)] == [False, False, True]
    assert not exists("tests/test_api.py", "test_names_that_do_not_exist_are_found")
    assert exists("tests/test_named_tests.py", "test_names_that_do_not_exist_are_found")


def rows_of(page: str) -> list[list[str]]:
    """The rows of all tables whose last column is about tests."""
    rows, is_about_tests = [], False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            is_about_tests = False
        elif cells[-1] in ("tests", "test"):
            is_about_tests = True
        elif is_about_tests and set(line) - set("|-: "):
            rows.append(cells)
    return rows


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/failures.md"])
def test_every_row_names_a_test(page):
    rows = rows_of(page)

    assert len(rows) > 10
    assert [
        row[0] for row in rows if not named_in(row[-1]) and "](" not in row[-1]
    ] == []
