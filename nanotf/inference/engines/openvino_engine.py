"""OpenVINO: converted from the SavedModel, kept as its own format, which processes map together.

OpenVINO would compute in bfloat16 wherever the processor can, and each process would pin its
threads from core 0 on. Both are set here: `INFERENCE_PRECISION_HINT`, `ENABLE_CPU_PINNING`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from nanotf.errors import InvalidArgumentError
from nanotf.inference.engines.inference_engine import (
    BF16,
    F32,
    INT8,
    Arrays,
    InferenceEngine,
    converting,
)
from nanotf.inference.signature import Signature

_EXACT = 1 << 24  # the significand of a float32 has 24 bits
_WIDE = 4  # bytes; narrower integers have no such numbers
_FILE = "model.xml"  # and model.bin, the weights
_EXTRA, _MODULE = "openvino", "openvino"


class OpenVINOEngine(InferenceEngine):
    """Converts to OpenVINO's format; int8 by NNCF's calibration."""

    name: ClassVar[str] = "openvino"
    precisions: ClassVar[tuple[str, ...]] = (F32, BF16, INT8)
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {
        F32: ((_MODULE,), _EXTRA),
        BF16: ((_MODULE,), _EXTRA),
        INT8: ((_MODULE, "nncf"), "openvino-int8"),
    }
    calibrates: ClassVar[bool] = True

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        import openvino

        with converting(self.name):
            model = openvino.convert_model(str(exported))
            if precision == INT8:
                assert rows is not None
                model = _quantized(model, rows)
            # By default, `save_model` rounds the weights to float16.
            openvino.save_model(model, folder / _FILE, compress_to_fp16=False)

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> OpenVINORequest:
        import openvino

        config = {
            "INFERENCE_PRECISION_HINT": "bf16" if precision == BF16 else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
            "PERFORMANCE_HINT": "LATENCY",  # one request at a time, on all threads
        }
        with converting(self.name, "load"):
            model = openvino.Core().compile_model(folder / _FILE, "CPU", config)
            return OpenVINORequest(model.create_infer_request(), signatures)


class OpenVINORequest:
    """A compiled model.

    Args:
        request: OpenVINO's, of a compiled model.
        signatures: of the program; it has one.
    """

    def __init__(self, request: Any, signatures: Mapping[str, Signature]) -> None:
        self._request = request
        self._outputs = {name: [s.name for s in each.outputs] for name, each in signatures.items()}

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """See `Runner`.

        Raises:
            InvalidArgumentError: An integer is beyond 2**24: OpenVINO might round it.
        """
        for name, array in inputs.items():
            _check_range(name, array)
        # It reads these arrays in place. Its results are copies, which the next call leaves alone.
        found = self._request.infer(dict(inputs), share_inputs=True)
        return {name: found[name] for name in self._outputs[signature]}


def _check_range(name: str, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.kind not in "iu" or array.dtype.itemsize < _WIDE or not array.size:
        return
    if array.max() > _EXACT or array.min() < -_EXACT:
        raise InvalidArgumentError(
            "OpenVINO computes with integers in float32, which has all of them up to 2**24 only. "
            f"Received: {name} with numbers from {array.min()} to {array.max()}. Choose another "
            "engine for this model."
        )


def _quantized(model: Any, rows: Arrays) -> Any:
    import nncf

    count = len(next(iter(rows.values())))
    samples = [{name: array[i : i + 1] for name, array in rows.items()} for i in range(count)]
    return nncf.quantize(model, nncf.Dataset(samples), subset_size=count)  # NNCF's default is 300
