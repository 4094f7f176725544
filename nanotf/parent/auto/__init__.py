"""`num_processes="auto"` and `tune=(...)`: measures before it trains.

- `candidates.py`: the numbers of processes to compare. `timed_fits.py`: measures one.
- `choice.py`, `choice_of_settings.py`: compare them, and choose.
- `choice_cache.py`, `step_key.py`: measurements are kept, for steps that take equally long.
"""
