"""This machine: cores, cgroups, placement, other pools, environment variables, allocators.

Called by `cli`, `parent` and `pool`.
May import `wire` and `errors`.
"""
