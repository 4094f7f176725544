"""Starts, supervises, restarts and stops worker processes: here, on other hosts, through Ray.

Called by `parent`, which borrows a warm pool for each call.
May import `collectives` and everything below it.
"""
