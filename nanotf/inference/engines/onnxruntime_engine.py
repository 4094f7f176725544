"""ONNX Runtime: converted from the SavedModel by tf2onnx, int8 by ONNX Runtime's own quantizer.

Threads do not spin when they wait: where several processes share cores, spinning wastes half.
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

_FILE = "model.onnx"
_OPSET = 17  # the newest that tf2onnx 1.16 and 1.17 support well: 18 changed the reductions
_PACKAGES = (("onnxruntime", "onnx", "tf2onnx"), "onnxruntime")


class OnnxRuntimeEngine(InferenceEngine):
    """Converts to ONNX; a model counts as converted when ONNX Runtime has loaded it."""

    name: ClassVar[str] = "onnxruntime"
    precisions: ClassVar[tuple[str, ...]] = (F32, INT8)
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {F32: _PACKAGES, INT8: _PACKAGES}
    calibrates: ClassVar[bool] = True

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        assert signature is not None
        with converting(self.name):
            path = folder / _FILE
            if precision == INT8:
                assert rows is not None
                full = folder / "float.onnx"
                _to_onnx(exported, full, signature)
                _quantize(full, path, rows)
                full.unlink()  # the folder of a program has only what `load` reads
            else:
                _to_onnx(exported, path, signature)
            _session(path, threads=1)  # tf2onnx writes invalid models, too, and does not say so

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> Runner:
        with converting(self.name, "load"):
            runner = OnnxSession(_session(folder / _FILE, threads))
        # Without rows, some operations end the process: LSTM, in ONNX Runtime 1.32.
        return PaddedRows(runner, signatures, at_least_one)


class OnnxSession:
    """A loaded model.

    Args:
        session: ONNX Runtime's, with the model.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """See `Runner`."""
        found = self._session.run(self._outputs, dict(inputs))
        return dict(zip(self._outputs, found, strict=True))


def _session(path: pathlib.Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1  # operations run one after the other, each on all threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )


def _to_onnx(exported: pathlib.Path, path: pathlib.Path, signature: Signature) -> None:
    import tf2onnx

    tf = require_tensorflow()
    model = tf.saved_model.load(str(exported))
    function, names = model.signatures[DEFAULT], signature.input_names
    # They have names, by which tf2onnx then calls the inputs.
    specs = [function.structured_input_signature[1][name] for name in names]

    @tf.function(input_signature=specs, autograph=False)
    def in_order(*tensors: Any) -> Any:
        return function(**dict(zip(names, tensors, strict=True)))

    tf2onnx.convert.from_function(in_order, specs, opset=_OPSET, output_path=str(path))


def _quantize(source: pathlib.Path, target: pathlib.Path, rows: Arrays) -> None:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class CalibrationRows(quantization.CalibrationDataReader):  # type: ignore[misc]
        """The rows, one by one."""

        def __init__(self) -> None:
            self._index, self._count = 0, len(next(iter(rows.values())))

        def get_next(self) -> Any:
            self._index += 1
            if self._index > self._count:
                return None
            return {name: array[self._index - 1 : self._index] for name, array in rows.items()}

    prepared = source.with_name("prepared.onnx")
    # Symbolic shapes would need another package; ONNX infers those that the quantizer needs.
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(str(prepared), str(target), CalibrationRows())
    prepared.unlink()
