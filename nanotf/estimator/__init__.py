"""`nanotf.estimator.TensorFlow`: SageMaker's estimator, on this machine; its models and predictors.

What users import; `sagemaker.estimator` and `sagemaker.serving` are behind it.

- `serializers.py`, `deserializers.py`: as the SDK's modules of these names.
- `serving.py`: `sagemaker.tensorflow.serving` of the SDK's version 1.
"""

from __future__ import annotations

from typing import Any

from nanotf.sagemaker.endpoints.predictor import Predictor, TensorFlowPredictor
from nanotf.sagemaker.endpoints.tensorflow_model import TensorFlowModel
from nanotf.sagemaker.endpoints.transformer import Transformer
from nanotf.sagemaker.estimator.tensorflow_estimator import TensorFlow
from nanotf.sagemaker.estimator.training_inputs import ShuffleConfig, TrainingInput
from nanotf.sagemaker.estimator.training_job import TrainingJob

s3_input = TrainingInput  # its name in the SDK's version 1

__all__ = [
    "Predictor",
    "ShuffleConfig",
    "TensorFlow",
    "TensorFlowModel",
    "TensorFlowPredictor",
    "TrainingInput",
    "TrainingJob",
    "Transformer",
    "s3_input",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # Python and libraries ask for those
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        "nanotf.estimator has those names of SageMaker's SDK that need no account: "
        f"{', '.join(__all__)}. Received: {name}. Leave sessions and roles out: none is needed."
    )
