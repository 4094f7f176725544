"""Measures a model in one process and in two parts: `python -m benchmarks.partitions [--help]`.

Six dense layers train with Adam through `smp.DistributedModel.from_keras`: in one process with all
cores, and in two partitions with half of them each, with both pipelines. A step's time is that from
the end of one to the end of the next, so it includes Keras's work between steps. The memory is that
of `smp.last_report`: the peak is the largest resident memory of a process, TensorFlow included.

`--memory` trains in plain scripts instead, in which `fit` starts the ranks, and sums up the memory
of all processes, next to Keras alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from benchmarks import apart, report

SCRIPT = apart.ROOT / "benchmarks" / "partitions_script.py"
PLAIN_SCRIPTS = ((0, 1), (2, 1), (2, 2))  # partitions, 0 for Keras alone, and microbatches
WAYS = (  # partitions, microbatches, pipeline
    (1, 1, "simple"),
    (1, 4, "simple"),
    (2, 1, "simple"),
    (2, 4, "simple"),
    (2, 4, "interleaved"),
)


def compare(units: int, rows: int, layers: int) -> list[dict[str, Any]]:
    """Trains in each way.

    Args:
        units: int, of each layer.
        rows: int, of a batch.
        layers: int, of the model, and a small last one.

    Returns:
        list of dict, for each way: `partitions`, `microbatches`, `pipeline` (None with one
        partition), `seconds` (median) and `fastest` of a step; lists by rank of bytes: `weights`,
        `others` (slots and all other variables) and `peaks`.
    """
    size = units, rows, layers
    return [
        apart.run("nanotf", "run", "--smp", "-n", partitions, SCRIPT, partitions, *how, *size)
        for partitions, *how in WAYS
    ]


def compare_memory(units: int, rows: int, layers: int) -> list[dict[str, Any]]:
    """Trains in plain scripts; see `compare` for the arguments.

    Returns:
        list of dict, for each way: `partitions` (0 for Keras alone), `microbatches`, and the most
        bytes that training adds: `private`, in all processes; `largest`, in one; `parent`, in the
        script's own while it trains; `shared`, which processes map.
    """
    module = "benchmarks.partitions_memory"
    return [apart.run(module, *how, units, rows, layers) for how in PLAIN_SCRIPTS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitions", description=__doc__)
    parser.add_argument("--units", type=int, default=2048, help="of each layer, default 2048")
    parser.add_argument("--rows", type=int, default=128, help="of a batch, default 128")
    parser.add_argument("--layers", type=int, default=6, help="of the model, default 6")
    parser.add_argument("--memory", action="store_true", help="of all processes of plain scripts")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    measure, table = compare, report.partitions
    if options.memory:
        measure, table = compare_memory, report.partitions_memory
    rows = measure(options.units, options.rows, options.layers)
    if options.json:
        print(json.dumps(rows))
    else:
        title = f"{options.layers} dense layers of {options.units} units, {options.rows} rows"
        print(f"{title}, {os.cpu_count()} logical CPUs\n" + table(rows))


if __name__ == "__main__":
    main()
