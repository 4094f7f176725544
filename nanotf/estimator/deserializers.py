"""Deserializers of SageMaker's SDK (`sagemaker.deserializers`)."""

from nanotf.sagemaker.endpoints.deserializers import (
    BaseDeserializer,
    BytesDeserializer,
    CSVDeserializer,
    JSONDeserializer,
    JSONLinesDeserializer,
    NumpyDeserializer,
    PandasDeserializer,
    SimpleBaseDeserializer,
    StreamDeserializer,
    StringDeserializer,
)

__all__ = [
    "BaseDeserializer",
    "BytesDeserializer",
    "CSVDeserializer",
    "JSONDeserializer",
    "JSONLinesDeserializer",
    "NumpyDeserializer",
    "PandasDeserializer",
    "SimpleBaseDeserializer",
    "StreamDeserializer",
    "StringDeserializer",
]
