"""The data of `fit`: `TrainingInput`, and what the argument `inputs` may be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentTypeError, UnavailableError, check_choice
from nanotf.sagemaker.jobs import data_channels
from nanotf.sagemaker.jobs.data_channels import DataChannel

DEFAULT_CHANNEL = "training"  # the SDK's name for the only input


@dataclass(frozen=True)
class ShuffleConfig:
    """Shuffles a channel in Pipe mode, in another order in each epoch.

    Args:
        seed: int; the order of an epoch depends on it and on the epoch's number.
    """

    seed: int


@dataclass(frozen=True)
class TrainingInput:
    """A channel's data, with SageMaker's arguments.

    Args:
        s3_data: str, a path, `file://`, or an address that fsspec reads, such as `s3://`.
        distribution: "FullyReplicated" (default) or "ShardedByS3Key". One script reads the data of
            all hosts, so both give it all of them.
        compression: None (default) or "Gzip"; Pipe mode only.
        content_type: str, a MIME type that the script finds in `inputdataconfig.json`, or None
            (default), which leaves it out.
        record_wrapping: None (default) or "RecordIO"; Pipe mode only.
        s3_data_type: "S3Prefix"; manifests are not supported.
        input_mode: "File", "FastFile", "Pipe", or None (default) for the estimator's.
        attribute_names: None; for manifests, which are not supported.
        shuffle_config: `ShuffleConfig` or None; Pipe mode only.
    """

    s3_data: str | os.PathLike[str]
    distribution: str | None = "FullyReplicated"
    compression: str | None = None
    content_type: str | None = None
    record_wrapping: str | None = None
    s3_data_type: str = "S3Prefix"
    input_mode: str | None = None
    attribute_names: Any = None
    shuffle_config: ShuffleConfig | None = None

    def __post_init__(self) -> None:
        if self.s3_data_type != "S3Prefix" or self.attribute_names is not None:
            raise UnavailableError(
                "nanotf reads folders and files, no manifests. Received: "
                f"s3_data_type={self.s3_data_type!r}, attribute_names={self.attribute_names!r}. "
                'Pass a folder, with s3_data_type="S3Prefix".'
            )

    def as_channel(self, name: str, input_mode: str) -> DataChannel:
        """Returns the channel of a name, in the estimator's input mode unless it has its own."""
        mode = self.input_mode or input_mode
        # Here, so that an error has the argument's name: `DataChannel` calls it `mode`.
        check_choice("input_mode", mode, data_channels.MODES)
        return DataChannel(
            name=name,
            source=os.fspath(self.s3_data),
            mode=mode,
            content_type=self.content_type,
            distribution=self.distribution or "FullyReplicated",
            compression=self.compression or "None",  # the API's word for none
            wrapping=self.record_wrapping or "None",
            shuffle=None if self.shuffle_config is None else self.shuffle_config.seed,
        )


def as_channels(inputs: Any, input_mode: str) -> tuple[DataChannel, ...]:
    """Reads the argument `inputs` of `fit`.

    Args:
        inputs: None, one source for the channel "training", or a mapping of channel and source. A
            source is a str, a path or a `TrainingInput`.
        input_mode: for sources that name none.

    Raises:
        InvalidArgumentTypeError: It is something else.
    """
    if inputs is None:
        return ()
    if not isinstance(inputs, Mapping):
        inputs = {DEFAULT_CHANNEL: inputs}
    found = []
    for name, source in inputs.items():
        if isinstance(source, (str, os.PathLike)):
            source = TrainingInput(os.fspath(source))
        if not isinstance(source, TrainingInput) or not isinstance(name, str):
            raise InvalidArgumentTypeError(
                "`inputs` must be a path, a nanotf.estimator.TrainingInput, or a dict of channel "
                f"names and these. Received: {name!r}: {source!r}."
            )
        found.append(source.as_channel(name, input_mode))
    return tuple(found)
