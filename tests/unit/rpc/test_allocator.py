"""Whether memory is kept between steps."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap

import pytest

# Steps of sixteen blocks of 3 MiB; prints how many pages the system had to hand out for
# each of the last ten steps.
PROGRAM = textwrap.dedent(
    """
    import resource
    import torch
    from gradwire.rpc._allocator import expect_large_blocks

    expect_large_blocks()

    def step():
        return [torch.ones(3 << 18) for _ in range(16)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
    """
)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
def test_memory_of_a_step_is_kept_for_the_next_one():
    environment = {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    # Where the memory of a process lies is random: in about half of them the pages, 12,000
    # a step, would stay by chance.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        faults = [float(p.communicate(timeout=60)[0]) for p in processes]
    finally:
        for process in processes:
            process.kill()

    assert max(faults) < 50, faults
