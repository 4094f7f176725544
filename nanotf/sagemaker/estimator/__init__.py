"""SageMaker's estimator, on this machine. Users import `nanotf.estimator`.

Never imports TensorFlow: the script does, in its own process.
"""
