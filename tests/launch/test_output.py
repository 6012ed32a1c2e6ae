"""What the launcher passes on from workers to streams that do not take everything."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TextIO

from gradwire.launch._output import Output


def show(tmp_path: Path, *streams: TextIO) -> None:
    """Shows a line of a worker on each of the streams."""
    output = Output(width=1, use_colours=False)
    for number, stream in enumerate(streams):
        path = tmp_path / f"{number}.log"
        path.write_bytes(b"\xc3\xa9\n")
        output.follow("w", str(path), stream)
    output.flush()
    assert output._thread.is_alive()
    output.close()


def test_characters_that_a_stream_has_not_are_escaped(tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    show(tmp_path, stream)

    stream.seek(0)
    assert stream.read() == "[w] \\xe9\n"


def test_stream_that_takes_no_more_does_not_end_the_others(tmp_path, capsys):
    good = io.StringIO()

    with Path("/dev/full").open("w") as full:
        show(tmp_path, full, good)

    assert good.getvalue() == "[w] é\n"
    assert "/dev/full is not shown any more: [Errno 28]" in capsys.readouterr().err


def test_what_follows_a_long_line_is_shown_at_the_end(tmp_path):
    stream, path = io.StringIO(), tmp_path / "log"
    long = "x" * (3 << 20)
    output = Output(width=1, use_colours=False)
    path.write_text(f"{long}\n\nlast\nno end")
    output.follow("w", str(path), stream)
    output.close()

    assert stream.getvalue() == f"[w] {long}\n[w] \n[w] last\n[w] no end\n"
