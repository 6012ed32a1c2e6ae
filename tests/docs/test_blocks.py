"""The code that pages show runs, and prints what they say."""

from __future__ import annotations

import multiprocessing
import re
from datetime import timedelta

import pytest
import torch.distributed

import cluster as harness
import doc_blocks
from doc_blocks import Block

pytestmark = pytest.mark.multiproc

LIMIT_S = 50.0

BLOCKS = {page: doc_blocks.read_blocks(page) for page in doc_blocks.find_pages()}
SCRIPTS = [block for blocks in BLOCKS.values() for block in blocks if block.processes]


def is_part_of_page(block: Block) -> bool:
    return not block.processes and not block.reason


PAGES = [page for page, blocks in BLOCKS.items() if any(map(is_part_of_page, blocks))]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_page_run(page, make_cluster):
    names = doc_blocks.workers_of(page)
    cluster = make_cluster(len(names), names=names)
    for rank in range(len(names)):
        cluster.run(rank, doc_blocks.load_page_on_worker, page)
    for block in filter(is_part_of_page, BLOCKS[page]):
        if block.everywhere:
            for rank in range(1, len(names)):
                cluster.run(rank, doc_blocks.run_block, block)
        doc_blocks.check_output(block, cluster.run(0, doc_blocks.run_block, block))


def serve_store() -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S)
    )


@pytest.fixture(scope="module")
def _first_store() -> None:
    """The first store opens descriptors for good, which are no leak of a test."""
    serve_store()


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.place)
@pytest.mark.usefixtures("_first_store")
def test_script_of_page_runs(block, tmp_path):
    harness.ensure_fork_server()
    script = tmp_path / "script.py"
    script.write_text(block.code)
    # The launcher serves the store, as torchrun does: no port has to be guessed.
    store = serve_store()
    context = multiprocessing.get_context("forkserver")
    outputs = [tmp_path / f"{rank}.out" for rank in range(block.processes)]
    processes = []
    for rank, output in enumerate(outputs):
        environment = doc_blocks.environment_of(block, rank, store.port)
        arguments = (block, str(script), environment, str(output))
        processes.append(context.Process(target=doc_blocks.run_script, args=arguments))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    texts = [output.read_text() if output.exists() else "" for output in outputs]

    assert codes == [0] * block.processes, "\n".join(texts)
    doc_blocks.check_output(block, texts[0])


def test_every_mark_belongs_to_a_block():
    for page, blocks in BLOCKS.items():
        text = (doc_blocks.ROOT / page).read_text()
        marks = re.findall(r"^<!-- block: .*-->$", text, re.MULTILINE)
        fences = re.findall(r"^ *```python", text, re.MULTILINE)

        assert len(blocks) == len(fences), f"{page}: a fence that was not understood"
        assert len(marks) <= len(blocks), page


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("", Block("p.md", 7, "x = 1\n")),
        ("everywhere", Block("p.md", 7, "x = 1\n", everywhere=True)),
        ("notebook", Block("p.md", 7, "x = 1\n", processes=1, notebook=True)),
        ("script, 2 processes", Block("p.md", 7, "x = 1\n", processes=2)),
        (
            "script, roles a=1 b=2",
            Block("p.md", 7, "x = 1\n", processes=3, roles="a=1,b=2"),
        ),
        (
            "not run: needs two hosts",
            Block("p.md", 7, "x = 1\n", reason="needs two hosts"),
        ),
    ],
)
def test_marks_of_blocks_are_understood(mark, expected):
    assert doc_blocks._make_block("p.md", 7, "x = 1\n", mark) == expected


@pytest.mark.parametrize("mark", ["anywhere", "not run", "not run: no", "script"])
def test_marks_that_are_not_understood_are_errors(mark):
    with pytest.raises(ValueError, match=r"p\.md:7"):
        doc_blocks._make_block("p.md", 7, "", mark)


def test_output_that_differs_from_the_page_is_found():
    block = Block("p.md", 7, "print(1 + 1)  # 3\n")

    with pytest.raises(AssertionError, match=r"p\.md:7.*'3'.*\['2'\]"):
        doc_blocks.check_output(block, "2\n")
