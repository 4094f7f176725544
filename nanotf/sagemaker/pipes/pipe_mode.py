"""`PipeModeDataset`: a channel's FIFOs as a `tf.data.Dataset`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanotf.collectives import native_library
from nanotf.compat.generators import from_generator
from nanotf.compat.versions import require_tensorflow
from nanotf.console import say
from nanotf.errors import InvalidArgumentError, check_choice
from nanotf.sagemaker.pipes import pipe_files
from nanotf.sagemaker.pipes.pipe_files import PipeModeDatasetException
from nanotf.sagemaker.pipes.records import FORMATS, RecordReader


def PipeModeDataset(
    channel: str,
    record_format: str = "RecordIO",
    state_dir: str | os.PathLike[str] | None = None,
    pipe_dir: str | os.PathLike[str] | None = None,
    config_dir: str | os.PathLike[str] | None = None,
    benchmark: bool = False,
    benchmark_records_interval: int = 0,
    max_corrupted_records_to_skip: int = 0,
) -> Any:
    """Makes a dataset of the records of a Pipe mode channel.

    Every iterator reads the next FIFO of the channel, `<pipe_dir>/<channel>_<n>`, from its first
    element on: one epoch. `repeat(k)` reads k of them. It has the name and arguments of
    sagemaker_tensorflow's class.

    Args:
        channel: str, the channel's name.
        record_format: str, "RecordIO" (the default), "TFRecord" or "TextLine".
        state_dir: path of the folder that holds the index of the next FIFO. Default:
            pipe_state in the folder of the job.
        pipe_dir: path of the folder of the FIFOs, default input/data in the folder of the job.
        config_dir: path of the folder of inputdataconfig.json, default input/config in the folder
            of the job.
        benchmark: bool, default False; True prints records and MB per second of each epoch.
        benchmark_records_interval: int, default 0: with `benchmark`, also prints them after every
            so many records.
        max_corrupted_records_to_skip: int, per epoch, default 0. Only for "TFRecord": records
            whose data do not match their checksum. A wrong checksum of a length always raises.

    Returns:
        A `tf.data.Dataset` of scalars, `tf.string`.

    Raises:
        NanoError: nanotf's native library is missing.
        PipeModeDatasetException: The job has no such channel, it is not in Pipe mode, or an
            argument does not match the format.
        InvalidArgumentError: An argument cannot be used.

    Environment variables read: `SAGEMAKER_BASE_DIR`, the folder of the job; default /opt/ml.

    Example:
        ```python
        dataset = PipeModeDataset("train", record_format="TFRecord").map(parse).batch(64)
        model.fit(dataset, num_processes=2)
        ```
    """
    native_library.check_available("`PipeModeDataset` needs")
    base = pipe_files.base_folder()
    check_choice("record_format", record_format, tuple(FORMATS))
    for name, value in (
        ("benchmark_records_interval", benchmark_records_interval),
        ("max_corrupted_records_to_skip", max_corrupted_records_to_skip),
    ):
        if value < 0:
            raise InvalidArgumentError(f"`{name}` must be 0 or more. Received: {name}={value}.")
    if max_corrupted_records_to_skip and record_format != "TFRecord":
        raise PipeModeDatasetException(
            "max_corrupted_records_to_skip can only be used with record_format TFRecord. Received: "
            f"record_format={record_format!r}, max_corrupted_records_to_skip="
            f"{max_corrupted_records_to_skip}. Other formats have no checksums; leave it out."
        )
    pipe_files.check_channel(channel, Path(config_dir or base / "input/config"))
    state, pipes = Path(state_dir or base / "pipe_state"), Path(pipe_dir or base / "input/data")
    interval = benchmark_records_interval if benchmark else None

    def epoch() -> Iterator[Any]:
        path = pipe_files.pipe_path(channel, pipe_files.take_index(channel, state), pipes)
        return read(path, record_format, max_corrupted_records_to_skip, interval)

    return _dataset(epoch)


def read(
    path: Path, record_format: str, max_corrupted_records_to_skip: int, interval: int | None
) -> Iterator[Any]:
    """Yields the records of one FIFO as arrays of bytes objects, one array per read.

    Args:
        record_format: a key of `records.FORMATS`.
        max_corrupted_records_to_skip: in this FIFO; only of "TFRecord".
        interval: print the speed after so many records, and at the end; 0: only at the end; None:
            never.
    """
    import numpy as np

    fd = pipe_files.open_pipe(path)
    began, printed = time.monotonic(), 0  # the wait for the writer does not count
    try:
        reader = RecordReader(str(path), fd, record_format, max_corrupted_records_to_skip)
        for records in reader.batches():
            # Not of dtype bytes, from which NumPy would strip zeros at the end of each record.
            array = np.empty(len(records), object)
            array[:] = records
            yield array
            if interval and reader.records // interval > printed:
                # An array may pass several multiples of the interval: one line tells them.
                printed = reader.records // interval
                _print_speed(path, reader, began)
        if interval is not None:
            _print_speed(path, reader, began)
    finally:
        os.close(fd)


def _print_speed(path: Path, reader: RecordReader, began: float) -> None:
    seconds = max(time.monotonic() - began, 1e-9)
    say(
        f"{path.name}: {reader.records} records, {reader.bytes / 1e6:.1f} MB in {seconds:.2f} s: "
        f"{reader.records / seconds:.0f} records/s, {reader.bytes / 1e6 / seconds:.1f} MB/s"
    )


def _dataset(epoch: Any) -> Any:
    """Makes a dataset of single records. Arrays of many cost a call of Python each, not records."""
    tf = require_tensorflow()
    return from_generator(epoch, tf.TensorSpec([None], tf.string)).unbatch()
