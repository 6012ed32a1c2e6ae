"""Programs that the tests start with ``gradwire run``; the first argument says which."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from gradwire import launch, rpc

PATIENCE_S = 60.0


def scale(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def train() -> None:
    me = launch.this_worker()
    rpc.init_rpc()
    assert rpc.get_worker_info().name == me.name
    if me.role == "trainer":
        x = torch.ones(2, requires_grad=True)
        rpc.rpc_sync("ps", scale, args=(x,)).sum().backward()
        print(f"gradient {x.grad}")
    print(f"secret of {len(os.environ['GRADWIRE_SECRET'])} characters")
    print("on stderr", file=sys.stderr)
    rpc.shutdown()


def fail() -> None:
    me = launch.this_worker()
    rpc.init_rpc()
    if me.name == "trainer:1":
        (Path(sys.argv[2]) / "failed").touch()
        raise ValueError("bad luck")
    rpc.rpc_sync("trainer:1", time.sleep, args=(PATIENCE_S,), timeout=0)


def die() -> None:
    me = launch.this_worker()
    rpc.init_rpc()
    if me.name == "trainer:1":
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.rpc_sync("trainer:1", time.sleep, args=(PATIENCE_S,), timeout=0)


def fail_once() -> None:
    me = launch.this_worker()
    rpc.init_rpc()
    mark = Path(sys.argv[2]) / "failed"
    if me.role == "ps" and not mark.exists():
        mark.touch()
        raise ValueError("only once")
    names = [info.name for info in rpc.get_workers()]
    print(f"all there: {names}")
    rpc.shutdown()


def wait() -> None:
    me = launch.this_worker()
    rpc.init_rpc()
    (Path(sys.argv[2]) / f"{me.rank}-{os.getpid()}").touch()
    time.sleep(PATIENCE_S)


def be_killed_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def print_before_and_after() -> None:
    print("before")
    mark = Path(sys.argv[2])
    deadline = time.monotonic() + PATIENCE_S
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    print("after")
    print("on stderr", file=sys.stderr)


def report() -> str:
    print(f"I am {rpc.get_worker_info().name}")
    return "done"


def both() -> None:
    found = launch.main({"trainer": report}, {"ps": 1, "trainer": 2})
    print(f"returned {found}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
