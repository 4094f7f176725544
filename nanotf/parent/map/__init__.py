"""`nanotf.map`: a function of many items, on warm workers, in the user's process.

- `mapping.py`: `map` and `imap`. `item_call.py` begins a call, `item_arguments.py` checks it.
- `joint_items.py`: items that run at once, as ranks, for packages above.
- `item_task.py`: the work of a call. `item_run.py`: gives items to workers, as many at a time as
  `item_batches.py` says. `item_output.py`: what becomes of the text they print.
- `item_results.py`: the iterator that the user gets.
"""
