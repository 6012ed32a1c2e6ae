"""The command ``gradwire run``, with real processes under torch's launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire._cli import main
from gradwire.errors import UsageError
from gradwire.launch._roles import parse_roles, worker_of
from probes import wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

PROGRAMS = Path(__file__).with_name("programs.py")
ROLES = ("--role", "ps=1", "--role", "trainer=2")
SOON_S = 100.0


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )


def test_workers_have_names_and_one_secret_and_prefixed_output(tmp_path):
    done = run("--log-dir", tmp_path, *ROLES, PROGRAMS, "train")

    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "gradient" in line) == [
        "[trainer:0] gradient tensor([2., 2.])",
        "[trainer:1] gradient tensor([2., 2.])",
    ]
    assert len(set(re.findall(r"secret of \d+", done.stdout))) == 1
    assert done.stderr.count("on stderr") == 3
    assert "[ps]        on stderr" in done.stderr
    assert list(tmp_path.rglob("stdout.log"))


def test_traceback_of_the_first_failure_comes_first_and_once(tmp_path):
    done = run(*ROLES, PROGRAMS, "fail", tmp_path)
    ended = time.time()

    assert done.returncode == 1
    assert ended - (tmp_path / "failed").stat().st_mtime < 5
    text = done.stderr
    assert "gradwire: worker 'trainer:1' failed first" in text
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("ValueError: bad luck") == 1
    assert "runpy" not in text
    assert text.index("ValueError: bad luck") < text.index(
        "worker 'trainer:0' failed then"
    )


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        (
            "class Mute(Exception):\n"
            "    def __str__(self): raise ValueError('no words')\n"
            "raise Mute",
            "Mute: <exception str() failed>",
        ),
    ],
)
def test_failure_of_a_program_is_shown_without_frames_of_ours(tmp_path, program, text):
    script = tmp_path / "script.py"
    script.write_text(program)
    done = run("--role", "a=1", script)

    assert done.returncode == 1
    assert "gradwire: worker 'a' failed first" in done.stderr
    assert text in done.stderr
    assert "_worker.py" not in done.stderr
    assert "_program.py" not in done.stderr


def test_one_program_runs_by_itself_and_under_the_launcher():
    launched = run(*ROLES, PROGRAMS, "both")
    alone = subprocess.run(
        [sys.executable, PROGRAMS, "both"],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )

    assert "[trainer:0] returned {'trainer:0': 'done'}" in launched.stdout
    assert "[ps]        returned {'ps': None}" in launched.stdout
    assert alone.stdout.splitlines()[-1] == (
        "returned {'ps': None, 'trainer:0': 'done', 'trainer:1': 'done'}"
    )
    wrong = run("--role", "other=1", PROGRAMS, "both")
    assert "was started as 'other'" in wrong.stderr


def test_killed_worker_is_named():
    done = run(*ROLES, PROGRAMS, "die")

    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(
        r"worker 'trainer:1' failed first \(process \d+\):\n\nit was killed by SIGKILL",
        done.stderr,
    )


def test_program_may_be_a_folder(tmp_path):
    (tmp_path / "__main__.py").write_text("import sys; print(*sys.argv[1:])")

    done = run("--role", "w=1", tmp_path, "an argument")

    assert done.stdout == "[w] an argument\n", done.stderr


def test_signal_without_a_name_is_reported():
    done = run("--role", "w=1", PROGRAMS, "be_killed_without_a_name")

    assert done.returncode == 128 + signal.SIGRTMIN + 6
    assert f"it was killed by signal {signal.SIGRTMIN + 6}" in done.stderr


def test_reader_that_goes_away_does_not_end_the_job(tmp_path):
    mark, folder = tmp_path / "go_on", tmp_path / "temporary"
    folder.mkdir()
    command = ["--role", "w=1", PROGRAMS, "print_before_and_after", mark]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire", "run", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[w] before\n"
    process.stdout.close()
    mark.touch()
    _, text = process.communicate(timeout=SOON_S)

    assert process.returncode == 0
    assert text == "[w] on stderr\n"
    assert list(folder.iterdir()) == []


def test_restarted_workers_find_each_other_again(tmp_path):
    done = run("--max-restarts", "1", *ROLES, PROGRAMS, "fail_once", tmp_path)

    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("[ps]        all there: ['ps', 'trainer:0', 'trainer:1']")
        == 1
    )
    assert "ValueError: only once" in done.stderr
    assert "all workers are started again (1 of 1)" in done.stderr


def start_waiting(folder: Path) -> subprocess.Popen[str]:
    """A job whose workers all wait; their process ids are names of files."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire", "run", *ROLES, PROGRAMS, "wait", folder],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + SOON_S
    while len(list(folder.iterdir())) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    return process


