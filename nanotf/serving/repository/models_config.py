"""Reads the file that tells TensorFlow Serving which models to serve, often "models.config".

It is a protobuf message as text. Fields that nanotf does not know are rejected. Source:
tensorflow_serving/config/model_server_config.proto, sources/storage_path/
file_system_storage_path_source.proto.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from nanotf.errors import InvalidArgumentError
from nanotf.serving.message_tables import INT64, STRING, UINT32, Tables, message_classes
from nanotf.serving.repository.model_layouts import check_distinct
from nanotf.serving.repository.model_sources import (
    LATEST,
    Source,
    VersionPolicy,
    absolute,
    check_model_name,
)
from nanotf.serving.repository.stamps import stamp_of

_PACKAGE = "nanotf.serving"
_PLATFORM = "tensorflow"
_TABLES: Tables = {
    "Latest": [("num_versions", 1, UINT32, "")],
    "All": [],
    "Specific": [("versions", 1, INT64, "*")],
    "ServableVersionPolicy": [
        ("latest", 100, "Latest", "|"),
        ("all", 101, "All", "|"),
        ("specific", 102, "Specific", "|"),
    ],
    # A map from text to numbers, as the text format writes it.
    "VersionLabel": [("key", 1, STRING, ""), ("value", 2, INT64, "")],
    "ModelConfig": [
        ("name", 1, STRING, ""),
        ("base_path", 2, STRING, ""),
        ("model_platform", 4, STRING, ""),
        ("model_version_policy", 7, "ServableVersionPolicy", ""),
        ("version_labels", 8, "VersionLabel", "*"),
    ],
    "ModelConfigList": [("config", 1, "ModelConfig", "*")],
    "ModelServerConfig": [("model_config_list", 1, "ModelConfigList", "|")],
}


class ConfigFile:
    """The models that TensorFlow Serving's file names.

    A changed file is read again; it is the whole truth.

    Args:
        path: the file.

    Raises:
        InvalidArgumentError: It cannot be read, or says something that nanotf cannot do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute(path)
        try:
            self._stamp = stamp_of(self.path)  # before the content: a later change is noticed
            self._sources = sources_in(self.path.read_bytes(), str(self.path))
        except OSError as error:
            raise InvalidArgumentError(
                f"--config must be a file that can be read. Received: {self.path} ({error})."
            ) from None
        self._read = self._stamp

    def sources(self) -> Sequence[Source]:
        """Returns the models.

        Raises:
            OSError: The file is not there, or the file system does not answer.
            InvalidArgumentError: It has changed, and cannot be used.
        """
        before, self._stamp = self._stamp, stamp_of(self.path)
        # Not while it is being written: what was written so far could be a whole message.
        if self._stamp == before and self._stamp != self._read:
            self._sources = sources_in(self.path.read_bytes(), str(self.path))
            self._read = before
        return self._sources


def sources_in(text: bytes, where: str) -> list[Source]:
    """Returns the models that the content of such a file names.

    Args:
        where: what to call the file in messages.

    Raises:
        InvalidArgumentError: It cannot be read, or says something that nanotf cannot do.
    """
    config = _message_class()()
    from google.protobuf import text_format

    try:
        text_format.Parse(text.decode(), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--config must be a ModelServerConfig of TensorFlow Serving, as text. Received: "
            f"{where} ({error})."
        ) from None
    if not config.HasField("model_config_list"):
        raise InvalidArgumentError(
            f"--config must have a model_config_list. Received: {where}, which has none."
        )
    sources = [_source(each, where) for each in config.model_config_list.config]
    check_distinct(sources)
    return sources


def _source(config: Any, where: str) -> Source:
    name = check_model_name(config.name, f"Change it in {where}.")
    path = pathlib.Path(config.base_path)
    if not path.is_absolute():
        raise InvalidArgumentError(
            f"base_path must be an absolute path on this machine. Received: {config.base_path!r} "
            f"of the model {name!r} in {where}."
        )
    if config.model_platform not in ("", _PLATFORM):
        raise InvalidArgumentError(
            f"model_platform must be {_PLATFORM!r}. Received: {config.model_platform!r} of the "
            f"model {name!r} in {where}."
        )
    labels = tuple((label.key, label.value) for label in config.version_labels)
    return Source(name, path, None, _policy(config, name, where), labels)


def _policy(config: Any, name: str, where: str) -> VersionPolicy:
    policy = config.model_version_policy
    choice = policy.WhichOneof("choice")
    if choice == "latest":
        return VersionPolicy(limit=policy.latest.num_versions or 1)  # 0 if it is not given: then 1
    if choice != "specific":
        return LATEST if choice is None else VersionPolicy()
    if not policy.specific.versions:
        raise InvalidArgumentError(
            f"The policy `specific` must name versions. Received: none, of the model {name!r} in "
            f"{where}."
        )
    return VersionPolicy(only=frozenset(policy.specific.versions))


@functools.cache
def _message_class() -> Any:
    """Makes the class of `ModelServerConfig`."""
    try:
        return message_classes(_PACKAGE, _TABLES)["ModelServerConfig"]
    except ImportError as error:
        raise InvalidArgumentError(
            f"--config needs protobuf, which comes with TensorFlow. Received: {error}. Install it: "
            "pip install protobuf."
        ) from error
