"""Worker processes: start, greet, supervise, restart and stop them, here or through Ray.

Called by `parent`, which borrows a warm pool for each call.
May import `collectives` and everything below it.
"""
