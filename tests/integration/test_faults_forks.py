"""Children that a worker makes by ``fork``."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import functions
from api_functions import call
from gradwire import rpc
from gradwire.errors import PeerLostError
from gradwire.rpc import _api

pytestmark = [pytest.mark.multiproc, pytest.mark.chaos]

NOTICED_S = 1.0  # as in `test_faults`


def die_before_a_child(pid_file: str) -> None:
    """Ends this process, while one that it has forked lives on."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        signal.pause()
    Path(pid_file).write_text(str(pid))
    functions.kill_process()


@pytest.mark.parametrize("options", [{}, {"transports": ("tcp",), "secret": "s" * 32}])
def test_loss_is_noticed_at_once_though_a_child_lives_on(
    make_cluster, tmp_path: Path, options
):
    cluster = make_cluster(2, {"lost_after": 120.0, **options})
    pid_file = tmp_path / "pid"
    assert cluster.run(0, call, "w1", functions.add, 1, 2) == 3

    start = time.monotonic()
    try:
        with pytest.raises(
            PeerLostError, match=r"'w1'.*it closed the connection.*see its output"
        ):
            cluster.run(0, call, "w1", die_before_a_child, str(pid_file))
        assert time.monotonic() - start < 10 * NOTICED_S
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert cluster.wait_dead(1) == -signal.SIGKILL


def ask_a_child(store: str) -> list[Any]:
    """What a process finds that this one has forked."""
    rref: rpc.RRef[int] = rpc.remote("w1", functions.add, (1, 2))
    assert rref.to_here() == 3
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(look_round_in_a_child(rref, store)))
        except BaseException as error:
            os.write(writer, pickle.dumps([repr(error)]))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found: list[Any] = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    assert rref.to_here() == 3
    return found


def look_round_in_a_child(rref: rpc.RRef[int], store: str) -> list[Any]:
    signal.alarm(60)
    found: list[Any] = [rpc.is_initialized()]
    uses: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("w1", functions.add, (1, 2)),
        rref.to_here,
        lambda: rref.rpc_sync().bit_length(),
        rpc.shutdown,
    ]
    for use in uses:
        try:
            found.append(use())
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    # The numbers that are free now are not those of the parent's things any more.
    own = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    agent = _api._parents[0].agent
    for link in agent.network._links:
        link.connection.close()
    agent.pool._close_pollers()
    agent.close()
    found.append({os.readlink(f"/proc/self/fd/{number}") for number in own})
    join_alone(store)
    found.append(rpc.rpc_sync("child", functions.add, (1, 2)))
    rpc.shutdown()
    return found


def join_alone(store: str) -> None:
    options = rpc.RpcBackendOptions(init_method=store, init_timeout=10.0)
    rpc.init_rpc("child", 0, 1, options)


@pytest.mark.parametrize("asked", [0, 1])
def test_child_of_a_worker_is_none_but_may_become_one(
    make_cluster, tmp_path: Path, asked
):
    cluster = make_cluster(2)
    store = f"file://{tmp_path}/store"

    if asked == 0:
        found = cluster.run(0, ask_a_child, store)
    else:
        found = cluster.run(1, call, "w0", ask_a_child, store)

    is_worker, call_text, rref_text, method_text, end_text, numbers, total = found
    assert not is_worker
    assert call_text.startswith("NotInitialized: ")
    assert "forked from worker 'w0'" in call_text
    for text in (rref_text, method_text):
        assert text.startswith(
            "NotInitialized: this process was forked from worker 'w0'"
        )
    assert end_text.startswith("NotInitialized: ")
    assert numbers == {"/dev/null"}
    assert total == 3
