"""Measures Pipe mode: `python -m benchmarks.records [--quick]`.

A feeder process writes a file to FIFOs, and this process, pinned to one core, reads them as a
`PipeModeDataset` in batches. `tf.data.TFRecordDataset` reads the same TFRecords from a regular
file, and cannot read a FIFO. Each figure is the best of several
epochs; the first, which traces the pipeline, does not count. MB per second of processor time tell
what a core reads when other programs do not share it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.apart import ROOT

FORMATS = ("RecordIO", "TFRecord", "TextLine")
SIZES = (100_000, 100)  # bytes of a record
EPOCHS = 4
QUICK_MB, MB = 40, 200


def _write(path: pathlib.Path, record_format: str, size: int, count: int) -> None:
    import tensorflow as tf

    from nanotf.sagemaker.pipes.channel_feeder import as_record

    payload = bytes(32 + i % 90 for i in range(size))
    if record_format == "TFRecord":
        with tf.io.TFRecordWriter(str(path)) as writer:
            for _ in range(count):
                writer.write(payload)
        return
    whole = {
        "RecordIO": b"".join(as_record(io.BytesIO(payload))),
        "TextLine": payload + b"\n",
    }
    with path.open("wb") as file:
        for _ in range(count):
            file.write(whole[record_format])


def _best(dataset: Any, size: int, epochs: int) -> tuple[float, float, int]:
    """Returns the least seconds of an epoch, of wall and processor time, and its records."""
    batches = dataset.batch(10 if size > 1000 else 1000).prefetch(2)
    walls, processors, records = [], [], 0
    for _ in range(epochs):
        wall, processor, records = time.perf_counter(), time.process_time(), 0
        for batch in batches:
            records += int(batch.shape[0])
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls[1:]), min(processors[1:]), records


def measure(record_format: str, size: int, count: int, reader: str) -> dict[str, Any]:
    """Measures one way to read.

    Args:
        record_format: str, one of `FORMATS`.
        size: int, bytes of a record.
        count: int, records of an epoch.
        reader: str, "native", or "tf.data" for a `TFRecordDataset`.

    Returns:
        dict of `format`, `reader`, `bytes` (of a record), `megabytes` (of payload per second),
        `records` (per second), and `per_processor` (MB per second of this process's processor
        time).

    Raises:
        RuntimeError: A record is missing.
    """
    import tensorflow as tf

    from nanotf.data import PipeModeDataset

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _write(folder / "file", record_format, size, count)
        if reader == "tf.data":
            wall, processor, records = _best(
                tf.data.TFRecordDataset(str(folder / "file")), size, EPOCHS
            )
        else:
            (folder / "inputdataconfig.json").write_text(
                json.dumps({"c": {"TrainingInputMode": "Pipe"}})
            )
            with _feeder(folder):
                dataset = PipeModeDataset("c", record_format, folder, folder, folder)
                wall, processor, records = _best(dataset, size, EPOCHS)
    if records != count:
        raise RuntimeError(f"{records} of {count} records were read")
    megabytes = size * count / 1e6
    return {
        "format": record_format,
        "reader": reader,
        "bytes": size,
        "megabytes": megabytes / wall,
        "records": count / wall,
        "per_processor": megabytes / processor,
    }


def _feeder(folder: pathlib.Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nanotf.data.feed", "--source", str(folder / "file")]
    command += ["--pipe-dir", str(folder), "--channel", "c", "--epochs", str(EPOCHS)]
    cores = _other_cores()
    return subprocess.Popen(
        command, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, cores) if cores else None
    )


_CORES = sorted(os.sched_getaffinity(0))


def _other_cores() -> list[int]:
    return _CORES[1:]


def measure_all(quick: bool) -> list[dict[str, Any]]:
    """Measures all formats, sizes and readers. Pins this process to one core.

    Args:
        quick: bool, True for less data.
    """
    os.sched_setaffinity(0, _CORES[:1])  # before TensorFlow makes its threads
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = []
    for size in SIZES:
        for record_format in FORMATS:
            extra = ("tf.data",) if record_format == "TFRecord" else ()
            for reader in ("native", *extra):
                amount = QUICK_MB if quick or size < 1000 else MB
                rows.append(measure(record_format, size, amount * 1_000_000 // size, reader))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data, rougher figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    rows = measure_all(options.quick)
    print(json.dumps(rows) if options.json else report.records(rows))


if __name__ == "__main__":
    main()
