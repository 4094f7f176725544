"""Data channels: where a job's data come from, and how its script finds them.

A local folder is linked, not copied: the script sees the folder itself and must not write to it.
Remote data are copied first. In Pipe mode a feeder process writes the data to FIFOs.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentError, check_choice
from nanotf.sagemaker.jobs import addresses
from nanotf.sagemaker.jobs.tree import Tree

# The words of `InputDataConfig` in SageMaker's API.
MODES = ("File", "FastFile", "Pipe")
DISTRIBUTIONS = ("FullyReplicated", "ShardedByS3Key")
COMPRESSIONS = ("None", "Gzip")
WRAPPINGS = ("None", "RecordIO")
# SageMaker's rule of channel names.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class DataChannel:
    """One channel."""

    name: str  # letters, digits, ".", "_" and "-"
    source: str  # a path, `file://`, or an address that fsspec reads
    mode: str = "File"  # or "FastFile" (the same here), or "Pipe"
    content_type: str | None = None  # a MIME type, for the script
    # Or "ShardedByS3Key". One script reads the data of all hosts, so both give it all of them.
    distribution: str = "FullyReplicated"
    # The rest is for Pipe mode only.
    compression: str = "None"  # or "Gzip": the feeder unzips
    wrapping: str = "None"  # or "RecordIO": the feeder makes a record of each file
    shuffle: int | None = None  # the seed by which the feeder shuffles the files of each epoch

    @property
    def is_pipe(self) -> bool:
        """True in Pipe mode."""
        return self.mode == "Pipe"

    def check(self) -> None:
        """Rejects a channel that no script could read. Raises `InvalidArgumentError`."""
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(
                "A channel's name must have 1 to 64 letters, digits, '.', '_' or '-'. "
                f"Received: {self.name!r}."
            )
        check_choice("mode", self.mode, MODES)
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        check_choice("compression", self.compression, COMPRESSIONS)
        check_choice("record-wrapping", self.wrapping, WRAPPINGS)
        for name, value in (
            ("compression", self.compression != "None"),
            ("record-wrapping", self.wrapping != "None"),
            ("shuffle", self.shuffle is not None),
        ):
            if value and not self.is_pipe:
                raise InvalidArgumentError(
                    f"`{name}` needs mode=Pipe: in File mode the script reads the files as they "
                    f"are. Received: channel {self.name}, mode={self.mode}."
                )
        addresses.check(self.source)

    def configuration(self) -> dict[str, str]:
        """Returns the channel's entry in `inputdataconfig.json`."""
        entry = {
            "TrainingInputMode": self.mode,
            "S3DistributionType": self.distribution,
            "RecordWrapperType": self.wrapping,
        }
        return entry | ({} if self.content_type is None else {"ContentType": self.content_type})


_OPTIONS = {
    "mode": "mode",
    "content-type": "content_type",
    "distribution": "distribution",
    "compression": "compression",
    "record-wrapping": "wrapping",
    "shuffle": "shuffle",
}


def parse_options(options: Iterable[str]) -> list[DataChannel]:
    """Reads the options `--channel name=source[,key=value...]` of the command line.

    Raises:
        InvalidArgumentError: A channel is not written like this, or two have the same name.
    """
    channels = [_parse(option) for option in options]
    names = [channel.name for channel in channels]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            f"Each channel must have a name of its own. Received: {', '.join(twice)} twice."
        )
    return channels


def _parse(option: str) -> DataChannel:
    name, equals, rest = option.partition("=")
    if not name or not equals or not rest:
        raise InvalidArgumentError(
            f"A channel must be written as name=source. Received: --channel {option}."
        )
    # A path may hold commas, so only what looks like one of the known options is taken as one.
    keys = "|".join(_OPTIONS)
    # The path is matched lazily, else it takes the options, too. It may hold line ends (DOTALL).
    found = re.fullmatch(rf"(.*?)((?:,(?:{keys})=[^,]*)*)", rest, re.DOTALL)
    assert found is not None  # both parts may be empty
    fields: dict[str, Any] = {}
    for pair in filter(None, found[2].split(",")):
        key, _, value = pair.partition("=")
        fields[_OPTIONS[key]] = _seed(option, value) if key == "shuffle" else value
    return DataChannel(name, found[1], **fields)


def _seed(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(
            f"`shuffle` must be a whole number, the seed. Received: --channel {option}."
        ) from None


def provide(channel: DataChannel, tree: Tree, downloads: pathlib.Path) -> pathlib.Path:
    """Makes a channel's data readable, and links them into a host's tree.

    A remote source is copied once, for all hosts.

    Args:
        tree: that of the host.
        downloads: the job's folder for copies.

    Returns:
        The local file or folder that holds the data. In Pipe mode nothing is linked.
    """
    path = addresses.local_path(channel.source)
    if path is None:
        path = downloads / channel.name
        if not path.exists():  # `download` names it when it is whole
            addresses.download(channel.source, path)
    if channel.is_pipe:
        return path
    place = tree.data / channel.name
    if path.is_dir():
        place.symlink_to(path, target_is_directory=True)
    else:  # as a container has it: a folder with this one file
        place.mkdir(exist_ok=True)  # from a try on a full disk
        (place / path.name).symlink_to(path)
    return path


def feeder_arguments(channel: DataChannel, source: pathlib.Path, tree: Tree) -> list[str]:
    """Returns the module that feeds a channel in Pipe mode, and its arguments."""
    # The public name of `pipes.channel_feeder`: a failure's message shows this command.
    arguments = ["nanotf.data.feed", "--source", str(source)]
    arguments += ["--pipe-dir", str(tree.data), "--channel", channel.name]
    if channel.shuffle is not None:
        arguments += ["--shuffle", str(channel.shuffle)]
    if channel.compression != "None":
        arguments += ["--compression", channel.compression]
    if channel.wrapping != "None":
        arguments += ["--record-wrapping", channel.wrapping]
    return arguments
