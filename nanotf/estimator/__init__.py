"""`nanotf.estimator.TensorFlow`: SageMaker's estimator, on this machine; its models and predictors.

What users import; `sagemaker.estimator` and `sagemaker.serving` are behind it.

- `serializers.py`, `deserializers.py`: as the SDK's modules of these names.
- `serving.py`: `sagemaker.tensorflow.serving` of the SDK's version 1.
"""

from nanotf.sagemaker.endpoints.predictor import Predictor, TensorFlowPredictor
from nanotf.sagemaker.endpoints.tensorflow_model import TensorFlowModel
from nanotf.sagemaker.endpoints.transformer import Transformer
from nanotf.sagemaker.estimator.tensorflow_estimator import TensorFlow
from nanotf.sagemaker.estimator.training_inputs import ShuffleConfig, TrainingInput
from nanotf.sagemaker.estimator.training_job import TrainingJob

__all__ = [
    "Predictor",
    "ShuffleConfig",
    "TensorFlow",
    "TensorFlowModel",
    "TensorFlowPredictor",
    "TrainingInput",
    "TrainingJob",
    "Transformer",
]
