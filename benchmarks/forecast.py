"""Forecast for machines with more cores than this one: `python -m benchmarks.forecast`.

A calculation, not a measurement, and up to 4.6 times too much for models that one process spreads
over many cores (docs/explanation/measurements.md). Its inputs are measured here, for each model:

- `t(B) = f + r B`: the time of a step of B rows in one process on one core, from two batch sizes;
- `s`: the part of it that more threads do not shorten, from the same step on all cores C of this
  machine: `t(B, C) = t(B) (s + (1 - s) / C)`, which is Amdahl's law;
- `b`: the bytes of gradients, and `x2`: the time of an all-reduce of them between two workers.

It assumes that memory and caches serve any number of cores as well as these, that N workers
exchange in `x2 (N - 1) / N * 2` (the bytes that each reads from the others, see `native/layout.h`),
and that the optimizer's update, which nanotf divides, is not divided. Then, on C cores,

    plain(C)     = t(B) (s + (1 - s) / C)
    nanotf(C, N) = t(B / N) (s + (1 - s) N / C) + x(N)

The report gives `max over N of plain(C) / nanotf(C, N)`, and that N.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import nanotf
from benchmarks import collectives, options, report, rounds
from benchmarks.contestants import Contestant, Setting
from benchmarks.models import MODELS, chosen

CORES = (8, 16, 32, 56, 112)
BATCH_SIZE = 256
FEW = 8  # how many times fewer rows the smaller batch has
SECONDS = 1.0  # of a block
DEFAULT_MODELS = ("mlp", "cnn", "lstm", "text", "transformer", "mobilenetv2", "resnet50")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Measurements of a model.

    Args:
        rows: int, of a batch.
        fixed, per_row: float, seconds of a step on one core, see above.
        serial: float, 0 to 1, the part that threads do not shorten.
        exchange: float, seconds of an all-reduce of the gradients between two workers.
    """

    rows: int
    fixed: float
    per_row: float
    serial: float
    exchange: float

    @classmethod
    def of(
        cls, rows: int, one: float, few: float, all_cores: float, cores: int, exchange: float
    ) -> Facts:
        """Returns the facts that follow from measured steps.

        Args:
            rows: int, of a batch.
            one, few: float, seconds of a step of `rows` and of `rows / FEW` rows, on one core.
            all_cores: float, seconds of a step of `rows` rows on `cores` cores.
            cores: int, at least 2.
            exchange: float, as above.
        """
        per_row = max(0.0, (one - few) / (rows - rows / FEW))
        serial = (all_cores / one - 1 / cores) / (1 - 1 / cores)
        fixed = max(0.0, one - per_row * rows)
        return cls(rows, fixed, per_row, min(max(serial, 0.0), 1.0), exchange)

    def plain(self, cores: int) -> float:
        """Returns the seconds of a step in one process."""
        return self._step(self.rows, cores)

    def nanotf(self, cores: int, workers: int) -> float:
        """Returns the seconds of a step with N workers."""
        exchange = self.exchange * 2 * (workers - 1) / workers
        return self._step(self.rows / workers, cores / workers) + exchange

    def best(self, cores: int) -> tuple[float, int]:
        """Returns the largest speed-up and its number of workers; tries all divisors of `cores`."""
        numbers = [n for n in range(2, min(cores, self.rows) + 1) if cores % n == 0]
        workers = min(numbers, key=lambda n: self.nanotf(cores, n))
        return self.plain(cores) / self.nanotf(cores, workers), workers

    def _step(self, rows: float, cores: float) -> float:
        return (self.fixed + self.per_row * rows) * (self.serial + (1 - self.serial) / cores)


def measure(model: str, logs: pathlib.Path) -> tuple[Facts, float]:
    """Measures a model.

    Returns:
        A tuple of `Facts` and of the bytes of its gradients.
    """
    cores = nanotf.plan(1).cores()
    few = BATCH_SIZE // FEW
    one = _seconds(model, BATCH_SIZE, cores[:1], logs)
    less = _seconds(model, few, cores[:1], logs)
    together = _seconds(model, BATCH_SIZE, cores, logs)
    nbytes = _gradient_bytes(model)
    (row,) = collectives.measure(2, (nbytes,))
    return Facts.of(BATCH_SIZE, one, less, together, len(cores), row["seconds"]), nbytes


def _seconds(model: str, batch_size: int, cores: Sequence[int], logs: pathlib.Path) -> float:
    spec = chosen(model, "", batch_size)
    setting = Setting(2, logs, batch_size=batch_size)
    contestant = Contestant("plain", model, setting, cores=tuple(cores))
    try:
        contestant.prepare(rounds.WARM_UP_STEPS)
        contestant.run(rounds.WARM_UP_STEPS, 1)
        rough = contestant.run(rounds.WARM_UP_STEPS, 1).step or SECONDS / rounds.MIN_STEPS
        steps = rounds.steps_of_epoch(rough, SECONDS, spec)
        contestant.prepare(steps)
        found = min(contestant.run(steps, 1).step or rough for _ in range(3))
    finally:
        contestant.end()
    return found


def _gradient_bytes(model: str) -> int:
    import tensorflow as tf

    inputs, outputs = MODELS[model].build(tf.keras)
    made = tf.keras.Model(inputs, outputs)
    return 4 * int(sum(weight.shape.num_elements() for weight in made.trainable_weights))


def render(found: Mapping[str, tuple[Facts, float]]) -> str:
    """Returns two tables: the measurements, and the forecast."""
    facts = [
        [
            MODELS[name].title,
            report.number(f.fixed * 1e3, 1),
            report.number(f.per_row * 1e6, 1),
            report.number(f.serial),
            report.number(nbytes / 1e6, 1),
            report.number(f.exchange * 1e3),
        ]
        for name, (f, nbytes) in found.items()
    ]
    rows = []
    for name, (f, _) in found.items():
        best = [f.best(cores) for cores in CORES]
        rows.append([MODELS[name].title, *(f"{up:.1f} (N={n})" for up, n in best)])
    return "\n\n".join(
        [
            "Measured on this machine\n"
            + report.table(
                ["model", "f, ms", "r, us a row", "s", "gradients, MB", "x2, ms"], facts
            ),
            f"Speed-up over plain Keras, batch {BATCH_SIZE}, on paper\n"
            + report.table(["model", *(f"{cores} cores" for cores in CORES)], rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forecast",
        description="Predicts the speed-up of more cores from this machine's steps.",
        allow_abbrev=False,
    )
    parser.add_argument("--models", type=options.names(MODELS), metavar="A,B")
    given: Any = parser.parse_args(arguments)
    if len(nanotf.plan(1).cores()) < 2:
        parser.error("two cores are needed to measure the gain of threads.")
    logs = options.DEFAULT_OUTPUT / "logs" / "forecast"
    found = {}
    for model in given.models or DEFAULT_MODELS:
        print(model, file=sys.stderr, flush=True)
        found[model] = measure(model, logs)
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
