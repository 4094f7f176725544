"""A worker's process: the zygote that it is forked from, its life, its jobs, what it prints.

Started by `pool` as `python -m nanotf.worker.zygote`; nothing imports it.
May import everything below it, but nothing of `parent`: the two meet in `shipping` and `wire`.
"""