def test_ctrl_c_ends_everything(tmp_path):
    process = start_waiting(tmp_path)

    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=SOON_S)

    assert process.returncode == 128 + signal.SIGINT
    assert "ended by SIGINT; all workers are ended" in text
    assert "Traceback" not in text
    assert time.monotonic() - start < 10
    for path in tmp_path.iterdir():
        assert not Path(f"/proc/{path.name.split('-')[1]}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_hosts_are_awaited_ends_at_once_and_leaves_nothing(
    number, tmp_path
):
    # Nobody answers there, and torch asks for a minute.
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{place.getsockname()[1]}"
        command = ["--role", "w=2", "--nnodes", "2", "--node-rank", "1"]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gradwire", "run", *command),
                *("--rdzv-endpoint", endpoint, PROGRAMS, "train"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRADWIRE_SECRET": "s" * 32, "TMPDIR": str(tmp_path)},
        )
        assert process.stderr is not None
        assert "waits for all 2 hosts" in process.stderr.readline()
        process.send_signal(number)
        _, text = process.communicate(timeout=30)

    assert process.returncode == -number
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_signal_that_is_ignored_does_not_end_the_job(tmp_path):
    mark = tmp_path / "go_on"
    command = ["--role", "w=1", PROGRAMS, "print_before_and_after", mark]
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "gradwire", "run", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[w] before\n"
    process.send_signal(signal.SIGHUP)
    mark.touch()
    rest, text = process.communicate(timeout=SOON_S)

    assert process.returncode == 0, text
    assert rest == "[w] after\n"


def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    process = start_waiting(tmp_path)

    process.kill()
    process.communicate(timeout=SOON_S)

    pids = [int(path.name.split("-")[1]) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(_is_running(pid) for pid in pids), "no worker is left")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_hosts_that_start_too_few_workers_together_are_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["--role", "w=3", "--nnodes", "2", "--nproc-per-node", "1"]
    jobs = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "gradwire", "run", *command),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", PROGRAMS, "train"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRADWIRE_SECRET": "s" * 32},
        )
        for _ in range(2)
    ]
    try:
        texts = [job.communicate(timeout=SOON_S)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()

    assert [job.returncode for job in jobs] == [1, 1]
    assert any("w=3 have 3 workers on all hosts together, but 2" in t for t in texts)
    place = f"gradwire: waits for all 2 hosts at 127.0.0.1:{port}"
    assert [text.splitlines()[0] for text in texts] == [place, place]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--role", "ps", "x.py"], "NAME=COUNT"),
        (["--role", "ps=1", "--role", "ps=2", "x.py"], "given twice"),
        (["--role", "ps=1", "no_such_file.py"], "no script 'no_such_file.py'"),
        (
            ["--role", "a=4", "--nnodes", "2", "--rdzv-endpoint", "h:1", str(PROGRAMS)],
            "need certificates",
        ),
        (
            ["--role", "a=2", "--nproc-per-node", "1", str(PROGRAMS)],
            "a=2 have 2 workers on all hosts together, but 1 are started",
        ),
        (["--role", f"{'a' * 126}=2", str(PROGRAMS)], "shorter than 128 characters"),
        (["--nnodes", "0", str(PROGRAMS)], "--nnodes must be at least 1, found 0"),
        (
            ["--role", "a=4", "--nnodes", "2", str(PROGRAMS)],
            "2 hosts need a place to meet: pass --rdzv-endpoint HOST:PORT",
        ),
        (["--nproc-per-node", "0", str(PROGRAMS)], "--nproc-per-node must be at least"),
        (["--max-restarts", "-1", str(PROGRAMS)], "at least 0, found -1"),
    ],
)
def test_wrong_commands_are_refused(arguments, text, capsys, monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    assert main(["run", *arguments]) == 1
    assert text in capsys.readouterr().err


def test_names_follow_from_roles_and_rank():
    roles = parse_roles(["ps=1", "trainer=2"])

    found = [worker_of(roles, rank).name for rank in range(3)]

    assert found == ["ps", "trainer:0", "trainer:1"]
    with pytest.raises(UsageError, match="no rank 3"):
        worker_of(roles, 3)
