"""Divides a step between workers: rows of batches, gradients, losses, the optimizer's update.

`worker` calls it in every step. Users' programs use its decorators and `CheckpointManager`.
May import `collectives` and everything below it.
"""
