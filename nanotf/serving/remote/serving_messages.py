"""The messages of TensorFlow Serving's services.

Those of TensorFlow itself are bytes here where they are read (`TensorProto`, `Example`): they look
the same in a message. Where a `TensorProto` is written, packed floats are bytes, so that an array's
memory is written as it is. Sources: `apis/*.proto` of tensorflow/serving;
`core/framework/tensor.proto`, `core/protobuf/meta_graph.proto` of tensorflow/tensorflow.
"""

from __future__ import annotations

import functools
from typing import Any

from nanotf.serving.message_tables import (
    BOOL,
    BYTES,
    FLOAT,
    INT32,
    INT64,
    STRING,
    UINT32,
    UINT64,
    Tables,
    message_classes,
)

METADATA_FIELD = "signature_def"  # the only one that there is
SIGNATURES_TYPE = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
# ModelVersionStatus.State
STATES = {"START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}
UNKNOWN_ERROR = 2  # error.Code

_REQUEST_OF_EXAMPLES = [("model_spec", 1, "ModelSpec", ""), ("input", 2, "Input", "")]
_TABLES: Tables = {
    "Int64Value": [("value", 1, INT64, "")],
    "ModelSpec": [
        ("name", 1, STRING, ""),
        ("version", 2, "Int64Value", "|"),
        ("signature_name", 3, STRING, ""),
        ("version_label", 4, STRING, "|"),
    ],
    # ------------------------------------------------------------------------------- Predict
    "PredictRequest": [
        ("model_spec", 1, "ModelSpec", ""),
        ("inputs", 2, BYTES, "%"),
        ("output_filter", 3, STRING, "*"),
    ],
    "PredictResponse": [
        ("outputs", 1, "TensorProto", "%"),
        ("model_spec", 2, "ModelSpec", ""),
    ],
    "Dim": [("size", 1, INT64, "")],
    "TensorShapeProto": [("dim", 2, "Dim", "*"), ("unknown_rank", 3, BOOL, "")],
    "TensorProto": [
        ("dtype", 1, INT32, ""),
        ("tensor_shape", 2, "TensorShapeProto", ""),
        ("float_val", 5, BYTES, ""),
        ("double_val", 6, BYTES, ""),
        ("int_val", 7, INT32, "*"),
        ("string_val", 8, BYTES, "*"),
        ("scomplex_val", 9, BYTES, ""),
        ("int64_val", 10, INT64, "*"),
        ("bool_val", 11, BOOL, "*"),
        ("dcomplex_val", 12, BYTES, ""),
        ("half_val", 13, INT32, "*"),
        ("uint32_val", 16, UINT32, "*"),
        ("uint64_val", 17, UINT64, "*"),
    ],
    # -------------------------------------------------------------------- Classify and Regress
    "ExampleList": [("examples", 1, BYTES, "*")],
    "ExampleListWithContext": [("examples", 1, BYTES, "*"), ("context", 2, BYTES, "")],
    "Input": [
        ("example_list", 1, "ExampleList", "|"),
        ("example_list_with_context", 2, "ExampleListWithContext", "|"),
    ],
    "ClassificationRequest": _REQUEST_OF_EXAMPLES,
    "RegressionRequest": _REQUEST_OF_EXAMPLES,
    "Class": [("label", 1, STRING, ""), ("score", 2, FLOAT, "")],
    "Classifications": [("classes", 1, "Class", "*")],
    "ClassificationResult": [("classifications", 1, "Classifications", "*")],
    "ClassificationResponse": [
        ("result", 1, "ClassificationResult", ""),
        ("model_spec", 2, "ModelSpec", ""),
    ],
    "Regression": [("value", 1, FLOAT, "")],
    "RegressionResult": [("regressions", 1, "Regression", "*")],
    "RegressionResponse": [
        ("result", 1, "RegressionResult", ""),
        ("model_spec", 2, "ModelSpec", ""),
    ],
    # ------------------------------------------------------------------------- MultiInference
    "InferenceTask": [("model_spec", 1, "ModelSpec", ""), ("method_name", 2, STRING, "")],
    "MultiInferenceRequest": [("tasks", 1, "InferenceTask", "*"), ("input", 2, "Input", "")],
    "InferenceResult": [
        ("model_spec", 1, "ModelSpec", ""),
        ("classification_result", 2, "ClassificationResult", "|"),
        ("regression_result", 3, "RegressionResult", "|"),
    ],
    "MultiInferenceResponse": [("results", 1, "InferenceResult", "*")],
    # ------------------------------------------------------------------------------- metadata
    "TensorInfo": [
        ("name", 1, STRING, ""),
        ("dtype", 2, INT32, ""),
        ("tensor_shape", 3, "TensorShapeProto", ""),
    ],
    "SignatureDef": [
        ("inputs", 1, "TensorInfo", "%"),
        ("outputs", 2, "TensorInfo", "%"),
        ("method_name", 3, STRING, ""),
    ],
    "SignatureDefMap": [("signature_def", 1, "SignatureDef", "%")],
    "Any": [("type_url", 1, STRING, ""), ("value", 2, BYTES, "")],
    "GetModelMetadataRequest": [
        ("model_spec", 1, "ModelSpec", ""),
        ("metadata_field", 2, STRING, "*"),
    ],
    "GetModelMetadataResponse": [("model_spec", 1, "ModelSpec", ""), ("metadata", 2, "Any", "%")],
    # --------------------------------------------------------------------------------- status
    "StatusProto": [("error_code", 1, INT32, ""), ("error_message", 2, STRING, "")],
    "ModelVersionStatus": [
        ("version", 1, INT64, ""),
        ("state", 2, INT32, ""),
        ("status", 3, "StatusProto", ""),
    ],
    "GetModelStatusResponse": [("model_version_status", 1, "ModelVersionStatus", "*")],
}


@functools.cache
def _classes() -> dict[str, Any]:
    return message_classes("tensorflow.serving", _TABLES)


def message_class(name: str) -> Any:
    """Returns the class of a message."""
    return _classes()[name]
