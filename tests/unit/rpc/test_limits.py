"""What one peer may make a worker hold: the accounting."""

from __future__ import annotations

import pickle

import pytest

from gradwire._config import RpcBackendOptions
from gradwire.errors import LimitExceeded
from gradwire.rpc._limits import Held, PeerLimits
from gradwire.rpc._rref_table import RefId, RefTable

LIMITS = PeerLimits(
    RpcBackendOptions(
        max_peer_bytes=100, max_peer_calls=3, max_peer_contexts=2, max_peer_rrefs=2
    ),
    "w1",
)


def held(calls: int, nbytes: int) -> Held:
    made = Held()
    made.calls, made.nbytes = calls, nbytes
    return made


def test_up_to_the_limit_nothing_is_exceeded():
    assert LIMITS.over_requests(held(3, 100), 0, "w0") is None
    assert LIMITS.over_requests(held(1, 100), 2, "w0") is None


@pytest.mark.parametrize(
    ("calls", "nbytes", "queued", "limit", "value"),
    [
        (4, 0, 0, "max_peer_calls", 3),
        (1, 0, 3, "max_peer_calls", 3),
        (1, 101, 0, "max_peer_bytes", 100),
        (9, 101, 0, "max_peer_bytes", 100),
    ],
)
def test_over_a_limit_the_error_has_all_facts(calls, nbytes, queued, limit, value):
    error = LIMITS.over_requests(held(calls, nbytes), queued, "w0")

    assert error is not None
    assert (error.limit, error.value) == (limit, value)
    assert (error.peer, error.worker) == ("w0", "w1")
    for fact in ("'w0'", "'w1'", limit, str(value)):
        assert fact in str(error)


def test_errors_of_the_other_limits():
    assert LIMITS.over_contexts("w0").limit == "max_peer_contexts"
    assert LIMITS.over_rrefs("w0").limit == "max_peer_rrefs"


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(LIMITS.over_rrefs("w0")))

    assert type(error) is LimitExceeded
    assert (error.limit, error.value, error.peer) == ("max_peer_rrefs", 2, "w0")


@pytest.mark.parametrize(
    "name", ["max_peer_bytes", "max_peer_calls", "max_peer_contexts", "max_peer_rrefs"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_limits_must_be_positive_ints(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        RpcBackendOptions(**{name: value})


def test_table_of_references_counts_by_holder():
    table = RefTable(0)
    values = [RefId(0, 1, number) for number in range(3)]
    forks = [RefId(0, 1, number) for number in range(10, 15)]

    table.add_fork(values[0], forks[0], 1)
    table.add_fork(values[0], forks[0], 1)  # told twice
    table.add_fork(values[0], forks[1], 2)
    table.add_fork(values[1], forks[2], 1)
    assert table.held == {1: 2, 2: 1}

    table.remove_fork(values[0], forks[0])
    table.remove_fork(values[0], forks[0])
    assert table.held == {1: 1, 2: 1}
    table.lose(1)
    assert table.held == {2: 1}
    table.remove_fork(values[0], forks[1])
    assert table.held == {}
