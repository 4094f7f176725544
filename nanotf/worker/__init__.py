"""A worker's process: its main, its inbox, the jobs that it runs, what it prints.

Started by `pool` as `python -m nanotf.worker`; nothing imports it.
May import everything below it, but nothing of `parent`: the two meet in `shipping` and `wire`.
"""
