"""``gradwire certs``: makes a certificate authority and certificates of workers."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire._certificate_names import check_pattern
from gradwire.errors import UsageError

if TYPE_CHECKING:
    from gradwire._cli._authority import Authority

__all__ = ["add_to"]

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
CA_DAYS = 3650
_MOST_DAYS = 36500

_EPILOG = """\
The folder then has ca.pem, ca.key and, for each worker, NAME.pem and NAME.key (where a
name has ':', '*' or ',', the files have '_', 'any' or '+'). Every worker needs ca.pem and its own
two files. ca.key can make a certificate for any name: keep it where no worker runs.
"""


def add_to(commands: Any) -> None:
    """Adds this command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "certs",
        help="make certificates for TLS between workers",
        description="Makes a certificate for each worker, signed by a small authority "
        "that is made as well, the first time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder for all files"
    )
    parser.add_argument(
        "--worker",
        required=True,
        action="append",
        metavar="NAME",
        help="name of a worker, as in init_rpc; 'trainer*' is for all names that begin "
        "so; 'a,b' makes one certificate for both",
    )
    parser.add_argument(
        "--host",
        default=[],
        action="append",
        metavar="HOST",
        help="name or address under which these workers are reached; without any, they "
        "may run anywhere",
    )
    parser.add_argument(
        "--days",
        default=365,
        type=int,
        metavar="N",
        help="how long the workers' certificates are valid (default 365)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not 1 <= options.days <= _MOST_DAYS:
        raise ValueError(f"--days must be 1 to {_MOST_DAYS}, found {options.days}")
    stems = _file_names(options.worker)
    folder: Path = options.out
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _find_authority(folder)
    # All are made before any is written: a host that is wrong leaves none behind.
    issued = {
        stem: authority.issue(workers.split(","), options.host, days=options.days)
        for stem, workers in stems.items()
    }
    for stem, files in issued.items():
        _write(folder / f"{stem}.key", files.key, 0o600)
        _write(folder / f"{stem}.pem", files.certificate, 0o644)
        print(f"{folder / stem}.pem, {stem}.key: worker {stems[stem]}")
    stem = next(iter(stems))
    print(
        "\nOn the host of each worker, with its own two files:\n"
        f"  export GRADWIRE_TLS_CA={folder / CA_CERTIFICATE}\n"
        f"  export GRADWIRE_TLS_CERT={folder / stem}.pem\n"
        f"  export GRADWIRE_TLS_KEY={folder / stem}.key"
    )
    return 0


def _file_names(workers: list[str]) -> dict[str, str]:
    """Names of files, without their endings, and the workers that they are for."""
    stems: dict[str, str] = {}
    for worker in workers:
        for name in worker.split(","):
            check_pattern(name)
        stem = worker.replace(":", "_").replace("*", "any").replace(",", "+")
        if stem == "ca" or stems.setdefault(stem, worker) != worker:
            raise UsageError(
                f"the files of worker {worker!r} would be named {stem!r}, as those of "
                f"{stems.get(stem, 'the authority')!r}: use another folder for one of them"
            )
    return stems


def _find_authority(folder: Path) -> Authority:
    """The authority in this folder; made if there is none."""
    try:
        from gradwire._cli._authority import Authority  # noqa: PLC0415 - optional
    except ImportError as error:
        raise UsageError(
            "'gradwire certs' needs the package 'cryptography', which is not installed: "
            "pip install 'gradwire[certs]'"
        ) from error
    certificate, key = folder / CA_CERTIFICATE, folder / CA_KEY
    if certificate.exists() != key.exists():
        missing = key if certificate.exists() else certificate
        raise UsageError(
            f"{missing} is missing, which belongs to the other file of the authority: "
            "restore it, or begin in an empty folder"
        )
    if certificate.exists():
        return Authority.load(certificate.read_bytes(), key.read_bytes())
    authority = Authority.create(CA_DAYS)
    _write(key, authority.key_pem, 0o600)
    _write(certificate, authority.certificate_pem, 0o644)
    print(f"{certificate}, {CA_KEY}: a new authority, valid for {CA_DAYS} days")
    return authority


def _write(path: Path, data: bytes, mode: int) -> None:
    """Writes a file as a whole; it never exists with a wider mode than this."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
