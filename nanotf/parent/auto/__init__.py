"""`num_processes="auto"` and `tune=(...)`: measures if that costs a tenth of what it can save.

- `rule.py`: what measuring may cost. `candidates.py`: the numbers of processes to compare.
- `auto_call.py`: one call. `first_epochs.py`: trained in this process and timed, then handed over.
- `choice.py`, `choice_of_settings.py`: compare and choose. `timed_fits.py`: measures workers.
- `choice_cache.py`, `step_key.py`: measurements are kept, for steps that take equally long.
"""
