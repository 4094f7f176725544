"""What travels: jobs, models, programs, arrays, streams of batches, state, results.

Called by `parent` and `worker`, which have a half each of most modules.
May import `pool`, `region` and everything below them.
"""
