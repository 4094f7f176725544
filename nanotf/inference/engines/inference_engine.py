"""The interface of an engine: it converts a SavedModel, and computes what it has converted.

    exported/   ----convert---->   folder/   ----load---->   `Runner`   ----run---->   outputs
    a SavedModel                   files of the engine       in a process

A folder is converted once and loaded in many processes. It does not refer to `exported`.
"""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from nanotf.errors import ConversionError
from nanotf.inference.signature import Signature

F32, BF16, INT8 = "f32", "bf16", "int8"  # precisions

_TEXT = 1000  # characters of an engine's error; some print the whole graph

Arrays = Mapping[str, np.ndarray[Any, Any]]


@contextlib.contextmanager
def converting(engine: str, what: str = "convert") -> Iterator[None]:
    """Makes `ConversionError` of whatever an engine's package raises in this context.

    These packages raise errors of their own, of many classes. Interrupts pass.
    """
    try:
        yield
    except ConversionError:  # it says already what nanotf knows about the model
        raise
    except Exception as error:
        text = str(error).strip()[:_TEXT] or "no more"
        raise ConversionError(
            f"The engine {engine!r} must be able to {what} the model. Received: "
            f"{type(error).__name__}: {text}. Choose another engine."
        ) from error


class Runner(Protocol):
    """A program that is loaded. One thread at a time may use it."""

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """Computes the outputs of a signature, by name.

        Args:
            inputs: by name, as `Signature.checked` returns them: with the dtypes of the signature.
        """


class InferenceEngine(abc.ABC):
    """An engine. Its objects have no state."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = (F32,)
    # By precision, the modules that it needs beside TensorFlow, and the extra of nanotf with them.
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {}
    # True if int8 is calibrated with rows.
    calibrates: ClassVar[bool] = False
    # True if it keeps all signatures of a SavedModel; False if `serving_default` alone.
    keeps_signatures: ClassVar[bool] = False

    @abc.abstractmethod
    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        """Makes the engine's files of a SavedModel.

        Args:
            exported: a SavedModel's folder. It stays as it is.
            folder: an empty folder that exists.
            signature: that of `serving_default`. None if the SavedModel has none, for engines that
                keep all signatures.
            precision: one that the engine has.
            rows: by the names of the inputs, rows as the model will see them, to calibrate int8.

        Raises:
            ConversionError: The engine cannot convert this model.
        """

    @abc.abstractmethod
    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> Runner:
        """Loads what `convert` has made.

        Args:
            folder: as `convert` got it, perhaps renamed or copied.
            signatures: by name, those that the program has.
            threads: how many threads compute. TensorFlow's engines leave it alone: TensorFlow's
                threads are those of the process, and fixed when it first computes.
            precision: as `convert` got it.
            apart: the signatures whose rows are apart, see `Program.reason_to_keep_together`. Rows
                of others must be computed as they come: padding rows would change them.

        Raises:
            ConversionError: The engine cannot load the files.
        """


def usable_cores() -> int:
    """Returns the default of `threads`: the number of logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0))  # `os.cpu_count` counts the cores of other workers, too
