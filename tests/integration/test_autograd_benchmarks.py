"""The benchmarks of autograd run, and their numbers mean what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
from benchmarks import autograd, autograd_memory, plots

ROOT = Path(__file__).parents[2]
LIMIT_S = 110.0  # each starts several processes that import torch
MIB = 1 << 20

BARS = {
    "one_hop": (2.5, 5),
    "one_hop_plain": (2.5, 5),
    "chain": (2.5, 5),
    "parallel": (3, 6),
    "pipeline": (1.5, None),
}


def run(*command: str | Path) -> tuple[int, str]:
    """Runs a Python program in a fresh process; returns its status and its output."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # With all that it started, or they would live on.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done within {LIMIT_S} s:\n{output}", pytrace=False)
    return process.returncode, output


# --------------------------------------------------------------------------- the times


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_autograd_benchmark_measures_all_parts(tmp_path):
    file = tmp_path / "autograd.json"

    status, output = run("benchmarks/autograd.py", "--quick", "--json", file)

    assert status == 0, output
    result = json.loads(file.read_text())
    items = {item["key"]: item for item in result["items"]}
    assert {key: (i["bar"], i["aim"]) for key, i in items.items()} == BARS
    for item in items.values():
        assert len(item["rounds"]) == 2
        assert item["torch"]["num_samples"] == item["gradwire"]["num_samples"] > 0
    assert 2000 <= result["local"]["num_nodes"] <= 2100
    for item in result["local"]["items"]:
        assert (item["bar"], item["aim"]) == (10, 3)
        assert item["plain"]["num_samples"] == item["gradwire"]["num_samples"] > 0
    for form in result["growth"]["forms"]:
        assert [row["calls"] for row in form["rows"]] == [1, 2, 5, 10, 20, 50]
        assert all(row["forward"] > 0 and row["backward"] > 0 for row in form["rows"])
    assert autograd.format_tables(result) in output


def make_samples(
    torch_: float = 4e-3, ours: float = 1e-3, added: float = 0.05, power: float = 1.0
) -> dict[str, Any]:
    """Two rounds, in which every sample of a kind is the same."""
    calls = {
        name: {item.key: [[value] * 3] * 2 for item in autograd.ITEMS}
        for name, value in (("torch", torch_), ("gradwire", ours))
    }
    local = {"plain": [0.01] * 3}
    local |= {key: [0.01 * (1 + added)] * 3 for key in autograd.LOCAL_ITEMS}
    sweep = {
        form: {
            n: {"forward": 3e-4 * n, "backward": 1e-4 * n**power, "release": 1e-5}
            for n in autograd.COUNTS
        }
        for form in autograd.FORMS
    }
    return {
        "calls": calls,
        "local": [local] * 2,
        "growth": [sweep] * 2,
        "num_nodes": 2011,
    }


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(2.4, "below the bar"), (2.6, "bar met"), (5.1, "aim met")],
)
def test_autograd_benchmark_compares_the_ratio_with_bar_and_aim(ratio, verdict):
    result = autograd.summarise(make_samples(torch_=ratio * 1e-3, ours=1e-3))

    row = autograd.make_call_rows(result)[0]

    assert (row[5], row[-1]) == (f"{ratio:.2f}x", verdict)


@pytest.mark.parametrize(
    ("added", "verdict"), [(0.11, "over the bar"), (0.05, "bar met"), (0.02, "aim met")]
)
def test_autograd_benchmark_compares_added_cost_with_bar_and_aim(added, verdict):
    result = autograd.summarise(make_samples(added=added))

    for row in autograd.make_local_rows(result):
        assert (row[4], row[-1]) == (f"{100 * added:.1f} %", verdict)


@pytest.mark.parametrize(("power", "is_linear"), [(1.0, True), (1.2, False)])
def test_autograd_benchmark_tells_linear_from_faster_growth(power, is_linear):
    growth = autograd.summarise(make_samples(power=power))["growth"]

    assert growth["is_linear"] is is_linear
    for form in growth["forms"]:
        expected = {"forward": 1.0, "backward": power}
        assert form["exponents"] == pytest.approx(expected)


def test_fixed_costs_of_small_numbers_do_not_hide_growth():
    points = [(n, 1e-2 if n < 10 else 1e-6 * n**2) for n in autograd.COUNTS]

    assert autograd.fit_exponent(points) == pytest.approx(2)


def test_autograd_benchmark_saves_page_numbers_and_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(autograd, "RESULTS", tmp_path)
    run_ = autograd.describe_run(["--save"], 2)
    result = {"run": run_, **autograd.summarise(make_samples())}

    page, data, plot = autograd.save(result)

    names = [f"autograd_{run_['date'][:10]}.{kind}" for kind in ("md", "json", "svg")]
    assert [page.name, data.name, plot.name] == names
    assert json.loads(data.read_text()) == result
    text = page.read_text()
    assert "`python benchmarks/autograd.py --save` (2 rounds)" in text
    assert f"]({plot.name})" in text
    for fact in (*run_["versions"].values(), run_["cpu"]["model"], "linear"):
        assert fact in text
    for item in (*result["items"], *result["local"]["items"]):
        assert f"| {item['text']} |" in text


