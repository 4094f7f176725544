"""Programs: trained models, converted to an engine, that are called, saved and loaded."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, Signature


class Program:
    """A model that an engine computes. `make` and `load` return it.

    One thread at a time may use it. A pickle of it names its folder.

    Attributes:
        folder: `pathlib.Path`, what it was loaded from.
        engine: str, the engine's name.
        precision: str, "f32", "bf16" or "int8".
        threads: int, how many threads compute; TensorFlow's engines use those of the process.
        signatures: dict of str to `Signature`.
    """

    folder: pathlib.Path
    engine: str
    precision: str
    threads: int
    signatures: dict[str, Signature]

    def __call__(self, x: Any) -> Any:
        """Computes the model's result for a batch.

        Args:
            x: as the Keras model takes it: an array, a list of arrays, or a dict of arrays by the
                names of the inputs. Of shape `(rows, ...)`.

        Returns:
            What the model returns: an array, a list, a tuple or a dict, of `np.ndarray`.
        """
        raise NotImplementedError

    def run(self, inputs: Mapping[str, Any], signature: str = DEFAULT) -> dict[str, Any]:
        """Computes the outputs of a signature, by name, for one batch of inputs, by name."""
        raise NotImplementedError

    def predict(
        self,
        x: Any,
        batch_size: int = 32,
        num_processes: int | None = None,
        cores_per_process: int | None = None,
    ) -> Any:
        """Computes the model's result for many rows, in batches."""
        raise NotImplementedError

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the program's folder."""
        raise NotImplementedError


def make(
    model: Any,
    engine: str = "tensorflow",
    precision: str = "f32",
    threads: int | None = None,
    rows: Mapping[str, np.ndarray[Any, Any]] | Any = None,
    folder: str | pathlib.Path | None = None,
) -> Program:
    """Converts a model to an engine, and loads it.

    Args:
        model: a Keras model, a `.keras` or `.h5` file, a `tf.Module` with signatures, or the
            folder of a SavedModel.
        rows: as the model takes them, to calibrate int8; None for other precisions.
        folder: where the program is written; None for a temporary folder that is deleted with the
            program.
    """
    raise NotImplementedError


def load(
    path: str | pathlib.Path, engine: str | None = None, threads: int | None = None
) -> Program:
    """Loads a program's folder; or makes a program of a SavedModel's folder or a Keras file.

    Args:
        engine: None for that of the program's folder; "tensorflow" for what is no program yet.
    """
    raise NotImplementedError
