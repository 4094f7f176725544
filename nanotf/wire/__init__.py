"""The wire between processes: messages, the socket that carries them, shared blocks, clocks, logs.

Called by both sides of the channel, and by nearly every package.
May import only `errors` and `console`.
"""
