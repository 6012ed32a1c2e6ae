"""What the doctor finds, and that it says what to do."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from certificates import Office
from gradwire import rpc
from gradwire.launch._checks import Finding, check_host

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (
        "GRADWIRE_SECRET",
        "GRADWIRE_SECRET_FILE",
        "GRADWIRE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
    ):
        monkeypatch.delenv(name, raising=False)


def find(what: str, **options) -> Finding:
    found = check_host(rpc.RpcBackendOptions(**options))
    return next(finding for finding in found if finding.what == what)


def test_a_sound_host_has_nothing_bad():
    found = check_host(rpc.RpcBackendOptions())

    assert [finding for finding in found if finding.level == "bad"] == []
    assert {"python", "torch", "transport unix", "port", "secret"} <= {
        finding.what for finding in found
    }


def test_every_remark_has_a_remedy():
    found = check_host(rpc.RpcBackendOptions(secret="short"))

    assert all(f.remedy for f in found if f.level != "ok")


def test_short_secret_is_bad_and_not_shown():
    finding = find("secret", secret="sesame")

    assert finding.level == "bad"
    assert "6 bytes" in finding.found
    assert "sesame" not in str(finding)


def test_secret_file_that_others_can_read_is_bad(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text("s" * 64)
    path.chmod(0o644)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(path))

    assert find("secret").level == "ok"
    assert find("secret file").remedy == f"chmod 600 {path}"


def test_port_in_use_is_bad():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = find("port", port=port, bind_address="127.0.0.1")

    assert finding.level == "bad"
    assert str(port) in finding.found


def test_unknown_interface_is_bad():
    assert "no network interface 'nope0'" in find("address", interface="nope0").found


def test_few_descriptors_are_bad():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        assert "ulimit" in find("descriptors").remedy
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_meeting_place_that_does_not_answer_is_bad_for_others_than_rank_0(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        assert find("meeting place").level == "ok"
    assert find("meeting place").level == "note"
    monkeypatch.setenv("RANK", "1")
    assert find("meeting place").level == "bad"


@pytest.mark.parametrize("port", ["abc", "-1", "65536"])
def test_meeting_place_without_a_port_number_is_bad(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)

    finding = find("meeting place")

    assert finding.level == "bad"
    assert f"MASTER_PORT is '{port}'" in finding.found


def test_without_a_secret_the_way_between_hosts_is_told_in_full():
    remedy = find("secret").remedy

    assert "certificates" in remedy
    assert "GRADWIRE_ALLOW_PLAIN_TCP=1 and the same GRADWIRE_SECRET" in remedy


def doctor(*arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in environment.items()},
        },
    )


def test_command_measures_the_way_to_a_worker():
    done = doctor("doctor")

    assert done.returncode == 0, done.stderr
    assert "ok   to patient by unix: " in done.stdout
    assert " us a call" in done.stdout


def test_command_measures_all_workers_of_a_group():
    done = doctor("run", "--role", "worker=2", "-m", "gradwire", "doctor")

    assert done.returncode == 0, done.stderr
    assert "ok   to worker:1 by " in done.stdout
    assert "ok   to worker:0 by " in done.stdout


def certificates_of(worker: str, folder: Path) -> dict[str, object]:
    tls = Office(folder).options(worker)
    return {
        "GRADWIRE_TLS_CA": tls.ca,
        "GRADWIRE_TLS_CERT": tls.certificate,
        "GRADWIRE_TLS_KEY": tls.key,
    }


def test_certificates_of_the_job_are_not_for_the_own_workers_of_the_command(tmp_path):
    done = doctor("doctor", **certificates_of("trainer:0", tmp_path))

    assert done.returncode == 0, done.stderr
    assert "ok   tls: " in done.stdout
    assert "ok   to patient by unix: " in done.stdout


def test_member_that_cannot_join_says_so_without_a_traceback(tmp_path):
    done = doctor(
        *("run", "--role", "worker=1", "-m", "gradwire", "doctor"),
        **certificates_of("trainer:0", tmp_path),
    )

    assert done.returncode == 1
    assert "BAD  group: " in done.stdout
    assert "trainer:0" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
