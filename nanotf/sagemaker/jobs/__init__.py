"""Jobs: a script with hyperparameters, data channels and a folder, owned by a detached process.

`cli` and `estimator` start and read jobs; `job` is what a script sees of its own.
May import `machine`, `wire`, `errors` and `console`. Never imports TensorFlow.

The path of a job: `launch` checks the request and makes the job's folder, `supervisor` owns the
running job, `record` holds its state on disk, `follow` reads it from any process.
"""
