"""`nanotf.job()`: what a script knows of the job that it runs in.

The same object in a SageMaker container, under `nanotf train` and in plain Python. It relies on the
three JSON files and on those SM_* variables that all versions of the platform set.

Reads: SAGEMAKER_BASE_DIR, SM_CHANNEL_*, SM_MODEL_DIR, SM_OUTPUT_DATA_DIR, SM_NUM_CPUS, SM_NUM_GPUS,
TRAINING_JOB_NAME, NANOTF_RANK.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import failure, script_variables, tree
from nanotf.sagemaker.jobs import hyperparameters as texts
from nanotf.sagemaker.jobs.tree import Tree
from nanotf.wire import files

_PLAIN_HOST = "algo-1"  # SageMaker's name of the first host
_CHANNEL = "SM_CHANNEL_"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Job:
    """The job that this process runs in. `nanotf.job()` makes it.

    Args:
        name: str or None, the job's name; None in plain Python, unless TRAINING_JOB_NAME is set.
        hyperparameters: dict of name and typed value.
        channels: dict of name and path.
        hosts: list of str, the names of all hosts.
        current_host: str, this host's name.
    """

    def __init__(
        self,
        name: str | None,
        hyperparameters: dict[str, Any],
        channels: dict[str, pathlib.Path],
        hosts: list[str],
        current_host: str,
        _folders: Mapping[str, pathlib.Path],
        _failure: pathlib.Path | None,
    ) -> None:
        self.name = name
        self.hyperparameters = hyperparameters
        self.channels = channels
        self.hosts = hosts
        self.current_host = current_host
        self._folders = _folders
        self._failure = _failure

    def __repr__(self) -> str:
        return (
            f"Job(name={self.name!r}, hyperparameters={self.hyperparameters!r}, "
            f"channels={self.channels!r}, hosts={self.hosts!r}, "
            f"current_host={self.current_host!r})"
        )

    def channel(self, name: str) -> pathlib.Path:
        """Returns the folder of a channel's data.

        Args:
            name: str, as in `--channel` or in `channels` of `nanotf.job`.

        Raises:
            InvalidArgumentError: The job has no such channel.
        """
        if name not in self.channels:
            known = ", ".join(sorted(self.channels)) or "none"
            raise InvalidArgumentError(
                f"The channel must be one of the job's: {known}. Received: channel={name!r}. Pass "
                f"it as `nanotf train --channel {name}=PATH`, or in plain Python as "
                f'nanotf.job(channels={{"{name}": PATH}}).'
            )
        return self.channels[name]

    @property
    def model_dir(self) -> pathlib.Path:
        """The folder that becomes model.tar.gz; `./model` in plain Python. Made if missing."""
        return self._folder("model")

    @property
    def output_data_dir(self) -> pathlib.Path:
        """The folder that becomes output.tar.gz; `./output` in plain Python. Made if missing."""
        return self._folder("output_data")

    @property
    def checkpoint_dir(self) -> pathlib.Path:
        """The folder of checkpoints; `./checkpoints` in plain Python. Made if missing."""
        return self._folder("checkpoints")

    def _folder(self, name: str) -> pathlib.Path:
        folder = self._folders[name]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def is_chief(self) -> bool:
        """True in one process of the job: on the first host, outside workers or in rank 0."""
        is_first = self.current_host == self.hosts[0]
        return is_first and os.environ.get("NANOTF_RANK", "0") == "0"

    @property
    def num_cpus(self) -> int:
        """The number of cores that the job may use on this host."""
        # Under a CPU quota no mask shows a simulated host's part, but the variable has its size.
        return int(os.environ.get("SM_NUM_CPUS") or script_variables.count_cpus())

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of this host."""
        text = os.environ.get("SM_NUM_GPUS")
        return int(text) if text else script_variables.count_gpus()

    def failure(self, text: str) -> None:
        """Says why the job fails: the reason of its failure. SageMaker reads 1,024 characters.

        The first text of a job counts. The script must still end with an exit code other than 0.
        In plain Python the text is logged.

        Args:
            text: str, what went wrong, for whoever reads the job's description.
        """
        if self._failure is None:
            logger.error("The job failed: %s", text)
            return
        self._failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write(self._failure, text)


