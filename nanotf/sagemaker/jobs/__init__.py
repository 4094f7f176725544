"""Jobs: a script with hyperparameters, data channels and a folder, owned by a detached process.

`cli` and `estimator` start and read jobs; `job` is what a script sees of its own.
Never imports TensorFlow, and of the core only what does without it.

The path of a job: `launch` checks the request and makes the job's folder, `supervisor` owns the
running job, `record` holds its state on disk, `follow` reads it from any process.
"""
