"""The arithmetic, options, tables and chart of `benchmarks`; nothing is trained."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from benchmarks import (
    chart,
    clock,
    forecast,
    goals,
    options,
    ratios,
    report,
    rounds,
    scaling,
    timeline,
)
from benchmarks.contestants import CONTESTANTS
from benchmarks.models import MODELS, OPTIMIZERS, share


# --------------------------------------------------------------------------- statistics
def test_ratios_are_taken_within_a_round() -> None:
    # The machine was half as fast in the second round; the ratio was the same.
    assert ratios.median_ratio([2.0, 4.0, 3.0], [1.0, 2.0, 1.0]) == 2.0


def test_a_round_with_a_missing_value_does_not_count() -> None:
    assert ratios.median_ratio([2.0, None, 6.0], [1.0, 1.0, 2.0]) == 2.5
    assert ratios.median_ratio([None], [1.0]) is None


def test_rounds_must_match() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios.median_ratio([1.0, 2.0], [1.0])


def test_geometric_mean() -> None:
    assert ratios.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert ratios.geometric_mean([]) is None
    with pytest.raises(ValueError, match=r"values above 0. Received: \[1.0, 0.0\]"):
        ratios.geometric_mean([1.0, 0.0])


# ----------------------------------------------------------------------------- timelines
def test_steps_alone_exclude_work_between_epochs() -> None:
    # Two epochs of 4 steps of 1 s; the first step of each takes 3 s, the boundary 5 s.
    noted = {
        "call": 10.0,
        "steps": [[0, n, 13.0 + n, n / 2] for n in range(4)]
        + [[1, n, 24.0 + n, 10 + n / 2] for n in range(4)],
        "ends": [16.0, 27.0],
        "done": 28.0,
    }
    assert timeline.read(noted, 4) == timeline.Block(
        step=1.0, processor=0.5, epoch=11.0, boundary=7.0, first_batch=3.0, call=18.0
    )


def test_steps_that_were_not_reported_are_counted() -> None:
    noted = {
        "call": 0.0,
        "steps": [[0, 0, 1.0, None], [0, 8, 5.0, None]],
        "ends": [6.0],
        "done": 6.0,
    }
    block = timeline.read(noted, 10)
    assert block.step == 0.5 and block.processor is None
    assert block.epoch is None and block.boundary is None
    noted["steps"] += [[1, 0, 8.0, None], [1, 9, 12.5, None]]
    noted["ends"] += [12.5]
    # From 5.0 to 8.0, less step 9 of the first epoch and step 0 of the second.
    assert timeline.read(noted, 10).boundary == 2.0


def test_the_last_of_several_steps_at_once_is_the_epochs_last() -> None:
    """Keras reports steps 15, 31 and 47 of 40, if it executes 16 at once."""
    noted = {
        "call": 0.0,
        "steps": [[0, n, (min(n, 39) + 1) / 10, None] for n in (15, 31, 47)],
        "ends": [4.0],
        "done": 4.0,
    }
    assert timeline.read(noted, 40).step == pytest.approx(0.1)


def test_calls_without_a_clock_are_timed_by_difference() -> None:
    assert timeline.read_calls([[1, 10.0], [4, 16.0]]).epoch == 2.0


def test_processes_together_are_as_fast_as_the_slowest() -> None:
    blocks = [timeline.Block(step=1.0, processor=2.0, call=5.0), timeline.Block(2.0, 1.0, call=4.0)]
    assert timeline.slowest(blocks) == timeline.Block(step=2.0, processor=1.5, call=5.0)


def test_processor_time_of_a_process() -> None:
    processor = clock.own_processor()
    before = processor.seconds()
    if before is None:
        pytest.skip("this system has no clocks of other processes")
    while time.process_time() - before < 0.01:
        pass
    assert processor.seconds() >= before + 0.01
    assert clock.Processor([]).seconds() is None


def test_processor_keeps_the_time_of_a_process_that_ends() -> None:
    """Workers of an earlier number of workers end while those of a later one are measured."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    processor = clock.Processor([busy.pid])
    try:
        if processor.seconds() is None:
            pytest.skip("this system has no clocks of other processes")
        while not processor.seconds() > 0:
            time.sleep(0.01)
    finally:
        busy.kill()
        busy.wait()
    ended = processor.seconds()
    assert ended > 0
    assert processor.seconds() == ended


