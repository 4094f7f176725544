"""`nanotf.estimator.TensorFlow`: SageMaker's estimator, on this machine.

What users import. May import `jobs` and everything below it. Never imports TensorFlow: the script
does, in its own process.
"""

from nanotf.estimator.estimator import TensorFlow
from nanotf.estimator.inputs import ShuffleConfig, TrainingInput
from nanotf.estimator.training_job import TrainingJob

__all__ = ["ShuffleConfig", "TensorFlow", "TrainingInput", "TrainingJob"]
