"""One `fit(num_processes=...)`, in the user's process.

- `training.py`: the call, started again after workers died.
- `fit_call.py`: one attempt of it: sends the order, runs hooks, returns the state.
- `fit_here.py`: `fit(resume=...)` without workers.
"""
