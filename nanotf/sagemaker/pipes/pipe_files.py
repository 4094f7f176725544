"""The files of a Pipe mode channel, as SageMaker lays them out.

    <base>/input/config/inputdataconfig.json        {channel: {"TrainingInputMode": "Pipe", ...}}
    <base>/input/data/<channel>_0, <channel>_1 ...   a FIFO per epoch
    <base>/pipe_state/.<channel>-pipe_mode-state     the index of the next FIFO
    <base>/pipe_state/.<channel>-pipe_mode-lock      locked while the state changes

`<base>` is `SAGEMAKER_BASE_DIR`, or /opt/ml.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, RecordError
from nanotf.wire import files

WAIT_SECONDS = 120.0  # for a FIFO to appear
STALL_SECONDS = 600.0  # for its writer to write
_SAY_AFTER = 10.0  # seconds of such a wait
_LOOK_EVERY = 0.05  # seconds


class PipeModeDatasetException(InvalidArgumentError):
    """A channel cannot be read in Pipe mode. Named like sagemaker_tensorflow's exception."""


def base_folder() -> Path:
    """Returns the folder of a training job.

    Environment variables read: `SAGEMAKER_BASE_DIR`; default /opt/ml.
    """
    return Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def check_channel(channel: str, config_dir: Path) -> None:
    """Checks that a job has a channel, and that it is in Pipe mode.

    Args:
        config_dir: the folder of inputdataconfig.json.

    Raises:
        PipeModeDatasetException: There is no such channel, or it is no pipe.
    """
    path = config_dir / "inputdataconfig.json"
    channels = _channels(path)
    if channel not in channels:
        raise PipeModeDatasetException(
            f"Channel {channel} not found in Training Job InputDataConfig. Received: "
            f"channel={channel!r}; {path} has {', '.join(sorted(channels)) or 'none'}."
        )
    mode = channels[channel].get("TrainingInputMode", "")
    if str(mode).lower() != "pipe":
        raise PipeModeDatasetException(
            f"Channel {channel} is not a PipeMode channel. Received: TrainingInputMode={mode!r} "
            f"in {path}. Start the job with this channel in Pipe mode, or read its files."
        )


def _channels(path: Path) -> dict[str, dict[str, Any]]:
    try:
        channels = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PipeModeDatasetException(
            f"A Pipe mode channel must be described in {path}. Received: {error}. Run the script "
            "as a training job, or name the folder with `config_dir`."
        ) from error
    if isinstance(channels, dict) and all(isinstance(v, dict) for v in channels.values()):
        return channels
    raise PipeModeDatasetException(
        f"{path} must hold an object with an object per channel. Received: {channels!r}."
    )


def take_index(channel: str, state_dir: Path) -> int:
    """Returns the index of the next FIFO of a channel, and counts it as used.

    Processes and threads that share the folder get different ones.

    Args:
        state_dir: made if it does not exist.

    Raises:
        RecordError: The state file does not hold a number.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    state = state_dir / f".{channel}-pipe_mode-state"
    with files.Lock(state_dir / f".{channel}-pipe_mode-lock", waits=True):
        text = state.read_bytes() if state.exists() else b"0"
        try:
            index = int(text)
        except ValueError:
            raise RecordError(
                f"{state} must hold the index of the next FIFO. Received: {text!r}. Remove it to "
                "begin with 0."
            ) from None
        files.write_text(state, str(index + 1))
    return index


def pipe_path(channel: str, index: int, pipe_dir: Path) -> Path:
    """Returns the path of a channel's FIFO for one epoch."""
    return pipe_dir / f"{channel}_{index}"


def open_pipe(path: Path, wait_seconds: float = WAIT_SECONDS) -> int:
    """Waits for a FIFO to appear, opens it, and waits for its writer.

    Opening for reading alone would wait for a writer without a deadline.

    Args:
        wait_seconds: for the FIFO to appear. Its writer then has `STALL_SECONDS`.

    Returns:
        Its file descriptor, which the caller closes.

    Raises:
        RecordError: The FIFO, or then its writer, did not come in time.
    """
    if not _appears(path.exists, path, wait_seconds):
        raise RecordError(
            f"File does not exist: {path}. Received: no such FIFO within {wait_seconds:.0f} s. "
            "Each iterator reads the next FIFO of its channel: check that the process that feeds "
            "the channel is running, and that it makes as many epochs as are read."
        )
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await_data(str(path), fd, STALL_SECONDS, 0)
    except BaseException:
        os.close(fd)
        raise
    os.set_blocking(fd, True)
    return fd


def await_data(path: str, fd: int, seconds: float, received: int) -> None:
    """Waits until a FIFO has data, or its writers have left.

    Linux reports that writers have left only after there was one.

    Args:
        path: for messages.
        fd: the FIFO, open for reading.
        seconds: the limit of the wait.
        received: bytes read so far, for messages.

    Raises:
        RecordError: The time is over.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)  # the kernel always reports POLLHUP, too
    if not poll.poll(seconds * 1000):
        raise RecordError(
            f"The writer of {path} must write or close it. Received: nothing for {seconds:.0f} s "
            f"after {received} bytes. Check that the process that feeds the channel is running."
        )


def _appears(exists: Callable[[], bool], path: Path, wait_seconds: float) -> bool:
    began, said = time.monotonic(), False
    while not exists():
        waited = time.monotonic() - began
        if waited > wait_seconds:
            return False
        if waited > _SAY_AFTER and not said:
            logger.warning("waiting for %s, for up to %.0f s", path, wait_seconds)
            said = True
        time.sleep(_LOOK_EVERY)
    return True
