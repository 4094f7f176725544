"""The engines by name, and the checks that one can be used here."""

from __future__ import annotations

import importlib.util
from typing import Any

from nanotf.errors import InvalidArgumentError, UnsupportedVersionError, check_choice
from nanotf.inference.engines.frozen_engine import FrozenEngine
from nanotf.inference.engines.inference_engine import F32, INT8, InferenceEngine
from nanotf.inference.engines.litert_engine import LiteRTEngine
from nanotf.inference.engines.onnxruntime_engine import OnnxRuntimeEngine
from nanotf.inference.engines.openvino_engine import OpenVINOEngine
from nanotf.inference.engines.tensorflow_engine import TensorFlowEngine
from nanotf.inference.engines.xla_engine import XLAEngine

# The simplest first: of equally fast ones, `optimize` takes the first.
ENGINES: dict[str, InferenceEngine] = {
    engine.name: engine
    for engine in (
        TensorFlowEngine(),
        FrozenEngine(),
        XLAEngine(),
        OpenVINOEngine(),
        OnnxRuntimeEngine(),
        LiteRTEngine(),
    )
}


def check_engine(name: str, precision: str = F32) -> InferenceEngine:
    """Returns an engine that can be used here.

    Nothing is imported for it, so that a missing package is found before anything starts.

    Args:
        name: a key of `ENGINES`.
        precision: what the engine is to compute in.

    Raises:
        InvalidArgumentError: There is no such engine, or it lacks the precision.
        UnsupportedVersionError: A package that it needs is not installed; tells how to install it.
    """
    check_choice("engine", name, tuple(ENGINES))
    engine = ENGINES[name]
    check_choice("precision", precision, engine.precisions)
    needed, extra = engine.needs.get(precision, ((), ""))
    missing = [each for each in needed if importlib.util.find_spec(each) is None]
    if missing:
        raise UnsupportedVersionError(
            f"The engine {name!r} with precision={precision!r} needs the packages "
            f"{', '.join(needed)}. Received: no module named {missing[0]!r}. Install it: "
            f"pip install 'nanotf[{extra}]'."
        )
    return engine


def check_rows(engine: InferenceEngine, precision: str, rows: Any) -> None:
    """Checks that int8 gets rows to calibrate with.

    Raises:
        InvalidArgumentError: It gets none.
    """
    if precision == INT8 and engine.calibrates and rows is None:
        raise InvalidArgumentError(
            f"precision='int8' of the engine {engine.name!r} is calibrated with rows. Received: "
            "rows=None. Pass some hundred rows of data as the model will see them."
        )
