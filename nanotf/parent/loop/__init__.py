"""`@nano`, a custom training loop on several workers, in the user's process.

- `loop_call.py`: the call. `loop_data.py`: data that this process reads for the workers.
- `divergence.py`: names the ranks that wait for different collectives.
"""
