"""A model-parallel API in the shape of SageMaker's smp v1 for TensorFlow.

    smp.init(config)         `runtime`: the configuration (`config`), this process's rank
                             (`rank_groups`)
    @smp.step                `steps`: splits a batch (`slicing`), runs the body once per
                             microbatch, one after the other, and returns `StepOutput`s
                             (`step_output`)
    smp.DistributedModel     `distributed`, on `step_model` and `from_keras`: Keras's loops
                             (`shares`: their batches; `workers_model`, `in_workers`: for a script
                             that is no rank; `keras_checks`)
    smp.CheckpointManager    `model_checkpoints`
    smp.send, smp.barrier    `communication`, through `mailboxes`
    StepOutput.accumulate    `replicas`: averages over the copies of the model
    smp.last_report          `step_report`, on `nanotf.report`: times, and `memory`

With one partition, a step needs the activations of one microbatch only, and gives the whole batch's
gradients. With several, `pipeline` makes the step:

    bodies                  the step's function, traced in a thread for each microbatch
    step_seeds              of its random operations, with one partition too
    schedule                what this partition does, in order
    partitioned             a model's cuts and variables
      trace                 the model's call, with the partition of each operation
      auto_partition        chooses them (`piece_times`, `balance`)
      cut                   one stage for each partition
      partition_variables   without values, but for those of this partition
    microbatch_passes       a microbatch's way through a stage (`exchange`: its messages)
    times                   when this partition computed and waited (`advice`: what to do about it)

Users import `nanotf.smp`, which has the public names. `nanotf run --smp` starts processes for a
script (`nanotf.ranks`), and makes `nanotf.smp` importable under its original name.
"""