# ------------------------------------------------------------------------------- options
def test_defaults() -> None:
    chosen = options.parse([])
    assert chosen.models == tuple(MODELS) and chosen.contestants == CONTESTANTS
    assert chosen.num_processes == 2 and chosen.rounds == 5 and not chosen.quick


def test_choices_come_in_the_order_of_the_benchmark() -> None:
    chosen = options.parse(["--models", "cnn,mlp", "--contestants", "shm, plain", "--quick"])
    assert chosen.models == ("mlp", "cnn") and chosen.contestants == ("plain", "shm")
    assert chosen.rounds == 2 and chosen.epoch_seconds < options.Options().epoch_seconds


def test_a_peer_is_one_more_contestant() -> None:
    chosen = options.parse(["--contestants", "plain", "--peer-python", sys.executable])
    assert chosen.contestants == ("plain", "peer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mlp,vgg"], r"--models: unknown: vgg. Choose from mlp, mlp128, cnn"),
        (["--models", ","], "no name given"),
        (
            ["--contestants", "horovod"],
            "Choose from plain, plain_16, ideal, one, shm, auto, grpc, stock",
        ),
        (
            ["--parts", "all"],
            "start-up, collectives, hosts, records, items, readers, partitions, serving, memory",
        ),
        (["--rounds", "0"], "--rounds: must be a whole number of at least 1. Received: '0'"),
        (["--num-processes", "1"], "at least 2. Received: '1'"),
        (["--num-processes", "4", "--batch-size", "2"], "so that every process has a row"),
        (["--optimizer", "lamb"], "invalid choice: 'lamb'"),
        (["--peer-python", "/nowhere/python"], "must be a Python interpreter. Received"),
        (["--output", __file__], "must be a directory"),
        (["--round", "2"], "unrecognized arguments"),
    ],
)
def test_invalid_options_name_the_problem(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_too_many_processes_are_refused_before_anything_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--num-processes", "5000"],
        cwd=pathlib.Path(options.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "Received: num_processes=5000" in done.stderr and "Traceback" not in done.stderr


# -------------------------------------------------------------------------------- blocks
def test_whole_epochs_are_compared_at_the_same_length() -> None:
    steps = {"plain": 0.01, "ideal": 0.006, "shm": 0.007, "grpc": 0.05, "stock": 0.1}
    tracks: Any = {name: rounds.Track(None, step) for name, step in steps.items()}  # type: ignore[arg-type]
    rounds.lay_out(tracks, 1.0, MODELS["cnn"])
    laid_out = {name: (track.steps, track.epochs) for name, track in tracks.items()}
    assert laid_out == {
        "plain": (100, 3),
        "ideal": (200, 1),
        "shm": (100, 3),
        "grpc": (20, 2),
        "stock": (10, 2),
    }


def test_an_epoch_has_some_steps_and_its_data_fit_into_memory() -> None:
    model = MODELS["cnn180"]
    assert rounds.steps_of_epoch(9.0, 1.0, model) == rounds.MIN_STEPS
    steps = rounds.steps_of_epoch(1e-6, 1.0, model)
    assert steps * model.batch_size * model.row_bytes <= rounds.MAX_DATA_BYTES


def test_shares_make_the_whole_batch() -> None:
    assert [share(64, rank, 3) for rank in range(3)] == [22, 21, 21]


@pytest.mark.parametrize("name", MODELS)
def test_data_are_the_same_in_every_process(name: str) -> None:
    (x, y), (again, _), (other, _) = (MODELS[name].data(3, rank) for rank in (0, 0, 1))
    assert x.shape == (3, *MODELS[name].shape) and y.max() < MODELS[name].classes
    assert (x == again).all() and not (x == other).all()
    assert MODELS[name].row_bytes * 3 == x.nbytes + y.nbytes
    assert MODELS[name].optimizer in OPTIMIZERS


# ---------------------------------------------------------------------------- the report
def _contestant(step: float | None, epoch: float | None = None) -> dict[str, Any]:
    block = {"step": step, "epoch": epoch, "boundary": None, "first_batch": 0.1, "call": 1.0}
    block["processor"] = step and 0.9 * step
    if epoch is not None and step is not None:
        block["boundary"] = epoch - 10 * step
    return {
        "steps": 10,
        "epochs": 3,
        "ready": {"import_s": 2.0, "build_s": 0.5, "tensorflow": "2.21.0", "keras": "3.15.1"},
        "cold": dict(block, first_batch=1.5),
        # The second round ran on a machine at half the speed.
        "blocks": [block, {k: v and 2 * v for k, v in block.items()}],
        "others": [0.0, 0.01],
        "peak_bytes": 500_000_000,
    }


def _result() -> dict[str, Any]:
    model = {
        "title": "CNN 32x32",
        "batch_size": 64,
        "contestants": {
            "plain": _contestant(0.02, 0.3),
            "ideal": _contestant(0.01),
            "shm": _contestant(0.0125, 0.15),
            "stock": _contestant(0.05),
            "ranks": _contestant(0.02),
        },
        "failed": {"grpc": "ended with exit code -9"},
    }
    slow = copy.deepcopy(model)
    slow["title"] = "LSTM 50x32"
    slow["contestants"]["shm"] = _contestant(0.025, 0.26)
    del slow["contestants"]["ideal"]
    return {
        "options": {"num_processes": 2, "rounds": 2, "optimizer": "adam"},
        "machine": {"cpu": "a CPU", "cores": 2, "load": "0.0", "nanotf": "0.1.0"},
        "models": {"cnn": model, "lstm": slow},
        "start_up": {"shm": {"import": 2.0, "cold": 6.0, "warm": 0.1, "new_model": 1.0}},
        "collectives": [
            {"bytes": 1 << 10, "seconds": 20e-6, "memcpy_seconds": 1e-7},
            {"bytes": 94 << 20, "seconds": 0.03, "memcpy_seconds": 0.01},
        ],
        "memory": {"array_bytes": 1 << 30, "extra_bytes": 1_090_000_000, "seconds": 4.0},
        "hosts": [{"bytes": 4 << 20, "two": 0.01, "one": 0.015, "ratios": [1.2, 1.5, 1.7]}],
        "records": [
            {
                "format": "RecordIO",
                "reader": reader,
                "bytes": 100_000,
                "megabytes": speed,
                "records": 10 * speed,
                "per_processor": speed,
            }
            for reader, speed in (("native", 900.0), ("tf.data", 90.0))
        ],
        "items": [
            {"name": "loop", "cold": 9.0, "warm": 8.0, "others": 0.0},
            {"name": "nanotf.map", "cold": 7.0, "warm": 4.0, "others": 0.25},
        ],
        "problems": ["cnn grpc: ended with exit code -9"],
    }


def test_ratios_of_contestants() -> None:
    model = _result()["models"]["cnn"]
    assert goals.ratio(model, "ideal") == pytest.approx(0.8)
    assert goals.ratio(model, "epochs") == pytest.approx(2.0)
    assert goals.ratio(model, "epochs_to_steps") == pytest.approx(0.2 / 0.15)
    assert goals.ratio(model, "stock") == pytest.approx(4.0)
    assert goals.ratio(model, "ranks") == pytest.approx(2.5)
    assert goals.ratio(model, "processor") == pytest.approx(1.25)
    assert goals.ratio(model, "grpc") is None


def test_break_even() -> None:
    """A start that takes 6 s longer, and epochs of half the time, pay after 12 s of plain Keras."""
    result = _result()
    shm = result["models"]["cnn"]["contestants"]["shm"]
    shm["cold"]["first_batch"] += 6.0
    slower = result["models"]["lstm"]["contestants"]["shm"] = _contestant(0.03, 0.4)
    slower["cold"]["first_batch"] += 6.0
    table = report.render(result).split("Break-even")[1].splitlines()
    assert [line.split()[-1] for line in table[3:5]] == ["12", "never"]


def test_goals() -> None:
    found = {goal.text: goal for goal in goals.goals(_result())}
    worst = found["epochs against plain Keras's steps alone, worst model"]
    assert worst.where == "lstm" and worst.met is False
    assert found["steps against ideal, worst model"].where == "cnn"
    assert found["epochs against plain Keras's epochs, geometric mean"].met is True
    assert found["all-reduce of 94 MB, against one memcpy"].met is False
    assert found["Pipe mode: 100 kB records on one core"].measured == 900.0
    assert found["1 GB array: memory beyond the parent's copy"].met is True
    assert [goal.met for goal in goals.goals({})] == [None] * len(found)


def test_a_table_is_aligned() -> None:
    text = report.table(["model", "a"], [["mlp", "1.00"], ["resnet50", "-"]])
    assert text.splitlines() == [
        "model        a",
        "--------  ----",
        "mlp       1.00",
        "resnet50     -",
    ]


def test_the_report_shows_everything() -> None:
    text = report.render(_result())
    assert re.search(r"nanotf\.map +7\.00? +4\.00? +2\.00 +25%", text)
    for part in (
        "num_processes=2, adam, rounds=2",
        "Other programs used 0% of all cores during the blocks",
        "0.80 (0.80-0.80)",
        "geometric mean",
        "MISSED",
        "Did not work\ncnn grpc: ended with exit code -9",
        "1.09 GB beyond the user's own copy",
        "98,566,144",
        "All-reduce of 2 hosts with 2 ranks each",
        "4,194,304           10.00          15.00  1.50 (1.20-1.70)",
        "RecordIO   native        100,000  900.0      9,000         900.0",
    ):
        assert part in text


def test_precisions_are_compared_with_the_first_of_their_model() -> None:
    found = [("CNN", "float32", 3.0), ("CNN", "policy", 2.0), ("MLP", "float32", 1.0)]
    rows = [{"model": m, "way": w, "seconds": s, "accuracies": [0.5, 1.0]} for m, w, s in found]
    _, _, *lines = report.precisions(rows).splitlines()
    assert [line.split()[3:] for line in lines] == [
        ["1.00", "75.00%", "50.00%", "100.00%"],
        ["1.50", "75.00%", "50.00%", "100.00%"],
        ["1.00", "75.00%", "50.00%", "100.00%"],
    ]


def test_the_largest_distributions_of_an_installation_and_nanotf() -> None:
    sizes = {"tiny": 1_000, "tensorflow": 900_000_000, "nanotf": 2_000_000, "numpy": 70_000_000}
    result = {"environment": 3.2, "seconds": 61.0, "sizes": sizes}
    made, _, _, *rows = report.install(result, shown=2).splitlines()
    assert made == "3 s for the environment, 61 s for pip"
    assert [row.split("  ")[0] for row in rows] == ["tensorflow", "numpy", "nanotf", "all 4"]
    assert rows[-1].endswith(" 972.0")


def test_a_noisy_machine_is_reported() -> None:
    result = _result()
    result["models"]["cnn"]["contestants"]["shm"]["others"] = [0.4, 0.5]
    assert "THE MACHINE WAS NOT QUIET" in report.render(result)


def test_the_report_of_nothing() -> None:
    assert "not measured" in report.render({})


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        ("AVX-512 BF16", "This processor computes it by AVX-512 BF16."),
        ("", "This processor has no instructions for it."),
        (None, "not measured."),
    ],
)
@pytest.mark.parametrize(("step", "gain"), [(0.00625, "a gain, 2.00"), (0.0125, "no gain, 1.00")])
def test_gain_of_bfloat16(instructions: str | None, words: str, step: float, gain: str) -> None:
    result = _result()
    result["machine"]["bfloat16"] = instructions
    result["models"]["cnn"]["contestants"]["shm_bf16"] = _contestant(step)
    text = report.render(result)
    assert f"nanotf: {gain} in the geometric mean; CNN 32x32" in text
    assert "Plain Keras: not measured." in text
    assert words in text
    assert ("This processor" in text) == (instructions is not None)