def job(
    hyperparameters: Mapping[str, Any] | None = None,
    channels: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Job:
    """Returns the job that this process runs in.

    Works in a SageMaker container, under `nanotf train`, and in plain Python, where it has the
    defaults, and reads `--name value` from the command line for the names in `hyperparameters`.

    Args:
        hyperparameters: mapping of name and default, default none. A value that the job gives is
            converted to the type of its default.
        channels: mapping of name and path, default none; for channels that the job does not have.

    Returns:
        `nanotf.sagemaker.jobs.job.Job`.

    Raises:
        InvalidArgumentError: A value cannot be converted to the type of its default.

    Example:
        >>> job = nanotf.job({"epochs": 3, "lr": 0.1}, channels={"train": "./data"})
        >>> job.hyperparameters["epochs"], job.channel("train")
        (3, PosixPath('data'))
    """
    defaults = dict(hyperparameters or {})
    given = {name: pathlib.Path(path) for name, path in (channels or {}).items()}
    here = tree.find()
    # Every job has this file, in a container and here; plain Python has none.
    if here.resources.is_file():
        return _in_job(here, defaults, given)
    folder = pathlib.Path.cwd()
    variables = {
        name.removeprefix(_CHANNEL).lower(): pathlib.Path(path)
        for name, path in os.environ.items()
        if name.startswith(_CHANNEL)
    }
    return Job(
        name=os.environ.get("TRAINING_JOB_NAME"),
        hyperparameters=_typed(_from_command_line(defaults, sys.argv[1:]), defaults),
        channels=given | variables,
        hosts=[_PLAIN_HOST],
        current_host=_PLAIN_HOST,
        _folders=_folders(folder / "model", folder / "output", folder / "checkpoints"),
        _failure=None,
    )


def _in_job(here: Tree, defaults: dict[str, Any], given: dict[str, pathlib.Path]) -> Job:
    with files.doubting(here.config):
        return _described(here, defaults, given)


def _described(here: Tree, defaults: dict[str, Any], given: dict[str, pathlib.Path]) -> Job:
    resources = files.read_json(here.resources)
    values = _read(here.hyperparameters)
    found = {
        name: pathlib.Path(os.environ.get(f"{_CHANNEL}{name.upper()}") or here.data / name)
        for name in _read(here.input_data)
    }
    return Job(
        name=os.environ.get("TRAINING_JOB_NAME") or None,
        hyperparameters=_typed(texts.of_script(texts.decode(values)), defaults),
        channels=given | found,
        hosts=sorted(resources["hosts"]),  # the first one is the chief: all must agree
        current_host=resources["current_host"],
        _folders=_folders(here.model, here.output_data, here.checkpoints),
        _failure=here.failure,
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = files.read_json(path) if path.is_file() else {}
    return found


def _folders(
    model: pathlib.Path, output: pathlib.Path, checkpoints: pathlib.Path
) -> dict[str, pathlib.Path]:
    return {
        "model": pathlib.Path(os.environ.get("SM_MODEL_DIR") or model),
        "output_data": pathlib.Path(os.environ.get("SM_OUTPUT_DATA_DIR") or output),
        "checkpoints": checkpoints,
    }


def _from_command_line(defaults: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Reads `--name value` for the names of defaults; other arguments belong to the script."""
    # No abbreviations: an argument of the script's own may be a prefix of a name.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prefix_chars="-")
    for name in defaults:
        dashes = "--" if len(name) > 1 else "-"  # as `texts.to_arguments` writes them
        # SUPPRESS: else an argument that is not given would be None, and hide the default.
        parser.add_argument(f"{dashes}{name}", dest=name, default=argparse.SUPPRESS)
    found, _ = parser.parse_known_args(list(arguments))
    return {name: texts.parse(text) for name, text in vars(found).items()}


def _typed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the defaults, and gives each value the type of its default."""
    typed = {n: _convert(n, v, defaults[n]) if n in defaults else v for n, v in values.items()}
    return {**defaults, **typed}


def _convert(name: str, value: Any, default: Any) -> Any:
    kind = type(default)  # True is an int, too: `_whole` makes it 1
    if default is None or value is None or (isinstance(value, kind) and kind is not int):
        return value
    try:
        if kind is bool:
            return _BOOLEANS[str(value).lower()]
        if kind is int:
            return _whole(value)
        if kind in (float, str):
            return kind(value)
    except (KeyError, TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        f"The hyperparameter {name} must be of the type of its default, {kind.__name__}. "
        f"Received: {name}={value!r}."
    )


def _whole(value: Any) -> int:
    number = int(value)
    if isinstance(value, float) and number != value:  # `int` cuts 2.5 in silence
        raise ValueError(value)
    return number
