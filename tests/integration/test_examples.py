"""What readers are told to run does run: examples, the README, the benchmark."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import rpc

from gradwire import errors, wire

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LIMIT_S = 110.0  # each starts several processes that import torch

BENCHMARK_ITEMS = {
    "python_1kib": (3, 5),
    "add_1kib": (2, 4),
    "in_flight": (4, 8),
    "one_way_64mib": (3, 5),
    "one_way_1mib": (1.5, 3),
}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Runs a Python program in a fresh process and returns what it printed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # What torchrun or a user may have set must not reach the program.
        if not name.startswith("GRADWIRE_")
        and name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # With all that it started, or they would live on.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"not done within {LIMIT_S} s:\n{output}\n{errors}", pytrace=False)
    assert process.returncode == 0, f"{output}\n{errors}"
    return output


# Runs an example as it would run in a notebook: the workers are forked then, and need
# not import torch again.
AS_IN_NOTEBOOK = """
import sys
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


def read_code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def find_links() -> list[tuple[str, str]]:
    """Links of the pages to other files of the project: page, target."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    pages += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    return [
        (str(page.relative_to(ROOT)), target)
        for page in sorted(pages)
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if "://" not in target
    ]


@pytest.mark.parametrize(("page", "target"), find_links())
def test_link_of_page_leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    found = (ROOT / page).parent / path if path else ROOT / page

    assert found.exists()
    if anchor:
        titles = re.findall(r"^#+ (.*)", found.read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
        assert anchor in anchors


def test_errors_page_names_every_error():
    page = (ROOT / "docs/errors.md").read_text()

    for name in errors.__all__:
        assert re.search(rf"\+-- {name}\b|^    {name}$", page, re.MULTILINE), name


def test_wire_protocol_page_shows_the_bytes_of_its_example():
    page = (ROOT / "docs/wire-protocol.md").read_text()
    section = page.partition("### An example")[2].partition("\n### ")[0]
    lines = re.findall(
        r"^    ( *[0-9a-f]{2}[0-9a-f ]*?)(?:  +.*)?$", section, re.MULTILINE
    )
    shown = bytes.fromhex("".join(lines))

    head = wire.encode(wire.Call(7, 0.0, "torch:add"), (torch.ones(2), 3)).head

    frame_bytes, (size,) = shown[:8], struct.unpack_from("!I", shown)
    assert size == len(head)
    assert frame_bytes[4:] == bytes([0, 0, 0, 0x67])
    assert shown[8:] == head


def test_wire_protocol_page_has_every_field_of_every_message():
    page = (ROOT / "docs/wire-protocol.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    shown = {
        (int(kind), name): re.findall(r"(\w+)(?: = [^,]+)?(?:, |$)", fields)
        for kind, name, fields in rows
    }

    assert shown == {
        (wire.kind_of(message), message.__name__): list(message.__struct_fields__)
        for message in wire.Message.__subclasses__()
        if message.__module__.startswith("gradwire.")
    }


def test_autograd_page_names_every_module():
    page = (ROOT / "docs/autograd.md").read_text()
    section = page.partition("## Where to change what")[2]

    modules = {
        path.stem for path in (ROOT / "src/gradwire/autograd").glob("_[a-z]*.py")
    }
    assert modules == set(re.findall(r" (_\w+)  ", section))


def test_readme_opens_with_the_commands():
    commands = re.findall(r"^    (\S.*?)(?: +#.*)?$", README.read_text(), re.MULTILINE)

    assert commands[:3] == ["pip install gradwire", "make demo", "make test"]


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hello_shows_every_kind_of_call():
    output = run("-c", AS_IN_NOTEBOOK, "examples/hello.py")

    assert "Three workers are there: alice, bob, carol." in output
    assert "hello alice, this is bob (rank 1)" in output
    assert "[[0.0, 2.0, 4.0, 6.0], [0.0, 2.0, 4.0, 6.0]]" in output
    assert "[0.0, 3.0, 6.0, 9.0]" in output
    assert "[0.0, 20.0, 40.0, 60.0]" in output
    assert "ZeroDivisionError from worker 'carol'" in output
    assert "bob's sum is 16777216; it went through shared memory (unix)" in output
    assert len(re.findall(r"\d+ us +\d+ us$", output, re.MULTILINE)) == 3


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_readme_example_prints_what_its_comments_say(tmp_path):
    (code,) = read_code_blocks(README)
    script = tmp_path / "hello.py"
    script.write_text(code)
    expected = re.findall(r"print\(.*\)  # (.*) on both workers", code)
    launch = re.search(r"gradwire (run .*) hello\.py", code)
    assert expected and launch is not None

    output = run("-m", "gradwire", *launch[1].split(), script, cwd=tmp_path)

    found = [line.partition("]")[2].strip() for line in output.splitlines()]
    assert found == expected * 2


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_autograd_example_shows_every_kind_of_backward():
    output = run("-c", AS_IN_NOTEBOOK, "examples/autograd.py")

    assert "x.grad tensor([2., 3.]) bob's tensor([1., 1.])" in output
    assert "gradient tensor([4., 9.]) carol's None" in output
    assert "x tensor([ 8., 18.]) and x.grad None\n    bob's tensor([2., 3.])" in output
    assert "x.grad tensor([0.1413, 0.0296]) bob's tensor([0.0707, 0.0099])" in output
    assert "x.grad tensor([32., 72.]) bob's tensor([16., 24.])" in output
    assert "no gradient today; it came from worker bob" in output
    assert "3.2 3 2.7 ... 0.84 0.79" in output
    left = output.partition("What is left of all this: ")[2]
    assert set(ast.literal_eval(left).values()) == {0}


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_parameter_server_example_trains_as_one_process_does():
    output = run("-c", AS_IN_NOTEBOOK, "examples/parameter_server.py", "--short")

    assert "the weights are exactly those of one process" in output
    assert "it is above 0.88" in output


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_demo_trains_as_one_process_does_and_draws_the_graph(tmp_path):
    picture = tmp_path / "graph.svg"

    output = run("examples/split_learning.py", "--short", "--picture", picture)

    assert "all of them outputs of their networks" in output
    assert "is the same, to the last bit" in output
    assert f"A picture of the graph of one step: {picture}" in output
    assert "50\u00d78 float64" in picture.read_text()


@pytest.mark.parametrize(
    ("name", "results"),
    [
        (
            "pipeline.py",
            ["all 42 gradients are equal, up to", "so is every loss, up to"],
        ),
        (
            "remote_embedding.py",
            ["the same network", "tables and network are equal, up to"],
        ),
        (
            "actor_learner.py",
            ["120 batches, each for 16 poles", "same network, to the last bit"],
        ),
        (
            "differentiable_simulator.py",
            ["the same beam, to the last bit, and the same way there"],
        ),
    ],
)
@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_example_gives_the_result_of_one_process(name, results):
    output = run("-c", AS_IN_NOTEBOOK, f"examples/{name}", "--short")

    for result in results:
        assert result in output


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(120)
def test_expert_that_is_killed_is_replaced_and_no_loss_differs():
    output = run("examples/mixture_of_experts.py", "--short")

    assert "expert:1 was killed in step 6" in output
    assert "that step was run 2 times" in output
    assert "all losses are the same, to the last bit" in output


@pytest.mark.parametrize(
    "example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name
)
def test_first_line_of_an_example_says_how_to_run_it(example):
    docstring = ast.get_docstring(ast.parse(example.read_text()))

    assert docstring is not None
    assert f"``python examples/{example.name}``." in docstring.splitlines()[0]
    assert (
        f"({Path('../examples') / example.name})"
        in (ROOT / "docs/examples.md").read_text()
    )


def test_readme_example_is_short_and_needs_no_context():
    (code,) = read_code_blocks(README)
    lines = [line for line in code.splitlines() if line and line[0] != "#"]

    assert len(lines) <= 10
    assert "loss.backward()" in code
    assert "context" not in code


def test_autograd_page_shows_what_the_example_runs():
    example = (ROOT / "examples/autograd.py").read_text()
    blocks = read_code_blocks(ROOT / "docs/autograd.md")

    # A step that is run again needs a worker that dies, which is none for a tour.
    blocks = [block for block in blocks if "autograd.retry" not in block]
    assert blocks
    for block in blocks:
        assert block in example or textwrap.indent(block, "    ") in example, block


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_benchmark_measures_both_systems_in_every_round(tmp_path):
    file = tmp_path / "rpc.json"

    output = run("benchmarks/rpc.py", "--quick", "--rounds", "2", "--json", file)

    result = json.loads(file.read_text())
    items = {item["key"]: item for item in result["items"]}
    assert {key: (i["bar"], i["aim"]) for key, i in items.items()} == BENCHMARK_ITEMS
    for item in items.values():
        assert len(item["rounds"]) == 2
        assert item["torch"]["num_samples"] == item["gradwire"]["num_samples"] > 0
    for limit in result["limits"]:
        assert limit["num_samples"] > 0
    assert rpc.format_table(result) in output


def make_samples(torch_: float, ours: float) -> dict[str, rpc.Samples]:
    """Two rounds, in which every sample of a system is the same."""
    return {
        name: {item.key: [[value] * 5] * 2 for item in rpc.ITEMS}
        for name, value in (("torch", torch_), ("gradwire", ours))
    }


LIMITS: rpc.Samples = {limit.key: [[1e-5]] * 2 for limit in rpc.LIMITS}


def test_benchmark_ratio_says_how_much_faster_gradwire_is():
    times = rpc.summarise(make_samples(torch_=9e-4, ours=2e-4), LIMITS)["items"]
    rates = rpc.summarise(make_samples(torch_=2e3, ours=9e3), LIMITS)["items"]

    found = {i["key"]: i["ratio"] for i in times if i["key"] != "in_flight"}
    found |= {i["key"]: i["ratio"] for i in rates if i["key"] == "in_flight"}
    assert found == pytest.approx(dict.fromkeys(BENCHMARK_ITEMS, 4.5))


def test_benchmark_reports_the_median_of_the_rounds_ratios():
    samples = make_samples(torch_=4e-4, ours=1e-4)
    samples["torch"]["python_1kib"] = [[2e-4], [4e-4], [50e-4]]
    samples["gradwire"]["python_1kib"] = [[1e-4], [1e-4], [10e-4]]

    item = rpc.summarise(samples, LIMITS)["items"][0]

    assert item["rounds"] == pytest.approx([2, 4, 5])
    assert item["ratio_by_round"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(2.9, "below the bar"), (3.1, "bar met"), (5.1, "aim met")],
)
def test_benchmark_says_whether_the_bar_is_met(ratio, verdict):
    result = rpc.summarise(make_samples(torch_=ratio * 1e-4, ours=1e-4), LIMITS)

    row = rpc.make_rows(result)[0]

    assert (row[6], row[-1]) == (f"{ratio:.2f}x", verdict)


def test_benchmark_p99_is_reached_by_99_of_100_samples():
    samples = make_samples(torch_=1.0, ours=1.0)
    samples["gradwire"]["one_way_64mib"] = [[i / 1e3 for i in range(1, 101)]]
    samples["torch"]["one_way_64mib"] = samples["gradwire"]["one_way_64mib"]
    samples["gradwire"]["in_flight"] = [[float(i) for i in range(1, 101)]]
    samples["torch"]["in_flight"] = samples["gradwire"]["in_flight"]

    items = {i["key"]: i for i in rpc.summarise(samples, LIMITS)["items"]}

    assert items["one_way_64mib"]["gradwire"]["p99"] == pytest.approx(99.0)
    assert items["in_flight"]["gradwire"]["p99"] == pytest.approx(1.0)


def test_benchmark_saves_a_report_with_date_command_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc, "RESULTS", tmp_path)
    result = {
        "run": rpc.describe_run(["--save"], 2),
        **rpc.summarise(make_samples(torch_=4e-4, ours=1e-4), LIMITS),
    }

    page, data = rpc.save(result)

    date = result["run"]["date"][:10]
    assert (page.name, data.name) == (f"rpc_{date}.md", f"rpc_{date}.json")
    assert json.loads(data.read_text()) == result
    text = page.read_text()
    assert "`python benchmarks/rpc.py --save` (2 rounds)" in text
    for fact in (date, *result["run"]["versions"].values(), _cpu_text(result)):
        assert fact in text
    for item in result["items"]:
        assert f"| {item['text']} |" in text


def _cpu_text(result: dict[str, Any]) -> str:
    cpu = result["run"]["cpu"]
    return f"{cpu['model']}, {cpu['count']} cores"
