"""Serializers of SageMaker's SDK (`sagemaker.serializers`)."""

from nanotf.sagemaker.endpoints.serializers import (
    BaseSerializer,
    CSVSerializer,
    DataSerializer,
    IdentitySerializer,
    JSONLinesSerializer,
    JSONSerializer,
    LibSVMSerializer,
    NumpySerializer,
    SimpleBaseSerializer,
    SparseMatrixSerializer,
    StringSerializer,
)

__all__ = [
    "BaseSerializer",
    "CSVSerializer",
    "DataSerializer",
    "IdentitySerializer",
    "JSONLinesSerializer",
    "JSONSerializer",
    "LibSVMSerializer",
    "NumpySerializer",
    "SimpleBaseSerializer",
    "SparseMatrixSerializer",
    "StringSerializer",
]
