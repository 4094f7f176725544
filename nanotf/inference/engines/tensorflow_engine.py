"""TensorFlow's engine: the functions of a SavedModel, as TensorFlow Serving calls them."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.inference.engines.inference_engine import Arrays, InferenceEngine, Runner, converting
from nanotf.inference.engines.row_padding import PaddedRows, at_least_one
from nanotf.inference.signature import Signature


class TensorFlowEngine(InferenceEngine):
    """Copies the SavedModel, and calls its functions."""

    name: ClassVar[str] = "tensorflow"
    keeps_signatures: ClassVar[bool] = True

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        shutil.copytree(exported, folder, dirs_exist_ok=True)  # `folder` exists, and is empty

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> Runner:
        with converting(self.name, "load"):
            runner = SavedFunctions(folder)
        # Without rows, some operations fail: convolutions, in TensorFlow 2.15.
        return PaddedRows(runner, signatures, at_least_one)


class SavedFunctions:
    """The functions of a SavedModel, by the names of their signatures.

    Args:
        folder: that of the SavedModel.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        tf = require_tensorflow()
        self._model = tf.saved_model.load(str(folder))  # the functions do not keep its variables
        self.functions: dict[str, Any] = dict(self._model.signatures)
        self._constant = tf.constant  # this module does not import TensorFlow

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """See `Runner`."""
        tensors = {name: self._constant(array) for name, array in inputs.items()}
        found = self.functions[signature](**tensors)
        return {name: tensor.numpy() for name, tensor in found.items()}
