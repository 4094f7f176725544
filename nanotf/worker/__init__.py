"""A worker's process: the zygote that forks it, its life cycle, its orders, its output.

Started by `pool` as `python -m nanotf.worker.zygote`, or in a fork of the user's process; nothing
else imports it.
May import everything below it, but nothing of `parent`: the two meet in `shipping` and `wire`.
"""
