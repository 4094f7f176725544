"""Sends orders, models, programs, arrays, batches, state and results between the processes.

Called by `parent` and `worker`. Most modules have a half for each of them.
May import `pool`, `region` and everything below them.
"""
