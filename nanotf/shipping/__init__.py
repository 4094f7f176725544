"""Everything that travels: jobs, models, programs, arrays, streams of batches, state, results.

Called by `parent` and `worker`. Most modules have a half for each of them.
May import `pool`, `region` and everything below them.
"""
