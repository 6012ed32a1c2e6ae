"""Every public name has an example in its docstring, and the examples run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import doc_blocks
import gradwire
from cluster import Cluster, ensure_fork_server
from doc_blocks import Documented

pytestmark = pytest.mark.multiproc

WORKERS = ("worker0", "worker1")
LIMIT_S = 50.0

# What an example contains that must not run on a worker, or not with others.
NO_WORKER = re.compile(r"\b(init_rpc|install|main|spawn)\(")
DEADLY = re.compile(r"\bos\._exit\b")

DOCUMENTED = doc_blocks.find_documented()


def text_of(documented: Documented) -> str:
    return "".join(example.source for example in documented.examples())


ALONE = [d for d in DOCUMENTED if NO_WORKER.search(text_of(d))]
KILLING = [d for d in DOCUMENTED if d not in ALONE and DEADLY.search(text_of(d))]
TOGETHER = [d for d in DOCUMENTED if d not in ALONE and d not in KILLING]


__all__ = ["Wrong"]


class Wrong:
    """An example that does not hold.

    Example:
        >>> rpc_sync("worker1", torch.mul, args=(torch.ones(2), 3))
        tensor([4., 4.])
    """


def check(report: str) -> None:
    if report:
        pytest.fail(report, pytrace=False)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two workers for all examples that leave them as they were."""
    with Cluster(2, names=WORKERS) as cluster:
        yield cluster


def test_no_public_module_is_left_out():
    pages = (doc_blocks.ROOT / "docs/reference").glob("*.md")
    shown = [re.findall(r"^::: (\S+)$", p.read_text(), re.MULTILINE) for p in pages]
    modules = {name for names in shown for name in names}

    assert modules == {*doc_blocks.MODULES, *doc_blocks.EXTENSION_POINTS}
    assert modules >= {f"gradwire.{name}" for name in gradwire.__all__}


@pytest.mark.parametrize("documented", DOCUMENTED, ids=str)
def test_public_name_has_an_example(documented):
    assert inspect.getdoc(documented.get())
    assert documented.examples()


@pytest.mark.parametrize("documented", TOGETHER, ids=str)
def test_example_runs_on_a_worker(documented, pair):
    check(pair.run(0, doc_blocks.run_examples, documented))


@pytest.mark.parametrize("documented", KILLING, ids=str)
def test_example_that_kills_a_worker_runs(documented, make_cluster):
    cluster = make_cluster(2, names=WORKERS)

    check(cluster.run(0, doc_blocks.run_examples, documented))
    cluster.wait_dead(1)


@pytest.mark.parametrize("documented", ALONE, ids=str)
def test_example_runs_outside_of_a_group(documented, tmp_path):
    ensure_fork_server()

    check(doc_blocks.run_examples_alone(documented, tmp_path, LIMIT_S))


def test_example_that_is_wrong_is_reported(pair):
    report = pair.run(0, doc_blocks.run_examples, Documented(__name__, "Wrong"))

    assert "Expected:\n    tensor([4., 4.])\nGot:\n    tensor([3., 3.])" in report
