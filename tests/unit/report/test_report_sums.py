"""Sums of a report, from times that the test sets by hand."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nanotf.errors import NanoError
from nanotf.report import call_chart, timeline
from nanotf.report.call_report import Report
from nanotf.report.stopwatch import Stopwatch
from nanotf.wire import timing

S = 10**9


def _worker(rank: int, slower: int = 0) -> timing.WorkerTimes:
    """Returns a worker of one epoch of three steps and a validation of two; numbers are seconds."""
    times = timing.WorkerTimes(
        rank, began=10 * S, ready=12 * S, ended=60 * S, knows_calls=True, knows_input=True
    )
    # The first step takes 8 s; the others 5 and 6 s: input 1 s, collectives 2 s, including 1 s
    # wait.
    train = timing.Pass(timing.TRAIN, 0, 13 * S, 50 * S, executions=3, inside=11 * S, first=8 * S)
    train.input, train.in_calls, train.waited = 2 * S, (4 - slower) * S, (2 - slower) * S
    test = timing.Pass(timing.TEST, None, 40 * S, 48 * S, executions=2, inside=2 * S, first=3 * S)
    times.passes += [train, test]
    rows = [(0, 14, 22, 0, 0, 0), (0, 22, 27, 1, 2, 1), (0, 27, 33, 1, 2, 1)]
    rows += [(1, 41, 44, 0, 0, 0), (1, 44, 46, 0, 0, 0)]
    for kind, *seconds in rows:
        times.steps.extend((kind, *(value * S for value in seconds), 1))
    return times


def _report(*workers: timing.WorkerTimes) -> Report:
    call = timing.CallTimes(
        began=0,
        prepared=S,
        lent=8 * S,
        written=9 * S,
        sent=10 * S,
        done=61 * S,
        ended=62 * S,
        shipped=3 * 2**20,
    )
    call.hooks.append(("on_epoch_end", 50 * S, 52 * S))
    call.in_hooks = 2 * S
    return Report.of("fit", call, workers, max(2, len(workers)))


def test_sums() -> None:
    report = _report(_worker(0), _worker(1, slower=1))
    assert (report.preparing, report.start_up, report.shipping) == pytest.approx((1, 7, 2))
    assert (report.running, report.finishing, report.total) == pytest.approx((51, 1, 62))
    worker = report.workers[0]
    assert worker.rebuilding == pytest.approx(3)  # until the first epoch begins
    assert worker.first_steps == pytest.approx(8 + 3)
    assert worker.input == pytest.approx(2)
    assert (worker.communication, worker.communication_wait) == pytest.approx((2, 2))
    assert worker.compute == pytest.approx(11 + 2 - 2 - 4)
    assert worker.between_steps == pytest.approx(37 - 13 - 11)  # validation is inside the epoch
    assert worker.epoch_ends == pytest.approx(10)
    assert worker.executions == 5
    # Worker 1 computes a second longer, so worker 0 waits: 8 s instead of 7.
    assert report.load_imbalance == pytest.approx(8 / 7.5 - 1)
    assert "worker 1 computes longest" in str(report)
    assert "3.0 MiB" in str(report)


def test_missing_measurements_are_not_shown() -> None:
    times = _worker(0)
    times.knows_calls = times.knows_input = False
    report = _report(times, times)
    worker = report.workers[0]
    assert worker.input is worker.communication is worker.communication_wait is None
    assert "Not measured here: input, comm., comm. wait." in str(report)


def test_no_line_is_longer_than_a_terminal() -> None:
    """Holds for any numbers: a weekend, many workers, two-word names."""
    workers = [_worker(rank) for rank in range(112)]
    for times in workers:
        times.ended = 200_000 * S
        times.passes[0].executions = 9_999_999
        times.passes[0].inside = 190_000 * S
    report = _report(*workers)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if line.split()[:1] == ["111"]]
    assert rows[0][-1] == str(9_999_999 + 2)


def test_one_process() -> None:
    stopwatch = Stopwatch(0, None)
    times = stopwatch.finish()
    times.began, times.ready, times.ended = 0, 0, 20 * S
    epochs = [timing.Pass(timing.TRAIN, n, (1 + 6 * n) * S, (6 + 6 * n) * S) for n in range(3)]
    times.passes += [*epochs, timing.Pass(timing.TEST, None, 4 * S, 5 * S)]
    report = Report.of_one_process(times, 'Try num_processes="auto".')
    (row,) = report.workers
    assert (report.size, report.total) == (1, pytest.approx(20))
    assert (report.preparing, row.rebuilding) == pytest.approx((1, 0))
    assert (row.compute, row.epoch_ends, row.total) == pytest.approx((15, 4, 19))
    assert row.first_steps is row.communication is row.between_steps is row.executions is None
    assert "the first 5.000 s, others 5.000 s" in str(report)
    assert 'num_processes="auto"' in str(report)
    tracks = call_chart._tracks(report.call, report.times, np.arange(0, 21) * float(S))
    track = call_chart._together(tracks)
    sums = {name: share.sum() for name, share in track.items() if share.max() > 0}
    assert sums == pytest.approx({"preparing": 1, "compute": 15, "epoch ends": 4})


def test_plot_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    titles: list[str] = []
    tracks: list[Any] = []
    monkeypatch.setattr(Axes, "set_title", lambda self, label, **_: titles.append(label))
    monkeypatch.setattr(Axes, "set_yticks", lambda self, at, names: tracks.append([*names]))
    times = timing.WorkerTimes(0, began=0, ready=0, ended=20 * S)
    times.passes.append(timing.Pass(timing.TRAIN, 0, S, 16 * S))
    Report.of_one_process(times, "").plot(tmp_path / "report.png")
    assert titles == ["fit in one process: 20.00 s"]
    assert tracks == [["this process"]]


def test_workers_that_died_after_training(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    report = dataclasses.replace(_report(_worker(0)), workers=(), times=())
    assert "fit on 2 workers: 62.00 s" in str(report)
    assert "died after training" in str(report)
    assert pathlib.Path(report.plot(tmp_path / "report.png")).stat().st_size > 0


def test_notebooks_show_text_and_picture() -> None:
    pytest.importorskip("matplotlib")
    report = dataclasses.replace(_report(_worker(0), _worker(1)), method="<fit>")
    shown = report._repr_html_()
    assert "&lt;fit&gt; on 2 workers" in shown and "<fit>" not in shown
    encoded = shown.partition("data:image/png;base64,")[2].partition('"')[0]
    assert base64.b64decode(encoded).startswith(b"\x89PNG")


def test_notebooks_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _report(_worker(0), _worker(1))._repr_html_().endswith("</pre>")


def test_trace_has_a_track_for_each_process(tmp_path: pathlib.Path) -> None:
    path = _report(_worker(0), _worker(1)).to_chrome_trace(tmp_path / "trace.json")
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "this process", 1: "worker 0", 2: "worker 1"}
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [e["name"] for e in slices][:3] == ["rebuilding", "epoch 1", "evaluation"]
    steps = [e for e in slices if e["name"] == "train step"]
    assert [(e["ts"], e["dur"]) for e in steps] == [(14e6, 8e6), (22e6, 5e6), (27e6, 6e6)]
    assert steps[1]["args"]["communication_wait_ms"] == 1000
    # Viewers nest slices of a track by their times: two slices are separate or nested.
    for one in slices:
        for other in slices:
            begins, ends = one["ts"], one["ts"] + one["dur"]
            other_begins, other_ends = other["ts"], other["ts"] + other["dur"]
            apart = ends <= other_begins or other_ends <= begins
            inside = begins <= other_begins and other_ends <= ends
            around = other_begins <= begins and ends <= other_ends
            assert apart or inside or around, (one, other)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # makes the import fail
    with pytest.raises(NanoError, match=r"plot\(\) draws with matplotlib.*pip install"):
        _report(_worker(0)).plot(tmp_path / "report.png")
    assert not list(tmp_path.iterdir())


def test_plot_shares_of_time() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    report = _report(_worker(0))
    edges = np.linspace(0, 62 * S, 63)  # a second each
    _, track = call_chart._tracks(report.call, report.times, edges)
    for name, share in track.items():
        assert share.min() >= 0, name
    everything = sum(track.values())
    np.testing.assert_allclose(everything[:10], 0, atol=1e-12)
    np.testing.assert_allclose(everything[10:60], 1)
    np.testing.assert_allclose(track["first step"].sum(), 11)
    np.testing.assert_allclose(track["input"].sum(), 2)
    np.testing.assert_allclose(track["comm. wait"].sum(), 2)
    np.testing.assert_allclose(track["epoch ends"][50:60], 1)


def test_steps_beyond_the_kept_ones_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timing, "STEPS_KEPT", 2)
    times = _worker(0)
    del times.steps[2 * timing.STEP_COLUMNS :]  # the first step, of 8 s, and one of 5 s
    report = _report(times)
    _, track = call_chart._tracks(report.call, report.times, np.linspace(0, 62 * S, 63))
    np.testing.assert_allclose(track["input"].sum(), 2)
    np.testing.assert_allclose(track["comm. wait"].sum(), 2)
    np.testing.assert_allclose(track["compute"].sum(), 2 + 3 + 2)  # as with all steps kept


def test_short_epochs_share_a_bar() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    times = timing.WorkerTimes(0, began=10 * S, ready=10 * S, ended=50 * S)
    for epoch, began in enumerate((10 * S, 30 * S)):
        passed = timing.Pass(timing.TRAIN, epoch, began, began + 10 * S, inside=4 * S)
        times.passes.append(passed)
        times.steps.extend((0, began, began + 4 * S, 0, 0, 0, 1))
    edges = np.array([0, 62 * S])
    _, track = call_chart._tracks(_report(times).call, (times,), edges)
    seconds = {name: share.sum() * 62 for name, share in track.items() if share.any()}
    assert seconds["between"] == pytest.approx(2 * (10 - 4))
    assert seconds["epoch ends"] == pytest.approx(20)


def test_reading_counts_the_time_in_an_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(timing, "now", lambda: clock[0])

    def data() -> Iterator[int]:
        for number in range(3):
            clock[0] += 5
            yield number
        clock[0] += 2

    reading = timing.Reading()
    for _ in reading.over(data()):
        clock[0] += 100
    assert reading.reading == 17


def _nano_worker() -> timing.WorkerTimes:
    """Returns a worker of a `@nano` call, which has no known epochs and steps."""
    times = timing.WorkerTimes(0, began=10 * S, ready=12 * S, ended=22 * S, knows_calls=True)
    times.in_calls, times.waited = 4 * S, 3 * S
    return times


def test_a_nano_call_has_no_passes() -> None:
    worker = _report(_nano_worker()).workers[0]
    assert (worker.compute, worker.communication) == pytest.approx((6, 1))
    assert (worker.communication_wait, worker.total) == pytest.approx((3, 12))
    assert worker.rebuilding == pytest.approx(2)
    # Keras's own loop did not run, so its parts are unknown.
    assert worker.first_steps is worker.input is worker.between_steps is None
    assert worker.hooks is worker.epoch_ends is worker.executions is None
    missing = "Not measured here: first step, input, between, hooks, epoch ends, steps."
    text = str(_report(_nano_worker(), _nano_worker()))
    assert missing in text and "epoch ends" not in text.replace(missing, "")


def test_trace_of_a_nano_call(tmp_path: pathlib.Path) -> None:
    path = _report(_nano_worker()).to_chrome_trace(tmp_path / "trace.json")
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    found = [(e["name"], e["ts"], e["dur"]) for e in slices]
    assert found == [("rebuilding", 10e6, 2e6), ("running", 12e6, 10e6)]
    assert slices[1]["args"] == {"communication_ms": 4000, "communication_wait_ms": 3000}


def test_plot_of_a_nano_call(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    report = _report(_nano_worker())
    report.call.hooks.clear()
    report.call.in_hooks = 0
    _, track = call_chart._tracks(report.call, report.times, np.linspace(0, 62 * S, 63))
    sums = {name: share.sum() for name, share in track.items() if share.max() > 1e-9}
    assert sums == pytest.approx({"rebuild": 2, "compute": 6, "comm.": 1, "comm. wait": 3})
    labels: list[str] = []
    monkeypatch.setattr(
        Figure, "legend", lambda self, handles, **_: labels.extend(h.get_label() for h in handles)
    )
    report.plot(tmp_path / "report.png")
    assert {*sums} <= {*labels}
    assert not {"first step", "input", "between", "hooks", "epoch ends"} & {*labels}


def test_legend_has_the_colors_of_the_bars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    times = _worker(0)
    del times.steps[:]  # only the sums include communication
    labels: list[str] = []
    monkeypatch.setattr(
        Figure, "legend", lambda self, handles, **_: labels.extend(h.get_label() for h in handles)
    )
    _report(times).plot(tmp_path / "report.png")
    assert {"first step", "input", "compute", "comm.", "comm. wait"} <= {*labels}


class _Group:
    """A group whose times are set by hand.

    Args:
        clock: list of one int, the time.
    """

    stamps = True

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock
        self.in_calls = self.waited = self.input = 0

    def times(self, steps_begin: bool = False) -> tuple[int, int, int, int]:
        if steps_begin:
            self.marked = self.clock[0]
            self.clock[0] += 30  # the core runs another program
        return 0, self.in_calls, self.waited, self.input

    def stamp(self) -> None:
        """Advances the clock to the arrival of the data."""
        self.input += self.clock[0] - self.marked


def test_parts_of_a_step_add_up_to_at_most_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(timing, "now", lambda: clock[0])
    group = _Group(clock)
    stopwatch = Stopwatch(0, group)

    def step(calls: tuple[int, int]) -> None:
        clock[0] += 5
        group.stamp()
        clock[0] += 10
        group.in_calls += calls[0]
        group.waited += calls[1]

    timed = stopwatch.timed(timing.TRAIN, step)
    stopwatch.ready()
    stopwatch.begin_pass(timing.TRAIN, 0)
    # The last step's collectives run two at a time, and add up to more than the time.
    for calls in ((0, 0), (4, 3), (18, 14)):
        timed(calls)
    stopwatch.end_pass()
    times = stopwatch.finish()
    rows = list(timeline.rows_of_steps(times))
    # Time lost to the system before the step counts as waiting for data, and lies inside the step.
    assert [(ended - began, *parts) for _, began, ended, *parts, _ in rows] == [
        (45, 35, 0, 0),
        (45, 35, 4, 3),
        (45, 35, 10, 10),
    ]
    (epoch,) = times.passes
    assert (epoch.inside, epoch.input, epoch.in_calls, epoch.waited) == (90, 70, 14, 13)
    assert all(piece.began <= piece.ended for piece in timeline.slices_of_worker(times))


def test_communication_of_a_job_without_steps_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0]
    monkeypatch.setattr(timing, "now", lambda: clock[0])
    group = _Group(clock)
    stopwatch = Stopwatch(0, group)
    clock[0] = 10
    stopwatch.ready()
    clock[0] = 30
    group.in_calls, group.waited = 35, 25
    times = stopwatch.finish()
    assert (times.in_calls, times.waited) == (20, 20)


def test_hooks_in_an_epoch_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(timing, "now", lambda: clock[0])
    stopwatch = Stopwatch(0, None)

    def hook(seconds: int) -> None:
        with stopwatch.hook():
            clock[0] += seconds * S

    stopwatch.begin_pass(timing.TRAIN, 0)
    hook(2)
    stopwatch.begin_pass(timing.TEST)
    hook(3)
    clock[0] += 1 * S
    stopwatch.end_pass()
    stopwatch.end_pass()
    hook(4)  # at the epoch's end
    times = stopwatch.finish()
    assert [p.hooks for p in times.passes] == [2 * S, 3 * S]
    assert [*times.hooks] == [0, 2 * S, 2 * S, 5 * S]
    assert [*times.moved(7).hooks] == [7, 2 * S + 7, 2 * S + 7, 5 * S + 7]
    worker = timeline.WorkerReport.of(times)
    assert (worker.hooks, worker.between_steps) == pytest.approx((5, 1))
    assert worker.epoch_ends == pytest.approx(4)
    slices = [(p.name, p.began, p.ended) for p in timeline.slices_of_worker(times)]
    assert [s for s in slices if s[0] == "hook"] == [("hook", 0, 2 * S), ("hook", 2 * S, 5 * S)]


def _with_hooks() -> Report:
    """Returns the worker's epoch, with hooks of 2 and 3 s between its steps and its validation."""
    times = _worker(0)
    times.hooks.extend((33 * S, 35 * S, 36 * S, 39 * S))
    times.passes[0].hooks = 5 * S
    report = _report(times)
    for began, ended in ((33, 35), (36, 39)):
        report.call.hooks.append(("on_train_batch_end", began * S, ended * S))
    report.call.in_hooks += 5 * S
    return report


@pytest.mark.parametrize("kept", [2, 1, 0])
def test_plot_shows_hooks_in_epochs(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("matplotlib")
    report = _with_hooks()
    monkeypatch.setattr(timing, "HOOKS_KEPT", kept)
    del report.times[0].hooks[kept * timing.HOOK_COLUMNS :]
    del report.call.hooks[1 + kept :]  # the first is the epoch's end
    parent, worker = call_chart._tracks(report.call, report.times, np.linspace(0, 62 * S, 63))
    np.testing.assert_allclose([parent["preparing"].sum(), parent["finishing"].sum()], 1)
    for track in (parent, worker):
        np.testing.assert_allclose(track["hooks"].sum(), 5)
        np.testing.assert_allclose(track["epoch ends"].sum(), 2 if track is parent else 10)
        assert sum(track.values()).max() < 1 + 1e-9
    np.testing.assert_allclose(worker["between"].sum(), 37 - 13 - 11 - 5)
    if kept:
        np.testing.assert_allclose(parent["hooks"][33:35], 1)
        np.testing.assert_allclose(worker["hooks"][33:35], 1)