def test_plot_draws_every_point_inside_its_panel():
    growth = autograd.summarise(make_samples())["growth"]

    document = xml.dom.minidom.parseString(autograd.make_plot(growth))

    groups = document.getElementsByTagName("g")
    assert len(groups) == 2
    for group in groups:
        lines = group.getElementsByTagName("polyline")
        assert len(lines) == 4  # forward and backward, in two forms
        for line in lines:
            points = line.getAttribute("points").split()
            assert len(points) == len(autograd.COUNTS)
            for x, y in (map(float, point.split(",")) for point in points):
                assert plots.LEFT <= x <= plots.WIDTH - plots.RIGHT
                assert plots.TOP <= y <= plots.HEIGHT - plots.BOTTOM


def test_plot_of_linear_growth_follows_its_guide():
    series = plots.Series("a", "black", [(1, 3.0), (1000, 3000.0)])
    panel = plots.Panel("t", "x", "y", [series], has_log_y=True, has_guide=True)

    document = xml.dom.minidom.parseString(plots.draw([panel]))

    (guide,) = (
        line
        for line in document.getElementsByTagName("line")
        if line.getAttribute("class") == "guide"
    )
    (drawn,) = document.getElementsByTagName("polyline")
    ends = [guide.getAttribute(name) for name in ("x1", "y1", "x2", "y2")]
    assert drawn.getAttribute("points") == "{},{} {},{}".format(*ends)


# -------------------------------------------------------------------------- the memory


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", autograd_memory.PARTS)
def test_memory_benchmark_runs(tmp_path, part):
    file = tmp_path / "memory.json"

    # So few contexts and so small activations say nothing about growth or peaks.
    lenient = ("--limit", "50", "--ratio", "5")
    status, output = run(
        "benchmarks/autograd_memory.py",
        *("--quick", "--only", part, *lenient, "--json", file),
    )

    assert status == 0, output
    result = json.loads(file.read_text())
    assert autograd_memory.format_tables(result) in output
    if part == "soak":
        soak = result["soak"]
        assert soak["is_empty"]
        assert [row["contexts"] for row in soak["rows"]] == list(range(6, 61, 6))
    else:
        rows = result["peak"]["rows"]
        assert [(r["worker"], r["steps"]) for r in rows] == [
            (worker, steps) for worker in ("caller", "callee") for steps in (1, 3)
        ]
        for row in rows:
            assert set(row["peaks"]) == {"torch", "gradwire", "no context"}
            # The activation itself must be in the peak.
            assert all(
                row["peaks"][name] >= row["before"][name] + 8 * MIB
                for name in row["peaks"]
            )


def make_soak(resident: int, own: int, left: int) -> dict[str, Any]:
    def row(number: int, resident: int, own: int) -> dict[str, Any]:
        counts = {"contexts": 0, "released_contexts_kept_alive": 1}
        worker = {"resident": resident * MIB, "own": own * MIB, "counts": counts}
        return {"contexts": number, "seconds": 1.0, "workers": [worker] * 3}

    end = {"counts": {"contexts": left}, "cyclic_garbage": 0}
    rows = [row(300, 200, 100), row(3000, resident, own)]
    return autograd_memory.summarise_soak(rows, [end] * 3, 3.0)


@pytest.mark.parametrize(
    ("resident", "own", "left", "is_good"),
    [
        (205, 105, 0, True),
        (207, 107, 0, False),
        (190, 107, 0, False),  # pages of files were taken away, but it grew
        (200, 100, 1, False),
    ],
)
def test_soak_is_good_if_nothing_grows_or_is_left(resident, own, left, is_good):
    soak = make_soak(resident, own, left)

    assert soak["is_good"] is is_good
    assert "growth" in autograd_memory.format_soak(soak)


def make_peak(ours: int) -> dict[str, Any]:
    def sizes(peak: int) -> list[dict[str, int]]:
        return [{"resident": 200 * MIB, "peak": peak * MIB}] * 2

    samples = {
        name: [{"before": sizes(200), "1": sizes(peak), "3": sizes(peak)}]
        for name, peak in (("torch", 500), ("gradwire", ours), ("no context", 500))
    }
    return autograd_memory.summarise_peak(samples, 64 * MIB, 1.2)


@pytest.mark.parametrize(("ours", "is_good"), [(599, True), (601, False)])
def test_peak_is_good_up_to_a_ratio(ours, is_good):
    peak = make_peak(ours)

    assert peak["is_good"] is is_good
    assert f"{ours / 500:.2f}x" in autograd_memory.format_peak(peak)


@pytest.mark.parametrize(("ours", "status"), [(599, 0), (601, 1)])
def test_memory_benchmark_saves_a_page_and_fails_if_a_limit_is_not_kept(
    tmp_path, monkeypatch, capsys, ours, status
):
    monkeypatch.setattr(autograd_memory, "RESULTS", tmp_path)
    monkeypatch.setattr(autograd_memory, "run_soak", lambda *_: make_soak(200, 100, 0))
    monkeypatch.setattr(autograd_memory, "run_peak", lambda *_: make_peak(ours))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    assert autograd_memory.main(["--save"]) == status

    (page,) = tmp_path.glob("autograd_memory_*.md")
    text = page.read_text()
    assert "`python benchmarks/autograd_memory.py --save`" in text
    assert f"limits kept: {'NO' if status else 'yes'}" in text
    assert autograd_memory.format_tables(
        json.loads(page.with_suffix(".json").read_text())
    ) in (capsys.readouterr().out)
