"""Which of two transactions has to give way, so that they never wait for each other."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from gradwire.optim._locks import GroupLock, find_locks, hold, try_hold

OLD, YOUNG = 1, 2
LIMIT_S = 10.0


def make_parameters(num: int = 2) -> list[Tensor]:
    return [torch.ones(1) for _ in range(num)]


def is_free(lock: GroupLock) -> bool:
    if lock.lock.acquire(blocking=False):
        lock.lock.release()
        return True
    return False


def test_younger_one_gives_way_at_once():
    locks = find_locks([make_parameters()])
    held = try_hold(locks, OLD)

    assert held is not None
    assert try_hold(locks, YOUNG) is None
    held.release()
    assert try_hold(locks, YOUNG) is not None


def test_older_one_waits():
    locks = find_locks([make_parameters()])
    held = try_hold(locks, YOUNG)
    assert held is not None
    found = []
    thread = threading.Thread(
        target=lambda: found.append(try_hold(locks, OLD, LIMIT_S))
    )
    thread.start()

    held.release()
    thread.join(LIMIT_S)

    assert found != [None]
    assert locks[0].holder == OLD


def test_one_that_gives_way_has_nothing_left():
    one, other = make_parameters()
    first, second = find_locks([[one], [other]])
    held = try_hold([second], OLD)

    assert held is not None
    assert try_hold([first, second], YOUNG) is None
    assert is_free(first)
    assert not is_free(second)


def test_patience_with_a_step_in_one_phase_ends():
    locks = find_locks([make_parameters()])

    with hold(locks):
        assert try_hold(locks, OLD, 0.01) is None

    assert try_hold(locks, OLD) is not None


def test_parts_of_one_transaction_share_a_lock():
    locks = find_locks([make_parameters()])
    one, other = try_hold(locks, OLD), try_hold(locks, OLD)
    assert one is not None
    assert other is not None

    one.release()
    assert not is_free(locks[0])
    other.release()
    assert is_free(locks[0])


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_locks_are_free_when_nobody_holds_them_any_more(in_a_cycle):
    locks = find_locks([make_parameters()])
    held = try_hold(locks, OLD)
    kept = [held]
    if in_a_cycle:
        kept.append(kept)  # type: ignore[arg-type]

    del held, kept
    gc.collect()

    assert is_free(locks[0])


@pytest.mark.parametrize("num_groups", [1, 2])
def test_holding_can_be_entered_again(num_groups):
    locks = find_locks([make_parameters() for _ in range(num_groups)])
    holding = hold(locks)

    for _ in range(2):
        with holding:
            assert not any(map(is_free, locks))
        assert all(map(is_free, locks))
