"""Names of the SDK's version 1: `Model` and `Predictor` of `sagemaker.tensorflow.serving`."""

from nanotf.sagemaker.serving.predictor import TensorFlowPredictor as Predictor
from nanotf.sagemaker.serving.tensorflow_model import TensorFlowModel as Model

__all__ = ["Model", "Predictor"]
