"""This machine: cores, cgroups, placement, other pools, environment variables, allocators;
programs that a process owns.

Called by `cli`, `parent` and `pool`.
May import `wire` and `errors`.
"""
