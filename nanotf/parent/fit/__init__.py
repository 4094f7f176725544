"""One `fit(num_processes=...)`, in the user's process.

- `fit_options.py`: the arguments that nanotf adds, checked.
- `with_workers.py`: the call, started again after workers died.
- `fit_call.py`: one attempt of it: sends the order, runs hooks, returns the state.
- `fit_here.py`: `fit(resume=...)` without workers.
"""
