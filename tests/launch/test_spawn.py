"""Workers as child processes: what comes back, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import ensure_fork_server
from gradwire import launch, rpc
from gradwire.errors import (
    DecodeError,
    LaunchError,
    LaunchTimeout,
    PeerLostError,
    RemoteError,
    UsageError,
)
from gradwire.launch import _spawn

pytestmark = pytest.mark.multiproc

SOON_S = 30.0
METHOD = "fork"  # much faster than a new interpreter that imports torch


def spawn(function: Any, roles: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    arguments = {"timeout": SOON_S, "start_method": METHOD, **kwargs}
    return launch.spawn(function, roles, args, **arguments)


# ------------------------------------------------------------------- run by workers


def who() -> tuple[str, str, int, int]:
    me = launch.this_worker()
    assert rpc.get_worker_info().name == me.name
    return me.name, me.role, me.index, me.rank


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def ask_all(x: torch.Tensor) -> torch.Tensor:
    helpers = [i.name for i in rpc.get_workers() if i.name.startswith("helper")]
    answers = [rpc.rpc_async(name, double, args=(x,)) for name in helpers]
    return torch.stack([answer.wait() for answer in answers]).sum(0)


def fail_on(role: str) -> None:
    if launch.this_worker().role == role:
        raise KeyError("the reason")
    time.sleep(SOON_S)


def wait_for(to: str) -> None:
    rpc.rpc_sync(to, time.sleep, args=(SOON_S,), timeout=0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Unreadable:
    def __reduce__(self) -> Any:
        return open, ("/no/such/file",)


# --------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("function", [who, die])
def test_workers_that_have_ended_before_anybody_looks(monkeypatch, function):
    """What they have reported is in the pipes only."""
    collect = _spawn._Group.collect

    def collect_late(group: Any, timeout: float | None) -> dict[str, Any]:
        for child in group._children:
            child.process.join(SOON_S)
        return collect(group, timeout)

    monkeypatch.setattr(_spawn._Group, "collect", collect_late)
    if function is die:
        with pytest.raises(LaunchError, match="was killed by SIGKILL"):
            spawn(die, {"a": 1})
    else:
        assert spawn(who, {"boss": 1, "helper": 1}) == {
            "boss": ("boss", "boss", 0, 0),
            "helper": ("helper", "helper", 0, 1),
        }


def test_every_worker_returns_its_value_by_name():
    found = spawn(who, {"ps": 1, "trainer": 2})

    assert found == {
        "ps": ("ps", "ps", 0, 0),
        "trainer:0": ("trainer:0", "trainer", 0, 1),
        "trainer:1": ("trainer:1", "trainer", 1, 2),
    }


def test_number_of_workers_is_enough():
    assert list(spawn(who, 2)) == ["worker:0", "worker:1"]


def test_role_without_a_function_serves_the_others():
    found = spawn({"boss": ask_all}, {"boss": 1, "helper": 2}, torch.ones(2))

    assert torch.equal(found["boss"], torch.full((2,), 4.0))
    assert found["helper:0"] is None


def test_exception_comes_back_with_its_type_and_worker():
    start = time.monotonic()

    with pytest.raises(KeyError, match="the reason") as caught:
        spawn(fail_on, {"good": 1, "bad": 1}, "bad")

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "bad"
    assert "fail_on" in caught.value.remote_traceback
    assert time.monotonic() - start < SOON_S / 2


def test_death_is_named_before_the_losses_that_follow_from_it():
    functions = {"first": lambda: wait_for("second"), "second": die}

    with pytest.raises(LaunchError, match=r"'second' .* was killed by SIGKILL"):
        spawn(functions, {"first": 1, "second": 1})


def test_loss_alone_is_reported_as_it_is():
    with pytest.raises(PeerLostError, match="gone"):
        spawn(raise_loss, 1)


def raise_loss() -> None:
    raise PeerLostError("worker 'gone' is gone", worker="gone")


def test_limit_ends_the_workers_and_names_them():
    with pytest.raises(LaunchTimeout, match=r"'worker:0', 'worker:1' .* within 0\.5 s"):
        spawn(lambda: time.sleep(SOON_S), 2, timeout=0.5)


def test_value_that_cannot_be_sent_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        spawn(lambda: lambda: 1, 1)


def test_value_that_cannot_be_read_is_an_error_that_names_the_worker():
    with pytest.raises(DecodeError, match=r"what worker 'worker' .*FileNotFound"):
        spawn(Unreadable, 1)


def test_options_reach_the_workers():
    found = spawn(rpc.get_rpc_timeout, 1, options=rpc.RpcBackendOptions(rpc_timeout=7))

    assert found == {"worker": 7}


def test_function_may_shut_down_itself():
    assert spawn(rpc.shutdown, 2) == {"worker:0": None, "worker:1": None}


def test_function_of_a_launched_worker_may_shut_down_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADWIRE_ROLES", "worker=1")
    monkeypatch.setenv("GRADWIRE_NAME", "worker")
    monkeypatch.setenv("RANK", "0")
    place = f"file://{tmp_path}/store?rank=0&world_size=1"
    options = rpc.RpcBackendOptions(init_method=place)

    assert launch.main(rpc.shutdown, 1, options=options) == {"worker": None}


@pytest.mark.parametrize(
    ("function", "roles", "text"),
    [
        (who, {}, "roles must be a dict"),
        (who, {"a": 0}, "at least 1 worker"),
        (who, {"a1": 1}, "must not end with a digit"),
        ({"b": who}, {"a": 1}, "function for role 'b', but the roles are 'a'"),
        ({"a": 3}, {"a": 1}, "must be given a function, found int"),
    ],
)
def test_wrong_roles_are_refused(function, roles, text):
    with pytest.raises(UsageError, match=text):
        spawn(function, roles)


async def wait_for_nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"function": wait_for_nothing}, "'worker' is an async def.*asyncio.run"),
        ({"args": 0}, "args must be a tuple of arguments, found int"),
        ({"args": "ab"}, "args must be a tuple of arguments, found str"),
        ({"options": {}}, "options must be RpcBackendOptions, found dict"),
        ({"timeout": "3"}, "timeout must be a number of seconds or None, found '3'"),
        ({"timeout": float("nan")}, "timeout must be .*, found nan"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_nothing_behind(
    settings, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError, match=text):
        launch.spawn(**{"function": os.getpid, "roles": 1, **settings})

    assert not list(tmp_path.iterdir())


def test_this_worker_needs_a_launcher(monkeypatch):
    monkeypatch.delenv("GRADWIRE_ROLES", raising=False)
    with pytest.raises(UsageError, match="gradwire run"):
        launch.this_worker()


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time
            from pathlib import Path
            from gradwire import launch

            def work():
                Path(f"{os.getpid()}.pid").touch()
                time.sleep(60)

            if __name__ == "__main__":
                launch.spawn(work, 2, start_method="fork")
            """
        )
    )
    parent = subprocess.Popen([sys.executable, script], cwd=tmp_path)
    try:
        _wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]

    _wait_until(lambda: not any(_is_running(pid) for pid in pids))


