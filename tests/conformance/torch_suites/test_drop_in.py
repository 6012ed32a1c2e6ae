"""Programs for torch.distributed.rpc, run unchanged on gradwire."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster
from conformance.torch_suites import drop_in_checks, drop_in_groups

HERE = Path(__file__).parent
PROGRAM = HERE / "drop_in_program.py"
# Importing torch on a machine that has other things to do.
LIMIT_S = 60
CHECK_S = 20
GROUP_S = 40


def run(*arguments: str, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_program_prints_the_same_as_with_torch(tmp_path):
    with_torch = run(str(PROGRAM), str(tmp_path / "torch"))
    assert with_torch.returncode == 0, with_torch.stderr
    ours = run("-m", "gradwire.torch_compat", str(PROGRAM), str(tmp_path / "ours"))
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == with_torch.stdout
    assert "served by torch" in with_torch.stderr
    assert "served by gradwire" in ours.stderr


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_module_is_run_like_a_script(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys, torch.distributed.rpc as rpc\n"
        "print(__name__, rpc.__name__, *sys.argv[1:])\n"
    )
    done = run("-m", "gradwire.torch_compat", "-m", "program", "--flag", cwd=tmp_path)
    assert done.stdout.split() == ["__main__", "gradwire.torch_compat.rpc", "--flag"], (
        done.stderr
    )


@pytest.mark.parametrize(
    "check",
    [
        drop_in_checks.names,
        drop_in_checks.options_are_mapped,
        drop_in_checks.device_maps,
        drop_in_checks.errors,
    ],
    ids=lambda check: check.__name__,
)
def test_in_a_process_of_its_own(check):
    run_all(CHECK_S, check)


def run_all(limit_s: float, *targets: Callable[[], None]) -> None:
    """Runs each in a process of its own; all must end well, and in time."""
    cluster.ensure_fork_server()
    processes = [cluster._context.Process(target=target) for target in targets]
    for process in processes:
        process.start()
    try:
        end = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * len(processes), "tracebacks are in the captured output"
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def play(part: Callable[[int], None], size: int, folder: Path) -> None:
    """Has all workers of a group play a part."""
    file = str(folder / "store")
    ranks = [
        functools.partial(drop_in_groups.play, part, rank, size, file)
        for rank in range(size)
    ]
    run_all(GROUP_S, *ranks)


@pytest.mark.multiproc
def test_errors_that_come_from_other_workers_are_runtime_errors(tmp_path):
    play(drop_in_groups.errors_of_calls, 2, tmp_path)


@pytest.mark.multiproc
def test_error_arrives_though_the_worker_cannot_show_it(tmp_path):
    play(drop_in_groups.errors_that_cannot_be_shown, 2, tmp_path)


@pytest.mark.multiproc
def test_futures_of_a_generator_are_awaited(tmp_path):
    play(drop_in_groups.futures_of_a_generator, 2, tmp_path)


@pytest.mark.multiproc
def test_operator_that_is_called_wrongly_raises_a_runtime_error(tmp_path):
    play(drop_in_groups.errors_of_operators, 2, tmp_path)


@pytest.mark.multiproc
def test_reference_whose_value_could_not_be_made_says_why(tmp_path):
    play(drop_in_groups.errors_of_creations, 2, tmp_path)


@pytest.mark.multiproc
def test_device_that_there_is_not_is_a_runtime_error(tmp_path):
    play(drop_in_groups.devices, 2, tmp_path)


@pytest.mark.multiproc
def test_type_is_asked_for_again_after_a_failure(tmp_path):
    play(drop_in_groups.types_of_values, 2, tmp_path)


@pytest.mark.multiproc
def test_type_of_a_value_that_is_not_made_yet_keeps_no_other_waiting(tmp_path):
    play(drop_in_groups.types_of_several_values, 1, tmp_path)


@pytest.mark.multiproc
def test_value_that_comes_later_is_itself_in_a_profile(tmp_path):
    play(drop_in_groups.values_in_a_profile, 2, tmp_path)


@pytest.mark.multiproc
def test_profile_with_calls_can_be_summed_up(tmp_path):
    play(drop_in_groups.tables_of_a_profile, 2, tmp_path)


@pytest.mark.multiproc
def test_names_that_come_with_a_star_work(tmp_path):
    play(drop_in_groups.names, 2, tmp_path)


@pytest.mark.multiproc
def test_what_a_lost_worker_owned_is_lost(tmp_path):
    play(drop_in_groups.values_of_a_lost_worker, 2, tmp_path)


@pytest.mark.multiproc
@pytest.mark.parametrize("victim", [0, 2], ids=["leader", "follower"])
def test_nobody_waits_at_the_end_for_a_worker_that_is_lost(victim, tmp_path):
    play(functools.partial(drop_in_groups.losing, victim), 3, tmp_path)
