"""The report of a step: its table and its picture."""

from __future__ import annotations

import pathlib
import sys

import pytest

from nanotf.errors import JobError, NanoError, UnavailableError
from nanotf.sagemaker.smp import runtime, step_report
from nanotf.sagemaker.smp.rank_report import RankReport
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.step_report import StepReport, last_report
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
    with pytest.raises(UnavailableError, match="Received: partitions=1"):
        made.plot(tmp_path / "pipeline.png")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(suffix: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"pipeline.{suffix}"
    assert _report().plot(path) == str(path)
    begin = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(begin)


def test_picture_without_matplotlib(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "nanotf.sagemaker.smp.step_chart", raising=False)
    monkeypatch.delattr("nanotf.sagemaker.smp.step_chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NanoError, match="pip install matplotlib"):
        _report().plot(tmp_path / "pipeline.png")


def test_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._here, "config", None)
    step_report.remember(None)
    monkeypatch.setattr(runtime, "called", {})
    runtime.init({"partitions": 1})
    with pytest.raises(JobError, match="before a step"):
        last_report()
