"""`PipeModeDataset`: the records that a feeder writes, in plain tf.data and with workers."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parity import assert_same_history, digits, small_cnn

from nanotf.data import PipeModeDataset, PipeModeDatasetException
from nanotf.errors import InvalidArgumentError

ROWS = 130


@pytest.fixture
def job(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a job with the channel `train`, and files in its folder `files`."""
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    (tmp_path / "input/config").mkdir(parents=True)
    config = {"train": {"TrainingInputMode": "Pipe"}, "test": {"TrainingInputMode": "File"}}
    (tmp_path / "input/config/inputdataconfig.json").write_text(json.dumps(config))
    (tmp_path / "files").mkdir()
    return tmp_path


@contextlib.contextmanager
def _fed(job: pathlib.Path) -> Iterator[None]:
    command = [sys.executable, "-m", "nanotf.data.feed", "--source", str(job / "files")]
    command += ["--pipe-dir", str(job / "input/data"), "--channel", "train"]
    with subprocess.Popen(command) as feeder:
        try:
            yield
        finally:
            feeder.terminate()


def _values(dataset: Any) -> list[bytes]:
    return list(dataset.as_numpy_iterator())


def _write_tf_records(path: pathlib.Path, payloads: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)


def test_digits_with_two_workers(job: pathlib.Path) -> None:
    """Each epoch reads the next FIFO; the losses are those of the same rows in memory."""
    x, y = digits(ROWS)
    rows = np.column_stack([y, x.reshape(ROWS, -1)])
    np.savetxt(job / "files/digits.csv", rows, delimiter=",", fmt="%.9g")

    def parse(line: Any) -> tuple[Any, Any]:
        row = tf.strings.to_number(tf.strings.split(line, ","))
        return tf.reshape(row[1:], (8, 8, 1)), tf.cast(row[0], tf.int64)

    expected = small_cnn().fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    dataset = PipeModeDataset("train", record_format="TextLine").map(parse).batch(40)
    assert isinstance(dataset, tf.data.Dataset)
    with _fed(job):
        found = small_cnn().fit(dataset, epochs=2, verbose=0, num_processes=2)
    assert found.epoch == expected.epoch
    assert_same_history(found.history, expected.history)
    assert (job / "pipe_state/.train-pipe_mode-state").read_text() in ("2", "3")  # read ahead


def test_epochs_of_tf_records(job: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`repeat(k)` reads k FIFOs, `take` closes one early, and the next iterator takes the next."""
    payloads = [bytes([i]) * i * 1000 for i in range(100)]
    _write_tf_records(job / "files/a", payloads[:50])
    _write_tf_records(job / "files/b", payloads[50:])
    dataset = PipeModeDataset("train", "TFRecord", benchmark=True)
    assert dataset.element_spec == tf.TensorSpec([], tf.string)
    with _fed(job):
        iter(dataset)  # takes no FIFO before its first element
        assert _values(dataset.repeat(2)) == payloads * 2
        assert _values(dataset.take(3)) == payloads[:3]
        assert _values(dataset) == payloads
    assert (job / "pipe_state/.train-pipe_mode-state").read_text() == "4"
    said = capsys.readouterr().out
    assert [said.count(f"nanotf: train_{n}: 100 records") for n in range(4)] == [1, 1, 0, 1]


def test_corrupt_records(job: pathlib.Path) -> None:
    _write_tf_records(job / "files/a", [b"one", b"two", b"three"])
    data = bytearray((job / "files/a").read_bytes())
    data[20 + 12] ^= 1  # of "two"
    (job / "files/a").write_bytes(data)
    with _fed(job):
        text = "number 1, at byte 19: the checksum of its data"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            _values(PipeModeDataset("train", "TFRecord"))
        skipping = PipeModeDataset("train", "TFRecord", max_corrupted_records_to_skip=1)
        assert _values(skipping) == [b"one", b"three"]


def test_wrong_arguments(job: pathlib.Path) -> None:
    for text, arguments in {
        "Channel x not found in Training Job InputDataConfig": {"channel": "x"},
        "Channel test is not a PipeMode channel": {"channel": "test"},
        "only be used with record_format TFRecord": {
            "channel": "train",
            "max_corrupted_records_to_skip": 1,
        },
    }.items():
        with pytest.raises(PipeModeDatasetException, match=text):
            PipeModeDataset(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="'RecordIO', 'TFRecord', 'TextLine'"):
        PipeModeDataset("train", "CSV")
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        PipeModeDataset("train", "TFRecord", max_corrupted_records_to_skip=-1)
