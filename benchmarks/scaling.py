"""Measures how training scales with the number of workers: `python -m benchmarks.scaling`.

For each model, nanotf trains with N = 2, 4, 8, ... workers and with one worker per core, each on
its part of all usable cores. Plain Keras trains in one process on all of these cores, with the same
global batch. Their blocks take turns. The report gives the median over the rounds of ratios within
a round, of steps alone; see the top of the package. The all-reduce is also timed for each N.

Writes `scaling.json`, `scaling.txt` and, with matplotlib, `scaling.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import nanotf
from benchmarks import cli, collectives, options, ratios, report, rounds
from benchmarks.contestants import Contestant, ContestantError, Setting
from benchmarks.models import MODELS, Model, chosen
from nanotf import errors

DEFAULT_MODELS = ("mlp", "cnn", "lstm", "text", "transformer", "mobilenetv2", "resnet50")
QUICK_MODELS = ("mlp", "cnn", "lstm")
BATCH_SIZE = 256  # of all models: a server's, and a power of two for every N
SIZES = (1 << 10, 1 << 20, 16 << 20, 94 << 20)  # bytes of an all-reduce
WARM_UP_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurements to make.

    Args:
        models: tuple of str, keys of `MODELS`.
        processes: tuple of int, numbers of workers, each at least 2.
        batch_size: int, of all workers together.
        rounds: int.
        epoch_seconds: float, approximate length of a block of plain Keras.
        output: path of a directory.
    """

    models: tuple[str, ...]
    processes: tuple[int, ...]
    batch_size: int
    rounds: int
    epoch_seconds: float
    output: pathlib.Path


def numbers_of_workers(cores: int) -> tuple[int, ...]:
    """Returns the powers of two from 2 up to a number of cores, and that number."""
    powers = [1 << n for n in range(1, cores.bit_length()) if 1 << n <= cores]
    return tuple(dict.fromkeys([*powers, *([cores] if cores > 1 else [])]))


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parses the command line; an invalid one ends the program with a one-line error."""
    cores = len(nanotf.plan(1).cores())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description="Trains models with plain Keras and with 2, 4, 8, ... workers, and compares.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--models",
        type=options.names(MODELS),
        metavar="A,B",
        help=f"of {', '.join(MODELS)}; default {', '.join(DEFAULT_MODELS)}",
    )
    add(
        "--processes",
        type=options.whole(2),
        nargs="+",
        metavar="N",
        help="numbers of workers; default 2, 4, 8, ... and the number of cores",
    )
    add("--batch-size", type=options.whole(2), default=BATCH_SIZE, metavar="N", help="default 256")
    add("--rounds", type=options.whole(1), metavar="N", help="default 5, quick 2")
    add("--quick", action="store_true", help="three models, shorter and fewer rounds")
    add("--output", type=pathlib.Path, default=options.DEFAULT_OUTPUT, metavar="DIR")
    given = parser.parse_args(arguments)
    processes = tuple(given.processes or numbers_of_workers(cores))
    if not processes:
        parser.error("a machine with one usable core has nothing to divide.")
    if given.batch_size < max(processes):
        parser.error(
            "--batch-size must be at least the number of workers. "
            f"Received: --batch-size {given.batch_size} and {max(processes)} workers."
        )
    return Options(
        given.models or (QUICK_MODELS if given.quick else DEFAULT_MODELS),
        processes,
        given.batch_size,
        given.rounds or (2 if given.quick else 5),
        0.6 if given.quick else 1.0,
        given.output.resolve(),
    )


Say = Callable[[str], None]


def measure(wanted: Options, say: Say) -> dict[str, Any]:
    """Runs the chosen measurements. Returns the content of `scaling.json`."""
    problems: list[str] = []
    result: dict[str, Any] = {
        "options": {**dataclasses.asdict(wanted), "output": str(wanted.output)},
        "machine": cli.machine(),
        "models": {},
        "all_reduce": {},
        "problems": problems,
    }
    for size in wanted.processes:
        say(f"all-reduce of {size} workers")
        result["all_reduce"][size] = collectives.measure(size, SIZES)
    logs = wanted.output / "logs" / "scaling"
    setting = Setting(max(wanted.processes), logs, batch_size=wanted.batch_size)
    for model in wanted.models:
        spec = chosen(model, "", wanted.batch_size)
        found: dict[int, Any] = {}
        result["models"][model] = {
            "title": spec.title,
            "batch_size": spec.batch_size,
            "workers": found,
        }
        pair: list[Contestant] = []
        try:
            for name in ("plain", "shm"):
                pair.append(Contestant(name, model, setting))
            for size in wanted.processes:
                found[size] = _compare(pair, model, spec, size, wanted)
                plain, ours = found[size][0]["plain"], found[size][0]["nanotf"]
                say(f"{model}, {size} workers: {plain['step'] / ours['step']:.2f}")
            result["machine"].setdefault("tensorflow", pair[0].ready["tensorflow"])
            result["machine"].setdefault("keras", pair[0].ready["keras"])
        except ContestantError as error:
            problems.append(f"{model}: {error}")
            say(problems[-1])
        finally:
            for contestant in pair:
                contestant.end()
    return result


def _compare(
    pair: Sequence[Contestant], model: str, spec: Model, size: int, wanted: Options
) -> list[dict[str, Any]]:
    """Runs plain Keras and `size` workers in turn. Returns each `timeline.Block`, as a dict."""
    plain, ours = pair
    ours.change(model, size)
    for contestant in pair:
        contestant.prepare(WARM_UP_STEPS)
        contestant.run(WARM_UP_STEPS, 1)
    rough = plain.run(WARM_UP_STEPS, 1).step or wanted.epoch_seconds / rounds.MIN_STEPS
    steps = rounds.steps_of_epoch(rough, wanted.epoch_seconds, spec)
    for contestant in pair:
        contestant.prepare(steps)
    made = []
    for _ in range(wanted.rounds):
        blocks = [dataclasses.asdict(contestant.run(steps, 1)) for contestant in pair]
        made.append(dict(zip(("plain", "nanotf"), blocks, strict=True)))
    return made


def speed_up(by_round: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the median over rounds of plain Keras's time of a step over nanotf's."""
    plain, ours = ([r[who]["step"] for r in by_round] for who in ("plain", "nanotf"))
    return ratios.median_ratio(plain, ours)


