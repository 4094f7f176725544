"""One call, in the user's process: `fit`, `evaluate`, `predict`, `@nano` and "auto".

Called by `keras` and `cli`; it sends orders to a pool and answers the workers' messages.
May import everything below it, but nothing of `worker`: the two meet in `shipping` and `wire`.
"""
