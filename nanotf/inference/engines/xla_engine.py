"""TensorFlow's XLA compiler: the functions of a SavedModel, compiled for each shape of inputs.

A shape that was not seen before takes a fraction of a second to minutes. So batches are padded to a
power of two of rows, if the model computes its rows one by one. Others are compiled for each number
of rows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ConversionError
from nanotf.inference.engines.inference_engine import Arrays, Runner, converting
from nanotf.inference.engines.row_padding import PaddedRows, at_least_one, power_of_two
from nanotf.inference.engines.tensorflow_engine import SavedFunctions, TensorFlowEngine
from nanotf.inference.signature import STRING, Signature


class XLAEngine(TensorFlowEngine):
    """Copies the SavedModel, and compiles its functions when they are called."""

    name: ClassVar[str] = "xla"

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        if signature and STRING in [s.dtype for s in (*signature.inputs, *signature.outputs)]:
            raise ConversionError(
                "XLA computes numbers. Received: a model that takes or returns text. Choose "
                "engine='tensorflow'."
            )
        super().convert(exported, folder, signature, precision, rows)

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
        for name in list(runner.functions):
            # A loaded function cannot be marked for XLA any more; one around it can.
            runner.functions[name] = _compiled(runner.functions[name])
        # All are padded to one row, which is right for no rows; only rows that are apart to more.
        padded = {name: signatures[name] for name in apart}
        return PaddedRows(PaddedRows(runner, signatures, at_least_one), padded, power_of_two)


def _compiled(function: Any) -> Any:
    def call(**tensors: Any) -> Any:
        return function(**tensors)

    return require_tensorflow().function(call, jit_compile=True, autograph=False)
