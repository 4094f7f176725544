"""The checks of `nanotf doctor --test`: run as a program, trains and sums on two workers.

Runs in a separate process, so that even a crash of TensorFlow is a result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from nanotf.errors import describe_exit
from nanotf.machine.interpreter import python_command

SECONDS = 300.0  # three imports of TensorFlow, from a cold network file system
WORKERS = 2
SIZES = (1, 1000, 1_000_003)  # elements of the sums: one, a few, more than a chunk
TOLERANCE = 1e-4  # relative, of float32 losses


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    passed: bool
    text: str  # the result in words: the measured difference, or the error


def run_trial() -> tuple[Check, ...]:
    """Runs the checks in a separate process."""
    process = subprocess.Popen(
        python_command("nanotf.cli.self_test"),
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)  # its workers exit with it
        process.communicate()  # leaves no zombie and no open pipes
        return (Check("two workers", False, f"it did not end within {SECONDS:.0f} s"),)
    lines = out.splitlines()
    if process.returncode or not lines:
        last = (said.strip().splitlines() or ["it printed nothing"])[-1]
        text = f"it {describe_exit(process.returncode)[0]}: {last}"
        return (Check("two workers", False, text),)
    return tuple(Check(**check) for check in json.loads(lines[-1]))  # libraries may print before


def _training() -> str:
    """Trains a small model with one process and with two."""
    import numpy as np
    import tensorflow as tf

    from nanotf.keras import Sequential

    layers = tf.keras.layers
    # 101 rows in batches of 20: the last has one row for two workers.
    x = np.random.default_rng(0).normal(size=(101, 8)).astype("float32")
    losses: list[list[float]] = []
    for processes in (None, WORKERS):
        tf.keras.utils.set_random_seed(1)  # the same weights at the start of both
        model: Any = Sequential(
            [layers.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)]
        )
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        history = model.fit(
            x, x.sum(1), batch_size=20, epochs=2, shuffle=False, verbose=0, num_processes=processes
        )
        losses.append([float(loss) for loss in history.history["loss"]])
    single, double = losses
    off = max(abs(a - b) / abs(a) for a, b in zip(single, double, strict=True))
    _must(off <= TOLERANCE, f"losses of one process {single}, of two {double}")
    return f"losses of one process and of two differ by {off:.0e} ({single[-1]:.4f})"


def _sums() -> str:
    """Sums numbers over two workers, in each dtype that gradients have."""
    import numpy as np
    import tensorflow as tf

    import nanotf
    from nanotf.keras import nano

    @nano(num_processes=WORKERS)
    def add(sizes: tuple[int, ...], types: tuple[str, ...]) -> Any:
        strategy, found = nanotf.get_strategy(), []
        for size in sizes:
            for dtype in types:
                # Small whole numbers, so that the sum is exact in every type.
                mine = tf.cast(tf.range(size) % 50 * (nanotf.rank() + 1), dtype)
                of_replicas = strategy.run(lambda value: value, args=(mine,))
                total = strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)
                found.append(np.asarray(tf.cast(total, "float32")))
        return found

    types = ("float32", "float64", "bfloat16")
    sums = iter(add(SIZES, types))
    for size in SIZES:
        for dtype in types:
            expected = np.arange(size) % 50 * 3  # ranks 0 and 1 add 1 and 2 times the number
            is_right = np.array_equal(next(sums), expected)
            _must(is_right, f"wrong sum of {size} numbers, {dtype}")
    return f"exact for {', '.join(map(str, SIZES))} numbers of {', '.join(types)}"


def _must(is_right: bool, text: str) -> None:
    """Raises if a number is wrong. No `assert`: PYTHONOPTIMIZE would leave it out."""
    if not is_right:
        raise ArithmeticError(text)


def _check(name: str, function: Callable[[], str]) -> Check:
    try:
        return Check(name, True, function())
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    checks = [_check("training", _training), _check("all-reduce", _sums)]
    print(json.dumps([asdict(check) for check in checks]))
