"""Hooks of the documentation site: pages and tables that are made when it is built.

Files of the project that pages link to (examples, results of benchmarks, the changelog)
become pages of the site, so that it is complete by itself. A line ``<!-- results: rpc -->``
becomes a table of the newest saved results of that name, and ``<!-- report: tls -->`` the
table that the newest report of that name has: no figure is typed by hand.
mkdocs.yml names this file; ``mkdocs`` calls the functions that begin with ``on_``.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"

log = logging.getLogger("mkdocs.hooks")  # where a warning ends a strict build

_FETCHED = re.compile(
    r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:href|src)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_RESULTS = re.compile(r"^<!-- results: (\w+) -->$", re.MULTILINE)
_REPORT = re.compile(r"^<!-- report: (\w+) -->$", re.MULTILINE)


# ------------------------------------------------------------- files that become pages


def _make_example_page(path: Path) -> str:
    return f"# {path.name}\n\n```python\n{path.read_text().rstrip()}\n```\n"


def _find_examples() -> list[Path]:
    return sorted(ROOT.glob("examples/[!_]*.py"))


def _find_borrowed() -> dict[Path, str]:
    """Files outside of docs/ that the site has, and their place in it."""
    borrowed = {path: f"examples/{path.stem}.md" for path in _find_examples()}
    borrowed |= {
        path: f"results/{path.name}"
        for path in sorted(RESULTS.glob("*"))
        if path.suffix in (".md", ".svg")
    }
    for name in ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"):
        if (ROOT / name).exists():
            borrowed[ROOT / name] = f"project/{name.lower()}"
    # Folders lead to what describes them.
    borrowed[RESULTS] = "results/README.md"
    borrowed[ROOT / "benchmarks"] = "numbers.md"
    borrowed[ROOT / "README.md"] = "index.md"
    return borrowed


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the borrowed pages to the navigation, and whatever it does not name."""
    nav: list[Any] = config.nav or []
    examples = [f"examples/{path.stem}.md" for path in _find_examples()]
    _fill(nav, "Examples", examples)
    docs = Path(config.docs_dir)
    known = set(_leaves(nav))
    found = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    _fill(nav, "More", [page for page in found if page not in known])
    places = _find_borrowed().values()
    project = [place for place in places if place.startswith("project/")]
    reports = [place for place in places if re.match(r"results/.*\.md", place)]
    nav.append({"Project": [*project, {"Saved results": reports}]})
    return config


