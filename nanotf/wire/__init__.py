"""The wire between parent and workers: messages, their socket, shared blocks, clocks.

Called by both sides of the channel, and by nearly every package.
May import `errors` alone.
"""
