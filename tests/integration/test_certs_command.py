"""``gradwire certs``: what it makes works, and is nobody else's to read."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from gradwire._cli import main
from gradwire.rpc import TlsOptions
from gradwire.transport._tls_credentials import load_credentials

LIMIT_S = 60.0


def files_in(folder: Path) -> dict[str, int]:
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in sorted(folder.iterdir())}


def make(folder: Path, *arguments: str) -> int:
    return main(["certs", "--out", str(folder), *arguments])


def options(folder: Path, stem: str) -> TlsOptions:
    return TlsOptions(
        ca=folder / "ca.pem",
        certificate=folder / f"{stem}.pem",
        key=folder / f"{stem}.key",
    )


def test_module_runs_as_a_command(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gradwire", "certs"),
            *("--out", str(tmp_path / "certs"), "--worker", "w0"),
        ],
        capture_output=True,
        timeout=LIMIT_S,
        text=True,
        check=True,
    )

    assert "export GRADWIRE_TLS_CERT=" in done.stdout
    assert done.stderr == ""
    assert load_credentials(options(tmp_path / "certs", "w0")).names.workers == ("w0",)


def test_keys_are_for_their_owner_only(tmp_path, capsys):
    folder = tmp_path / "deep" / "certs"

    assert make(folder, "--worker", "w0", "--worker", "trainer:*") == 0

    assert files_in(folder) == {
        "ca.key": 0o600,
        "ca.pem": 0o644,
        "trainer_any.key": 0o600,
        "trainer_any.pem": 0o644,
        "w0.key": 0o600,
        "w0.pem": 0o644,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "PRIVATE" not in capsys.readouterr().out


def test_certificates_say_what_was_asked_for(tmp_path):
    hosts = ["--host", "10.0.0.5", "--host", "*.example", "--host", "fd00::1"]

    assert make(tmp_path, "--worker", "trainer:*", *hosts, "--days", "3") == 0

    names = load_credentials(options(tmp_path, "trainer_any")).names
    assert names.workers == ("trainer:*",)
    assert names.hosts == ("*.example",)
    assert names.objection_to_host("10.0.0.5") is None
    assert names.objection_to_host("fd00::1") is None
    data = (tmp_path / "trainer_any.pem").read_bytes()
    certificate = x509.load_pem_x509_certificate(data)
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lasts.days == 3
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)


def test_workers_of_a_host_can_share_a_certificate(tmp_path):
    assert make(tmp_path, "--worker", "ps,trainer:*") == 0

    names = load_credentials(options(tmp_path, "ps+trainer_any")).names
    assert names.workers == ("ps", "trainer:*")


def test_authority_is_made_once(tmp_path):
    assert make(tmp_path, "--worker", "w0") == 0
    before = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "ca.key").read_bytes()

    assert make(tmp_path, "--worker", "w1") == 0

    assert before == (
        (tmp_path / "ca.pem").read_bytes(),
        (tmp_path / "ca.key").read_bytes(),
    )
    for stem in ("w0", "w1"):
        load_credentials(options(tmp_path, stem))


def test_certificate_can_be_renewed(tmp_path):
    assert make(tmp_path, "--worker", "w0") == 0
    before = files_in(tmp_path), (tmp_path / "w0.key").read_bytes()

    assert make(tmp_path, "--worker", "w0") == 0

    assert files_in(tmp_path) == before[0]
    assert (tmp_path / "w0.key").read_bytes() != before[1]
    load_credentials(options(tmp_path, "w0"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "a b"], "Worker name must match"),
        (["--worker", "../w0"], "Worker name must match"),
        (["--worker", "w0", "--host", "no host"], "neither the name nor the address"),
        (["--worker", "w0", "--days", "0"], "--days must be 1 to"),
        (["--worker", "a:b", "--worker", "a_b"], "as those of 'a:b'"),
        (["--worker", "ca"], "as those of 'the authority'"),
    ],
)
def test_bad_arguments_make_no_certificate(tmp_path, capsys, arguments, message):
    assert make(tmp_path, *arguments) == 1

    assert message in capsys.readouterr().err
    assert not [name for name in files_in(tmp_path) if not name.startswith("ca.")]


def test_half_an_authority_is_an_error(tmp_path, capsys):
    assert make(tmp_path, "--worker", "w0") == 0
    (tmp_path / "ca.key").unlink()

    assert make(tmp_path, "--worker", "w1") == 1

    assert "ca.key is missing" in capsys.readouterr().err


def test_authority_with_a_strange_key_is_an_error(tmp_path, capsys):
    for folder in ("one", "two"):
        assert make(tmp_path / folder, "--worker", "w0") == 0
    strange = (tmp_path / "two" / "ca.key").read_bytes()
    (tmp_path / "one" / "ca.key").write_bytes(strange)

    assert make(tmp_path / "one", "--worker", "w1") == 1

    assert "not the one of its certificate" in capsys.readouterr().err


def test_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [m for m in sys.modules if m == "gradwire._cli._authority"]:
        monkeypatch.delitem(sys.modules, name)

    assert make(tmp_path, "--worker", "w0") == 1

    assert "pip install 'gradwire[certs]'" in capsys.readouterr().err
