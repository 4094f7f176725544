"""The report of a step: its table and its picture."""

from __future__ import annotations

import json
import pathlib

import pytest

from nanotf.errors import JobError, UnavailableError
from nanotf.sagemaker.smp import runtime, step_report
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.step_report import RankReport, StepReport, last_report
from nanotf.sagemaker.smp.times import ComputedHalf, Execution, Interval

MS, MIB = 1_000_000, 2**20


def _report(partitions: int = 2) -> StepReport:
    ranks = []
    for rank in range(partitions):
        begin = 1000 * MS + rank * MS
        blocks = (
            ComputedHalf(Half.FORWARD, 0, Interval(begin, begin + 2 * MS)),
            ComputedHalf(Half.BACKWARD, 0, Interval(begin + 5 * MS, begin + 8 * MS)),
        )
        waits = (Interval(begin + 2 * MS, begin + 4 * MS),)
        execution = Execution(7, Interval(begin, begin + 8 * MS), blocks, waits)
        known = execution if partitions > 1 else None
        ranks.append(RankReport(rank, rank, 0, known, 3 * MIB, 6 * MIB, 400 * MIB))
    return StepReport(partitions, 1, "simple", tuple(ranks))


def test_table() -> None:
    lines = str(_report()).splitlines()
    assert lines[0] == 'Step 7 in 2 partitions, 1 microbatch, "simple": 9.00 ms'
    for rank, line in enumerate(lines[4:6]):
        expected = [rank, 0, rank, 2.0, 3.0, 2.0, 1.0, 3.0, 6.0, 400.0]
        assert [float(text) for text in line.split()] == expected
    assert lines[-2:] == [
        "rank 0  F0 0.00-2.00  B0 5.00-8.00",
        "rank 1  F0 1.00-3.00  B0 6.00-9.00",
    ]


def test_with_one_partition_memory_alone(tmp_path: pathlib.Path) -> None:
    made = _report(partitions=1)
    lines = str(made).splitlines()
    assert lines[0] == "1 partition, 1 microbatch"
    assert lines[-1].split() == ["0", "0", "0", "-", "-", "-", "-", "3.0", "6.0", "400.0"]
    for write in (made.plot, made.to_chrome_trace):
        with pytest.raises(UnavailableError, match=r"Received: .* of 1 partition, 1 microbatch\."):
            write(tmp_path / "pipeline.png")
    assert made._repr_html_().endswith("</pre>")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(suffix: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"pipeline.{suffix}"
    assert _report().plot(path) == str(path)
    begin = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(begin)


def test_trace(tmp_path: pathlib.Path) -> None:
    path = _report().to_chrome_trace(tmp_path / "trace.json")
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0, partition 0", 1: "rank 1, partition 1"}
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"]] == [
        ("messages, other", 1000, 8000),
        ("waiting", 3000, 2000),
        ("forward 0", 1000, 2000),
        ("backward 0", 6000, 3000),
    ]


def test_picture_has_a_row_for_each_process() -> None:
    drawn = _report()._chart()
    assert drawn.whole == (1000 * MS, 1009 * MS)
    assert [row.name for row in drawn.rows] == ["rank 0\npartition 0", "rank 1\npartition 1"]
    for row in drawn.rows:
        assert [(piece.name, piece.label) for piece in row.slices] == [
            ("messages, other", ""),
            ("waiting", ""),
            ("forward", "0"),
            ("backward", "0"),
        ]
        assert list(row.sums.values()) == [3, 6, 391]


def test_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._here, "config", None)
    step_report.remember(None)
    monkeypatch.setattr(runtime, "called", {})
    runtime.init({"partitions": 1})
    with pytest.raises(JobError, match="before a step"):
        last_report()
