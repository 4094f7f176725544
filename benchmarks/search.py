"""`python -m benchmarks.search`: trials a minute, against Optuna's threads (`n_jobs`).

Both train the same models: a small MLP with the parameters of the same random trials, without
pruning. Optuna's threads share one process, its TensorFlow and all cores.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import nanotf

SPACE = {"units": (64, 256), "rate": (1e-4, 1e-2, "log")}


def build(units: int, rate: float) -> Any:
    """Returns the model of a trial."""
    import tensorflow as tf

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(units, "relu"),
            tf.keras.layers.Dense(units, "relu"),
            tf.keras.layers.Dense(10, "softmax"),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    return model


def data(rows: int) -> tuple[Any, Any]:
    """Returns random images and labels."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(rows, 784)).astype("float32"), draw.integers(0, 10, rows)


def by_nanotf(trials: int, parallel: int, x: Any, y: Any) -> None:
    """Searches with workers."""
    import optuna

    nanotf.search(
        build,
        SPACE,
        (x, y),
        "loss",
        trials,
        parallel,
        sampler=optuna.samplers.RandomSampler,
        pruner=optuna.pruners.NopPruner(),
        seed=0,
        verbose=0,
    )


def by_threads(trials: int, threads: int, x: Any, y: Any) -> None:
    """Searches with Optuna's threads, in this process."""
    import optuna

    def objective(trial: Any) -> float:
        units = trial.suggest_int("units", 64, 256)
        model = build(units, trial.suggest_float("rate", 1e-4, 1e-2, log=True))
        return float(model.fit(x, y, verbose=0).history["loss"][-1])

    sampler = optuna.samplers.RandomSampler(seed=0)
    optuna.create_study(sampler=sampler).optimize(objective, n_trials=trials, n_jobs=threads)


def main() -> None:
    """Measures each way once cold, then in turns, and prints the medians."""
    import optuna

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y = data(options.rows)
    ways: dict[str, Callable[[], None]] = {
        f"Optuna, n_jobs={n}": functools.partial(by_threads, options.trials, n, x, y)
        for n in sorted({1, options.workers})
    }
    name = f"nanotf.search, parallel={options.workers}"
    ways[name] = functools.partial(by_nanotf, options.trials, options.workers, x, y)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + options.rounds):
        for name, way in ways.items():
            started = time.monotonic()
            way()
            seconds[name].append(time.monotonic() - started)
            print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    print(f"{options.trials} trials; s, first run and median of {options.rounds} later ones")
    for name, (cold, *warm) in seconds.items():
        print(f"{name:<32} {cold:8.1f} {float(np.median(warm)):8.1f}")


if __name__ == "__main__":
    main()