def _fill(nav: list[Any], title: str, pages: list[str]) -> None:
    for entry in nav:
        if isinstance(entry, dict) and title in entry:
            entry[title] = [*(entry[title] or []), *pages]
            return
    if pages:
        nav.append({title: pages})


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav or []:
        yield from _leaves(entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Makes pages of the borrowed files."""
    for path, place in _find_borrowed().items():
        if not path.is_file() or files.get_file_from_path(place) is not None:
            continue
        is_code = path.suffix == ".py"
        text = _make_example_page(path) if is_code else path.read_text()
        files.append(File.generated(config, place, content=text))
    return files


# ------------------------------------------------------------------------------- links


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Puts tables in their places, and mends links that leave docs/."""
    markdown = _RESULTS.sub(lambda match: make_table(match[1]), markdown)
    markdown = _REPORT.sub(lambda match: copy_table(match[1]), markdown)
    borrowed = _find_borrowed()
    origins = {place: path for path, place in borrowed.items() if path.is_file()}
    here = page.file.src_uri
    docs = Path(config.docs_dir)
    source = docs / here if (docs / here).exists() else origins[here]

    def mend(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return match[0]
        found = Path(os.path.normpath(source.parent / path))
        if found in borrowed:
            place = borrowed[found]
        elif found.is_relative_to(docs):
            place = found.relative_to(docs).as_posix()
        else:
            return text  # of the sources: the name must do
        place = os.path.relpath(place, Path(here).parent)
        return f"{mark}[{text}]({place}{'#' if anchor else ''}{anchor})"

    return _outside_code(markdown, lambda text: _LINK.sub(mend, text))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if number % 2 else change(part) for number, part in enumerate(parts)
    )


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warns of what a reader's browser would fetch from elsewhere."""
    for address in find_fetched(output):
        log.warning(f"{page.file.src_uri} fetches {address}")
    return output


def find_fetched(html: str) -> list[str]:
    """Addresses of other hosts that a page loads something from; links do not count."""
    return _FETCHED.findall(html)


# ------------------------------------------------------------------------------ tables


def load_newest(name: str) -> dict[str, Any]:
    """The newest saved results of a benchmark.

    Raises:
        FileNotFoundError: There are none.
    """
    path = _find_newest(name, ".json")
    result: dict[str, Any] = json.loads(path.read_text())
    result["report"] = path.with_suffix(".md").name
    return result


def _find_newest(name: str, suffix: str) -> Path:
    found = sorted(RESULTS.glob(f"{name}_[0-9]*{suffix}"))
    if not found:
        raise FileNotFoundError(f"no saved results of {name!r} in {RESULTS}")
    return found[-1]


def copy_table(name: str) -> str:
    """Markdown for ``<!-- report: name -->``."""
    report = _find_newest(name, ".md")
    lines = [line for line in report.read_text().splitlines() if line.startswith("|")]
    date = report.stem.rpartition("_")[2]
    return "\n".join(
        [*lines, "", f"From [the saved report](results/{report.name}) of {date}."]
    )


def make_table(name: str) -> str:
    """Markdown for ``<!-- results: name -->``."""
    if name == "misses":
        return _make_list_of_misses()
    result = load_newest(name)
    if name == "memory":
        return _describe_memory(result)
    run = result["run"]
    versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    lines = [
        "| work | torch RPC | gradwire | ratio | bar | aim | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for item in result["items"]:
        aim = f"{item['aim']}x" if item["aim"] else "-"
        lines.append(
            f"| {item['text']} | {_format(item['torch'])} | {_format(item['gradwire'])} "
            f"| **{item['ratio']:.2f}x** | {item['bar']}x | {aim} | {_verdict(item)} |"
        )
    lines += [
        "",
        f"{run['date'][:10]}, {run['rounds']} rounds, {run['cpu']['model']}, "
        f"{run['cpu']['count']} cores; {versions}. Command: `{run['command']}`. All "
        f"columns are in [the saved report](results/{result['report']}).",
    ]
    return "\n".join(lines)


def _format(samples: dict[str, Any]) -> str:
    median, unit = samples["median"], samples["unit"]
    if unit == "us" and median >= 10_000:
        median, unit = median / 1000, "ms"
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} {unit}"


def _verdict(item: dict[str, Any]) -> str:
    if item.get("aim_is_met"):
        return "aim met"
    if item["bar_is_met"]:
        return "bar met"
    return "slower than torch" if item["ratio"] < 1 else "below the bar"


def _make_list_of_misses() -> str:
    lines = []
    for name in ("rpc", "autograd", "torch_surface"):
        for item in load_newest(name)["items"]:
            if not item["bar_is_met"]:
                slower = ": **slower than torch**" if item["ratio"] < 1 else ""
                lines.append(
                    f"- {item['text']}: {item['ratio']:.2f}x, where at least "
                    f"{item['bar']}x was asked for{slower}"
                )
    return "\n".join(lines) or "None in the newest saved runs."


def _describe_memory(result: dict[str, Any]) -> str:
    growth = ", ".join(
        f"{side} {percent:+.2f} %" for side, percent in result["growth_percent"].items()
    )
    return (
        f"{result['rows'][-1]['calls']} calls with a tensor of {result['mib']:g} MiB there "
        f"and back; growth of the resident size from the first row to the last: {growth} "
        f"(limit {result['limit_percent']:g} %). All rows are in "
        f"[the saved report](results/{result['report']})."
    )