def test_without_bfloat16_it_is_not_mentioned() -> None:
    assert "bfloat16" not in report.render(_result())


def test_bfloat16_policy_applies_to_one_model_only() -> None:
    policies = []

    class Policies:
        set_global_policy = policies.append

    class Keras:
        mixed_precision = Policies

    for precision in ("float32", "mixed_bfloat16"):
        spec = dataclasses.replace(
            MODELS["mlp"], build=lambda _: tuple(policies), precision=precision
        )
        built = spec._built(Keras)
        assert built == (() if precision == "float32" else ("mixed_bfloat16",))
    assert policies == ["mixed_bfloat16", "float32"]  # the next model's layers are float32 again


# ----------------------------------------------------------------------------- the chart
@pytest.mark.parametrize("parts", [("models", "collectives"), ("models",), ("collectives",)])
def test_the_chart_is_drawn(parts: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    result = {key: value for key, value in _result().items() if key in (*parts, "options")}
    chart.draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- scaling, forecast
def test_numbers_of_workers_are_powers_of_two_and_all_cores() -> None:
    assert scaling.numbers_of_workers(1) == ()
    assert scaling.numbers_of_workers(2) == (2,)
    assert scaling.numbers_of_workers(16) == (2, 4, 8, 16)
    assert scaling.numbers_of_workers(56) == (2, 4, 8, 16, 32, 56)


def test_scaling_options(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = scaling.parse(["--quick", "--processes", "2", "4", "--batch-size", "64"])
    assert chosen.models == scaling.QUICK_MODELS and chosen.processes == (2, 4)
    with pytest.raises(SystemExit):
        scaling.parse(["--processes", "8", "--batch-size", "4"])
    assert "Received: --batch-size 4 and 8 workers" in capsys.readouterr().err


def test_scaling_report() -> None:
    by_round = [
        {"plain": {"step": 0.2}, "nanotf": {"step": 0.1}},
        {"plain": {"step": 0.6}, "nanotf": {"step": 0.2}},
        {"plain": {"step": 0.1}, "nanotf": {"step": None}},
    ]
    assert scaling.speed_up(by_round) == pytest.approx(2.5)
    result = {
        "options": {"processes": [2, 4], "batch_size": 64, "rounds": 3},
        "machine": {"nanotf": "0.1.0", "cpu": "a CPU", "cores": 4},
        "models": {"mlp": {"title": "MLP", "batch_size": 64, "workers": {"2": by_round}}},
        "all_reduce": {"2": [{"bytes": n, "seconds": 1e-9 * n} for n in scaling.SIZES]},
        "problems": ["mlp: it ended"],
    }
    text = scaling.render(result)
    (row,) = (line for line in text.splitlines() if line.startswith("MLP"))
    assert row.split() == ["MLP", "320", "2.50", "-"]
    assert "1,048.6 us, 1.0 GB/s" in text and "mlp: it ended" in text


def test_forecast() -> None:
    # A step of 2 ms and 0.1 ms per row; threads shorten nine tenths of it.
    facts = forecast.Facts.of(100, 0.012, 0.002 + 1e-4 * 100 / forecast.FEW, 0.0066, 2, 0.001)
    assert facts.fixed == pytest.approx(0.002) and facts.per_row == pytest.approx(1e-4)
    assert facts.serial == pytest.approx(0.1)
    assert facts.plain(8) == pytest.approx(0.012 * (0.1 + 0.9 / 8))
    assert facts.nanotf(8, 2) == pytest.approx(0.007 * (0.1 + 0.9 / 4) + 0.001)
    speed_up, workers = facts.best(8)
    assert speed_up == pytest.approx(max(facts.plain(8) / facts.nanotf(8, n) for n in (2, 4, 8)))
    assert speed_up == facts.plain(8) / facts.nanotf(8, workers)
