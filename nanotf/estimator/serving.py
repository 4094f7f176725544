"""Names of the SDK's version 1: `Model` and `Predictor` of `sagemaker.tensorflow.serving`."""

from nanotf.sagemaker.endpoints.predictor import TensorFlowPredictor as Predictor
from nanotf.sagemaker.endpoints.tensorflow_model import TensorFlowModel as Model

__all__ = ["Model", "Predictor"]
