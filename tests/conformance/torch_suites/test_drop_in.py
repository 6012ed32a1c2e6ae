"""Programs for torch.distributed.rpc, run unchanged on gradwire."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
from conformance.torch_suites import drop_in_checks

HERE = Path(__file__).parent
PROGRAM = HERE / "drop_in_program.py"
# Importing torch on a machine that has other things to do.
LIMIT_S = 60
CHECK_S = 20


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
    cluster.ensure_fork_server()
    process = cluster._context.Process(target=check)
    process.start()
    try:
        process.join(CHECK_S)
        assert process.exitcode == 0, "the traceback is in the captured output"
    finally:
        process.kill()
        process.join()
        process.close()
