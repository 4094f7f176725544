"""`nanotf.estimator.TensorFlow`: SageMaker's estimator, on this machine.

What users import; `sagemaker.estimator` is behind it.
"""

from nanotf.sagemaker.estimator.tensorflow_estimator import TensorFlow
from nanotf.sagemaker.estimator.training_inputs import ShuffleConfig, TrainingInput
from nanotf.sagemaker.estimator.training_job import TrainingJob

__all__ = ["ShuffleConfig", "TensorFlow", "TrainingInput", "TrainingJob"]
