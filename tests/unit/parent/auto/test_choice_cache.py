"""Decisions from measurements, and how nanotf remembers them. No TensorFlow."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from nanotf import cli
from nanotf.errors import NanoError
from nanotf.parent.auto import choice_cache


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanotf" / "tuning.json"


def _entry(step: float) -> dict[str, Any]:
    rest = {"start_up": 5.0, "note": ""}
    measured = [{"num_processes": n, "step": step, **rest} for n in (1, 2)]
    return {"measured": measured, "date": "2026-01-01", "model": "digits"}


def test_remembers_and_forgets(cache: pathlib.Path) -> None:
    assert choice_cache.entries() == {}
    choice_cache.remember("one", _entry(0.1))
    choice_cache.remember("two", _entry(0.2))
    choice_cache.remember("one", _entry(0.3))
    assert choice_cache.entries() == {"one": _entry(0.3), "two": _entry(0.2)}
    assert {entry.name for entry in cache.parent.iterdir()} == {"tuning.json", "tuning.lock"}
    assert choice_cache.clear() == 2
    assert choice_cache.clear() == 0
    assert not cache.exists()


def test_workers_alone_decide_nothing(cache: pathlib.Path) -> None:
    one, several = _entry(0.1)["measured"][:2]
    choice_cache.remember_now("one", [one, several], "digits")
    choice_cache.remember_now("two", [several], "digits")
    assert list(choice_cache.entries()) == ["one"]


def test_the_default_location_is_in_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert choice_cache.path() == tmp_path / "home/.cache/nanotf/tuning.json"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 4}', '{"version": 4, "entries": 5}', "\xff"]
)
def test_an_unreadable_file_is_not_used(
    cache: pathlib.Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    assert choice_cache.entries() == {}
    assert "cannot be read, and is not used" in caplog.text
    choice_cache.remember("one", _entry(0.1))
    assert choice_cache.entries() == {"one": _entry(0.1)}


def _changed(**fields: Any) -> dict[str, Any]:
    entry = _entry(0.1)
    return {**entry, "measured": [*entry["measured"], {**entry["measured"][0], **fields}]}


BAD_ENTRIES: list[Any] = [
    None,
    {**_entry(0.1), "measured": _entry(0.1)["measured"][1:]},  # decides nothing
    "text",
    {},
    {name: value for name, value in _entry(0.1).items() if name != "date"},
    {**_entry(0.1), "model": 5},
    {**_entry(0.1), "more": 1},
    {**_entry(0.1), "measured": {}},
    {**_entry(0.1), "measured": [1]},
    {**_entry(0.1), "measured": [{"num_processes": 1}]},
    _changed(more=1),
    _changed(num_processes="1"),
    _changed(num_processes=0),
    _changed(num_processes=True),
    _changed(step="0.1"),
    _changed(step=float("nan")),
    _changed(step=10**400),
    _changed(start_up=None),
    _changed(start_up=-1),
    _changed(note=None),
    _changed(stopped=[]),
]


@pytest.mark.parametrize("bad", BAD_ENTRIES)
def test_an_invalid_entry_is_not_used(
    cache: pathlib.Path,
    bad: Any,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = {"good": _changed(num_processes=4, step=None, note="too slow", stopped=3)}
    cache.parent.mkdir()
    cache.write_text(json.dumps({"version": choice_cache.VERSION, "entries": {"bad": bad, **good}}))
    assert choice_cache.entries() == good
    assert "1 of 2 entries of" in caplog.text
    assert cli.main(["tune"]) == 0
    assert "4: too slow" in capsys.readouterr().out
    choice_cache.remember("one", _entry(0.1))
    assert list(choice_cache.entries()) == ["good", "one"]


def test_a_user_without_a_home_directory(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", home)
    choice_cache.remember("one", _entry(0.1))
    assert "cannot be remembered. " in caplog.text
    assert choice_cache.entries() == {}
    for options in ([], ["--clear"]):
        assert cli.main(["tune", *options]) == 2
        assert "Set XDG_CACHE_HOME to a directory." in capsys.readouterr().err


def test_a_file_of_another_version(cache: pathlib.Path) -> None:
    choice_cache.remember("one", _entry(0.1))
    cache.write_text(json.dumps({"version": 0, "entries": {"one": "what it was"}}))
    assert choice_cache.entries() == {}


def test_a_directory_that_cannot_be_made(
    cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file is in the way")
    choice_cache.remember("one", _entry(0.1))
    assert "cannot be remembered" in caplog.text
    with pytest.raises(NanoError, match=r"Received: .*tuning.json, Not a directory"):
        choice_cache.clear()


def test_command(capsys: pytest.CaptureFixture[str], cache: pathlib.Path) -> None:
    choice_cache.remember("one", _entry(0.0123))
    assert cli.main(["tune"]) == 0
    said = capsys.readouterr().out
    assert str(cache) in said
    assert "digits: ms per step by processes: 1: 12.30, 2: 12.30" in said
    assert cli.main(["tune", "--clear"]) == 0
    assert "nanotf: Forgot 1 measurement" in capsys.readouterr().out
    assert choice_cache.entries() == {}
