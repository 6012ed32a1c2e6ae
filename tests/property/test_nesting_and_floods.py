"""Random programs of nested calls and floods between three workers with tiny credits.

A program is a tree. Each node is a call: it runs on some worker, makes the calls of its
children there (one by one, all at once, or through callbacks), and returns the sum of
what they return and of its own numbers. The right result is known beforehand.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from cluster import Cluster
from gradwire import rpc
from gradwire.rpc.functions import async_execution

pytestmark = pytest.mark.multiproc

NUM_WORKERS = 3
FIXED_SEEDS = [1, 2, 3, 4, 5, 6]
LIMIT_S = 40.0

Style = Literal["one by one", "at once", "callbacks"]
STYLES: list[Style] = ["one by one", "at once", "callbacks"]


@dataclass(frozen=True)
class Node:
    """One call of a program."""

    worker: int
    number: int
    style: Style
    answers_later: bool
    padding: bytes
    children: tuple[Node, ...] = ()

    def total(self) -> int:
        return self.number + sum(child.total() for child in self.children)

    def count(self) -> int:
        return 1 + sum(child.count() for child in self.children)


# ------------------------------------------------------------------- run by workers


def call(node: Node) -> rpc.Future[int]:
    function: Any = run_later if node.answers_later else run
    return rpc.rpc_async(f"w{node.worker}", function, (node,), timeout=LIMIT_S)


def run(node: Node) -> int:
    if node.style == "one by one":
        return node.number + sum(
            rpc.rpc_sync(f"w{child.worker}", run, (child,), timeout=LIMIT_S)
            for child in node.children
        )
    if node.style == "at once":
        futures = [call(child) for child in node.children]
        return node.number + sum(future.wait() for future in futures)
    futures = [call(child).then(lambda f: f.wait() + 1) for child in node.children]
    return node.number + sum(future.wait() - 1 for future in futures)


@async_execution
def run_later(node: Node) -> rpc.Future[int]:
    """The same, without a thread that waits."""
    total: rpc.Future[int] = rpc.Future()
    total.set_result(node.number)
    for child in node.children:
        total = add_later(total, call(child))
    return total


def add_later(left: rpc.Future[int], right: rpc.Future[int]) -> rpc.Future[int]:
    result: rpc.Future[int] = rpc.Future()

    def on_left(done_left: rpc.Future[int]) -> None:
        def on_right(done_right: rpc.Future[int]) -> None:
            try:
                result.set_result(done_left.value() + done_right.value())
            except Exception as error:
                result.set_exception(error)

        right.add_done_callback(on_right)

    left.add_done_callback(on_left)
    return result


def run_programs(programs: list[Node]) -> list[int]:
    """As a user's program does: outside of handlers, so that credits count."""
    return [future.wait() for future in [call(program) for program in programs]]


def get_counts() -> dict[str, Any]:
    return rpc.get_debug_info()


# ------------------------------------------------------------------------ programs


def make_node(chance: random.Random, children: tuple[Node, ...]) -> Node:
    return Node(
        worker=chance.randrange(NUM_WORKERS),
        number=chance.randrange(1000),
        style=chance.choice(STYLES),
        answers_later=chance.random() < 0.25,
        padding=b"x" * chance.choice([0, 0, 10, 500, 5000]),
        children=children,
    )


def make_chain(chance: random.Random, depth: int) -> Node:
    node = make_node(chance, ())
    for _ in range(depth):
        twig = (make_node(chance, ()),) if chance.random() < 0.2 else ()
        node = make_node(chance, (node, *twig))
    return node


def make_flood(chance: random.Random, width: int) -> Node:
    return make_node(chance, tuple(make_node(chance, ()) for _ in range(width)))


def make_tree(chance: random.Random, depth: int) -> Node:
    if depth == 0:
        return make_node(chance, ())
    width = chance.randrange(1, 4)
    return make_node(chance, tuple(make_tree(chance, depth - 1) for _ in range(width)))


def make_program(chance: random.Random) -> Node:
    kind = chance.randrange(4)
    if kind == 0:
        return make_chain(chance, chance.randrange(5, 30))
    if kind == 1:
        return make_flood(chance, chance.randrange(10, 120))
    if kind == 2:
        return make_tree(chance, chance.randrange(1, 5))
    # A flood at the end of a chain.
    node = make_flood(chance, chance.randrange(5, 60))
    for _ in range(chance.randrange(1, 15)):
        node = make_node(chance, (node,))
    return node


# ------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def tiny() -> Iterator[Cluster]:
    """Three workers with hardly any credit and few threads to begin with."""
    options = {"max_inflight_bytes": 4096, "num_worker_threads": 1}
    with Cluster(NUM_WORKERS, options) as cluster:
        yield cluster


def find_seeds() -> list[int]:
    """The fixed ones and one that differs, or the one of the environment."""
    given = os.environ.get("GRADWIRE_TEST_SEED")
    return [int(given)] if given else [*FIXED_SEEDS, 0]


@pytest.mark.parametrize("seed", find_seeds())
def test_random_programs_return_the_right_values(tiny, seed):
    seed = seed or random.randrange(1, 1 << 32)
    print(f"GRADWIRE_TEST_SEED={seed} repeats this")
    chance = random.Random(seed)
    programs = [
        [make_program(chance) for _ in range(chance.randrange(1, 8))]
        for _ in range(NUM_WORKERS)
    ]

    handles = [tiny.start(rank, run_programs, own) for rank, own in enumerate(programs)]
    results = [handle.result(LIMIT_S) for handle in handles]

    assert results == [[program.total() for program in own] for own in programs]
    for rank in range(NUM_WORKERS):
        counts = tiny.run(rank, get_counts)
        assert counts["client_active_calls"] == counts["inflight_bytes"] == 0


def test_programs_are_large_enough_to_mean_something():
    chance = random.Random(1)
    sizes = [make_program(chance).count() for _ in range(50)]

    assert max(sizes) > 50
    assert sum(sizes) > 1000
