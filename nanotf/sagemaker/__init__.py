"""The parts shaped after SageMaker: jobs, its estimator, hosting, Pipe mode, model parallelism.

A wing beside the core: it builds on the core's packages, and none of them imports it. Users import
`nanotf.estimator`, `nanotf.smp`, `nanotf.data` and `nanotf.job`; `cli` has the commands.

- `detached/`: folders that a detached supervisor owns; jobs and endpoints are such.
- `endpoints/`: endpoints on this machine, and the SDK's models, predictors and serializers.
- `serving/`: what SageMaker's containers answer, and the user's `inference.py`.
- `jobs/`: a script with hyperparameters, data channels and a folder, owned by a detached process.
- `estimator/`: SageMaker's estimator, for such jobs.
- `pipes/`: datasets of records from FIFOs, and the feeder that writes them.
- `smp/`: steps in microbatches, models in partitions, ranks and their mailboxes.
- `padding.py`: batches of one shape, for code that XLA compiles.
- `script_aliases.py`: makes all this importable by the names of the packages that it replaces.
"""
