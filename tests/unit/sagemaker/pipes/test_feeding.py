"""The feeder of a channel, as a process, and the reader's side of the same files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures

import pytest
from streams import read_all, record_io
from waiting import wait_until

from nanotf.data.feed import main
from nanotf.errors import InvalidArgumentError, RecordError
from nanotf.sagemaker.pipes import channel_feeder, pipe_files
from nanotf.sagemaker.pipes.channel_feeder import Feed, feed


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """Files whose order is not that of their making."""
    folder = tmp_path / "source"
    (folder / "b").mkdir(parents=True)
    for name in ("c", "b/2", "a", "b/1"):
        (folder / name).write_text(f"{name}\n")
    return folder


@contextlib.contextmanager
def _feeding(source: pathlib.Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nanotf.data.feed", "--source", str(source)]
    command += ["--pipe-dir", str(source.parent / "pipes"), "--channel", "train", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as feeder:
        try:
            yield feeder
        finally:
            feeder.kill()


def _read(source: pathlib.Path, epoch: int) -> bytes:
    fd = pipe_files.open_pipe(source.parent / f"pipes/train_{epoch}")
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def _left(source: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (source.parent / "pipes").iterdir())


def test_epochs_in_order_until_the_last(source: pathlib.Path) -> None:
    with _feeding(source, "--epochs", "2") as feeder:
        assert [_read(source, epoch) for epoch in range(2)] == [b"a\nb/1\nb/2\nc\n"] * 2
        assert feeder.wait(60) == 0
    assert _left(source) == []


def test_sigterm_ends_it_and_removes_its_pipes(source: pathlib.Path) -> None:
    """Also while it waits for a reader or for room in the pipe. A reader may close early."""
    (source / "big").write_bytes(bytes(1 << 22))
    for opened in (False, True):
        with _feeding(source) as feeder:
            wait_until((source.parent / "pipes/train_1").exists, "the FIFOs are made")
            if opened:
                os.close(pipe_files.open_pipe(source.parent / "pipes/train_0"))
                fd = pipe_files.open_pipe(source.parent / "pipes/train_1")
                assert os.read(fd, 1) == b"a"
            feeder.send_signal(signal.SIGTERM)
            assert feeder.wait(60) == 0
            if opened:
                os.close(fd)
            assert feeder.stderr is not None
            assert feeder.stderr.read() == ""
        assert _left(source) == []


def test_shuffled_files(source: pathlib.Path) -> None:
    """By the seed plus the epoch; the files of an epoch are whole."""
    what = Feed(source, source.parent / "pipes", "train", shuffle=7)
    orders = [[path.name for path in what.files(epoch)] for epoch in range(6)]
    expected = []
    for epoch in range(6):
        names = ["a", "1", "2", "c"]
        random.Random(7 + epoch).shuffle(names)
        expected.append(names)
    assert orders == expected
    assert len(set(map(tuple, orders))) > 1


def test_gzip_and_records_of_whole_files(source: pathlib.Path) -> None:
    for path in [source / name for name in ("a", "c", "b/1", "b/2")]:
        path.write_bytes(gzip.compress(path.read_bytes()))
    options = ("--compression", "Gzip", "--record-wrapping", "RecordIO", "--epochs", "1")
    with _feeding(source, *options) as feeder:
        data = _read(source, 0)
        assert feeder.wait(60) == 0
    assert data == b"".join(map(record_io, (b"a\n", b"b/1\n", b"b/2\n", b"c\n")))


def test_a_large_file_becomes_a_multipart_record(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_feeder, "MAX_PART", 5)
    for size, parts in ((0, 1), (5, 1), (6, 2), (15, 3)):
        (tmp_path / "file").write_bytes(bytes(range(size)))
        with (tmp_path / "file").open("rb") as file:
            written = list(channel_feeder.as_record(file))
        found, _, error = read_all(tmp_path / "pipe", b"".join(written), "RecordIO")
        assert (len(written) // 2, found, error) == (parts, [bytes(range(size))], None)


def test_a_file_that_is_no_gzip(source: pathlib.Path) -> None:
    with _feeding(source, "--compression", "Gzip") as feeder:
        assert _read(source, 0) == b""
        assert feeder.wait(60) == 1
        assert feeder.stderr is not None
        said = feeder.stderr.read()
    assert said.startswith("nanotf: Files of a channel with compression")
    assert str(source / "a") in said
    assert _left(source) == []


def test_one_feeder_for_a_channel(source: pathlib.Path) -> None:
    with _feeding(source):
        wait_until((source.parent / "pipes/train_1").exists, "the FIFOs are made")
        with pytest.raises(InvalidArgumentError, match="one feeder"):
            feed(Feed(source, source.parent / "pipes", "train"))


def test_wrong_arguments(source: pathlib.Path) -> None:
    pipes = source.parent / "pipes"
    with pytest.raises(InvalidArgumentError, match="file, or a folder with files"):
        feed(Feed(source / "missing", pipes, "train"))
    (source / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="file, or a folder with files"):
        feed(Feed(source / "empty", pipes, "train"))
    assert not pipes.exists()
    for arguments, text in [
        ({"channel": "a/b"}, "file name"),
        ({"compression": "zip"}, "'Gzip'"),
        ({"record_wrapping": "TFRecord"}, "'RecordIO'"),
        ({"epochs": 0}, "1 or more"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            Feed(**{"source": source, "pipe_dir": pipes, "channel": "train", **arguments})
    pipes.mkdir()
    (pipes / "train_0").write_text("precious")
    with pytest.raises(InvalidArgumentError, match="must not replace a file"):
        feed(Feed(source, pipes, "train"))
    assert (pipes / "train_0").read_text() == "precious"


def test_the_command_reports_wrong_arguments(
    source: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = main(["--source", "/missing/x", "--pipe-dir", str(source), "--channel", "train"])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert code == 2
    assert capsys.readouterr().err.startswith("nanotf: `source` must be a file")


def test_the_feeder_imports_no_tensorflow() -> None:
    code = "import sys, nanotf.data.feed; print('tensorflow' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_each_iterator_takes_the_next_index(tmp_path: pathlib.Path) -> None:
    state = tmp_path / "new/state"
    assert [pipe_files.take_index("train", state) for _ in range(3)] == [0, 1, 2]
    assert pipe_files.take_index("test", state) == 0
    with futures.ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: pipe_files.take_index("many", state), range(200)))
    assert sorted(taken) == list(range(200))
    assert (state / ".train-pipe_mode-state").read_text() == "3"
    assert (state / ".train-pipe_mode-lock").exists()
    (state / ".train-pipe_mode-state").write_text("x")
    with pytest.raises(RecordError, match="index of the next FIFO"):
        pipe_files.take_index("train", state)


def test_channels_of_a_job(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "inputdataconfig.json"
    with pytest.raises(pipe_files.PipeModeDatasetException, match=r"inputdataconfig\.json"):
        pipe_files.check_channel("train", tmp_path)
    config.write_text(
        json.dumps({"train": {"TrainingInputMode": "pIpE"}, "test": {"TrainingInputMode": "File"}})
    )
    pipe_files.check_channel("train", tmp_path)
    with pytest.raises(pipe_files.PipeModeDatasetException, match="Channel test is not a PipeMode"):
        pipe_files.check_channel("test", tmp_path)
    text = "Channel x not found in Training Job InputDataConfig"
    with pytest.raises(pipe_files.PipeModeDatasetException, match=text):
        pipe_files.check_channel("x", tmp_path)
    config.write_text("[]")
    with pytest.raises(pipe_files.PipeModeDatasetException, match="an object per channel"):
        pipe_files.check_channel("train", tmp_path)


def test_a_pipe_that_never_appears(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RecordError, match=f"File does not exist: {tmp_path}/train_0"):
        pipe_files.open_pipe(tmp_path / "train_0", wait_seconds=0.1)
