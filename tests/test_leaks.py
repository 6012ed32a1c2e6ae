"""The leak check finds what it is there to find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

import leaks


def find_now(before):
    return leaks.find_leaks(before, leaks.take_snapshot, grace_s=0)


@pytest.mark.parametrize(
    ("name", "daemon", "reported"),
    [
        ("gradwire-io", True, ["daemon thread 'gradwire-io'"]),
        ("anything", False, ["thread 'anything'"]),
        ("anything", True, []),
    ],
)
def test_find_leaks_reports_threads(name, daemon, reported):
    before = leaks.take_snapshot()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name, daemon=daemon)
    thread.start()

    found = find_now(before)

    done.set()
    thread.join()
    assert found == reported


def test_find_leaks_reports_sockets():
    before = leaks.take_snapshot()
    left, right = socket.socketpair()

    with left, right:
        found = find_now(before)

    assert [line.split(":")[1] for line in found] == [" socket", " socket"]
    assert find_now(before) == []


def test_find_leaks_counts_descriptors_without_identity():
    first = os.eventfd(0) if hasattr(os, "eventfd") else os.memfd_create("same")
    before = leaks.take_snapshot()
    second = os.dup(first)

    found = find_now(before)

    os.close(first)
    os.close(second)
    assert len(found) == 1
    assert found[0].startswith(f"file descriptor {second}:")


def test_find_leaks_reports_children():
    before = leaks.take_snapshot()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        found = find_now(before)
        child.communicate(b"\n")

    assert any(line.startswith(f"child process {child.pid}:") for line in found)
    assert find_now(before) == []


def test_find_leaks_waits_for_threads_that_are_ending():
    before = leaks.take_snapshot()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="gradwire-ending")
    thread.start()
    num_looks = 0

    def look():
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            done.set()
            thread.join()
        return leaks.take_snapshot()

    assert leaks.find_leaks(before, look) == []
    assert num_looks == 3
