"""What the hooks of the site add to its pages, and the figures of the README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts import site_hooks

ROOT = Path(__file__).parents[2]
FACTOR = 1.5  # within which the README's figures must be those of the newest saved run


def make_item(text: str, ratio: float, bar: float) -> dict[str, object]:
    return {
        "text": text,
        "torch": {"unit": "us", "median": 200.0 * ratio},
        "gradwire": {"unit": "us", "median": 200.0},
        "ratio": ratio,
        "bar": bar,
        "aim": None,
        "bar_is_met": ratio >= bar,
        "aim_is_met": None,
    }


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Saved results of each benchmark, an older and a newer one."""
    run = {
        "date": "2026-02-01T00:00:00+00:00",
        "rounds": 3,
        "command": "python benchmarks/rpc.py",
        "versions": {"torch": "2.13"},
        "cpu": {"model": "a CPU", "count": 2},
    }
    for name in ("rpc", "autograd", "torch_surface"):
        old = {"run": run, "items": [make_item("work", 9.0, 2.0)]}
        new = {
            "run": run,
            "items": [
                make_item(f"{name} fast", 4.0, 2.0),
                make_item(f"{name} slow", 1.5, 2.0),
                make_item(f"{name} slower", 0.5, 2.0),
            ],
        }
        (tmp_path / f"{name}_2026-01-31.json").write_text(json.dumps(old))
        (tmp_path / f"{name}_2026-02-01.json").write_text(json.dumps(new))
    monkeypatch.setattr(site_hooks, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("results")
def test_table_shows_the_newest_saved_results():
    table = site_hooks.make_table("rpc")

    assert "| rpc fast | 800 us | 200 us | **4.00x** | 2.0x | - | bar met |" in table
    assert (
        "| rpc slow | 300 us | 200 us | **1.50x** | 2.0x | - | below the bar |" in table
    )
    assert "| **0.50x** | 2.0x | - | slower than torch |" in table
    assert "9.00x" not in table
    assert "(results/rpc_2026-02-01.md)" in table


@pytest.mark.usefixtures("results")
def test_list_of_misses_has_all_that_is_below_its_bar():
    lines = site_hooks.make_table("misses").splitlines()

    assert [line.partition(":")[0] for line in lines] == [
        f"- {name} {speed}"
        for name in ("rpc", "autograd", "torch_surface")
        for speed in ("slow", "slower")
    ]
    assert sum("slower than torch" in line for line in lines) == 3


def test_table_of_a_report_is_that_of_the_newest(results):
    row = "| call | tls |\n|---|---:|\n| small | {} us |"
    for day, time_us in ((1, 300), (2, 200)):
        text = f"# Calls\n\n- a fact\n\n{row.format(time_us)}\n\nEnd.\n"
        (results / f"tls_2026-02-0{day}.md").write_text(text)

    assert site_hooks.copy_table("tls") == (
        f"{row.format(200)}\n\nFrom [the saved report](results/tls_2026-02-02.md) of "
        "2026-02-02."
    )


def test_saved_results_that_are_missing_are_an_error(results):
    for file in results.iterdir():
        file.unlink()

    with pytest.raises(FileNotFoundError, match="rpc"):
        site_hooks.make_table("rpc")


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ('<script src="https://cdn.example/x.js">', ["https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/a">', ["//fonts.example/a"]),
        ('<a href="https://example.org/">read</a>', []),
        ('<script src="assets/main.js">', []),
    ],
)
def test_what_a_page_fetches_from_elsewhere_is_found(html, expected):
    assert site_hooks.find_fetched(html) == expected


def test_readme_figures_are_those_of_the_newest_saved_run():
    row = re.search(
        r"^\| small call, round trip \| ([\d.]+) ms \| ([\d.]+) ms \|",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert row is not None
    items = {item["key"]: item for item in site_hooks.load_newest("rpc")["items"]}

    for shown, system in zip(row.groups(), ("gradwire", "torch"), strict=True):
        measured_ms = items["python_1kib"][system]["median"] / 1000
        assert measured_ms / FACTOR < float(shown) < measured_ms * FACTOR, (
            f"README.md shows {shown} ms for {system}, the newest saved run "
            f"{measured_ms:.2f} ms"
        )


def test_readme_is_no_longer_than_a_screen_and_a_half():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 75
