"""Division of a step between workers: rows, gradients, losses, the optimizer's update.

Called by `worker` in every step; its decorators and `CheckpointManager` by users' programs.
May import `collectives` and everything below it.
"""
