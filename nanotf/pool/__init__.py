"""Starts, supervises, restarts and stops worker processes, on this machine or through Ray.

Called by `parent`, which borrows a warm pool for each call.
May import `collectives` and everything below it.
"""
