"""`nanotf.map`: a function of many items, on warm workers, in the user's process.

- `mapping.py`: `map` and `imap`; `item_arguments.py` checks their arguments.
- `joint_items.py`: items that run at once, as ranks, for packages above.
- `item_run.py`: gives items to workers. `item_results.py`: the iterator that the user gets.
"""
