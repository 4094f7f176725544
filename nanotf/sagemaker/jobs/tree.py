"""The folders that a script sees, named as under `/opt/ml` of a SageMaker container.

`SAGEMAKER_BASE_DIR` names the base folder, default `/opt/ml`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

BASE_VARIABLE = "SAGEMAKER_BASE_DIR"
CONTAINER_BASE = "/opt/ml"


@dataclass(frozen=True)
class Tree:
    """The folders and files of one host of a job."""

    base: pathlib.Path  # corresponds to `/opt/ml`

    @property
    def code(self) -> pathlib.Path:
        """The user's code, and the script's working directory."""
        return self.base / "code"

    @property
    def model(self) -> pathlib.Path:
        """Becomes model.tar.gz when the job ends."""
        return self.base / "model"

    @property
    def shared(self) -> pathlib.Path:
        """A folder that all hosts of the job share."""
        return self.base / "shared"

    @property
    def shared_model(self) -> pathlib.Path:
        """The hyperparameter `model_dir` of a local estimator."""
        return self.shared / "model"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Checkpoints, restored before the script begins."""
        return self.base / "checkpoints"

    @property
    def input(self) -> pathlib.Path:
        """Configuration and data."""
        return self.base / "input"

    @property
    def config(self) -> pathlib.Path:
        """The three JSON files."""
        return self.input / "config"

    @property
    def data(self) -> pathlib.Path:
        """A folder, or the FIFOs, of each channel."""
        return self.input / "data"

    @property
    def output(self) -> pathlib.Path:
        """Holds `failure`, `success` and `data`."""
        return self.base / "output"

    @property
    def output_data(self) -> pathlib.Path:
        """Becomes output.tar.gz when the job ends."""
        return self.output / "data"

    @property
    def intermediate(self) -> pathlib.Path:
        """Output that a container uploads while the script runs."""
        return self.output / "intermediate"

    @property
    def failure(self) -> pathlib.Path:
        """The text of why the job failed."""
        return self.output / "failure"

    @property
    def success(self) -> pathlib.Path:
        """An empty file after a script that ended well."""
        return self.output / "success"

    @property
    def hyperparameters(self) -> pathlib.Path:
        """The file of hyperparameters."""
        return self.config / "hyperparameters.json"

    @property
    def resources(self) -> pathlib.Path:
        """The file of hosts."""
        return self.config / "resourceconfig.json"

    @property
    def input_data(self) -> pathlib.Path:
        """The file of channels."""
        return self.config / "inputdataconfig.json"

    def make(self) -> None:
        """Creates the folders that a script may write to, and those of its input."""
        # Not `code`, `shared` and `checkpoints`: these become links to what all hosts share.
        for folder in (
            self.config,
            self.data,
            self.model,
            self.output_data,
            self.intermediate,
        ):
            folder.mkdir(parents=True, exist_ok=True)


def find(environ: Mapping[str, str] | None = None) -> Tree:
    """Returns the tree of the process: that of `SAGEMAKER_BASE_DIR`, else `/opt/ml`.

    Args:
        environ: None for `os.environ`.
    """
    environ = os.environ if environ is None else environ
    return Tree(pathlib.Path(environ.get(BASE_VARIABLE) or CONTAINER_BASE))
