"""Text of items, which comes in pieces and from several workers at a time."""

from __future__ import annotations

import io
import sys

import pytest

from nanotf.console import pass_on
from nanotf.parent.map import item_output
from nanotf.parent.map.item_output import WholeLines


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        (["one\ntwo\n"], ["one", "two"], []),
        (["o", "n", "e\nt", "wo"], ["one"], ["two"]),
        (["\n\n"], ["", ""], []),
        (["1%\r", "2%\r", "3%\n"], ["3%"], []),
        (["1%\r2%\r"], [], ["2%"]),
        (["one\r", "\ntwo\r\n"], ["one", "two"], []),
        (["\r1%", "\r2%"], [], ["2%"]),
        (["ä€😀", "\n"], ["ä€😀"], []),
        (["a\x0cb\x1cc\u2028d\n"], ["a\x0cb\x1cc\u2028d"], []),  # only a newline ends a line
        (["\r", "\r", "\r"], [], []),
    ],
)
def test_whole_lines(pieces: list[str], lines: list[str], rest: list[str]) -> None:
    made = WholeLines()
    assert [line for piece in pieces for line in made.take(piece)] == lines
    assert made.rest() == rest and made.rest() == []


def test_a_long_line_comes_in_pieces() -> None:
    made, longest = WholeLines(), item_output.LONGEST
    assert made.take("x" * (2 * longest + 1)) == ["x" * longest] * 2
    assert made.take("y\n") == ["xy"]


def test_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    """No line has text of two items, or of two streams."""
    output = item_output.output_of("prefix", lambda index: index + 7)
    output.take(0, "stdout", "loss ")
    output.take(1, "stdout", "other\n\n")
    output.take(0, "stderr", "warning\n")
    output.take(0, "stdout", "0.5\nunfinished")
    assert output.end(0) == ""
    said = capsys.readouterr()
    assert said.out == "[8] other\n[8]\n[7] loss 0.5\n[7] unfinished\n"
    assert said.err == "[7] warning\n"


def test_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    output = item_output.output_of("keep", str)
    output.take(0, "stdout", "1%\r2%\n")
    output.take(1, "stdout", "other\n")
    output.take(0, "stderr", "warning")
    assert output.end(0) == "1%\r2%\nwarning"
    assert output.end(0) == ""
    output.take(0, "stdout", "x" * item_output.KEPT)
    output.take(0, "stdout", "last")
    kept = output.end(0)
    assert len(kept) == item_output.KEPT and kept.endswith("last")
    assert capsys.readouterr() == ("", "")


def test_what_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    output = item_output.output_of("drop", str)
    output.take(0, "stdout", "text\n")
    assert output.end(0) == "" and capsys.readouterr() == ("", "")


def test_text_that_the_stream_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's streams take any text; those of this process may be ASCII."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    pass_on("stdout", "ä\n")
    assert written.getvalue() == b"\\xe4\n"
