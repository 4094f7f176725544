"""A version of a model in a worker: its program, and what requests may do with it."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference import program
from nanotf.inference.signature import STRING, Signature, TensorSpec
from nanotf.serving.computing.batches import Arrays
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import WorkerOptions
from nanotf.wire.files import Lock

_LENGTH = 1  # of axes of any length but the first, in rows that are made up


class LoadedModel:
    """A version of a model.

    Attributes:
        name: str.
        version: int, its number.
        folder, code: as in `ModelVersion`.
    """

    def __init__(self, version: ModelVersion, options: WorkerOptions) -> None:
        self.name, self.version = version.model, version.number
        self.folder: pathlib.Path = version.path
        self.code: pathlib.Path | None = version.code
        self._stamp, self._options = version.stamp, options
        self._program: program.Program | None = None
        self._together: dict[str, str] = {}  # by signature: why its rows must stay together

    def load(self) -> None:
        """Loads the program. What is none is converted, once for all workers of the server.

        Raises:
            Exception: It cannot be loaded.
        """
        engine, threads = self._options.engine, self._options.threads
        if program.is_loaded_as_it_is(self.folder, engine):
            self._program = program.load(self.folder, engine, threads)
        else:
            place = self._place()
            with Lock(place.with_suffix(".lock"), waits=True):
                if not place.exists():
                    program.make(self.folder, engine or program.TENSORFLOW, folder=place)
            self._program = program.load(place, engine, threads)
        self._together = {
            name: self._program.reason_to_keep_together(name) for name in self.signatures
        }

    def _place(self) -> pathlib.Path:
        """Returns the folder of the converted program, another one for other files."""
        what = repr((self.folder, self._stamp, self._options.engine))
        digest = hashlib.sha256(what.encode()).hexdigest()[:16]
        return self._options.folder / f"program-{self.version}-{digest}"

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The signatures, by name; none if code beside the model computes by itself."""
        return {} if self._program is None else self._program.signatures

    @property
    def kept_together(self) -> Mapping[str, str]:
        """The signatures whose rows depend on each other, or may, each with the reason."""
        return {name: reason for name, reason in self._together.items() if reason}

    def has_rows_apart(self, signature: str) -> bool:
        """Returns True if a signature gives a row the same results whatever the other rows are."""
        return not self._together.get(signature, "it is not known")

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """Computes the outputs, by name."""
        assert self._program is not None, "a request for a model without signatures has no rows"
        return self._program.run_checked(inputs, signature)


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """The first calls of a model, so that no client waits for what they prepare.

    Args:
        most_rows: that a model computes at once.
    """

    most_rows: int

    def sizes(self) -> list[int]:
        """Returns the numbers of rows to compute: 1, 2, 4, ... and the most."""
        found = [1]
        while found[-1] * 2 < self.most_rows:
            found.append(found[-1] * 2)
        return found if found[-1] == self.most_rows else [*found, self.most_rows]

    def run(self, model: LoadedModel) -> None:
        """Computes made-up rows with each signature.

        Raises:
            Exception: What the model raises: it may not take zeros, or empty texts.
        """
        for name, signature in model.signatures.items():
            sizes = self.sizes() if model.has_rows_apart(name) else [1]
            for rows in sizes:
                model.run({spec.name: made_up(spec, rows) for spec in signature.inputs}, name)


def made_up(spec: TensorSpec, rows: int) -> np.ndarray[Any, Any]:
    """Returns rows of zeros, or of empty texts, that an input accepts."""
    known = (None,) if spec.shape is None else spec.shape
    shape = tuple(
        (rows if place == 0 else _LENGTH) if length is None else length
        for place, length in enumerate(known)
    )
    if spec.dtype == STRING:
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, dtype=spec.dtype)
