"""Whether memory is kept between steps."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap

import pytest

# Steps of eight blocks of 1 MiB; prints how many pages the system had to hand out for
# each of the last ten steps.
PROGRAM = textwrap.dedent(
    """
    import resource, sys
    import torch
    from gradwire.rpc._allocator import expect_large_blocks

    if "taught" in sys.argv:
        expect_large_blocks()

    def step():
        return [torch.ones(1 << 18) for _ in range(8)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
    """
)


def faults_per_step(*arguments: str) -> float:
    environment = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
def test_memory_of_a_step_is_kept_for_the_next_one():
    assert faults_per_step() > 1000
    assert faults_per_step("taught") < 50
