"""Division of a step between workers: shares, gradients, losses, the optimizer's update.

`worker` calls it in every step. Users' programs use its decorators and `CheckpointManager`.
May import `collectives` and everything below it.
"""
