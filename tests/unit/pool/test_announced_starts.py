"""The line that tells of workers that start."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from nanotf.pool import starts


@pytest.fixture(autouse=True)
def times(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The file of times, not yet there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanotf" / "starts.json"


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


def _start(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int = 2, kind: str = "worker"
) -> None:
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(starts, "time", clock)
        with starts.announced(count, kind):
            starts.takes_seconds("TensorFlow")
            starts.takes_seconds("TensorFlow")  # each worker's own import
            clock.now += seconds


def test_the_time_is_that_of_the_last_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: pathlib.Path
) -> None:
    _start(monkeypatch, 5.2)
    _start(monkeypatch, 5.6)  # about the same: the file stays
    assert list(json.loads(times.read_text()).values()) == [5.2]
    assert starts.last_seconds(starts.TENSORFLOW) == 5.2
    _start(monkeypatch, 30.0, 1, "reader")
    _start(monkeypatch, 1.0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "nanotf: starting 2 workers, some seconds, once",
        "nanotf: starting 2 workers, about 5 s, once",
        "nanotf: starting 1 reader, about 5 s, once",
        "nanotf: starting 2 workers, about 30 s, once",
    ]


def test_forks_of_a_warm_process_are_not_announced(
    capsys: pytest.CaptureFixture[str], times: pathlib.Path
) -> None:
    with starts.announced(2, "worker"):
        pass
    starts.takes_seconds("TensorFlow")  # outside a start
    assert capsys.readouterr().err == "" and not times.exists()


def test_a_start_that_fails_has_no_time(times: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError), starts.announced(2, "worker"):
        starts.takes_seconds("TensorFlow")
        raise ZeroDivisionError
    assert not times.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"TensorFlow": "soon"}', '{"TensorFlow": null}'])
def test_a_file_that_is_not_nanotfs(
    content: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: pathlib.Path,
) -> None:
    times.parent.mkdir()
    times.write_text(content)
    _start(monkeypatch, 3.0)
    assert capsys.readouterr().err == "nanotf: starting 2 workers, some seconds, once\n"
    assert list(json.loads(times.read_text()).values()) == [3.0]


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "0"])
def test_a_number_that_is_no_time(seconds: str, times: pathlib.Path) -> None:
    times.parent.mkdir()
    times.write_text(json.dumps({f"TensorFlow {sys.prefix}": 0}).replace("0}", f"{seconds}}}"))
    assert starts.last_seconds(starts.TENSORFLOW) is None


def test_nowhere_to_note_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _start(monkeypatch, 3.0)
    assert capsys.readouterr().err == "nanotf: starting 2 workers, some seconds, once\n"
