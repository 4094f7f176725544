"""LiteRT, the runtime of TensorFlow Lite: converted by TensorFlow from the SavedModel.

It has no operations for most recurrent models; converting them fails.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from nanotf.compat.versions import require_tensorflow
from nanotf.inference.engines.inference_engine import (
    F32,
    INT8,
    Arrays,
    InferenceEngine,
    Runner,
    converting,
)
from nanotf.inference.engines.row_padding import PaddedRows, at_least_one
from nanotf.inference.signature import DEFAULT, Signature

_FILE = "model.tflite"
_PACKAGES = (("ai_edge_litert",), "litert")


class LiteRTEngine(InferenceEngine):
    """Converts to TensorFlow Lite's format.

    Its int8 keeps weights in 8 bits, and computes the ranges of everything else as it runs. It
    needs no rows to calibrate.
    """

    name: ClassVar[str] = "litert"
    precisions: ClassVar[tuple[str, ...]] = (F32, INT8)
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {F32: _PACKAGES, INT8: _PACKAGES}

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        lite = require_tensorflow().lite
        with converting(self.name):
            converter = lite.TFLiteConverter.from_saved_model(
                str(exported), signature_keys=[DEFAULT]
            )
            if precision == INT8:
                # No representative_dataset: only the weights are quantized now.
                converter.optimizations = [lite.Optimize.DEFAULT]
            (folder / _FILE).write_bytes(converter.convert())

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> Runner:
        from ai_edge_litert.interpreter import Interpreter

        with converting(self.name, "load"):
            interpreter = Interpreter(model_path=str(folder / _FILE), num_threads=threads)
            runner = LiteRTFunction(interpreter)
        return PaddedRows(runner, signatures, at_least_one)  # XNNPACK refuses to compute no rows


class LiteRTFunction:
    """A loaded model.

    Args:
        interpreter: LiteRT's, with the model.
    """

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter  # which owns the function's memory
        self._function = interpreter.get_signature_runner(DEFAULT)

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """See `Runner`."""
        found: dict[str, np.ndarray[Any, Any]] = self._function(**inputs)
        return found
