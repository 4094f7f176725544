"""The data of a call: which process reads them, in which order, and what is handed out.

- `fit_data.py`: the data of a `fit`, laid out for the workers.
- `passes.py`, `shuffle_orders.py`: passes over the data, in the orders that Keras draws.
- `read_ahead.py`: `read_processes`, in which other processes call `__getitem__`.
"""