def render(result: Mapping[str, Any]) -> str:
    """Returns the tables: speed-up by model and number of workers, and the all-reduce."""
    about, models = result["machine"], result["models"]
    sizes = [str(size) for size in result["options"]["processes"]]
    header = ["model", "plain, rows/s", *(f"{size} workers" for size in sizes)]
    rows = []
    for model in models.values():
        workers = {str(size): by_round for size, by_round in model["workers"].items()}
        plain = ratios.median(r["plain"]["step"] for found in workers.values() for r in found)
        rate = None if plain is None else model["batch_size"] / plain
        ups = [speed_up(workers.get(size, ())) for size in sizes]
        rows.append([model["title"], report.number(rate, 0), *map(report.number, ups)])
    means = [
        ratios.geometric_mean(
            speed_up({str(k): v for k, v in m["workers"].items()}.get(size, ()))
            for m in models.values()
        )
        for size in sizes
    ]
    rows.append(["geometric mean", "", *map(report.number, means)])
    exchange = [
        [
            str(size),
            *(
                f"{row['seconds'] * 1e6:,.1f} us, {row['bytes'] / row['seconds'] / 1e9:.1f} GB/s"
                for row in found
            ),
        ]
        for size, found in result["all_reduce"].items()
    ]
    parts = [
        f"nanotf {about['nanotf']}, TensorFlow {about.get('tensorflow', '?')}; {about['cpu']}, "
        f"{about['cores']} cores; batch {result['options']['batch_size']}, "
        f"rounds={result['options']['rounds']}",
        "Steps a second, plain Keras on all cores = 1\n" + report.table(header, rows),
        "All-reduce\n"
        + report.table(["workers", *(f"{nbytes:,} bytes" for nbytes in SIZES)], exchange),
    ]
    if result["problems"]:
        parts.append("Did not work\n" + "\n".join(result["problems"]))
    return "\n\n".join(parts)


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG: speed-up over the number of workers, a line for each model.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for model in result["models"].values():
        points = [(int(n), speed_up(found)) for n, found in model["workers"].items()]
        known = [(n, value) for n, value in points if value is not None]
        axes.plot(*zip(*known, strict=True), marker="o", label=model["title"])
    sizes = list(result["options"]["processes"])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xlabel(f"workers, on {result['machine']['cores']} cores together")
    axes.set_ylabel("steps a second, plain Keras = 1")
    axes.set_title(f"{result['machine']['cpu']}, batch {result['options']['batch_size']}")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement. Returns 0, 1 if a measurement failed, 2 if an option is invalid."""
    wanted = parse(arguments)
    try:
        for size in wanted.processes:
            nanotf.plan(size)
    except errors.NanoError as error:
        print(f"python -m benchmarks.scaling: {error}", file=sys.stderr)
        return 2
    wanted.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    result = measure(wanted, say)
    (wanted.output / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    text = render(result)
    (wanted.output / "scaling.txt").write_text(text + "\n")
    print(text)
    try:
        draw(result, wanted.output / "scaling.png")
    except ImportError:
        print("No chart: pip install 'matplotlib>=3.8'", file=sys.stderr)
    print(f"\nscaling.json, scaling.txt and the chart are in {wanted.output}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
