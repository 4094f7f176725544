"""The messages of the Open Inference Protocol over gRPC.

Parameters are not read: nanotf knows none. In an answer packed floats are bytes, so that an array's
memory is written as it is. Source: `specification/protocol/open_inference_grpc.proto` of
kserve/open-inference-protocol.
"""

from __future__ import annotations

import functools
from typing import Any

from nanotf.serving.message_tables import (
    BOOL,
    BYTES,
    DOUBLE,
    FLOAT,
    INT32,
    INT64,
    STRING,
    UINT32,
    UINT64,
    Tables,
    message_classes,
)

_NAME_AND_VERSION = [("name", 1, STRING, ""), ("version", 2, STRING, "")]
_METADATA = [("name", 1, STRING, ""), ("datatype", 2, STRING, ""), ("shape", 3, INT64, "*")]
_CONTENTS = [
    ("bool_contents", 1, BOOL, "*"),
    ("int_contents", 2, INT32, "*"),
    ("int64_contents", 3, INT64, "*"),
    ("uint_contents", 4, UINT32, "*"),
    ("uint64_contents", 5, UINT64, "*"),
    ("bytes_contents", 8, BYTES, "*"),
]
_TABLES: Tables = {
    "ServerLiveResponse": [("live", 1, BOOL, "")],
    "ServerReadyResponse": [("ready", 1, BOOL, "")],
    "ModelReadyRequest": _NAME_AND_VERSION,
    "ModelReadyResponse": [("ready", 1, BOOL, "")],
    "ServerMetadataResponse": [*_NAME_AND_VERSION, ("extensions", 3, STRING, "*")],
    "ModelMetadataRequest": _NAME_AND_VERSION,
    "TensorMetadata": _METADATA,
    "ModelMetadataResponse": [
        ("name", 1, STRING, ""),
        ("versions", 2, STRING, "*"),
        ("platform", 3, STRING, ""),
        ("inputs", 4, "TensorMetadata", "*"),
        ("outputs", 5, "TensorMetadata", "*"),
    ],
    "SentContents": [
        *_CONTENTS,
        ("fp32_contents", 6, FLOAT, "*"),
        ("fp64_contents", 7, DOUBLE, "*"),
    ],
    "InferInputTensor": [*_METADATA, ("contents", 5, "SentContents", "")],
    "InferRequestedOutputTensor": [("name", 1, STRING, "")],
    "ModelInferRequest": [
        ("model_name", 1, STRING, ""),
        ("model_version", 2, STRING, ""),
        ("id", 3, STRING, ""),
        ("inputs", 5, "InferInputTensor", "*"),
        ("outputs", 6, "InferRequestedOutputTensor", "*"),
        ("raw_input_contents", 7, BYTES, "*"),
    ],
    "GivenContents": [
        *_CONTENTS,
        ("fp32_contents", 6, BYTES, ""),
        ("fp64_contents", 7, BYTES, ""),
    ],
    "InferOutputTensor": [*_METADATA, ("contents", 5, "GivenContents", "")],
    "ModelInferResponse": [
        ("model_name", 1, STRING, ""),
        ("model_version", 2, STRING, ""),
        ("id", 3, STRING, ""),
        ("outputs", 5, "InferOutputTensor", "*"),
        ("raw_output_contents", 6, BYTES, "*"),
    ],
}


@functools.cache
def _classes() -> dict[str, Any]:
    return message_classes("inference", _TABLES)


def message_class(name: str) -> Any:
    """Returns the class of a message."""
    return _classes()[name]
