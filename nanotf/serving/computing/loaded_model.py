"""A version of a model in a worker: its program, and what requests may do with it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference import program
from nanotf.inference.signature import Signature
from nanotf.serving.computing.batches import Arrays
from nanotf.serving.repository.model_sources import ModelVersion
from nanotf.serving.worker_messages import WorkerOptions
from nanotf.wire import files

# In `ModelVersion.place_in`: what the first worker makes, and others read.
_LOCK, _PROGRAM, _TOGETHER = "lock", "program", "together.json"


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
        self._place, self._options = version.place_in(options.folder), options
        self._program: program.Program | None = None
        self._together: dict[str, str] = {}  # by signature: why its rows must stay together

    def load(self) -> None:
        """Loads the program. What is none is converted, once for all workers of the server.

        Raises:
            Exception: It cannot be loaded.
        """
        engine, threads = self._options.engine, self._options.threads
        self._place.mkdir(exist_ok=True)  # another worker may have made it
        if program.is_loaded_as_it_is(self.folder, engine):
            self._program = program.load(self.folder, engine, threads)
        else:
            self._program = self._converted(engine, threads)
        self._together = self._reasons(self._program)

    def _converted(self, engine: str | None, threads: int) -> program.Program:
        place = self._place / _PROGRAM
        with files.Lock(self._place / _LOCK, waits=True):
            if not place.exists():  # made by renaming a whole folder: never half of one
                return program.make(
                    self.folder, engine or program.TENSORFLOW, threads=threads, folder=place
                )
        return program.load(place, engine, threads)

    def _reasons(self, loaded: program.Program) -> dict[str, str]:
        """Returns by signature why its rows must stay together.

        The proof takes as long as the load of a SavedModel: one worker of the server looks for it.
        """
        place = self._place / _TOGETHER
        with files.Lock(self._place / _LOCK, waits=True):
            if place.exists():
                return dict(files.read_json(place))
            found = {name: loaded.reason_to_keep_together(name) for name in loaded.signatures}
            files.write_json(place, found)
        return found

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