def test_functions_of_a_script_work_in_new_interpreters(tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from gradwire import launch, rpc

            def add_one(x):
                return x + 1

            def main():
                x = torch.ones(2, requires_grad=True)
                rpc.rpc_sync("server", add_one, args=(x,)).sum().backward()
                return x.grad

            if __name__ == "__main__":
                print(launch.spawn({"main": main}, {"main": 1, "server": 1})["main"])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "tensor([1., 1.])\n"


def at_a_prompt(program: str, **environment: str) -> str:
    """Runs a program that has no file, as the cells of a notebook have none."""
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(program),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


def test_functions_of_a_prompt_work():
    output = at_a_prompt(
        """
        from gradwire import launch, rpc
        def answer():
            return 42
        def ask():
            return rpc.rpc_sync("other", answer)
        print(launch.spawn({"one": ask}, {"one": 1, "other": 1}))
        """
    )

    assert output == "{'one': 42, 'other': None}\n"


def test_worker_of_a_prompt_computes_after_the_prompt_has_used_its_threads():
    output = at_a_prompt(
        """
        import torch
        from gradwire import launch
        def compute():
            x = torch.ones(600, 600, requires_grad=True)
            (x @ x).sum().backward()
            return x.grad[0, 0].item()
        torch.set_num_threads(2)
        print(compute(), launch.spawn(compute, 1, timeout=30))
        """,
        OMP_NUM_THREADS="2",
    )

    assert output == "1200.0 {'worker': 1200.0}\n"


def test_function_of_a_prompt_is_refused_where_workers_would_import_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    function = lambda: 1  # noqa: E731
    function.__module__, function.__qualname__ = "__main__", "train"

    with pytest.raises(UsageError, match=r"'train' exists in this notebook .* only"):
        spawn(function, 1, start_method="spawn")


def test_function_that_cannot_be_sent_is_refused():
    ensure_fork_server()  # with a helper of multiprocessing's own, which stays
    with pytest.raises(UsageError, match=r"'worker' .*lambda.* at module level"):
        spawn(lambda: 1, 1, start_method="spawn")


def test_worker_cannot_be_forked(tmp_path: Path):
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alice", 0, 1, options)
    try:
        with pytest.raises(UsageError, match=r"worker 'alice' itself.*rpc\.shutdown"):
            spawn(who, 1)
        assert rpc.rpc_sync("alice", max, (1, 2)) == 2
    finally:
        rpc.shutdown()


def test_program_that_would_start_itself_again_is_refused(tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text("from gradwire import launch\nprint(launch.spawn(print, 1))\n")

    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert done.stdout == ""
    assert 'put what starts them below  if __name__ == "__main__":' in done.stderr
    assert "LaunchError: worker 'worker' " in done.stderr


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
